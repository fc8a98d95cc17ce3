//! Runs one node's part of a job, from the start to the exit code.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::announcer::Announcer;
use super::any_program::{self, AnyProgram};
use super::cores::{self, CoreAssignment};
use super::error::{LaunchError, Result, USAGE, WORKER_DIED};
use super::helper::Guard;
use super::job_secret::{JobSecret, random_secret};
use super::listen::{bind, listen_address};
use super::node_failure::{NodeInfo, RendezvousError};
use super::node_rendezvous::NodeRendezvous;
use super::node_wait::NodeWait;
use super::output::{OnScreen, Screen};
use super::port;
use super::process::{WorkerProcess, WorkerSpec};
use super::rendezvous_parameters::{MOST_MEMBERS, RendezvousParameters};
use super::secret::derive;
use super::signals::{self, STOPPING, Signals};
use super::supervisor::{Outcome, Supervisor};
use super::worker::NOTICE;
use super::worker_group::{WorkerGroup, threads_of_any_program};
use comm::{Member, StoreConfig};
use folder::Folder;

/// How long the launcher waits.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// A worker that sends no heartbeats for this long counts as failed. So does a node that does not answer for this long.
    pub stall: Duration,
    /// Longest wait of nodes and workers for each other at the start.
    pub join: Duration,
    /// Time from SIGTERM to SIGKILL.
    pub grace: Duration,
    /// Longest time for workers to save a checkpoint and exit after a signal.
    pub stop: Duration,
    /// Interval between messages about a wait.
    pub notice: Duration,
}

/// The log folder of a job's workers, and their additional variables.
#[derive(Debug, Clone)]
pub struct JobFolder {
    /// `logs/`. It gets one folder `rank-N` per worker, and `attempt-K/` with the folders of failed attempts. Workers that are
    /// any program have folders `attempt_K/N`. The parent folder must exist.
    pub logs: PathBuf,
    /// Additional environment variables of each worker.
    pub variables: Vec<(String, OsString)>,
}

/// The launcher's reaction to the first signal. A second signal ends the workers at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnSignal {
    /// Asks the workers to save a checkpoint and exit.
    Save,
    /// Ends the workers at once, since they have nothing to save.
    End,
    /// Forwards the signal to the workers, which have [`Timeouts::grace`] to end.
    Forward,
}

/// Describes a job to start, as torchrun's class of this name does.
#[derive(Debug, Clone)]
pub struct LaunchConfig {
    /// Number of workers on this node.
    pub workers: usize,
    /// Executable of the workers: this program, or any other.
    pub program: PathBuf,
    /// Arguments of the workers: this process's arguments.
    pub arguments: Vec<OsString>,
    /// Set if the workers run a program other than this one. Then this process's `main` must call
    /// [`helper::run_if_asked`](crate::helper).
    pub any_program: Option<AnyProgram>,
    /// How long the launcher waits for workers and nodes.
    pub timeouts: Timeouts,
    /// The reaction to the first signal.
    pub on_signal: OnSignal,
    /// Most restarts of a job that failed.
    pub max_restarts: usize,
    /// Whether each worker is limited to its own cores, if there are at least as many cores as workers.
    pub pin: bool,
    /// Set for a job on several nodes.
    pub rendezvous: Option<RendezvousParameters>,
    /// Host and port of the workers' rendezvous in a job on one node: the loopback address, and by default a port that the kernel
    /// chooses.
    pub address: (String, u16),
}

impl LaunchConfig {
    /// Describes a job of `workers` processes on this machine that run this executable with this process's arguments.
    ///
    /// # Errors
    /// The executable cannot be found.
    pub fn of_this_program(workers: usize) -> Result<Self> {
        let program = std::env::current_exe().map_err(|error| {
            LaunchError::failed(format!("cannot find this program's own file: {error}"), "is /proc mounted?")
        })?;
        Ok(Self {
            workers,
            program,
            arguments: std::env::args_os().skip(1).collect(),
            any_program: None,
            timeouts: Timeouts {
                stall: Duration::from_secs(300),
                join: Duration::from_secs(300),
                grace: Duration::from_secs(2),
                stop: Duration::from_secs(120),
                notice: NOTICE,
            },
            on_signal: OnSignal::Save,
            max_restarts: 0,
            pin: true,
            rendezvous: None,
            address: ("127.0.0.1".to_owned(), 0),
        })
    }

