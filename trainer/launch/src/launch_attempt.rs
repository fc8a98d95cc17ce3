//! One attempt to run a job on this node: rendezvous of the nodes, start of the workers, and their supervision to the end.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use signal_hook::consts::SIGTSTP;

use super::announcer::Announcer;
use super::any_program;
use super::cores::{self, CoreAssignment};
use super::error::{LaunchError, Result};
use super::exit_barrier::{ExitWait, JobEnd, NodeEnd};
use super::helper::Guard;
use super::job_secret::{JobSecret, random_secret};
use super::launcher::{JobFolder, LaunchConfig, system_error};
use super::listen::{bind, listen_address};
use super::node_failure::{NodeInfo, RendezvousError};
use super::node_rendezvous::NodeRendezvous;
use super::node_wait::NodeWait;
use super::port;
use super::process::{WorkerProcess, WorkerSpec};
use super::rendezvous_parameters::RendezvousParameters;
use super::screen::{OnScreen, Screen};
use super::secret::derive;
use super::signals::{STOPPING, Signals, ends_at_once};
use super::supervisor::{Outcome, Supervisor};
use super::worker_environment::{WorkerEnvironment, threads_of_any_program};
use comm::{MemberKind, Secret, StoreConfig, StoreServer};
use folder::Folder;

/// The state of a job that lasts from one attempt to the next.
pub(super) struct JobState {
    /// Number of the attempt, from 0.
    pub(super) attempt: usize,
    /// Set when the secret of the job's nodes is known.
    pub(super) secret: Option<JobSecret>,
    /// Set when the folder is made.
    pub(super) folder: Option<JobFolder>,
    pub(super) signals: Signals,
    pub(super) screen: Arc<Screen>,
}

impl LaunchConfig {
    /// Runs the job once. Sets the number of the attempt to node 0's, which may be higher.
    pub(super) fn attempt(
        &self,
        job: &mut JobState,
        make_folder: &mut dyn FnMut(usize) -> Result<JobFolder>,
    ) -> std::result::Result<Outcome, RendezvousError> {
        let rendezvous = match &self.rendezvous {
            Some(parameters) => Some(self.join_nodes(parameters, job)?),
            None => None,
        };
        job.attempt = rendezvous.as_ref().map_or(job.attempt, |rendezvous| rendezvous.attempt);
        // The store outlives the exit barrier: ranks of other nodes may still use it.
        let mut store = None;
        let result = self.run_workers(job, rendezvous.as_ref(), &mut store, make_folder);
        let Some(rendezvous) = rendezvous else { return result };
        // Without a report the other nodes would wait for this node.
        if let Err(error) = &result {
            rendezvous.publish_error(error);
        }
        let outcome = result.as_ref().ok().copied();
        // A SIGHUP never counts as the second signal.
        let is_stopping = matches!(outcome, Some(Outcome::Stopped(_)));
        let attempt = job.attempt;
        let signals = &mut job.signals;
        let mut interrupted = || stopping(signals).filter(|signal| !is_stopping || ends_at_once(*signal));
        let mut wait = ExitWait::new(&job.screen, &self.timeouts, self.on_signal, &mut interrupted);
        let node = NodeEnd { outcome, attempts_left: attempt < self.max_restarts };
        match (rendezvous.exit_barrier(node, &mut wait), outcome) {
            (JobEnd::Interrupted(signal), Some(Outcome::Done | Outcome::Stopped(_))) => Ok(Outcome::Stopped(signal)),
            (JobEnd::Interrupted(signal), _) if node.wants_restart() => Ok(Outcome::Stopped(signal)),
            (JobEnd::Interrupted(signal), None) if matches!(result, Err(RendezvousError::Lost(_))) => {
                Err(RendezvousError::Interrupted(signal))
            }
            // The launcher of another node has ended after the failure, and does not come back.
            (JobEnd::Failed(failure), _) if node.wants_restart() && !failure.restartable => {
                job.screen.say(&format!("error: {}", failure.to_error()));
                Ok(Outcome::Failed { restartable: false })
            }
            (JobEnd::Failed(failure), Some(Outcome::Done)) => {
                job.screen.say(&format!("error: {}", failure.to_error()));
                Ok(Outcome::Failed { restartable: failure.restartable })
            }
            (JobEnd::NoRestart(node), Some(_)) => {
                job.screen.say(&format!("note: node {node} does not start its workers again, so the job ends"));
                Ok(Outcome::Failed { restartable: false })
            }
            _ => result,
        }
    }

