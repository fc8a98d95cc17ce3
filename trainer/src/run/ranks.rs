//! Starts the worker processes, and joins a worker to the other ranks.

use std::{path::PathBuf, time::Duration};

use super::job_flags::NodePlacement;
use crate::cli::{JobArgs, TrainArgs};
use crate::config::{Backend, RunPlan};
use crate::device::LocalRank;
use crate::failure::{Failure, Hint};
use crate::signals::StopFlag;
use comm::{CommError, Communicator, TransportKind, cuda::driver::Gpu};
use launch::{
    JobFolder, JoinTimeouts, LaunchConfig, NOTICE_INTERVAL, ProcessGroup, Role, WorkerStatus, best_transport, cores,
    environment::{KubeflowNode, Launcher, Variables, WorkerRole},
    secret,
    worker::ShutdownBarrier,
};

/// Environment variable that names rank 0's run folder to the workers of this program's launcher.
const RUN_FOLDER: &str = "TRAINER_RUN_FOLDER";
/// NVIDIA's variable that decides whether the driver loads kernels with their module (`EAGER`) or at their first launch.
const MODULE_LOADING: &str = "CUDA_MODULE_LOADING";
/// Time limit for the ranks to join at the start of a job.
const JOIN_TIMEOUT: Duration = Duration::from_secs(300);
/// Longest wait, at shutdown, of the process that hosts the store for the other ranks.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the address of a job on several nodes, and the index of this node. `None` for other jobs and for workers.
pub(crate) fn job_of_nodes(flags: &JobArgs, role: &Role) -> Option<(String, usize)> {
    match role {
        Role::Worker(_) => None,
        Role::Launcher | Role::KubeflowLauncher(_) => {
            NodePlacement::of(flags, role.kubeflow_node()).map(|node| (node.address(), node.node_rank))
        }
    }
}

/// Returns the run folder that this program's launcher has locked for this worker.
pub(crate) fn folder_of_launcher(role: &Role) -> Option<PathBuf> {
    match role {
        Role::Worker(worker) if worker.launcher == Launcher::Builtin => std::env::var_os(RUN_FOLDER).map(PathBuf::from),
        _ => None,
    }
}

/// Starts this program once per worker, supervises the workers and returns the exit code. `folder` makes the run folder, given
/// the world size; [`LaunchConfig::run`] documents when it is called.
///
/// # Errors
/// The job cannot be set up.
pub(crate) fn launch(
    arguments: &TrainArgs,
    plan: &RunPlan,
    kubeflow: Option<&KubeflowNode>,
    variables: &Variables,
    workers: usize,
    mut folder: impl FnMut(usize) -> Result<PathBuf, Failure>,
) -> Result<u8, Failure> {
    let flags = &arguments.job;
    let mut job = LaunchConfig::of_this_program(workers)?;
    job.timeouts.join = JOIN_TIMEOUT;
    job.timeouts.stall = Duration::from_secs(plan.parallel.timeout_s as u64);
    // Workers stop after the step that they are in, and one step may take as long as a collective waits for the slowest rank.
    job.timeouts.stop = job.timeouts.stop.max(job.timeouts.stall);
    job.max_restarts = flags.max_restarts.unwrap_or(0);
    job.address.1 = flags.master_port.unwrap_or(0);
    let secret = secret::of_job(variables)?;
    if let Some(node) = kubeflow {
        job.workers = node.workers.unwrap_or(workers);
    }
    job.rendezvous = NodePlacement::of(flags, kubeflow).map(|node| node.rendezvous(secret)).transpose()?;
    let code = job.run(|world_size| {
        let folder = folder(world_size).map_err(Failure::into_launch_error)?;
        let path = std::path::absolute(&folder).unwrap_or_else(|_| folder.clone());
        let mut variables = vec![(RUN_FOLDER.to_owned(), path.into_os_string())];
        // Load modules eagerly: loading a module waits for the GPU. A rank that loads a module late would wait for a running
        // kernel, which may itself wait for this rank (a deadlock).
        if std::env::var_os(MODULE_LOADING).is_none() {
            variables.push((MODULE_LOADING.to_owned(), "EAGER".into()));
        }
        Ok(JobFolder { logs: folder.join("logs"), variables })
    })?;
    Ok(code)
}

