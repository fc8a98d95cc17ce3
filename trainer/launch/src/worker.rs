//! The worker's side of the rendezvous: the first steps of a rank.
//!
//! ```text
//! let status = worker::attach(&role, &variables)?;     // first thing in main: from here on, the worker dies with its launcher
//! status.set_status(format_args!("loading cifar10"));
//! let worker = Worker::join(&role, &variables, status, timeouts)?; // joins the rendezvous
//! … worker.client: the store, for the collectives
//! worker.leave(limit);      // under another launcher, rank 0 hosts the store and leaves last
//! ```
//!
//! A worker of this program's launcher must not outlive the launcher. Two mechanisms ensure this without any action of the
//! launcher: the kernel sends SIGKILL when the launcher's main thread ends (on Linux), and a thread of the worker watches the
//! launcher. The same thread sends the heartbeats. If they stop, the launcher knows that the worker is stopped.

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
/// The variable with the number of earlier starts of the job: from 0 to `--max-restarts`.
pub const ATTEMPT: &str = "TRAINER_ATTEMPT";
/// Interval between heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between messages of a process that waits for others.
pub const NOTICE_INTERVAL: Duration = Duration::from_secs(10);

/// How long a rank waits for other ranks.
#[derive(Debug, Clone, Copy)]
pub struct JoinTimeouts {
    /// Longest wait for all ranks to join.
    pub join: Duration,
    /// After joining, a connection ends when another host has not answered for this long. It survives shorter outages of the
    /// network.
    pub answer: Duration,
    /// Interval between messages about a wait. Workers of this program's launcher print none, since the launcher prints them.
    pub notice: Duration,
}

/// A rank that has joined the job, together with all other ranks.
#[derive(Debug)]
pub struct Worker {
    /// The rank's role in the job.
    pub role: WorkerRole,
    /// Number of earlier starts of the job.
    pub attempt: usize,
    /// The control connection, for the collectives. Dropped before the store.
    pub client: StoreClient,
    /// Reports the worker's status to the launcher.
    pub status: WorkerStatus,
    /// The job's secret, for connections between ranks.
    pub secret: Secret,
    hosted: Option<StoreServer>,
}

/// Makes this process a worker: ends it when its launcher ends, starts the heartbeats, and installs the panic hook. Call this
/// function first in `main`, from the main thread.
///
/// # Errors
/// The variables or the standard input were not set by this program's launcher, or the launcher has already ended.
pub fn attach(role: &WorkerRole, variables: &Variables) -> Result<WorkerStatus> {
    let own = role.launcher == Launcher::Builtin;
    let page =
        if own { die_with_launcher(variables)? } else { StatusPage::create().map_err(|e| broken("memory", &e))? };
    // Read the environment and not `variables`, which skips paths that are not UTF-8.
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
    /// Joins the job, and waits until all other ranks have joined.
    ///
    /// # Errors
    /// No variable has rank 0's address, rank 0's port is taken, rank 0 does not answer, or ranks do not join in time. The
    /// error is also recorded for the launcher.
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
        status.set_status(format_args!("rendezvous with {} ranks at {host}", role.world_size));
        let wait = RankWait { launcher_announces: role.launcher == Launcher::Builtin, start: Instant::now(), timeouts };
        let (secret, offer) = secret.get(role, &host, &wait)?;
        let answer_timeout = timeouts.answer;
        let config = StoreConfig { answer_timeout, ..StoreConfig::new(secret.clone(), role.world_size) };
        let hosted = match (role.rank, role.launcher) {
            (_, Launcher::Builtin) | (1.., _) => None,
            (0, _) => Some(host_store(role, &host, &ports, &config, timeouts)?),
        };
        let ports = hosted.as_ref().map_or(ports, |hosted| vec![hosted.local_addr().port()]);
        let comm = |error: CommError| {
            status.record_comm_error(&error);
            LaunchError::failed(error.message, error.hint)
        };
        let client = connect(role.rank, &host, &ports, &config, &wait)?;
        status.set_status(format_args!("rendezvous: waiting for all of {} ranks", role.world_size));
        client.barrier("launch", timeouts.join).map_err(comm)?;
        // All ranks have the secret now.
        drop(offer);
        status.set_joined();
        tracing::info!(rank = role.rank, world_size = role.world_size, host, ?ports, attempt, "all ranks have joined");
        Ok(Self { role: role.clone(), attempt, client, status: status.clone(), secret, hosted })
    }

    /// Splits the worker into the control connection, which the collectives use, and the barrier to wait for at the end.
    pub fn into_parts(self) -> (StoreClient, ShutdownBarrier) {
        (self.client, ShutdownBarrier(self.hosted))
    }

    /// Closes the connection. If this process hosts the store, waits up to `limit` until all other ranks have left.
    pub fn leave(self, limit: Duration) {
        let (client, barrier) = self.into_parts();
        drop(client);
        barrier.wait(limit);
    }
}

/// Keeps the store alive until all ranks have left. A worker waits for this barrier last.
#[derive(Debug)]
pub struct ShutdownBarrier(Option<StoreServer>);

impl ShutdownBarrier {
    /// If this process hosts the store, waits up to `limit` until all other ranks have left. If the store ended first, the
    /// other ranks could not distinguish a normal end from a failure.
    pub fn wait(self, limit: Duration) {
        if let Some(hosted) = self.0 {
            // Dropping the store then aborts the job for ranks that have not left.
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
    LaunchError::failed(format!("a worker cannot {what}: {error}"), "see `ulimit -a` and `dmesg | tail`")
}

/// Makes the kernel kill this process when its launcher ends, and opens the status page, which is inherited as standard input.
fn die_with_launcher(variables: &Variables) -> Result<StatusPage> {
    let text = variables.get(environment::WORKER).map_or("", String::as_str);
    let launcher = text.parse().ok().and_then(Pid::from_raw).ok_or_else(|| {
        LaunchError::usage(
            format!("{}={text:?} is not a process id", environment::WORKER),
            "only this program's launcher sets it: unset it",
        )
    })?;
    set_parent_death_signal(Signal::KILL).map_err(|e| broken("set its parent-death signal", &e))?;
    // The launcher may have died before the call above.
    if getppid() != Some(launcher) {
        return Err(LaunchError::failed(
            format!("the launcher (process {}) has ended before its worker began", launcher.as_raw_nonzero()),
            "a worker is started by its launcher only, and ends with it",
        ));
    }
    let page = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)
        .map_err(|e| broken("open its status page", &e.into()))?;
    let null = File::open("/dev/null").map_err(|e| broken("open /dev/null", &e))?;
    rustix::stdio::dup2_stdin(&null).map_err(|e| broken("replace its standard input", &e.into()))?;
    StatusPage::open(File::from(page)).map_err(|e| broken("read its status page from standard input", &e))
}

/// Starts the thread that sends heartbeats, and that kills this process and its children when the launcher has ended.
fn start_heartbeats(status: &WorkerStatus) -> Result<()> {
    let launcher =
        getppid().ok_or_else(|| LaunchError::failed("this worker has no parent process", "start it again"))?;
    let launcher = ParentWatch::new(launcher).map_err(|e| broken("watch its launcher", &e))?;
    let status = status.clone();
    let run = move || {
        loop {
            status.send_heartbeat();
            if launcher.has_ended_within(HEARTBEAT_INTERVAL) {
                let _ = kill_current_process_group(Signal::KILL);
            }
        }
    };
    let thread = std::thread::Builder::new().name("launcher-watch".into()).stack_size(128 << 10);
    thread.spawn(run).map(drop).map_err(|e| broken("start its heartbeat thread", &e))
}