    /// Runs the job and returns the exit code: 0 done, 2 a worker has reported wrong input, 3 a worker died (the reports are on
    /// stderr), 128 + n stopped by signal n. Call this function from the main thread: workers die with the thread that starts
    /// them.
    ///
    /// `folder` makes the job's folder, given the world size. It is called once, when the port is bound and all nodes have
    /// joined. So a job that cannot start leaves no folder, and the world size is known.
    ///
    /// # Errors
    /// The job cannot be started: the port is taken, a node does not come, a process cannot be started, `folder` fails.
    pub fn run(&self, mut folder: impl FnMut(usize) -> Result<JobFolder>) -> Result<u8> {
        if self.workers == 0 {
            return Err(LaunchError::usage("a job of 0 workers", "ask for at least one: --cpus 1"));
        }
        if self.workers > MOST_MEMBERS {
            let message = format!("{} workers are more than a job may have, {MOST_MEMBERS}", self.workers);
            return Err(LaunchError::usage(message, "--cpus and --gpus count processes on this machine"));
        }
        let screen = Arc::new(Screen::default());
        let mut signals = Signals::install().map_err(|error| system("catch signals", &error))?;
        let (mut found, mut secret) = (None, None);
        let mut attempt = 0;
        loop {
            let outcome = self.attempt(&mut attempt, &mut secret, &mut signals, &screen, &mut found, &mut folder);
            let outcome = match outcome {
                Ok(outcome) => outcome,
                Err(RendezvousError::Interrupted(signal)) => Outcome::Stopped(signal),
                Err(RendezvousError::Failed(error)) => return Err(error),
                Err(RendezvousError::Lost(failure)) => {
                    let restartable = failure.restartable && attempt < self.max_restarts;
                    let error = LaunchError::failed(&failure.what, failure.hint().unwrap_or_default());
                    if !restartable {
                        return Err(error);
                    }
                    screen.say(&format!("error: {error}"));
                    Outcome::Failed { restartable }
                }
            };
            tracing::info!(attempt, ?outcome, "attempt ended");
            match outcome {
                Outcome::Done => return Ok(0),
                Outcome::Refused => return Ok(USAGE),
                Outcome::Stopped(signal) => {
                    screen.say(&format!("stopped by {}", signals::name(signal)));
                    return Ok(128 + signal as u8);
                }
                Outcome::Failed { restartable: true } if attempt < self.max_restarts => {
                    screen.say(&format!(
                        "starting all workers again: attempt {} of {}",
                        attempt + 2,
                        self.max_restarts + 1
                    ));
                    attempt += 1;
                }
                Outcome::Failed { .. } => return Ok(WORKER_DIED),
            }
        }
    }

    /// Runs the job once. Sets `attempt` to node 0's number, which may be higher. `secret` holds the job's secret once it is
    /// known.
    fn attempt(
        &self,
        attempt: &mut usize,
        secret: &mut Option<JobSecret>,
        signals: &mut Signals,
        screen: &Arc<Screen>,
        found: &mut Option<JobFolder>,
        folder: &mut dyn FnMut(usize) -> Result<JobFolder>,
    ) -> std::result::Result<Outcome, RendezvousError> {
        let rendezvous = match &self.rendezvous {
            Some(parameters) => Some(self.join_nodes(parameters, *attempt, secret, signals, screen)?),
            None => None,
        };
        *attempt = rendezvous.as_ref().map_or(*attempt, |rendezvous| rendezvous.attempt);
        let attempt = *attempt;
        let (world, first_rank) = rendezvous.as_ref().map_or((self.workers, 0), NodeRendezvous::world);
        let (node, mut host, port, secret) = match (&self.rendezvous, secret) {
            (Some(nodes), Some(secret)) => {
                (nodes.node_rank, nodes.master_addr.clone(), 0, derive(&secret.secret, "workers", attempt))
            }
            _ => (0, self.address.0.clone(), self.address.1, random_secret()?),
        };
        // Node 0 hosts the store of all workers. Workers that are any program make their own rendezvous.
        let store = match node {
            0 if self.any_program.is_none() => {
                let config =
                    StoreConfig { answer_limit: self.timeouts.stall, ..StoreConfig::new(secret.clone(), world) };
                let announcer = Announcer {
                    say: screen.sayer(),
                    member: Member::Rank,
                    world,
                    place: host.clone(),
                    interval: self.timeouts.notice,
                    limit: self.timeouts.join,
                };
                let address = listen_address(&host, rendezvous.is_some(), |_| {});
                let store = bind(&address, port, config, announcer.start()?)?;
                if store.local_addr().ip().is_unspecified() {
                    // This host may be unable to resolve the name.
                    host = "127.0.0.1".to_owned();
                }
                Some(store)
            }
            _ => None,
        };
        let port = match (&store, &rendezvous) {
            (Some(store), _) => store.local_addr().port(),
            (None, Some(rendezvous)) if node > 0 => {
                let mut interrupted = || stopping(signals);
                rendezvous.workers_port(&mut self.wait(screen, &mut interrupted))?
            }
            (None, rendezvous) => {
                any_program::port_for_workers(&listen_address(&host, rendezvous.is_some(), |_| {}), port)?
            }
        };
        if let (0, Some(rendezvous)) = (node, &rendezvous) {
            rendezvous.publish_port(port)?;
        }
        tracing::info!(attempt, world, node, first_rank, host, port, "starting {} workers", self.workers);
        let folder = match found {
            Some(folder) => {
                if self.any_program.is_none() {
                    archive(&folder.logs, attempt.saturating_sub(1), first_rank..first_rank + self.workers)?;
                }
                folder
            }
            None => found.insert(folder(world)?),
        };
        let nodes = self.rendezvous.as_ref().map_or(1, |nodes| nodes.nnodes);
        let local_world = self.workers;
        let group = WorkerGroup { world, nodes, first_rank, local_world, node, attempt, host, port, secret };
        // The guard is dropped after the workers. If they have ended by then, it has nothing to kill.
        let guard = self.any_program.as_ref().map(|_| Guard::start()).transpose()?;
        let mut workers = self.start(&group, folder, screen, guard.as_ref())?;
        let supervisor = Supervisor {
            workers: &mut workers,
            store: store.as_ref(),
            rendezvous: rendezvous.as_ref(),
            node: self.rendezvous.as_ref().map(|nodes| nodes.node_rank),
            signals,
            screen,
            timeouts: self.timeouts,
            on_signal: self.on_signal,
        };
        let outcome = supervisor.run().map_err(|error| system("watch the workers", &error))?;
        let stopped = rendezvous.as_ref().and_then(|rendezvous| rendezvous.finish(&mut || stopping(signals)));
        Ok(stopped.map_or(outcome, Outcome::Stopped))
    }