/// Returns the error for the mpi backend without mpirun: this program's launcher does not start MPI processes.
pub(crate) fn needs_mpirun(workers: usize) -> Failure {
    Failure::usage(
        "the mpi backend carries data between processes that mpirun has started, and this one was started by hand",
        format!("mpirun -np {workers} trainer … --backend mpi, without --cpus"),
    )
}

/// A rank that has joined the job.
pub(crate) struct JoinedRank {
    /// The communicator of all ranks.
    pub comm: Communicator,
    /// Reports what this rank is doing.
    pub status: WorkerStatus,
    /// Requests a stop of this rank.
    pub stop: StopFlag,
    shutdown: Option<ShutdownBarrier>,
}

impl JoinedRank {
    /// Writes the failure report. The launcher shows the report when the process ends.
    pub(crate) fn record_failure(&self, failure: &Failure) {
        match self.comm.error() {
            Some(error) => self.status.record_comm_error(&explained(error)),
            None => {
                let hint = failure.hint.as_deref().unwrap_or_default();
                self.status.record_error(&failure.message, hint, failure.is_permanent);
            }
        }
    }

    /// Leaves the job after waiting for the other ranks at the shutdown barrier.
    pub(crate) fn leave(self) {
        drop(self.comm);
        self.shutdown.into_iter().for_each(|shutdown| shutdown.wait(SHUTDOWN_TIMEOUT));
    }
}

/// Returns `error` with the message and the hint that a user sees, instead of cubecl's text about a GPU.
fn explained(error: CommError) -> CommError {
    let (message, hint) = (Hint::message(&error), Hint::hint(&error).unwrap_or_default().to_owned());
    CommError { message, hint, ..error }
}

/// Returns the position of a rank among the ranks of its host.
pub(crate) fn local_rank(role: &WorkerRole, oversubscribe: bool) -> LocalRank {
    LocalRank {
        local_rank: role.local_rank,
        local_world_size: role.local_world_size,
        other_launcher: role.launcher != Launcher::Builtin,
        oversubscribe,
    }
}

/// Limits this process's threads to its share of the host's cores. Call this function only if another launcher started the
/// process: this program's launcher has already split the cores. Launchers that bind ranks to cores (mpirun, srun) leave each
/// rank its own cores. torchrun binds nothing, so each of its ranks would start one thread per core. `RAYON_NUM_THREADS` takes
/// precedence.
///
/// # Errors
/// A rank has left the job.
pub(crate) fn limit_threads(rank: &JoinedRank) -> Result<(), Failure> {
    // Bytes of a boot id, or of the start of a host name.
    const HOST: usize = 36;
    // The kernel may hide the boot id.
    let boot = Some(comm::host::boot_id()).filter(|boot| !boot.is_empty());
    let name = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut own = boot.unwrap_or_else(name).into_bytes();
    own.resize(HOST, 0);
    own.extend(cores::affinity_mask().map_err(|error| {
        Failure::run(format!("cannot read the cores of this process: {error}"), "set RAYON_NUM_THREADS")
    })?);
    let mut all = vec![0; own.len() * rank.comm.world_size()];
    rank.comm.all_gather(&own, &mut all)?;
    if std::env::var_os(cores::RAYON_NUM_THREADS).is_some() {
        return Ok(());
    }
    let masks: Vec<&[u8]> =
        all.chunks_exact(own.len()).filter(|o| o[..HOST] == own[..HOST]).map(|o| &o[HOST..]).collect();
    let threads = cores::threads_of_rank(&own[HOST..], &masks);
    // An error means that a test's process has already built the pool. The pool then keeps its size.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    Ok(())
}

