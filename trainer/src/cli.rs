//! The command line: raw flags, nothing else.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Image-classification trainer: one TOML says what to train.
#[derive(Debug, Parser)]
#[command(name = "trainer", version, args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub struct Cli {
    /// Without a subcommand: train.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Flags of `train`.
    #[command(flatten)]
    pub train: TrainArgs,
    /// Write diagnostics to logs/ of the run folder: off, error, warn, info, debug, trace, or LEVEL,MODULE=LEVEL
    #[arg(long, value_name = "LEVEL", env = "TRAINER_LOG", global = true)]
    pub log_level: Option<String>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model as a TOML file says (the default command)
    Train(TrainArgs),
    /// Evaluate a run's best weights, or a weight file, on a test set
    Eval(EvalArgs),
    /// Write a run's weights to a safetensors file with PyTorch's names
    Export(ExportArgs),
    /// Train a few steps in each mode and show speed, time, memory, traffic and losses side by side
    Compare(CompareArgs),
    /// List the models: parameters, multiply-adds, published accuracy
    Models {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// The accuracy table: published and reached, of run folders or committed summaries
    Table(TableArgs),
    /// List, fetch and verify data sets
    #[command(subcommand)]
    Data(DataCommand),
    /// Measure the collectives
    #[command(subcommand)]
    Bench(BenchCommand),
    /// What this machine has for training: GPUs, driver, libraries, and what would be used
    Doctor(DoctorArgs),
}

/// Flags of `trainer doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// The other process of the IPC check: the handle of the first one's memory
    #[arg(long, value_name = "HEX", hide = true)]
    pub ipc_peer: Option<String>,
    /// The GPU of that memory
    #[arg(long, value_name = "INDEX", default_value_t = 0, hide = true)]
    pub gpu: usize,
}

/// Flags of `trainer compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The TOML file that says what to train
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Workers of dp and ddp, between which the cores are split; single has all cores in one process
    #[arg(long, value_name = "N", required_unless_present = "gpus", conflicts_with = "gpus")]
    pub cpus: Option<usize>,
    /// GPUs of dp and ddp; single has the first alone
    #[arg(long, value_name = "N")]
    pub gpus: Option<usize>,
    /// Let workers share a GPU where there are fewer than N: for tests, the timings mean nothing
    #[arg(long, requires = "gpus", conflicts_with = "cpus")]
    pub oversubscribe: bool,
    /// What to compare, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "single,dp,ddp")]
    pub modes: Vec<String>,
    /// Optimizer steps of each run; up to five of them are left out as warm-up
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub steps: usize,
    /// Runs of each mode, taken in turn; the median is shown
    #[arg(long, value_name = "R", default_value_t = 3)]
    pub rounds: usize,
    /// Override a key of the TOML: `--set train.batch_size=64`, as often as needed
    #[arg(long, value_name = "KEY.PATH=VALUE")]
    pub set: Vec<String>,
    /// Where the data sets are
    #[arg(long, value_name = "DIR", env = "TRAINER_DATA_DIR")]
    pub data_dir: Option<PathBuf>,
    /// Where compare.json, compare.svg and the runs go (default: a new folder under runs/)
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trainer bench …`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// All-reduce between N processes, in nccl-tests' columns
    Allreduce(AllreduceArgs),
}

/// Flags of `trainer bench allreduce`.
#[derive(Debug, Args)]
pub struct AllreduceArgs {
    /// Processes, which sum in the host's memory (default: 2)
    #[arg(long, value_name = "N", conflicts_with = "gpus", value_parser = clap::value_parser!(u16).range(1..))]
    pub cpus: Option<u16>,
    /// Processes with a GPU each, which sum in its memory
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub gpus: Option<u16>,
    /// Let processes share a GPU where there are fewer than N: for tests, the timings mean nothing
    #[arg(long, requires = "gpus", conflicts_with = "cpus")]
    pub oversubscribe: bool,
    /// What carries the data: shm (default), tcp or mpi (started by mpirun, in a build with that feature); between GPUs
    /// auto (default), cuda (kernels of our own) or nccl
    #[arg(long)]
    pub backend: Option<String>,
    /// Type of the elements; between GPUs, of those that travel, and f32, f16 or bf16
    #[arg(long, default_value = "f32")]
    pub dtype: String,
    /// Where the arrays lie: shared (default), which is what training uses (the ranks reach each other's with shm), or
    /// ordinary
    #[arg(long, value_parser = ["shared", "ordinary"], conflicts_with = "gpus")]
    pub memory: Option<String>,
    /// Sizes in bytes, separated by commas
    #[arg(long, value_delimiter = ',')]
    pub sizes: Vec<usize>,
    /// Milliseconds spent on each size
    #[arg(long, default_value_t = 400)]
    pub ms: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Flags of `trainer [train]`.
#[derive(Debug, Args)]
pub struct TrainArgs {
    /// The TOML file that says what to train
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Override a key of the TOML: `--set optimizer.lr=0.05`, as often as needed
    #[arg(long, value_name = "KEY.PATH=VALUE")]
    pub set: Vec<String>,
    /// Continue a run: its folder, or the newest one in the run directory
    #[arg(long, value_name = "RUN", num_args = 0..=1)]
    pub resume: Option<Option<PathBuf>>,
    /// Where run folders are made
    #[arg(long, value_name = "DIR", default_value = "runs")]
    pub run_dir: PathBuf,
    /// Where the data sets are
    #[arg(long, value_name = "DIR", env = "TRAINER_DATA_DIR")]
    pub data_dir: Option<PathBuf>,
    /// Override train.epochs
    #[arg(long, value_name = "N")]
    pub epochs: Option<usize>,
    /// Override train.seed
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Resolve and check everything, build the model, print the plan, train nothing
    #[arg(long)]
    pub dry_run: bool,
    /// No progress on the screen, only the summary
    #[arg(long, short)]
    pub quiet: bool,
    /// Train with N worker processes on the CPU, or with N devices of one process (--mode dp)
    #[arg(long, value_name = "N")]
    pub cpus: Option<usize>,
    /// single, dp (one process, N devices) or ddp (N processes; what --cpus N does unless told otherwise)
    #[arg(long, value_name = "MODE")]
    pub mode: Option<String>,
    /// What carries gradients: auto, shm, tcp or mpi (started by mpirun, in a build with that feature)
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Train with N worker processes, one a GPU, or with N GPUs of one process (--mode dp); a build with --features cuda
    #[arg(long, value_name = "N", conflicts_with = "cpus")]
    pub gpus: Option<usize>,
    /// Let several processes share a GPU where there are fewer than N: for tests, slow
    #[arg(long, requires = "gpus", conflicts_with = "cpus")]
    pub oversubscribe: bool,
    /// Flags about worker processes.
    #[command(flatten)]
    pub job: JobArgs,
}

/// Flags about worker processes.
#[derive(Debug, Args)]
pub struct JobArgs {
    /// Who starts the workers: auto, local, env (torchrun, Kubernetes), slurm, mpi
    #[arg(long, value_name = "WHO", default_value = "auto")]
    pub launcher: String,
    /// Start all workers again after a failure, at most N times
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_restarts: usize,
    /// Launchers of the job, one a machine
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub nnodes: usize,
    /// This machine's place among them
    #[arg(long, value_name = "R", default_value_t = 0)]
    pub node_rank: usize,
    /// Address of machine 0
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1")]
    pub master_addr: String,
    /// Port on machine 0 (on one machine: chosen by the kernel unless given)
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub master_port: u16,
    /// File with the secret of a job on several machines, the same on all of them (mode 600; takes precedence over
    /// TRAINER_SECRET)
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
}

/// Flags of `trainer eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// A run folder: its best checkpoint is evaluated (the last one where it has no best)
    #[arg(long, value_name = "RUN", conflicts_with_all = ["model", "weights"], required_unless_present = "model")]
    pub run: Option<PathBuf>,
    /// A model's name
    #[arg(long, value_name = "NAME", requires = "weights")]
    pub model: Option<String>,
    /// Weights under PyTorch's names: a state dict (.pth, .pt), a safetensors file, or a checkpoint's folder
    #[arg(long, value_name = "FILE", requires = "model")]
    pub weights: Option<PathBuf>,
    /// Data set (default: the run's; required with --model)
    #[arg(long, value_name = "NAME")]
    pub data: Option<String>,
    /// Where the data sets are
    #[arg(long, value_name = "DIR", env = "TRAINER_DATA_DIR")]
    pub data_dir: Option<PathBuf>,
    /// Pad or resize the images to this side, as data.image_size does (default: the run's; else as they are)
    #[arg(long, value_name = "PIXELS")]
    pub image_size: Option<usize>,
    /// Mean of each channel that is subtracted, in [0, 1] (default: the run's, or the data set's)
    #[arg(long, value_name = "MEAN", value_delimiter = ',')]
    pub mean: Option<Vec<f32>>,
    /// Standard deviation of each channel that is divided by (default: the run's, or the data set's)
    #[arg(long, value_name = "STD", value_delimiter = ',')]
    pub std: Option<Vec<f32>>,
    /// Images a batch
    #[arg(long, default_value_t = 256)]
    pub batch_size: usize,
    /// Print JSON: top1 and top5 in percent, loss, correct, total
    #[arg(long)]
    pub json: bool,
}

