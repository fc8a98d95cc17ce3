//! Runs one node's part of a job, from the start to the exit code.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::any_program::AnyProgram;
use super::error::{LaunchError, Result, USAGE, WORKER_DIED};
use super::launch_attempt::JobState;
use super::node_failure::RendezvousError;
use super::rendezvous_parameters::{MOST_MEMBERS, RendezvousParameters};
use super::screen::Screen;
use super::signals::{self, Signals};
use super::supervisor::Outcome;
use super::worker::NOTICE_INTERVAL;

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
    /// Asks the workers to save a checkpoint and exit. Ends them with SIGTERM if one of them does not train yet
    /// ([`WorkerStatus::set_training`](crate::WorkerStatus::set_training)).
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
    /// Maximum number of restarts of a job that failed.
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
                notice: NOTICE_INTERVAL,
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
    /// The job cannot be started: the port is taken, a node does not join, a process cannot be started, `folder` fails.
    pub fn run(&self, mut folder: impl FnMut(usize) -> Result<JobFolder>) -> Result<u8> {
        if self.workers == 0 {
            return Err(LaunchError::usage("a job of 0 workers", "ask for at least one: --cpus 1"));
        }
        if self.workers > MOST_MEMBERS {
            let message = format!("{} workers are more than a job may have, {MOST_MEMBERS}", self.workers);
            return Err(LaunchError::usage(message, "--cpus and --gpus count processes on this machine"));
        }
        let mut job = JobState {
            attempt: 0,
            secret: None,
            folder: None,
            signals: Signals::install().map_err(|error| system_error("catch signals", &error))?,
            screen: Arc::new(Screen::start()?),
        };
        let result = self.attempts(&mut job, &mut folder);
        job.screen.end();
        result
    }

    /// Runs the job until it succeeds, or until it may not be started again.
    fn attempts(&self, job: &mut JobState, folder: &mut dyn FnMut(usize) -> Result<JobFolder>) -> Result<u8> {
        loop {
            let outcome = match self.attempt(job, folder) {
                Ok(outcome) => outcome,
                Err(RendezvousError::Interrupted(signal)) => Outcome::Stopped(signal),
                Err(RendezvousError::Failed(error)) => return Err(error),
                Err(RendezvousError::Lost(failure)) => {
                    let restartable = failure.restartable && job.attempt < self.max_restarts;
                    let error = failure.to_error();
                    if !restartable {
                        return Err(error);
                    }
                    job.screen.say(&format!("error: {error}"));
                    Outcome::Failed { restartable }
                }
            };
            tracing::info!(attempt = job.attempt, ?outcome, "attempt ended");
            match outcome {
                Outcome::Done => return Ok(0),
                Outcome::UsageError => return Ok(USAGE),
                Outcome::Stopped(signal) => {
                    job.screen.say(&format!("stopped by {}", signals::name(signal)));
                    return Ok(128 + signal as u8);
                }
                Outcome::Failed { restartable: true } if job.attempt < self.max_restarts => {
                    job.screen.say(&format!(
                        "starting all workers again: attempt {} of {}",
                        job.attempt + 2,
                        self.max_restarts + 1
                    ));
                    job.attempt += 1;
                }
                Outcome::Failed { .. } => return Ok(WORKER_DIED),
            }
        }
    }
}

/// Returns the error for a refusal of the system. `what` completes `cannot …`.
pub(super) fn system_error(what: &str, error: &io::Error) -> LaunchError {
    LaunchError::failed(format!("cannot {what}: {error}"), "see `ulimit -a` and `dmesg | tail`")
}