/// Checks that no two ranks have the same GPU, unless `oversubscribe` allows sharing. Another launcher may make the same GPU
/// visible to several ranks.
///
/// # Errors
/// Two ranks have the same GPU. The error names both ranks, and every rank gets the same error. Also: a rank has left the job.
pub(crate) fn check_gpus_unique(rank: &JoinedRank, gpu: Option<&Gpu>, oversubscribe: bool) -> Result<(), Failure> {
    const BYTES: usize = 64;
    let mut own = gpu.map(|gpu| gpu.uuid.clone()).unwrap_or_default().into_bytes();
    own.resize(BYTES, 0);
    let mut all = vec![0; BYTES * rank.comm.world_size()];
    rank.comm.all_gather(&own, &mut all)?;
    let uuids: Vec<&[u8]> = all.chunks_exact(BYTES).collect();
    match same_gpu(&uuids) {
        Some((first, second)) if !oversubscribe => Err(Failure::usage(
            format!(
                "ranks {first} and {second} have the same GPU, {}",
                String::from_utf8_lossy(uuids[first]).trim_end_matches('\0')
            ),
            "start as many ranks per host as it has GPUs and let each see all of them, or one of its own (CUDA_VISIBLE_DEVICES); \
             --gpus N --oversubscribe shares them, for tests",
        )),
        _ => Ok(()),
    }
}

/// Returns the first two ranks with the same GPU UUID. Ranks without a GPU have zeros.
fn same_gpu(uuids: &[&[u8]]) -> Option<(usize, usize)> {
    let twin =
        |second: usize| uuids[..second].iter().position(|uuid| *uuid == uuids[second]).map(|first| (first, second));
    (0..uuids.len()).filter(|&rank| uuids[rank].iter().any(|&byte| byte != 0)).find_map(twin)
}

/// Joins the other ranks of a training job.
///
/// # Errors
/// The other ranks do not join in time, or belong to another job.
pub(crate) fn join(role: &WorkerRole, variables: &Variables, plan: &RunPlan) -> Result<JoinedRank, Failure> {
    let transport = match plan.parallel.backend {
        Backend::Tcp => TransportKind::Tcp,
        Backend::Shm => TransportKind::Shm,
        Backend::Mpi => TransportKind::Mpi,
        _ => best_transport(role),
    };
    let stop = if role.launcher == Launcher::Builtin {
        StopFlag::of_builtin_worker()?
    } else {
        StopFlag::of_foreign_worker()?
    };
    join_over(role, variables, transport, Duration::from_secs(plan.parallel.timeout_s as u64), stop)
}

/// Joins the other ranks. `timeout` limits each wait in a collective. `stop` is the stop flag of this rank. The caller makes it
/// before, since signals must be caught before the ranks join.
///
/// # Errors
/// The other ranks do not join in time, or belong to another job.
pub(crate) fn join_over(
    role: &WorkerRole,
    variables: &Variables,
    transport: TransportKind,
    timeout: Duration,
    stop: StopFlag,
) -> Result<JoinedRank, Failure> {
    let timeouts = JoinTimeouts { join: JOIN_TIMEOUT, answer: timeout, notice: NOTICE_INTERVAL };
    let (comm, status, shutdown) = ProcessGroup::join(role, variables, transport, timeouts)?.into_parts();
    Ok(JoinedRank { comm, status, stop, shutdown })
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm::ErrorKind;

    #[test]
    fn the_launcher_gets_the_explained_error_and_the_rank_that_caused_it() {
        let message =
            "GPU 1: one_shot: An IO error happened\nCaused by:\n  out of device memory allocating 2097152 bytes";
        let raw = CommError { kind: ErrorKind::System, culprit: Some(1), message: message.into(), hint: String::new() };
        let error = explained(raw);
        assert_eq!((error.kind, error.culprit), (ErrorKind::System, Some(1)));
        assert_eq!(error.message, "the GPU's memory is used up: 2.1 MB more was wanted");
        assert!(error.hint.starts_with("a smaller train.batch_size"), "{}", error.hint);
        let other = CommError { hint: "h".into(), ..CommError::usage("m") };
        assert_eq!(explained(other.clone()), other);
    }

    #[test]
    fn two_ranks_with_one_gpu_are_found() {
        let (a, b, none): (&[u8], &[u8], &[u8]) = (b"GPU-a\0", b"GPU-b\0", &[0; 6]);
        assert_eq!(same_gpu(&[a, b]), None);
        assert_eq!(same_gpu(&[none, none, a]), None, "the CPU is everybody's");
        assert_eq!(same_gpu(&[none, b, a, b]), Some((1, 3)));
    }
}
