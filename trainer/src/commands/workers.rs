//! Several processes: the launcher's side, and the side of a worker.

use std::{path::Path, time::Duration};

use crate::{
    cli::TrainArgs,
    comm::{self, CommConfig, Communicator, TransportKind},
    config::{Backend, RunPlan},
    failure::Failure,
    launch::{
        Job, Nodes, Reporter,
        environment::{LocalRole, Variables, WorkerRole},
        secret,
        worker::{self, Farewell},
    },
    signals::Stop,
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
    local: &LocalRole,
    variables: &Variables,
    workers: usize,
    folder: &Path,
) -> Result<u8, Failure> {
    let flags = &arguments.job;
    let mut job = Job::of_this_program(workers, folder.join("logs"))?;
    job.timeout = Duration::from_secs(plan.parallel.timeout_s as u64);
    job.max_restarts = flags.max_restarts;
    job.address.1 = flags.master_port;
    let given = secret::given(variables, None)?;
    job.nodes = match &local.share {
        Some(share) if share.nodes > 1 => {
            job.workers = share.workers.unwrap_or(workers);
            Some(Nodes::new(share.nodes, share.node_rank, share.master_addr.clone(), share.master_port, given)?)
        }
        _ if flags.nnodes > 1 => {
            Some(Nodes::new(flags.nnodes, flags.node_rank, flags.master_addr.clone(), flags.master_port, given)?)
        }
        _ => None,
    };
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    job.variables = vec![vec![(RUN_FOLDER.to_owned(), folder.display().to_string())]; job.workers];
    Ok(job.run()?)
}

/// A rank that has met the others.
pub(super) struct Rank {
    /// The connection to them.
    pub comm: Communicator,
    /// Says what this rank is doing.
    pub reporter: Reporter,
    /// Signals, seen from before the ranks met.
    pub stop: Stop,
    farewell: Farewell,
}

impl Rank {
    /// Leaves word of why this rank fails: its launcher shows it when the process ends.
    pub(super) fn failed(&self, failure: &Failure) {
        match self.comm.error() {
            Some(error) => self.reporter.comm_failed(&error),
            None => self.reporter.failed(&failure.message, failure.hint.as_deref().unwrap_or_default(), false),
        }
    }

    /// Ends the connection in good order.
    pub(super) fn leave(self) {
        drop(self.comm);
        self.farewell.wait(GOODBYE);
    }
}

/// Meets the other ranks of a training job.
///
/// # Errors
/// They do not come, or are another job's.
pub(super) fn join(role: &WorkerRole, variables: &Variables, plan: &RunPlan) -> Result<Rank, Failure> {
    let transport = match plan.parallel.backend {
        Backend::Tcp => TransportKind::Tcp,
        Backend::Shm => TransportKind::Shm,
        _ if role.local_world == role.world => TransportKind::Shm,
        _ => TransportKind::Tcp,
    };
    join_over(role, variables, transport, Duration::from_secs(plan.parallel.timeout_s as u64))
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
    let joined = worker::attach(role, variables)?.join(JOIN)?;
    let (reporter, secret) = (joined.reporter.clone(), joined.secret.clone());
    // the control connection is there already: the address is of no use any more
    let mut config = CommConfig::new(role.rank, role.world, "", secret, transport);
    config.timeout = timeout;
    reporter.doing(format_args!("connecting over {transport}"));
    let (client, farewell) = joined.into_parts();
    let comm = comm::join_through(client, &config).inspect_err(|error| reporter.comm_failed(error))?;
    Ok(Rank { comm, reporter, stop, farewell })
}
