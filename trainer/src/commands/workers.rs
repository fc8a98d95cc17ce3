//! Several processes: the launcher's side, and the side of a worker.

use std::{path::Path, time::Duration};

use crate::cli::TrainArgs;
use crate::config::{Backend, RunPlan};
use crate::failure::Failure;
use crate::signals::Stop;
use comm::{self, CommConfig, Communicator, TransportKind, cuda::driver::Gpu};
use launch::{
    LaunchConfig, RendezvousParameters, Worker, WorkerStatus, cores,
    environment::{NodeShare, Variables, WorkerRole},
    secret,
    worker::{self, ShutdownBarrier},
};

/// Tells the workers of our own launcher where rank 0 writes.
pub(super) const RUN_FOLDER: &str = "TRAINER_RUN_FOLDER";
/// How long ranks wait for each other at the start.
const JOIN: Duration = Duration::from_secs(300);
/// How long the host of the store waits for the others' goodbyes.
const GOODBYE: Duration = Duration::from_secs(10);

/// Starts this program once a worker and watches over them; gives the exit code.
///
/// # Errors
/// The job cannot be put together.
pub(super) fn launch(
    arguments: &TrainArgs,
    plan: &RunPlan,
    share: Option<&NodeShare>,
    variables: &Variables,
    workers: usize,
    folder: &Path,
) -> Result<u8, Failure> {
    let flags = &arguments.job;
    let mut job = LaunchConfig::of_this_program(workers, folder.join("logs"))?;
    job.timeouts.stall = Duration::from_secs(plan.parallel.timeout_s as u64);
    job.max_restarts = flags.max_restarts;
    job.address.1 = flags.master_port;
    let secret = secret::of_job(variables)?;
    job.rendezvous = match share {
        Some(share) if share.nodes > 1 => {
            job.workers = share.workers.unwrap_or(workers);
            let address = share.master_addr.clone();
            Some(RendezvousParameters::new(share.nodes, share.node_rank, address, share.master_port, secret)?)
        }
        _ if flags.nnodes > 1 => {
            let address = flags.master_addr.clone();
            Some(RendezvousParameters::new(flags.nnodes, flags.node_rank, address, flags.master_port, secret)?)
        }
        _ => None,
    };
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    job.variables = vec![vec![(RUN_FOLDER.to_owned(), folder.display().to_string())]; job.workers];
    Ok(job.run()?)
}

/// The mpi backend's ranks are MPI's processes, which this program's launcher does not start.
pub(super) fn needs_mpirun(workers: usize) -> Failure {
    Failure::usage(
        "the mpi backend carries data between processes that mpirun has started, and this one was started by hand",
        format!("mpirun -np {workers} trainer … --backend mpi, without --cpus"),
    )
}

/// A rank that has met the others.
pub(super) struct Rank {
    /// The connection to them.
    pub comm: Communicator,
    /// Says what this rank is doing.
    pub status: WorkerStatus,
    /// Signals, seen from before the ranks met.
    pub stop: Stop,
    shutdown: ShutdownBarrier,
}

impl Rank {
    /// Leaves word of why this rank fails: its launcher shows it when the process ends.
    pub(super) fn failed(&self, failure: &Failure) {
        match self.comm.error() {
            Some(error) => self.status.record_comm_error(&error),
            None => self.status.record_error(&failure.message, failure.hint.as_deref().unwrap_or_default(), false),
        }
    }

    /// Ends the connection in good order.
    pub(super) fn leave(self) {
        drop(self.comm);
        self.shutdown.wait(GOODBYE);
    }
}

/// Gives this process its share of the host's cores, where another launcher has started it: ours has split them already.
/// Launchers that bind ranks to cores (mpirun, srun) leave each its own; torchrun binds nothing, and each of its ranks would
/// start a thread for every core. What `RAYON_NUM_THREADS` says counts.
///
/// # Errors
/// A rank is gone.
pub(super) fn share_cores(rank: &Rank) -> Result<(), Failure> {
    let mut own = comm::host::boot().into_bytes();
    own.resize(36, 0);
    let host = own.len();
    own.extend(cores::affinity_mask().map_err(|error| {
        Failure::run(format!("cannot read the cores of this process: {error}"), "set RAYON_NUM_THREADS")
    })?);
    let mut all = vec![0; own.len() * rank.comm.world()];
    rank.comm.all_gather(&own, &mut all)?;
    if std::env::var_os("RAYON_NUM_THREADS").is_some() {
        return Ok(());
    }
    let masks: Vec<&[u8]> =
        all.chunks_exact(own.len()).filter(|o| o[..host] == own[..host]).map(|o| &o[host..]).collect();
    let threads = cores::threads_of_rank(&own[host..], &masks);
    // An error says that a test's process has built the pool already: the pool stays as it is
    let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    Ok(())
}

