//! The worker's side: what a rank does first.
//!
//! ```text
//! let attached = worker::attach(&role, &variables)?;     // first thing in main: dies with its launcher from here on
//! attached.status().set_status(format_args!("loading cifar10"));
//! let worker = attached.join(limit)?;                    // meets the other ranks
//! … worker.client: the store, for the collectives
//! worker.leave(limit);                                   // rank 0 of somebody else's job hosts the store: it goes last
//! ```
//!
//! A worker of this program's launcher dies with it in two ways, neither of which needs the launcher to do anything: the
//! kernel sends SIGKILL when the launcher's main thread ends, and a thread watches the launcher's pidfd. The same thread
//! beats the heart whose silence tells the launcher of a worker that is stopped.

use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, getppid, kill_current_process_group, pidfd_open, set_parent_process_death_signal,
};

use super::environment::{self, Source, Variables, WorkerRole};
use super::error::{LaunchError, Result};
use super::port;
use super::secret;
use super::status_page::StatusPage;
use super::worker_status::WorkerStatus;
use comm::{CommError, Secret, StoreClient, StoreEvent, StoreServer};

/// Where a worker leaves its `error.json`.
pub const FAILURE_FILE: &str = "TRAINER_FAILURE_FILE";
/// How often the job was started before: 0, then up to `--max-restarts`.
pub const ATTEMPT: &str = "TRAINER_ATTEMPT";
/// Between two beats.
const BEAT: Duration = Duration::from_millis(100);
/// Ports that are tried where the job's id decides; another job may have the first.
const CANDIDATES: u64 = 8;

/// A worker that has not met the others yet.
#[derive(Debug)]
pub struct Attached {
    role: WorkerRole,
    variables: Variables,
    status: WorkerStatus,
}

/// A worker that has met all others.
#[derive(Debug)]
pub struct Worker {
    /// Its place in the job.
    pub role: WorkerRole,
    /// How often the job was started before.
    pub attempt: usize,
    /// Its control connection, for the collectives. Dropped before the store.
    pub client: StoreClient,
    /// Says what the worker is doing.
    pub status: WorkerStatus,
    /// The job's secret, for connections between ranks.
    pub secret: Secret,
    hosted: Option<StoreServer>,
}

/// Makes this process a proper worker: to be called first thing in `main`, by the main thread.
///
/// # Errors
/// The variables or standard input are not what this program's launcher sets, or it has ended already.
pub fn attach(role: &WorkerRole, variables: &Variables) -> Result<Attached> {
    let own = role.source == Source::Own;
    let page =
        if own { die_with_launcher(variables)? } else { StatusPage::create().map_err(|e| broken("memory", &e))? };
    let account = variables.get(FAILURE_FILE).filter(|_| own).map(PathBuf::from);
    let status = WorkerStatus::new(role.rank, page, account);
    status.hook_panics();
    if own {
        start_heart(&status)?;
    }
    status.set_status(format_args!("before rendezvous"));
    Ok(Attached { role: role.clone(), variables: variables.clone(), status })
}

/// [`attach`], then [`Attached::join`].
///
/// # Errors
/// Those of both.
pub fn join(role: &WorkerRole, limit: Duration) -> Result<Worker> {
    attach(role, &environment::variables())?.join(limit)
}

impl Attached {
    /// Says what the worker is doing; what it says before [`Attached::join`] is what it did before rendezvous.
    pub fn status(&self) -> &WorkerStatus {
        &self.status
    }

    /// Meets all other ranks, within `limit`.
    ///
    /// # Errors
    /// Nothing says where rank 0 is, its port is taken, nobody is there, or ranks do not come; the failure is left for the
    /// launcher too.
    pub fn join(self, limit: Duration) -> Result<Worker> {
        let status = self.status.clone();
        self.meet(limit)
            .inspect_err(|error| status.record_error(&error.message, &error.hint, false))
            .map_err(|error| *error)
    }

    fn meet(self, limit: Duration) -> std::result::Result<Worker, Box<LaunchError>> {
        let Self { role, variables, status } = self;
        let Meeting { host, ports, secret } = Meeting::find(&role, &variables)?;
        let attempt = variables.get(ATTEMPT).and_then(|text| text.parse().ok()).unwrap_or(0);
        status.set_status(format_args!("rendezvous with {} ranks at {host}", role.world));
        let hosted = match (role.rank, role.source) {
            (_, Source::Own) | (1.., _) => None,
            (0, _) => Some(host_store(&role, &host, &ports, &secret)?),
        };
        let ports = hosted.as_ref().map_or(ports, |hosted| vec![hosted.local_addr().port()]);
        let comm = |error: CommError| {
            status.record_comm_error(&error);
            Box::new(LaunchError::failed(error.message, error.hint))
        };
        let client = connect(&role, &host, &ports, &secret, limit).map_err(comm)?;
        status.set_status(format_args!("rendezvous: waiting for all of {} ranks", role.world));
        client.barrier("launch", limit).map_err(comm)?;
        status.joined();
        Ok(Worker { role, attempt, client, status, secret, hosted })
    }
}

impl Worker {
    /// Gives the control connection to the collectives; what is left says goodbye when they are done.
    pub fn into_parts(self) -> (StoreClient, ShutdownBarrier) {
        (self.client, ShutdownBarrier(self.hosted))
    }

    /// Says goodbye. Where this process hosts the store it waits up to `limit` for the others' goodbyes, as theirs would
    /// find nobody.
    pub fn leave(self, limit: Duration) {
        let (client, shutdown) = self.into_parts();
        drop(client);
        shutdown.wait(limit);
    }
}

