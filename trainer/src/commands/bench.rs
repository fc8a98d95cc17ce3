//! `trainer bench allreduce`: starts processes as a training run does, and measures only the all-reduce.

use std::time::Duration;

use super::temporary_logs;
use crate::cli::{AllreduceArgs, workers_flag};
use crate::console;
use crate::device::{DeviceRequest, DeviceSet, LocalRank, SelectedDevice};
use crate::failure::Failure;
use crate::run::ranks::{self, JoinedRank};
use crate::signals::StopFlag;
use crate::text::thousands;
use comm::{DType, TransportKind, bench, cuda};
use launch::{
    self, JobFolder, LaunchConfig, OnSignal, Role,
    environment::{self, WorkerRole},
};

/// Timeout of one all-reduce.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Default number of processes.
const WORKERS: u16 = 2;

/// The memory and the backend of the all-reduce.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BenchBackend {
    /// Data in CPU memory.
    Host(TransportKind),
    /// Data in GPU memory.
    Gpus(cuda::DeviceBackend),
}

impl BenchBackend {
    fn requested(arguments: &AllreduceArgs) -> Result<Self, Failure> {
        let word = arguments.backend.as_deref();
        if arguments.gpus.is_some() {
            return match word {
                None | Some("auto") => Ok(Self::Gpus(cuda::DeviceBackend::Auto)),
                Some("cuda") => Ok(Self::Gpus(cuda::DeviceBackend::Kernels)),
                Some("nccl") => Ok(Self::Gpus(cuda::DeviceBackend::Nccl)),
                Some(other) => Err(Failure::usage(
                    format!("--backend {other} does not sum on GPUs"),
                    "use --backend auto, cuda or nccl; or measure the host's memory: --cpus N",
                )),
            };
        }
        let Some(word) = word else { return Ok(Self::Host(TransportKind::best(true))) };
        let transport: TransportKind = word.parse().map_err(|error: String| {
            Failure::usage(error, "use --backend shm or --backend tcp; auto, cuda and nccl go with --gpus N")
        })?;
        transport.built().map_err(|error| Failure::usage(&error.message, error.hint))?;
        Ok(Self::Host(transport))
    }

    /// Returns the transport between the CPUs of the ranks. With GPUs, this transport carries only the control messages.
    fn transport(self, role: &WorkerRole) -> TransportKind {
        match self {
            Self::Host(transport) => transport,
            Self::Gpus(_) => launch::best_transport(role),
        }
    }
}

/// Runs the benchmark and returns the exit code.
///
/// # Errors
/// The backend is unknown, a GPU is missing, or the processes cannot be started or cannot connect.
pub(super) fn run(arguments: &AllreduceArgs) -> Result<u8, Failure> {
    let backend = BenchBackend::requested(arguments)?;
    let config = config(arguments)?;
    let variables = environment::variables();
    let target = DeviceSet::of(arguments.gpus.map_or(DeviceRequest::Cpu, |count| DeviceRequest::Gpus(count.into())))?;
    let workers = workers_flag(arguments.gpus, arguments.cpus);
    match launch::detect(&variables, arguments.launcher.parse()?, workers)? {
        Role::Worker(role) => {
            let local_rank = ranks::local_rank(&role, arguments.oversubscribe);
            let selected = target.select(&local_rank)?;
            // A measurement has nothing to save, so signals keep their default action: they end the process.
            let rank = ranks::join_over(&role, &variables, backend.transport(&role), TIMEOUT, StopFlag::never())?;
            let result = ranks::check_gpus_unique(&rank, selected.gpu.as_ref(), arguments.oversubscribe)
                .and_then(|()| measure(arguments, backend, &config, &role, &rank, &selected));
            if let Err(failure) = &result {
                rank.record_failure(failure);
            }
            rank.leave();
            result.map(|()| 0)
        }
        Role::Launcher | Role::KubeflowLauncher(_) => {
            let workers = arguments.gpus.or(arguments.cpus).unwrap_or(WORKERS).into();
            if backend == BenchBackend::Host(TransportKind::Mpi) {
                return Err(ranks::needs_mpirun(workers));
            }
            // Check for too few GPUs here, so that one process reports the mistake and not every worker.
            target.all(&LocalRank {
                local_world_size: workers,
                oversubscribe: arguments.oversubscribe,
                ..LocalRank::ALONE
            })?;
            let folder = temporary_logs::create("bench")?;
            let logs = folder.join("logs");
            let job = LaunchConfig { on_signal: OnSignal::End, ..LaunchConfig::of_this_program(workers)? };
            let result = job.run(|_| Ok(JobFolder { logs: logs.clone(), variables: Vec::new() }));
            temporary_logs::remove_unless_failed(&folder, &result);
            Ok(result?)
        }
    }
}

