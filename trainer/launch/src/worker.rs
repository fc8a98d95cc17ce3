//! The worker's side: what a rank does first.
//!
//! ```text
//! let status = worker::attach(&role, &variables)?;     // first thing in main: from here on, the worker dies with its launcher
//! status.set_status(format_args!("loading cifar10"));
//! let worker = Worker::join(&role, &variables, status, limit)?;    // meets the other ranks
//! … worker.client: the store, for the collectives
//! worker.leave(limit);      // under another launcher, rank 0 hosts the store and leaves last
//! ```
//!
//! A worker of this program's launcher dies with it in two ways, neither of which needs an action of the launcher: the kernel
//! sends SIGKILL when the launcher's main thread ends, and a thread watches the launcher's pidfd. The same thread sends the
//! heartbeats, whose absence shows the launcher that a worker is stopped.

use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, getppid, kill_current_process_group, pidfd_open, set_parent_process_death_signal,
};

use super::environment::{self, Launcher, Variables, WorkerRole};
use super::error::{LaunchError, Result};
use super::port;
use super::secret;
use super::status_page::StatusPage;
use super::worker_status::WorkerStatus;
use comm::{CommError, Secret, StoreClient, StoreEvent, StoreServer, fnv};

/// Path of the worker's `error.json`.
pub const FAILURE_FILE: &str = "TRAINER_FAILURE_FILE";
/// How often the job was started before: from 0 to `--max-restarts`.
pub const ATTEMPT: &str = "TRAINER_ATTEMPT";
/// Interval between heartbeats.
const HEARTBEAT: Duration = Duration::from_millis(100);
/// Number of ports to try where the job's id determines the port. Another job may have the first.
const CANDIDATES: u64 = 8;

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
    /// Meets all other ranks within `limit`.
    ///
    /// # Errors
    /// No variable says where rank 0 is, its port is taken, it does not answer, or ranks do not come. The error is also
    /// recorded for the launcher.
    pub fn join(role: &WorkerRole, variables: &Variables, status: WorkerStatus, limit: Duration) -> Result<Self> {
        Self::rendezvous(role, variables, &status, limit)
            .inspect_err(|error| status.record_error(&error.message, &error.hint, false))
    }

    fn rendezvous(role: &WorkerRole, variables: &Variables, status: &WorkerStatus, limit: Duration) -> Result<Self> {
        let RendezvousAddress { host, ports, secret } = RendezvousAddress::find(role, variables)?;
        let attempt = variables.get(ATTEMPT).and_then(|text| text.parse().ok()).unwrap_or(0);
        status.set_status(format_args!("rendezvous with {} ranks at {host}", role.world));
        let hosted = match (role.rank, role.launcher) {
            (_, Launcher::Own) | (1.., _) => None,
            (0, _) => Some(host_store(role, &host, &ports, &secret)?),
        };
        let ports = hosted.as_ref().map_or(ports, |hosted| vec![hosted.local_addr().port()]);
        let comm = |error: CommError| {
            status.record_comm_error(&error);
            LaunchError::failed(error.message, error.hint)
        };
        let client = connect(role, &host, &ports, &secret, limit).map_err(comm)?;
        status.set_status(format_args!("rendezvous: waiting for all of {} ranks", role.world));
        client.barrier("launch", limit).map_err(comm)?;
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

fn missing(name: &str) -> LaunchError {
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
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|e| broken("parent-death signal", &e.into()))?;
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
    let launcher = pidfd_open(launcher, PidfdFlags::empty()).map_err(|e| broken("view of its launcher", &e.into()))?;
    let status = status.clone();
    let interval = Timespec { tv_sec: 0, tv_nsec: HEARTBEAT.as_nanos() as i64 };
    let run = move || {
        loop {
            status.send_heartbeat();
            let mut fds = [PollFd::new(&launcher, PollFlags::IN)];
            if poll(&mut fds, Some(&interval)).is_ok() && !fds[0].revents().is_empty() {
                let _ = kill_current_process_group(Signal::KILL);
            }
        }
    };
    let thread = std::thread::Builder::new().name("launcher-watch".into()).stack_size(128 << 10);
    thread.spawn(run).map(drop).map_err(|e| broken("watching thread", &e))
}

/// Where the ranks of a job meet.
struct RendezvousAddress {
    host: String,
    ports: Vec<u16>,
    secret: Secret,
}

