//! Checks our kernels on GPUs (those of `trainer/comm/src/cuda` and of the crate `ops`) and prints tables:
//!
//! ```text
//! gpu_check [--ops [--cases all] [--random 16] [--alternate]] [--networks NAME,… [--near 0.4]] [--ranks 2,4]
//!     [--sizes 1,1000,…] [--rounds 20] [--trainer PATH [--train 1,2,4] [--steps 24]]
//! ```
//!
//! Collectives: every algorithm x wire type x size x number of ranks, with values whose sums are exact. `#wrong` (the number of
//! wrong elements) must be 0 on every rank, and all ranks must have the same bits. With fewer GPUs than ranks, ranks share GPUs and
//! synchronize on the host between steps; times then mean nothing, and the table says so. `--ops` compares the crate `ops` on the
//! first GPU with the CPU. `--random N` adds N convolutions of random shapes. Each convolution is checked in f32 and in bf16; with
//! `--alternate` in one of the two types, in turn. `--cases deferred` selects batch norms that convolutions apply, `--cases single`
//! all other operations. `--networks` compares the gradients of whole networks. `--trainer` (the path of the trainer's binary)
//! trains with the numbers of ranks in `--train` for `--steps` steps and compares the losses with those of the CPU.
//! `first_light.sh` runs this program, also under compute-sanitizer; `on_cpu.sh` runs it without a GPU.

mod batches;
mod convolutions;
mod deferred;
mod matrix;
mod networks;
mod norm;
mod ops;
mod training;
mod updates;

use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use comm::{CommConfig, Secret, StoreConfig, StoreServer, TransportKind, join};
use trainer::device::{DeviceRequest, DeviceSet, LocalRank};

/// Variable of a process that is a rank: rank, world size, store address, secret.
const RANK: &str = "GPU_CHECK_RANK";

/// Operations to check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cases {
    All,
    /// Batch norms that convolutions apply.
    Deferred,
    /// All other operations.
    Single,
}

/// Command-line arguments.
#[derive(Clone, Debug)]
struct Arguments {
    ranks: Vec<usize>,
    sizes: Vec<usize>,
    rounds: usize,
    trainer: Option<String>,
    train: Vec<usize>,
    /// Number of training steps whose losses are compared; even.
    steps: usize,
    ops: bool,
    /// The operations that `ops` checks.
    cases: Cases,
    random: usize,
    alternate: bool,
    networks: Vec<String>,
    near: f64,
}

impl Arguments {
    fn parse() -> Result<Self, String> {
        let mut this = Self {
            ranks: vec![2, 4],
            // Elements: tails, a pack, the boundary of a slot, the gradients of ResNet-18.
            sizes: vec![1, 3, 4, 1000, 1023, 65_537, 1 << 20, 11_173_962],
            rounds: 20,
            trainer: None,
            train: vec![1, 2, 4],
            steps: 24,
            ops: false,
            cases: Cases::All,
            random: 16,
            alternate: false,
            networks: Vec::new(),
            near: 0.4,
        };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            match word.as_str() {
                "--ops" => {
                    this.ops = true;
                    continue;
                }
                "--alternate" => {
                    this.alternate = true;
                    continue;
                }
                _ => {}
            }
            let value = words.next().ok_or_else(|| format!("{word} needs a value"))?;
            let number = |v: &str| v.parse::<usize>().map_err(|_| format!("{word}: {v:?} is not a number"));
            let list = |value: &str| value.split(',').map(number).collect::<Result<Vec<_>, _>>();
            match word.as_str() {
                "--ranks" => this.ranks = list(&value)?,
                "--sizes" => this.sizes = list(&value)?,
                "--rounds" => this.rounds = number(&value)?,
                "--cases" => {
                    this.cases = match value.as_str() {
                        "all" => Cases::All,
                        "deferred" => Cases::Deferred,
                        "single" => Cases::Single,
                        _ => return Err(format!("--cases {value} is not all, deferred or single")),
                    }
                }
                "--random" => this.random = number(&value)?,
                "--networks" => this.networks = value.split(',').map(str::to_owned).collect(),
                "--near" => this.near = value.parse().map_err(|_| format!("{word}: {value:?} is not a number"))?,
                "--trainer" => this.trainer = Some(value),
                "--train" => this.train = list(&value)?,
                "--steps" => {
                    let steps = value.parse().ok().filter(|steps| steps % 2 == 0 && *steps > 0);
                    this.steps = steps.ok_or_else(|| format!("--steps {value} is not an even number of at least 2"))?;
                }
                _ => {
                    return Err(format!(
                        "unknown option {word}: the options are --ops, --cases, --random, --alternate, --networks, --near, \
                         --ranks, --sizes, --rounds, --trainer, --train and --steps"
                    ));
                }
            }
        }
        Ok(this)
    }
}

