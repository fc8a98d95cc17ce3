//! The worker's side: what a rank does first.
//!
//! ```text
//! let status = worker::attach(&role, &variables)?;     // first thing in main: from here on, the worker dies with its launcher
//! status.set_status(format_args!("loading cifar10"));
//! let worker = Worker::join(&role, &variables, status, timeouts)?; // meets the other ranks
//! … worker.client: the store, for the collectives
//! worker.leave(limit);      // under another launcher, rank 0 hosts the store and leaves last
//! ```
//!
//! A worker of this program's launcher dies with it in two ways, neither of which needs an action of the launcher: the kernel
//! sends SIGKILL when the launcher's main thread ends (on Linux), and a thread watches the launcher. The same thread sends the
//! heartbeats, whose absence shows the launcher that a worker is stopped.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getppid, kill_current_process_group};

use super::environment::{self, Launcher, Variables, WorkerRole};
use super::error::{LaunchError, Result};
use super::rank_rendezvous::{RankWait, RendezvousAddress, connect, host_store};
use super::status_page::StatusPage;
use super::system::{ParentWatch, set_parent_death_signal};
use super::worker_status::WorkerStatus;
use comm::{CommError, Secret, StoreClient, StoreConfig, StoreServer};

/// Path of the worker's `error.json`.
pub const FAILURE_FILE: &str = "TRAINER_FAILURE_FILE";
/// How often the job was started before: from 0 to `--max-restarts`.
pub const ATTEMPT: &str = "TRAINER_ATTEMPT";
/// Interval between heartbeats.
const HEARTBEAT: Duration = Duration::from_millis(100);
/// How often a process says for whom it waits.
pub const NOTICE: Duration = Duration::from_secs(10);

/// How long a rank waits for others.
#[derive(Debug, Clone, Copy)]
pub struct JoinTimeouts {
    /// For all ranks to join.
    pub join: Duration,
    /// Longest silence of another host afterwards. Shorter outages of the network are survived.
    pub answer: Duration,
    /// How often to say for whom the rank waits. This program's launcher says it instead of its workers.
    pub notice: Duration,
}

/// A rank that has met all others.
#[derive(Debug)]
pub struct Worker {
    /// The rank's place in the job.
    pub role: WorkerRole,
    /// How often the job was started before.
    pub attempt: usize,
    /// The control connection, for the collectives. Dropped before the store.
    pub client: StoreClient,
    /// Tells the launcher what the worker is doing.
    pub status: WorkerStatus,
    /// The job's secret, for connections between ranks.
    pub secret: Secret,
    hosted: Option<StoreServer>,
}

/// Makes this process a worker: ties its life to its launcher's, starts the heartbeats and hooks panics. Call it first thing
/// in `main`, from the main thread.
///
/// # Errors
/// The variables or standard input are not what this program's launcher sets, or the launcher has ended already.
pub fn attach(role: &WorkerRole, variables: &Variables) -> Result<WorkerStatus> {
    let own = role.launcher == Launcher::Own;
    let page =
        if own { die_with_launcher(variables)? } else { StatusPage::create().map_err(|e| broken("memory", &e))? };
    // Not from `variables`, which has no paths that are not UTF-8
    let report = std::env::var_os(FAILURE_FILE).filter(|_| own).map(PathBuf::from);
    let status = WorkerStatus::new(role.rank, page, report);
    status.hook_panics();
    if own {
        start_heartbeats(&status)?;
    }
    status.set_status(format_args!("before rendezvous"));
    Ok(status)
}

impl Worker {
    /// Meets all other ranks.
    ///
    /// # Errors
    /// No variable says where rank 0 is, its port is taken, it does not answer, or ranks do not come. The error is also
    /// recorded for the launcher.
    pub fn join(
        role: &WorkerRole,
        variables: &Variables,
        status: WorkerStatus,
        timeouts: JoinTimeouts,
    ) -> Result<Self> {
        Self::rendezvous(role, variables, &status, timeouts)
            .inspect_err(|error| status.record_error(&error.message, &error.hint, false))
    }

