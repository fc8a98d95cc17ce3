//! The command line: raw flags, and the variable that replaces one of them (`TRAINER_DATA_DIR`).

mod data_dir;
mod launch_args;
mod measure;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

pub use data_dir::{DATA_DIR, DataDir, NamedBy};
pub use launch_args::{LaunchArgs, ProcessCount};
pub(crate) use launch_args::{hint_of, normalize_flags};
pub use measure::{AllreduceArgs, BenchCommand, CompareArgs, ScalingArgs, ShortRunArgs, SweepArgs};

/// Trains image classifiers. A TOML file describes the run.
#[derive(Debug, Parser)]
#[command(name = "trainer", version, args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub struct Cli {
    /// The subcommand. The default is `train`.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Flags of `train`.
    #[command(flatten)]
    pub train: TrainArgs,
    /// Level of the diagnostics in logs/ of the run folder: off (default), error, warn, info, debug or trace; LEVEL,MODULE=LEVEL
    /// sets another level for a module
    #[arg(long, value_name = "LEVEL", env = "TRAINER_LOG", global = true)]
    pub log_level: Option<String>,
}

/// Returns the flag that asks for workers, with their number. At most one of the two is given.
pub fn workers_flag<T: Into<usize>>(gpus: Option<T>, cpus: Option<T>) -> Option<(&'static str, usize)> {
    let flag = |name, count: Option<T>| count.map(|count| (name, count.into()));
    flag("--gpus", gpus).or(flag("--cpus", cpus))
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model (the default command)
    Train(TrainArgs),
    /// Measure the accuracy of a run's best weights, or of a weight file, on a test set
    Eval(EvalArgs),
    /// Classify images: files, folders or a list of files, to CSV or JSON lines
    Predict(PredictArgs),
    /// Write a run's weights to a safetensors file with PyTorch's names, or its network to an ONNX model
    Export(ExportArgs),
    /// Start any program as N processes, with torchrun's variables
    Launch(LaunchArgs),
    /// Train a few steps in each mode, and show speed, time, memory, traffic and losses side by side
    Compare(CompareArgs),
    /// Train all combinations of some values, several at a time, and show one table
    Sweep(SweepArgs),
    /// List the models with parameters, multiply-adds, memory of a step and published accuracy
    Models {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the accuracy table: the published accuracy of each model, and the accuracy of runs
    Table(TableArgs),
    /// List, download and verify data sets
    #[command(subcommand)]
    Data(DataCommand),
    /// Measure all-reduce, or measure and predict the scaling of training
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Show what this machine offers for training (GPUs, driver, libraries) and what a run would use
    Doctor(DoctorArgs),
}

/// Flags of `trainer doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Run as the second process of the IPC check. The value is the handle of the first process's memory
    #[arg(long, value_name = "HEX", hide = true)]
    pub ipc_peer: Option<String>,
    /// Run as the process of the MPI check: start MPI and print its thread support
    #[arg(long, hide = true)]
    pub mpi_threads: bool,
    /// The GPU that has the memory of --ipc-peer
    #[arg(long, value_name = "INDEX", default_value_t = 0, hide = true)]
    pub gpu: usize,
}

/// Flags of `trainer [train]`.
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// The TOML file that describes the run
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Override a key of the TOML, such as `--set optimizer.lr=0.05`; may be repeated
    #[arg(long, value_name = "KEY.PATH=VALUE")]
    pub set: Vec<String>,
    /// Continue the run in folder RUN, by default the newest run of --run-dir, with its mode and number of workers
    #[arg(long, value_name = "RUN", num_args = 0..=1)]
    pub resume: Option<Option<PathBuf>>,
    /// The folder in which run folders are created
    #[arg(long, value_name = "DIR", default_value = "runs")]
    pub run_dir: PathBuf,
    /// The folder of the data sets (default: the variable TRAINER_DATA_DIR)
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<DataDir>,
    /// Override train.epochs
    #[arg(long, value_name = "N")]
    pub epochs: Option<usize>,
    /// Override train.seed
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Check the configuration, build the model and print the plan; read no data and train nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Print only errors, warnings, notes and, after a signal, how to continue; the run folder has everything else
    #[arg(long, short)]
    pub quiet: bool,
    /// Train on the CPU with N worker processes, or with N devices of one process (--mode dp)
    #[arg(long, value_name = "N")]
    pub cpus: Option<usize>,
    /// single, dp (one process, N devices) or ddp (N processes; the default with --cpus N and --gpus N)
    #[arg(long, value_name = "MODE")]
    pub mode: Option<String>,
    /// Communication backend: auto, shm, tcp, or mpi (under mpirun, in a build with --features mpi); between GPUs also cuda or
    /// nccl
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Try bucket sizes and numbers of threads in the first steps, and keep the fastest (parallel.autotune); for several processes
    #[arg(long)]
    pub autotune: bool,
    /// Train with N worker processes, one per GPU, or with N GPUs of one process (--mode dp); needs a build with --features cuda
    #[arg(long, value_name = "N", conflicts_with = "cpus")]
    pub gpus: Option<usize>,
    /// Let processes share GPUs if there are fewer than N. Only for tests: training is slow
    #[arg(long, requires = "gpus", conflicts_with = "cpus")]
    pub oversubscribe: bool,
    /// Flags about worker processes.
    #[command(flatten)]
    pub job: JobArgs,
}