    fn join_nodes(
        &self,
        parameters: &RendezvousParameters,
        attempt: usize,
        secret: &mut Option<JobSecret>,
        signals: &mut Signals,
        screen: &Arc<Screen>,
    ) -> std::result::Result<NodeRendezvous, RendezvousError> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let own = NodeInfo { workers: self.workers, host, max_restarts: self.max_restarts };
        let mut interrupted = || stopping(signals);
        let mut wait = self.wait(screen, &mut interrupted);
        let secret = match secret {
            Some(secret) => secret,
            None => secret.insert(JobSecret::of(parameters, &mut wait)?),
        };
        NodeRendezvous::join(parameters, &secret.secret, &own, attempt, &mut wait, self.timeouts, screen)
    }

    /// Makes a wait for the other nodes that starts now.
    fn wait<'a>(&self, screen: &'a Screen, interrupted: &'a mut dyn FnMut() -> Option<i32>) -> NodeWait<'a> {
        let place = self.rendezvous.as_ref().map(|nodes| port::joined(&nodes.master_addr, nodes.master_port));
        NodeWait::new(screen, place.unwrap_or_default(), self.timeouts, interrupted)
    }

    fn start(
        &self,
        group: &WorkerGroup,
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
        let attempt_folder = attempt_folder(&folder.logs, group.attempt, group.first_rank);
        if let (Some(threads), Some(_), 0) = (threads_of_any_program(self.workers), &self.any_program, group.attempt) {
            screen.say(&format!(
                "note: OMP_NUM_THREADS={threads} for each worker, as torchrun sets it; set it to have more"
            ));
        }
        let CoreAssignment { threads, cores } = cores::assign(&cores::available(), cores::quota(), self.workers);
        let cores = cores.filter(|_| self.pin);
        let mut workers = Vec::with_capacity(self.workers);
        for local_rank in 0..self.workers {
            let rank = group.first_rank + local_rank;
            let mut variables = match &self.any_program {
                Some(any) => group.of_any_program(local_rank, &any.run_id, self.max_restarts),
                None => group.of_this_program(local_rank),
            };
            let names = match &self.any_program {
                Some(_) => vec![attempt_folder.clone(), rank.to_string()],
                None => vec![format!("rank-{rank}")],
            };
            let on_screen = |prefix| OnScreen { screen: Arc::clone(screen), prefix };
            // The user's value takes precedence
            if std::env::var_os("RAYON_NUM_THREADS").is_none() {
                variables.push(("RAYON_NUM_THREADS".to_owned(), threads.to_string().into()));
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

/// Returns the first signal in the queue that asks the job to stop.
fn stopping(signals: &mut Signals) -> Option<i32> {
    signals.take().into_iter().find(|signal| STOPPING.contains(signal))
}

fn system(what: &str, error: &io::Error) -> LaunchError {
    LaunchError::failed(format!("cannot {what}: {error}"), "see `ulimit -a` and `dmesg | tail`")
}