/// Builds the benchmark's configuration from the flags.
fn config(arguments: &AllreduceArgs) -> Result<bench::BenchConfig, Failure> {
    let name = &arguments.dtype;
    let choices = match arguments.gpus {
        Some(_) => cuda::layout::WireType::ALL.map(cuda::layout::WireType::dtype).to_vec(),
        None => DType::ALL.to_vec(),
    };
    let dtype = DType::from_name(name).filter(|dtype| choices.contains(dtype)).ok_or_else(|| {
        let names: Vec<_> = choices.iter().map(|dtype| dtype.name()).collect();
        Failure::usage(format!("--dtype {name}: it cannot be summed here"), format!("choices: {}", names.join(", ")))
    })?;
    let shared = arguments.memory.as_deref() != Some("ordinary");
    let time = Duration::from_millis(arguments.ms);
    let mut config = bench::BenchConfig { dtype, shared, time, ..Default::default() };
    if arguments.sizes.is_empty() {
        config.sizes.retain(|size| *size >= dtype.size());
        return Ok(config);
    }
    config.sizes = arguments.sizes.clone();
    let ranks = arguments.cpus.unwrap_or(WORKERS).max(1);
    // The memory of GPUs is not known here.
    let memory = data::total_memory().filter(|_| arguments.gpus.is_none());
    let most = memory.map_or(u64::MAX >> 1, |bytes| bytes / u64::from(ranks));
    for size in &config.sizes {
        if *size < dtype.size() {
            let cause = format!("--sizes {size}: an element of {name} has {} bytes", dtype.size());
            return Err(Failure::usage(cause, format!("use {} or more", dtype.size())));
        }
        if *size as u64 > most {
            let cause = format!(
                "--sizes {size}: this machine has {} bytes of memory for each of {ranks} ranks",
                thousands(most)
            );
            return Err(Failure::usage(cause, "use smaller arrays, or fewer ranks"));
        }
    }
    Ok(config)
}

fn measure(
    arguments: &AllreduceArgs,
    backend: BenchBackend,
    config: &bench::BenchConfig,
    role: &WorkerRole,
    rank: &JoinedRank,
    selected: &SelectedDevice,
) -> Result<(), Failure> {
    let shown = role.rank == 0 && !arguments.json;
    if shown && matches!(backend, BenchBackend::Gpus(_)) {
        console::print(format_args!("# {}", selected.description));
    }
    let report = |row: &bench::BenchRow| {
        if shown {
            console::print(row.line());
        }
    };
    let head = || {
        if shown {
            console::print(bench::header());
        }
    };
    let rows = match backend {
        BenchBackend::Host(_) => {
            head();
            bench::all_reduce(&rank.comm, config, report)?
        }
        BenchBackend::Gpus(backend) => {
            let describe = |route: &str| {
                if shown {
                    console::print(format_args!("# {route}"));
                }
                head();
            };
            on_gpus(rank, selected, backend, config, describe, report)?
        }
    };
    if role.rank == 0 && arguments.json {
        let text = bench::json(&rows).map_err(|error| Failure::run(error, "please report this"))?;
        console::print(&text);
    }
    Ok(())
}

/// Measures between GPUs. A build without the backend never calls this function: its [`DeviceSet::of`] selects no GPUs.
fn on_gpus(
    rank: &JoinedRank,
    selected: &SelectedDevice,
    backend: cuda::DeviceBackend,
    config: &bench::BenchConfig,
    describe: impl FnOnce(&str),
    report: impl FnMut(&bench::BenchRow),
) -> Result<Vec<bench::BenchRow>, Failure> {
    #[cfg(feature = "cuda")]
    return Ok(cuda::bench::all_reduce(&rank.comm, &selected.device().inner(), backend, config, describe, report)?);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (rank, selected, backend, config, describe, report);
        unreachable!("a build without the CUDA backend has selected a GPU")
    }
}