/// What a worker does last, after its connection is closed.
#[derive(Debug)]
pub struct ShutdownBarrier(Option<StoreServer>);

impl ShutdownBarrier {
    /// Where this process hosts the store: waits up to `limit` for the others' goodbyes, as theirs would find nobody.
    pub fn wait(self, limit: Duration) {
        if let Some(hosted) = self.0 {
            // whoever is still there afterwards sees its job aborted, which is what it has to know
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

/// Ties this process's life to its launcher's and takes over the page that stands in for standard input.
fn die_with_launcher(variables: &Variables) -> Result<StatusPage> {
    let launcher = variables.get(environment::WORKER).and_then(|text| text.parse().ok()).and_then(Pid::from_raw);
    let launcher = launcher.ok_or_else(|| missing("its value a process id"))?;
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|e| broken("parent-death signal", &e.into()))?;
    // the launcher may have died before that call
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

/// Starts the thread that beats, and ends this process and its children when the launcher is gone.
fn start_heart(status: &WorkerStatus) -> Result<()> {
    let launcher = getppid().ok_or_else(|| missing("a launcher"))?;
    let launcher = pidfd_open(launcher, PidfdFlags::empty()).map_err(|e| broken("view of its launcher", &e.into()))?;
    let status = status.clone();
    let beat = Timespec { tv_sec: 0, tv_nsec: BEAT.as_nanos() as i64 };
    let run = move || {
        loop {
            status.beat();
            let mut fds = [PollFd::new(&launcher, PollFlags::IN)];
            if poll(&mut fds, Some(&beat)).is_ok() && !fds[0].revents().is_empty() {
                let _ = kill_current_process_group(Signal::KILL);
            }
        }
    };
    let thread = std::thread::Builder::new().name("launcher-watch".into()).stack_size(128 << 10);
    thread.spawn(run).map(drop).map_err(|e| broken("watching thread", &e))
}

/// Where the ranks of a job meet.
struct Meeting {
    host: String,
    ports: Vec<u16>,
    secret: Secret,
}

impl Meeting {
    fn find(role: &WorkerRole, variables: &Variables) -> Result<Self> {
        let host = role.master_addr.clone().ok_or_else(|| {
            LaunchError::usage(
                format!("{} has started ranks on several hosts, and nothing says where rank 0 is", role.source),
                "set MASTER_ADDR to the address of rank 0's host in all of them (mpirun -x MASTER_ADDR=…)",
            )
        })?;
        let job = job_words(role)?;
        let secret = match secret::given(variables, None)? {
            Some(secret) => secret,
            None if role.source == Source::Own => return Err(missing(secret::VARIABLE)),
            None => Secret::from_words(&job.iter().map(String::as_str).collect::<Vec<_>>()),
        };
        let ports = role.master_port.map_or_else(|| candidates(&job), |port| vec![port]);
        Ok(Self { host, ports, secret })
    }
}

/// Words that only this job's processes share.
fn job_words(role: &WorkerRole) -> Result<Vec<String>> {
    if !role.job.is_empty() || role.source == Source::Own {
        return Ok(role.job.clone());
    }
    if role.local_world == role.world {
        // all of them are children of one process on this host
        let parent = getppid().map_or(0, |parent| parent.as_raw_nonzero().get());
        return Ok(vec![role.source.to_string(), format!("children of {parent}")]);
    }
    Err(LaunchError::usage(
        format!("{} gives the job neither an id nor a port, and has started ranks on several hosts", role.source),
        "set MASTER_PORT to a free port of rank 0's host, the same in all of them",
    ))
}

/// Ports below those that the kernel gives away, by the job's words (FNV-1a): the same in all of its processes.
fn candidates(job: &[String]) -> Vec<u16> {
    let bytes = job.iter().flat_map(|word| word.bytes().chain([0]));
    let hash =
        bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    // from every bit of it
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
    // other jobs may be behind some of them, which do not know this one's secret
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

/// The store of a job that somebody else has started, in rank 0.
fn host_store(
    role: &WorkerRole,
    host: &str,
    ports: &[u16],
    secret: &Secret,
) -> std::result::Result<StoreServer, Box<LaunchError>> {
    let address = listen_address(host, role.local_world < role.world);
    let mut last = None;
    for port in ports {
        match bind(&address, *port, secret, role.world, |_| {}) {
            Ok(server) => return Ok(server),
            Err(error) => last = Some(error),
        }
    }
    Err(Box::new(last.unwrap_or_else(|| LaunchError::failed("no port is left to try", "set MASTER_PORT"))))
}

/// Where to listen so that others reach `host`: a literal address is taken at its word. A name may lead to an address that
/// is none of this machine's (a service's, 127.0.1.1): jobs of several hosts listen on all of this machine's then.
pub(super) fn listen_address(host: &str, several_hosts: bool) -> String {
    let literal = host.parse::<std::net::IpAddr>().is_ok();
    if several_hosts && !literal { "0.0.0.0".to_owned() } else { host.to_owned() }
}

/// [`StoreServer::bind`], with errors that name port and holder.
pub(super) fn bind(
    host: &str,
    port: u16,
    secret: &Secret,
    world: usize,
    on_event: impl FnMut(StoreEvent) + Send + 'static,
) -> Result<StoreServer> {
    let address = port::joined(host, port);
    // looks first: the store's own error has no room for the holder
    if port != 0 {
        TcpListener::bind(&address).map_err(|error| {
            let (cause, hint) = port::cannot_listen(host, port, &error);
            LaunchError::failed(cause, hint)
        })?;
    }
    StoreServer::bind(address, secret.clone(), world, on_event)
        .map_err(|error| LaunchError::failed(error.message, error.hint))
}