impl RendezvousAddress {
    fn find(role: &WorkerRole, variables: &Variables) -> Result<Self> {
        let host = role.master_addr.clone().ok_or_else(|| {
            LaunchError::usage(
                format!("{} has started ranks on several hosts, and nothing says where rank 0 is", role.launcher),
                "set MASTER_ADDR to the address of rank 0's host in all of them (mpirun -x MASTER_ADDR=…)",
            )
        })?;
        let job = job_words(role)?;
        let secret = match secret::of_job(variables)? {
            Some(secret) => secret,
            None if role.launcher == Launcher::Own => return Err(missing(secret::VARIABLE)),
            None => Secret::from_words(&job.iter().map(String::as_str).collect::<Vec<_>>()),
        };
        let ports = role.master_port.map_or_else(|| candidates(&job), |port| vec![port]);
        Ok(Self { host, ports, secret })
    }
}

/// Returns words that only this job's processes share.
fn job_words(role: &WorkerRole) -> Result<Vec<String>> {
    if !role.job.is_empty() || role.launcher == Launcher::Own {
        return Ok(role.job.clone());
    }
    if role.local_world == role.world {
        // All ranks are children of one process on this host
        let parent = getppid().map_or(0, |parent| parent.as_raw_nonzero().get());
        return Ok(vec![role.launcher.to_string(), format!("children of {parent}")]);
    }
    Err(LaunchError::usage(
        format!("{} gives the job neither an id nor a port, and has started ranks on several hosts", role.launcher),
        "set MASTER_PORT to a free port of rank 0's host, the same in all of them",
    ))
}

/// Derives ports from the job's words: the same in all of its processes, and below the ports that the kernel hands out.
fn candidates(job: &[String]) -> Vec<u16> {
    let hash = fnv::hash(job.iter().flat_map(|word| word.bytes().chain([0])));
    // Every bit of the hash counts
    let hash = hash ^ hash >> 32;
    (0..CANDIDATES).map(|i| 15_000 + (hash.wrapping_add(i * 1009) % 15_000) as u16).collect()
}

fn connect(
    role: &WorkerRole,
    host: &str,
    ports: &[u16],
    secret: &Secret,
    limit: Duration,
) -> std::result::Result<StoreClient, CommError> {
    let connect =
        |port: u16, limit| StoreClient::connect(port::joined(host, port), secret, role.rank, role.world, limit);
    if let [port] = ports {
        return connect(*port, limit);
    }
    // Other jobs may use some of the ports. They do not know this job's secret
    let until = Instant::now() + limit;
    loop {
        for port in ports {
            match connect(*port, Duration::ZERO) {
                Err(error) if Instant::now() >= until => return Err(error),
                Err(_) => {}
                Ok(client) => return Ok(client),
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Starts the store of a job that another launcher has started, in rank 0.
fn host_store(role: &WorkerRole, host: &str, ports: &[u16], secret: &Secret) -> Result<StoreServer> {
    let address = listen_address(host, role.local_world < role.world);
    let mut last = None;
    for port in ports {
        match bind(&address, *port, secret, role.world, |_| {}) {
            Ok(server) => return Ok(server),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| LaunchError::failed("no port is left to try", "set MASTER_PORT")))
}

/// Returns the address to listen on so that others reach `host`. That is a literal address itself. A name may resolve to an
/// address that other hosts cannot use (a service's, 127.0.1.1), so jobs of several hosts listen on all addresses then.
pub(super) fn listen_address(host: &str, several_hosts: bool) -> String {
    let literal = host.parse::<std::net::IpAddr>().is_ok();
    if several_hosts && !literal { "0.0.0.0".to_owned() } else { host.to_owned() }
}

/// Does the same as [`StoreServer::bind`], with errors that name the port and the process that has it.
///
/// # Errors
/// This process cannot listen on the address.
pub(super) fn bind(
    host: &str,
    port: u16,
    secret: &Secret,
    world: usize,
    on_event: impl FnMut(StoreEvent) + Send + 'static,
) -> Result<StoreServer> {
    let address = port::joined(host, port);
    // Tries first: the store's own error does not name the process that has the port
    if port != 0 {
        TcpListener::bind(&address).map_err(|error| port::cannot_listen(host, port, &error))?;
    }
    StoreServer::bind(address, secret.clone(), world, on_event)
        .map_err(|error| LaunchError::failed(error.message, error.hint))
}