    fn rendezvous(
        role: &WorkerRole,
        variables: &Variables,
        status: &WorkerStatus,
        timeouts: JoinTimeouts,
    ) -> Result<Self> {
        let RendezvousAddress { host, ports, secret } = RendezvousAddress::find(role, variables)?;
        let attempt = variables.get(ATTEMPT).and_then(|text| text.parse().ok()).unwrap_or(0);
        status.set_status(format_args!("rendezvous with {} ranks at {host}", role.world));
        let wait = RankWait { own: role.launcher == Launcher::Own, start: Instant::now(), timeouts };
        let (secret, offer) = secret.get(role, &host, &wait)?;
        let answer_limit = timeouts.answer;
        let config = StoreConfig { answer_limit, ..StoreConfig::new(secret.clone(), role.world) };
        let hosted = match (role.rank, role.launcher) {
            (_, Launcher::Own) | (1.., _) => None,
            (0, _) => Some(host_store(role, &host, &ports, &config, timeouts)?),
        };
        let ports = hosted.as_ref().map_or(ports, |hosted| vec![hosted.local_addr().port()]);
        let comm = |error: CommError| {
            status.record_comm_error(&error);
            LaunchError::failed(error.message, error.hint)
        };
        let client = connect(role.rank, &host, &ports, &config, &wait)?;
        status.set_status(format_args!("rendezvous: waiting for all of {} ranks", role.world));
        client.barrier("launch", timeouts.join).map_err(comm)?;
        // All ranks have the secret
        drop(offer);
        status.set_joined();
        tracing::info!(rank = role.rank, world = role.world, host, ?ports, attempt, "all ranks have joined");
        Ok(Self { role: role.clone(), attempt, client, status: status.clone(), secret, hosted })
    }

    /// Splits off the control connection, for the collectives. The barrier is for afterwards.
    pub fn into_parts(self) -> (StoreClient, ShutdownBarrier) {
        (self.client, ShutdownBarrier(self.hosted))
    }

    /// Closes the connection. Where this process hosts the store, waits up to `limit` until all other ranks have left.
    pub fn leave(self, limit: Duration) {
        let (client, barrier) = self.into_parts();
        drop(client);
        barrier.wait(limit);
    }
}

/// Keeps the store alive until all ranks have left. The last thing that a worker waits for.
#[derive(Debug)]
pub struct ShutdownBarrier(Option<StoreServer>);

impl ShutdownBarrier {
    /// Where this process hosts the store, waits up to `limit` until all other ranks have left: without the store they could
    /// not tell a normal end from a failure.
    pub fn wait(self, limit: Duration) {
        if let Some(hosted) = self.0 {
            // The job of a rank that is still there afterwards is aborted
            hosted.wait_until_left(limit);
        }
    }
}

pub(super) fn missing(name: &str) -> LaunchError {
    LaunchError::usage(
        format!("{} is set but {name} is not", environment::WORKER),
        "only this program's launcher sets these; to start a job unset both",
    )
}

fn broken(what: &str, error: &io::Error) -> LaunchError {
    LaunchError::failed(format!("a worker cannot have its {what}: {error}"), "see `ulimit -a` and `dmesg | tail`")
}

/// Ties this process's life to its launcher's, and opens the page that it has inherited as standard input.
fn die_with_launcher(variables: &Variables) -> Result<StatusPage> {
    let launcher = variables.get(environment::WORKER).and_then(|text| text.parse().ok()).and_then(Pid::from_raw);
    let launcher = launcher.ok_or_else(|| missing("its value a process id"))?;
    set_parent_death_signal(Signal::KILL).map_err(|e| broken("parent-death signal", &e))?;
    // The launcher may have died before that call
    if getppid() != Some(launcher) {
        return Err(LaunchError::failed(
            format!("the launcher (process {}) has ended before its worker began", launcher.as_raw_nonzero()),
            "a worker is started by its launcher only, and ends with it",
        ));
    }
    let page = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).map_err(|e| broken("page", &e.into()))?;
    let null = File::open("/dev/null").map_err(|e| broken("/dev/null", &e))?;
    rustix::stdio::dup2_stdin(&null).map_err(|e| broken("standard input", &e.into()))?;
    StatusPage::open(File::from(page)).map_err(|e| broken("page of its launcher as standard input", &e))
}

/// Starts the thread that sends heartbeats, and that kills this process and its children when the launcher is gone.
fn start_heartbeats(status: &WorkerStatus) -> Result<()> {
    let launcher = getppid().ok_or_else(|| missing("a launcher"))?;
    let launcher = ParentWatch::new(launcher).map_err(|e| broken("view of its launcher", &e))?;
    let status = status.clone();
    let run = move || {
        loop {
            status.send_heartbeat();
            if launcher.has_ended_within(HEARTBEAT) {
                let _ = kill_current_process_group(Signal::KILL);
            }
        }
    };
    let thread = std::thread::Builder::new().name("launcher-watch".into()).stack_size(128 << 10);
    thread.spawn(run).map(drop).map_err(|e| broken("watching thread", &e))
}
