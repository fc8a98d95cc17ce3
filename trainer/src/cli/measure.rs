//! Flags of the commands that start several runs, and of the benchmarks.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::DataDir;

/// Flags of the commands that train a few steps several times.
#[derive(Debug, Args)]
pub struct ShortRunArgs {
    /// The TOML file that describes the run
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Optimizer steps of each run; the first steps, up to five, are warm-up and are not measured
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub steps: usize,
    /// Override a key of the TOML, such as `--set train.batch_size=64`; may be repeated
    #[arg(long, value_name = "KEY.PATH=VALUE")]
    pub set: Vec<String>,
    /// The folder of the data sets (default: the variable TRAINER_DATA_DIR)
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<DataDir>,
    /// The folder for the results as JSON and SVG, and for the runs (default: a new folder in runs/)
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Flags of `trainer compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// Flags of every run.
    #[command(flatten)]
    pub runs: ShortRunArgs,
    /// Workers of dp and ddp, which divide the cores of this machine; single uses all cores in one process
    #[arg(long, value_name = "N", required_unless_present = "gpus", conflicts_with = "gpus")]
    pub cpus: Option<usize>,
    /// GPUs of dp and ddp; single uses the first one
    #[arg(long, value_name = "N")]
    pub gpus: Option<usize>,
    /// Let workers share GPUs if there are fewer than N. Only for tests: the timings mean nothing
    #[arg(long, requires = "gpus", conflicts_with = "cpus")]
    pub oversubscribe: bool,
    /// The modes to compare, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "single,dp,ddp")]
    pub modes: Vec<String>,
    /// Runs of each mode; the median is shown. The modes take turns
    #[arg(long, value_name = "R", default_value_t = 3)]
    pub rounds: usize,
}

/// Flags of `trainer sweep`.
#[derive(Debug, Args)]
pub struct SweepArgs {
    /// The TOML file that describes the runs
    #[arg(long, value_name = "FILE", required_unless_present = "resume", conflicts_with = "resume")]
    pub config: Option<PathBuf>,
    /// A key with the values to train with, such as `--set optimizer.lr=0.05,0.1`; one value is for all runs. Several lists make
    /// all combinations
    #[arg(long, value_name = "KEY.PATH=VALUE,…", conflicts_with = "resume")]
    pub set: Vec<String>,
    /// Parts of the CPU that the runs share: as many runs train at a time
    #[arg(long, value_name = "N", conflicts_with = "gpus", required_unless_present_any = ["gpus", "resume"])]
    pub cpus: Option<usize>,
    /// GPUs that the runs share
    #[arg(long, value_name = "N")]
    pub gpus: Option<usize>,
    /// Worker processes of each run, each with one of the N (default: 1)
    #[arg(long, value_name = "N", conflicts_with = "resume")]
    pub workers_per_run: Option<usize>,
    /// The folder of the data sets (default: the variable TRAINER_DATA_DIR)
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    pub data_dir: Option<DataDir>,
    /// The folder for the table and the runs (default: a new folder in runs/)
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    pub out: Option<PathBuf>,
    /// Continue the sweep in this folder: train what has not ended or has failed
    #[arg(long, value_name = "FOLDER")]
    pub resume: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trainer bench …`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Measure all-reduce between N processes, and print the columns of nccl-tests
    Allreduce(AllreduceArgs),
    /// Measure training with several numbers of workers, and predict it for up to 512 from a step and a link
    Scaling(ScalingArgs),
}

/// Flags of `trainer bench scaling`.
#[derive(Debug, Args)]
pub struct ScalingArgs {
    /// Flags of every run.
    #[command(flatten)]
    pub runs: ShortRunArgs,
    /// Numbers of worker processes to measure, rising
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,2")]
    pub cpus: Vec<usize>,
    /// Numbers of GPUs to measure, rising
    #[arg(long, value_name = "N,…", value_delimiter = ',', conflicts_with = "cpus")]
    pub gpus: Vec<usize>,
    /// Let several workers share a GPU. Checks the command; their times mean nothing
    #[arg(long, requires = "gpus")]
    pub oversubscribe: bool,
    /// Communication backend of the measured runs
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// The link between hosts that is computed: latency (us, ms) and bandwidth (Mbit, Gbit per second)
    #[arg(long, value_name = "LATENCY,BANDWIDTH", default_value = "50us,10Gbit")]
    pub link: String,
    /// Workers of a host, for the two-level algorithm
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub per_host: usize,
    /// The connection of the workers of a host, for the two-level algorithm
    #[arg(long, value_name = "LATENCY,BANDWIDTH", default_value = "5us,80Gbit")]
    pub local_link: String,
}

/// Flags of `trainer bench allreduce`.
#[derive(Debug, Args)]
pub struct AllreduceArgs {
    /// Number of processes, which sum in host memory (default: 2)
    #[arg(long, value_name = "N", conflicts_with = "gpus", value_parser = clap::value_parser!(u16).range(1..))]
    pub cpus: Option<u16>,
    /// Number of processes with one GPU each, which sum in GPU memory
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub gpus: Option<u16>,
    /// Let processes share GPUs if there are fewer than N. Only for tests: the timings mean nothing
    #[arg(long, requires = "gpus", conflicts_with = "cpus")]
    pub oversubscribe: bool,
    /// The launcher that has started this process: auto (by its variables) or local (none)
    #[arg(long, default_value = "auto", value_parser = ["auto", "local"])]
    pub launcher: String,
    /// Communication backend. Between CPUs: shm (default), tcp, or mpi (under mpirun, in a build with --features mpi). Between
    /// GPUs: auto (default), cuda (custom kernels) or nccl
    #[arg(long)]
    pub backend: Option<String>,
    /// Type of the elements; between GPUs f32, f16 or bf16, the type that travels
    #[arg(long, default_value = "f32")]
    pub dtype: String,
    /// Memory of the arrays: shared (default) as in training, where ranks read each other's arrays directly with shm; or
    /// ordinary
    #[arg(long, value_parser = ["shared", "ordinary"], conflicts_with = "gpus")]
    pub memory: Option<String>,
    /// Sizes of the array in bytes, separated by commas (default: 4 bytes to 64 MiB)
    #[arg(long, value_delimiter = ',')]
    pub sizes: Vec<usize>,
    /// Milliseconds to measure each size
    #[arg(long, default_value_t = 400)]
    pub ms: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