/// Flags of `trainer export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The run folder
    #[arg(long, value_name = "RUN")]
    pub run: PathBuf,
    /// Which of its checkpoints: best, last, or a name such as epoch-3 (default: the best, or the last where it has none)
    #[arg(long, value_name = "best|last|NAME")]
    pub checkpoint: Option<String>,
    /// The averaged weights (train.ema) in place of the trained ones
    #[arg(long)]
    pub ema: bool,
    /// The file to write
    #[arg(long, value_name = "FILE.safetensors")]
    pub to: PathBuf,
    /// Replace the file if it is there
    #[arg(long)]
    pub force: bool,
}

/// Flags of `trainer table`.
#[derive(Debug, Args)]
pub struct TableArgs {
    /// Run folders, or folders that hold some (default: results)
    #[arg(value_name = "RUN")]
    pub runs: Vec<PathBuf>,
    /// Print JSON
    #[arg(long, conflicts_with_all = ["markdown", "save"])]
    pub json: bool,
    /// Print a Markdown table
    #[arg(long, conflicts_with = "save")]
    pub markdown: bool,
    /// Print nothing: copy the runs' summaries, without this machine's paths, to folders below DIR
    #[arg(long, value_name = "DIR", requires = "runs")]
    pub save: Option<PathBuf>,
}

/// `trainer data …`.
#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// The data sets and what each needs
    List,
    /// Download a data set from its official address, checked before it is unpacked
    Fetch {
        /// The data set's name
        name: String,
        /// Where to put it
        #[arg(long, value_name = "DIR", env = "TRAINER_DATA_DIR")]
        data_dir: Option<PathBuf>,
        /// Another server that has the same files
        #[arg(long, value_name = "URL")]
        mirror: Option<String>,
    },
    /// Check the files of a data set against their checksums
    Verify {
        /// The data set's name
        name: String,
        /// Where it is
        #[arg(long, value_name = "DIR", env = "TRAINER_DATA_DIR")]
        data_dir: Option<PathBuf>,
    },
}