/// Makes sure that no two ranks of a host have the same GPU, unless they are meant to: a launcher may have given each what
/// it sees, and each sees the same.
///
/// # Errors
/// Names two ranks that have the same GPU; the same on every rank.
pub(super) fn one_gpu_each(rank: &Rank, gpu: Option<&Gpu>, oversubscribe: bool) -> Result<(), Failure> {
    const BYTES: usize = 64;
    let mut own = gpu.map(|gpu| gpu.uuid.clone()).unwrap_or_default().into_bytes();
    own.resize(BYTES, 0);
    let mut all = vec![0; BYTES * rank.comm.world()];
    rank.comm.all_gather(&own, &mut all)?;
    let cards: Vec<&[u8]> = all.chunks_exact(BYTES).collect();
    match same_card(&cards) {
        Some((first, second)) if !oversubscribe => Err(Failure::usage(
            format!(
                "ranks {first} and {second} have the same GPU, {}",
                String::from_utf8_lossy(cards[first]).trim_end_matches('\0')
            ),
            "start as many ranks a host as it has GPUs and let each see all of them, or one of its own (CUDA_VISIBLE_DEVICES); \
             --gpus N --oversubscribe shares them, for tests",
        )),
        _ => Ok(()),
    }
}

/// The first two ranks with the same GPU, known by its UUID; ranks without a GPU have zeros.
fn same_card(cards: &[&[u8]]) -> Option<(usize, usize)> {
    let twin =
        |second: usize| cards[..second].iter().position(|card| *card == cards[second]).map(|first| (first, second));
    (0..cards.len()).filter(|&rank| cards[rank].iter().any(|&byte| byte != 0)).find_map(twin)
}

/// Meets the other ranks of a training job.
///
/// # Errors
/// They do not come, or are another job's.
pub(super) fn join(role: &WorkerRole, variables: &Variables, plan: &RunPlan) -> Result<Rank, Failure> {
    let transport = match plan.parallel.backend {
        Backend::Tcp => TransportKind::Tcp,
        Backend::Shm => TransportKind::Shm,
        Backend::Mpi => TransportKind::Mpi,
        _ => best_transport(role),
    };
    join_over(role, variables, transport, Duration::from_secs(plan.parallel.timeout_s as u64))
}

/// What reaches all ranks of a job, where nobody says what to use.
pub(super) fn best_transport(role: &WorkerRole) -> TransportKind {
    if role.local_world == role.world { TransportKind::Shm } else { TransportKind::Tcp }
}

/// Meets the other ranks; each wait in a collective is at most `timeout` long.
///
/// # Errors
/// They do not come, or are another job's.
pub(super) fn join_over(
    role: &WorkerRole,
    variables: &Variables,
    transport: TransportKind,
    timeout: Duration,
) -> Result<Rank, Failure> {
    let stop =
        Stop::of_worker().map_err(|error| Failure::run(format!("signal handlers: {error}"), "check the limits"))?;
    let status = worker::attach(role, variables)?;
    let joined = Worker::join(role, variables, status.clone(), JOIN)?;
    let secret = joined.secret.clone();
    // the control connection is there already: the address is of no use any more
    let mut config = CommConfig::new(role.rank, role.world, "", secret, transport);
    config.timeout = timeout;
    status.set_status(format_args!("connecting over {transport}"));
    let (client, shutdown) = joined.into_parts();
    let comm = comm::join_through(client, &config).inspect_err(|error| status.record_comm_error(error))?;
    tracing::info!(rank = role.rank, world = role.world, %transport, ?timeout, "created the process group");
    Ok(Rank { comm, status, stop, shutdown })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ranks_with_one_gpu_are_found() {
        let (a, b, none): (&[u8], &[u8], &[u8]) = (b"GPU-a\0", b"GPU-b\0", &[0; 6]);
        assert_eq!(same_card(&[a, b]), None);
        assert_eq!(same_card(&[none, none, a]), None, "the CPU is everybody's");
        assert_eq!(same_card(&[none, b, a, b]), Some((1, 3)));
    }
}