    /// Starts this node's workers, and watches them until all have ended.
    fn run_workers(
        &self,
        job: &mut JobState,
        rendezvous: Option<&NodeRendezvous>,
        store: &mut Option<StoreServer>,
        make_folder: &mut dyn FnMut(usize) -> Result<JobFolder>,
    ) -> std::result::Result<Outcome, RendezvousError> {
        let (world_size, first_rank) = rendezvous.map_or((self.workers, 0), NodeRendezvous::world_size_and_first_rank);
        let (node, mut host, secret) = match (&self.rendezvous, &job.secret) {
            (Some(nodes), Some(secret)) => {
                (nodes.node_rank, nodes.master_addr.clone(), derive(&secret.secret, "workers", job.attempt))
            }
            _ => (0, self.address.0.clone(), random_secret()?),
        };
        // Node 0 hosts the store of all workers. Workers that are any program make their own rendezvous.
        if node == 0 && self.any_program.is_none() {
            *store = Some(self.start_store(&mut host, &secret, world_size, &job.screen)?);
        }
        let port = self.port_of_workers(&host, store.as_ref(), rendezvous, job)?;
        let attempt = job.attempt;
        tracing::info!(attempt, world_size, node, first_rank, host, port, "starting {} workers", self.workers);

        let folder = match &mut job.folder {
            Some(folder) => {
                if self.any_program.is_none() {
                    archive(&folder.logs, attempt.saturating_sub(1), first_rank..first_rank + self.workers)?;
                }
                folder
            }
            missing => missing.insert(make_folder(world_size)?),
        };
        let nodes = self.rendezvous.as_ref().map_or(1, |nodes| nodes.nnodes);
        let local_world_size = self.workers;
        let environment =
            WorkerEnvironment { world_size, nodes, first_rank, local_world_size, node, attempt, host, port, secret };
        // The guard is dropped after the workers. If they have ended by then, it has nothing to kill.
        let guard = self.any_program.as_ref().map(|_| Guard::start()).transpose()?;
        let mut workers = self.start(&environment, folder, &job.screen, guard.as_ref())?;
        let supervisor = Supervisor {
            workers: &mut workers,
            store: store.as_ref(),
            rendezvous,
            node: self.rendezvous.as_ref().map(|nodes| nodes.node_rank),
            signals: &mut job.signals,
            screen: &job.screen,
            timeouts: self.timeouts,
            on_signal: self.on_signal,
        };
        Ok(supervisor.run().map_err(|error| system_error("watch the workers", &error))?)
    }

    /// Waits for the other nodes.
    fn join_nodes(
        &self,
        parameters: &RendezvousParameters,
        job: &mut JobState,
    ) -> std::result::Result<NodeRendezvous, RendezvousError> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let own = NodeInfo { workers: self.workers, host, max_restarts: self.max_restarts };
        let mut interrupted = || stopping(&mut job.signals);
        let mut wait = self.wait(&job.screen, &mut interrupted);
        let secret = match &mut job.secret {
            Some(secret) => secret,
            unknown => unknown.insert(JobSecret::of(parameters, &mut wait)?),
        };
        NodeRendezvous::join(parameters, &secret.secret, &own, job.attempt, &mut wait)
    }

    /// Starts the store of all workers on `host`. Sets `host` to the address at which this node's workers reach the store.
    fn start_store(
        &self,
        host: &mut String,
        secret: &Secret,
        world_size: usize,
        screen: &Arc<Screen>,
    ) -> Result<StoreServer> {
        let config =
            StoreConfig { answer_timeout: self.timeouts.stall, ..StoreConfig::new(secret.clone(), world_size) };
        let announcer = Announcer {
            say: screen.message_writer(),
            member: MemberKind::Rank,
            world_size,
            place: host.clone(),
            interval: self.timeouts.notice,
            limit: self.timeouts.join,
        };
        let (address, port) = self.worker_address(host);
        let store = bind(&address, port, config, announcer.start()?)?;
        if store.local_addr().ip().is_unspecified() {
            // This host may be unable to resolve the name.
            *host = "127.0.0.1".to_owned();
        }
        Ok(store)
    }

    /// Returns the port of the workers' rendezvous. Node 0 publishes the port, and the other nodes wait for it.
    fn port_of_workers(
        &self,
        host: &str,
        store: Option<&StoreServer>,
        rendezvous: Option<&NodeRendezvous>,
        job: &mut JobState,
    ) -> std::result::Result<u16, RendezvousError> {
        if let (Some(rendezvous), Some(nodes)) = (rendezvous, &self.rendezvous)
            && nodes.node_rank > 0
        {
            let mut interrupted = || stopping(&mut job.signals);
            return rendezvous.workers_port(&mut self.wait(&job.screen, &mut interrupted));
        }
        let port = match store {
            Some(store) => store.local_addr().port(),
            None => {
                let (address, port) = self.worker_address(host);
                any_program::port_for_workers(&address, port)?
            }
        };
        if let Some(rendezvous) = rendezvous {
            rendezvous.publish_port(port)?;
        }
        Ok(port)
    }

    /// Returns the address and the port at which node 0 listens for the workers.
    fn worker_address(&self, host: &str) -> (String, u16) {
        let several_nodes = self.rendezvous.is_some();
        (listen_address(host, several_nodes, |_| {}), if several_nodes { 0 } else { self.address.1 })
    }

    /// Makes a wait for the other nodes that starts now.
    fn wait<'a>(&self, screen: &'a Arc<Screen>, interrupted: &'a mut dyn FnMut() -> Option<i32>) -> NodeWait<'a> {
        let place = self.rendezvous.as_ref().map(|nodes| port::host_port(&nodes.master_addr, nodes.master_port));
        NodeWait::new(screen, place.unwrap_or_default(), self.timeouts, interrupted)
    }

    /// Starts this node's workers.
    fn start(
        &self,
        environment: &WorkerEnvironment,
        folder: &JobFolder,
        screen: &Arc<Screen>,
        guard: Option<&Arc<Guard>>,
    ) -> Result<Vec<WorkerProcess>> {
        let (program, arguments) = match &self.any_program {
            Some(_) => {
                let helper = Self::of_this_program(0)?.program;
                (helper, any_program::through_helper(&self.program, &self.arguments))
            }
            None => (self.program.clone(), self.arguments.clone()),
        };
        let attempt_folder = attempt_folder(&folder.logs, environment.attempt, environment.first_rank);
        if let (Some(threads), Some(_), 0) =
            (threads_of_any_program(self.workers), &self.any_program, environment.attempt)
        {
            screen.say(&format!(
                "note: OMP_NUM_THREADS={threads} for each worker, as torchrun sets it; set it to have more"
            ));
        }
        let CoreAssignment { threads, cores } = cores::assign(&cores::available(), cores::quota(), self.workers);
        let cores = cores.filter(|_| self.pin);
        let mut workers = Vec::with_capacity(self.workers);
        for local_rank in 0..self.workers {
            let rank = environment.first_rank + local_rank;
            let mut variables = match &self.any_program {
                Some(any) => environment.of_any_program(local_rank, &any.run_id, self.max_restarts),
                None => environment.of_this_program(local_rank),
            };
            let names = match &self.any_program {
                Some(_) => vec![attempt_folder.clone(), rank.to_string()],
                None => vec![format!("rank-{rank}")],
            };
            let on_screen = |prefix| OnScreen { screen: Arc::clone(screen), prefix };
            // The user's value takes precedence
            if std::env::var_os(cores::RAYON_NUM_THREADS).is_none() {
                variables.push((cores::RAYON_NUM_THREADS.to_owned(), threads.to_string().into()));
            }
            variables.extend(folder.variables.iter().cloned());
            let spec = WorkerSpec {
                rank,
                program: &program,
                arguments: &arguments,
                variables,
                cores: cores.as_ref().map(|cores| &cores[local_rank]),
                logs: &folder.logs,
                folder: &names,
                screen: match &self.any_program {
                    Some(_) => Some(on_screen(Some(format!("[{rank}]: ")))),
                    None => (rank == 0).then(|| on_screen(None)),
                },
                guard,
            };
            // On an error, `workers` is dropped, which ends the workers that run already.
            let worker = WorkerProcess::start(spec)?;
            tracing::debug!(rank, pid = worker.pid.as_raw_nonzero(), "started a worker");
            workers.push(worker);
        }
        Ok(workers)
    }
}