/// Returns the first GPU, with autodiff.
fn first_gpu() -> Result<burn::tensor::Device, String> {
    let found = DeviceSet::of(DeviceRequest::Gpus(1)).map_err(|failure| failure.to_string())?;
    Ok(found.select(&LocalRank::ALONE).map_err(|failure| failure.to_string())?.device())
}

/// Starts `world_size` ranks of this program and waits for them. Returns whether all succeeded.
fn group(world_size: usize) -> Result<bool, String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let secret = Secret::random().map_err(|e| text(&e))?;
    let store =
        StoreServer::bind("127.0.0.1:0", StoreConfig::new(secret.clone(), world_size), |_| {}).map_err(|e| text(&e))?;
    let this = std::env::current_exe().map_err(|e| text(&e))?;
    let mut ranks = Vec::new();
    for rank in 0..world_size {
        let place = format!("{rank} {world_size} {} {}", store.local_addr(), secret.to_hex());
        let mut command = Command::new(&this);
        command.args(std::env::args().skip(1)).env(RANK, place).stdin(Stdio::null());
        ranks.push(command.spawn().map_err(|e| text(&e))?);
    }
    let mut all_passed = true;
    for (rank, mut process) in ranks.into_iter().enumerate() {
        let status = process.wait().map_err(|e| text(&e))?;
        // A rank that a signal killed has printed no error.
        if status.code().is_none() {
            eprintln!("gpu_check: rank {rank} of {world_size}: {status}");
        }
        all_passed &= status.success();
    }
    Ok(all_passed)
}

/// Runs one rank: joins the others and runs the matrix. Returns whether all results were correct.
fn rank(place: &str, arguments: &Arguments) -> Result<bool, String> {
    let words: Vec<&str> = place.split(' ').collect();
    let [rank, world_size, store, secret] = words.as_slice() else { return Err(format!("{RANK}: {place}")) };
    let secret = Secret::from_hex(secret).ok_or("the secret is invalid")?;
    let number = |word: &str| word.parse::<usize>().map_err(|e| e.to_string());
    let mut config = CommConfig::new(number(rank)?, number(world_size)?, *store, secret, TransportKind::Shm);
    // A rank compiles and tunes kernels before an exchange. That takes minutes on a busy machine without a GPU.
    config.timeout = Duration::from_secs(600);
    let comm = join(&config).map_err(|e| e.to_string())?;
    matrix::run(&comm, &arguments.sizes, arguments.rounds).map_err(|e| e.to_string())
}

fn run() -> Result<bool, String> {
    let arguments = Arguments::parse()?;
    if let Ok(place) = std::env::var(RANK) {
        return rank(&place, &arguments);
    }
    let mut all_passed = true;
    if let Arguments { ops: true, cases, random, alternate, .. } = arguments {
        if cases != Cases::Single {
            all_passed &= deferred::run(alternate)?;
        }
        if cases != Cases::Deferred {
            all_passed &= updates::run()? & ops::run()? & convolutions::run(random, alternate)? & batches::run()?;
        }
    }
    if !arguments.networks.is_empty() {
        all_passed &= networks::run(&arguments.networks, arguments.near)?;
    }
    for &world_size in arguments.ranks.iter().filter(|world_size| **world_size > 1) {
        all_passed &= group(world_size)?;
    }
    if let Some(trainer) = &arguments.trainer {
        all_passed &= training::run(trainer, &arguments.train, arguments.steps)?;
    }
    println!("{}", if all_passed { "gpu_check: all checks passed" } else { "gpu_check: FAILED" });
    Ok(all_passed)
}

fn main() -> ExitCode {
    let result = run();
    trainer::device::save_kernels();
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu_check: {error}");
            ExitCode::from(2)
        }
    }
}