/// Flags about worker processes.
#[derive(Debug, Clone, Default, Args)]
pub struct JobArgs {
    /// What has started this process: auto (detect it), local (a user), env (torchrun, Kubeflow), slurm, mpi or lsf
    #[arg(long, value_name = "WHO", default_value = "auto")]
    pub launcher: String,
    /// Start all workers again after a failure, at most N times (default: 0)
    #[arg(long, value_name = "N")]
    pub max_restarts: Option<usize>,
    /// Start the job on these hosts over ssh: host1:4,host2:4 have 4 ranks each, `lsf` is the hosts of the LSF job. The program
    /// and its files have the same paths on all hosts
    #[arg(short = 'H', long, value_name = "HOSTS", conflicts_with_all = ["hostfile", "nnodes", "node_rank"])]
    pub hosts: Option<String>,
    /// Do the same with the hosts of a file: a line `host1 slots=4` or `host1:4` for each
    #[arg(long, value_name = "FILE", conflicts_with_all = ["nnodes", "node_rank"])]
    pub hostfile: Option<PathBuf>,
    /// The flags that start the same hosts again. Set in the launchers that -H has started.
    #[arg(skip)]
    pub host_flags: Vec<String>,
    /// Number of machines; start the same command on each of them (default: 1)
    #[arg(long, value_name = "N", value_parser = launch_args::nnodes)]
    pub nnodes: Option<usize>,
    /// Index of this machine, from 0 (default: 0)
    #[arg(long, value_name = "R")]
    pub node_rank: Option<usize>,
    /// Address of machine 0 (default: 127.0.0.1)
    #[arg(long, value_name = "ADDR")]
    pub master_addr: Option<String>,
    /// Port on machine 0 (on one machine the default is a free port)
    #[arg(long, value_name = "PORT")]
    pub master_port: Option<u16>,
    /// File with the secret of a job on several machines, the same on all of them. Its mode must be 600. It takes precedence over
    /// TRAINER_SECRET
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
}

/// Flags of `trainer eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// The folder of the run whose checkpoint is evaluated
    #[arg(long, value_name = "RUN", conflicts_with_all = ["model", "weights"], required_unless_present = "model")]
    pub run: Option<PathBuf>,
    /// The checkpoint: best, last, or a name such as epoch-3 (default: best, or last if the run has no best). Averaged weights are
    /// used if there are any
    #[arg(long, value_name = "best|last|NAME", requires = "run")]
    pub checkpoint: Option<String>,
    /// The name of a model; `trainer models` lists them
    #[arg(long, value_name = "NAME", requires = "weights")]
    pub model: Option<String>,
    /// Weights with PyTorch's names: a state dict (.pth, .pt), a safetensors file, or the folder of a checkpoint
    #[arg(long, value_name = "FILE", requires = "model")]
    pub weights: Option<PathBuf>,
    /// The data set (default: that of the run; required with --model)
    #[arg(long, value_name = "NAME")]
    pub data: Option<String>,
    /// The folder of the data sets (default: that of the run, or the variable TRAINER_DATA_DIR)
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<DataDir>,
    /// Side of the images in pixels, as data.image_size (default: that of the run, or of the data set)
    #[arg(long, value_name = "PIXELS")]
    pub image_size: Option<usize>,
    /// Side in pixels to which the shorter side of images in files is resized before the centre is cut out, as data.resize
    /// (default: that of the run)
    #[arg(long, value_name = "PIXELS")]
    pub resize: Option<usize>,
    /// Mean of each channel, from 0 to 1, separated by commas (default: that of the run, or of the data set)
    #[arg(long, value_name = "MEAN", value_delimiter = ',')]
    pub mean: Option<Vec<f32>>,
    /// Standard deviation of each channel, separated by commas (default: that of the run, or of the data set)
    #[arg(long, value_name = "STD", value_delimiter = ',')]
    pub std: Option<Vec<f32>>,
    /// The character between the classes of an image in a manifest, as data.label_delim (default: that of the run)
    #[arg(long, value_name = "CHARACTER")]
    pub label_delim: Option<char>,
    /// Images per batch
    #[arg(long, default_value_t = 256)]
    pub batch_size: usize,
    /// Evaluate the mean of the logits of several views of each image too: flip (the image and its mirror image, as train.tta; the
    /// default) or ten-crop (corners and centre of the resized image, and their mirror images)
    #[arg(long, value_name = "VIEWS", num_args = 0..=1, default_missing_value = "flip", value_parser = ["flip", "ten-crop"])]
    pub tta: Option<String>,
    /// Print JSON: top1, top5 and balanced_accuracy in percent, loss, correct, total, and tta_top1 with --tta; of images with
    /// several classes mean_average_precision in percent, and that of each class
    #[arg(long)]
    pub json: bool,
}