/// Moves the logs of this node's `ranks` to `attempt-K` after a failed attempt. A resumed run may already have logs of earlier
/// attempts, so K is the first number whose folder has none of these ranks. Nodes may share the folder of logs, and each moves
/// only its own ranks.
fn archive(logs: &Path, attempt: usize, ranks: Range<usize>) -> Result<()> {
    let names: Vec<String> = ranks.map(|rank| format!("rank-{rank}")).filter(|name| logs.join(name).exists()).collect();
    let move_all = || -> io::Result<()> {
        let is_free = |folder: &String| !names.iter().any(|name| logs.join(folder).join(name).exists());
        let Some(target) = (attempt..).map(|number| format!("attempt-{number}")).find(is_free) else { return Ok(()) };
        Folder::open(logs)?.ensure_folder(&target)?;
        names.iter().try_for_each(|name| fs::rename(logs.join(name), logs.join(&target).join(name)))
    };
    if names.is_empty() {
        return Ok(());
    }
    move_all().map_err(|error| {
        LaunchError::failed(
            format!("{}: cannot keep the logs of the attempt that failed: {error}", logs.display()),
            "make the folder writable, or free some space",
        )
    })
}

/// Returns the name of an attempt's folder in the logs of any program: the first `attempt_K` that no earlier job has used.
/// Nodes of this job may share the folder of logs, so a folder counts as used only if it has a folder for this node's first
/// rank.
fn attempt_folder(logs: &Path, attempt: usize, first_rank: usize) -> String {
    let name = |number: usize| format!("attempt_{number}");
    let is_free = |number: &usize| !logs.join(name(*number)).join(first_rank.to_string()).exists();
    (attempt..).find(is_free).map_or_else(|| name(attempt), name)
}

/// Returns the first signal in the queue that asks the job to stop. Handles Ctrl-Z by stopping this process alone: no worker runs
/// yet.
fn stopping(signals: &mut Signals) -> Option<i32> {
    let received = signals.take();
    if received.contains(&SIGTSTP) {
        // Returns after SIGCONT. A launcher that cannot stop continues to wait.
        let _ = signal_hook::low_level::emulate_default_handler(SIGTSTP);
    }
    received.into_iter().find(|signal| STOPPING.contains(signal))
}