/// Flags of `trainer predict`.
#[derive(Debug, Args)]
pub struct PredictArgs {
    /// Images (.png, .jpg, .jpeg, .jpe, .jfif), and folders, which are searched for images
    #[arg(value_name = "PATH", required_unless_present = "list")]
    pub paths: Vec<PathBuf>,
    /// A file with one path per line, after those of the command line
    #[arg(long, value_name = "FILE")]
    pub list: Option<PathBuf>,
    /// The run folder
    #[arg(long, value_name = "RUN")]
    pub run: PathBuf,
    /// The checkpoint: best, last, or a name such as epoch-3 (default: best, or last if the run has no best). Averaged weights are
    /// used if there are any
    #[arg(long, value_name = "best|last|NAME")]
    pub checkpoint: Option<String>,
    /// Classes per image, the most probable first (default: 1, of a run with data.label_delim all)
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u16).range(1..))]
    pub top_k: Option<u16>,
    /// csv (with a header) or jsonl (one JSON object per line)
    #[arg(long, default_value = "csv", value_parser = ["csv", "jsonl"])]
    pub format: String,
    /// Write to a file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub to: Option<PathBuf>,
    /// Replace the file if it exists
    #[arg(long, requires = "to")]
    pub force: bool,
    /// Add the prediction of the mean of the logits of several views: flip (the image and its mirror image; the default) or
    /// ten-crop (corners and centre of the resized image, and their mirror images)
    #[arg(long, value_name = "VIEWS", num_args = 0..=1, default_missing_value = "flip", value_parser = ["flip", "ten-crop"])]
    pub tta: Option<String>,
    /// Leave out images that cannot be read, with a warning for each and their number at the end
    #[arg(long)]
    pub skip_errors: bool,
    /// Images per batch
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch_size: u32,
    /// Threads (default: all cores)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
}

/// Flags of `trainer export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The run folder
    #[arg(long, value_name = "RUN")]
    pub run: PathBuf,
    /// The checkpoint: best, last, or a name such as epoch-3 (default: best, or last if the run has no best)
    #[arg(long, value_name = "best|last|NAME")]
    pub checkpoint: Option<String>,
    /// Write the trained weights, not their moving average (train.ema), which evaluations use
    #[arg(long)]
    pub no_ema: bool,
    /// safetensors (the weights, for PyTorch) or onnx (the network with its weights) (default: the ending of --to)
    #[arg(long, value_parser = ["safetensors", "onnx"])]
    pub format: Option<String>,
    /// Fold batch norms into the convolutions in front of them. The file is for inference only
    #[arg(long)]
    pub fold: bool,
    /// Let the ONNX model normalise its input: it takes pixels from 0 to 1, as torchvision's ToTensor makes them
    #[arg(long)]
    pub normalise: bool,
    /// The file to write, with the ending .safetensors or .onnx
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    pub force: bool,
}

/// Flags of `trainer table`.
#[derive(Debug, Args)]
pub struct TableArgs {
    /// Run folders, folders that contain run folders, or folders of sweeps (default: results)
    #[arg(value_name = "RUN")]
    pub runs: Vec<PathBuf>,
    /// Print JSON
    #[arg(long, conflicts_with_all = ["markdown", "save"])]
    pub json: bool,
    /// Print a Markdown table
    #[arg(long, conflicts_with = "save")]
    pub markdown: bool,
    /// Print no table, but copy the summaries of the runs, without paths of this machine, to folders in DIR
    #[arg(long, value_name = "DIR", requires = "runs")]
    pub save: Option<PathBuf>,
}

/// `trainer data …`.
#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// List the data sets with their sizes and what each needs
    List,
    /// Download a data set from its official address, verify and unpack it
    Fetch {
        /// The data set's name
        name: String,
        /// The folder to unpack it in (default: the variable TRAINER_DATA_DIR)
        #[arg(long, value_name = "DIR")]
        data_dir: Option<DataDir>,
        /// Another server that has the same files
        #[arg(long, value_name = "URL")]
        mirror: Option<String>,
    },
    /// Check the files of a data set against their checksums
    Verify {
        /// The data set's name
        name: String,
        /// The folder of the data sets (default: the variable TRAINER_DATA_DIR)
        #[arg(long, value_name = "DIR")]
        data_dir: Option<DataDir>,
        /// The character between the classes of an image in a manifest, as data.label_delim
        #[arg(long, value_name = "CHARACTER")]
        label_delim: Option<char>,
    },
}
