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
//! sends SIGKILL when the launcher's main thread ends, and a thread watches the launcher's pidfd. The same thread sends the
//! heartbeats, whose absence shows the launcher that a worker is stopped.

use std::fs::File;
use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, getppid, kill_current_process_group, pidfd_open, set_parent_process_death_signal,
};

use super::announcer::{Announcer, waiting_for};
use super::environment::{self, Launcher, Variables, WorkerRole, is_loopback};
use super::error::{LaunchError, Result};
use super::local_secret::{self, SecretOffer};
use super::port;
use super::secret;
use super::status_page::StatusPage;
use super::worker_status::WorkerStatus;
use comm::{CommError, ConnectError, Member, Secret, StoreClient, StoreConfig, StoreEvent, StoreServer, fnv};

/// Path of the worker's `error.json`.
pub const FAILURE_FILE: &str = "TRAINER_FAILURE_FILE";
/// How often the job was started before: from 0 to `--max-restarts`.
pub const ATTEMPT: &str = "TRAINER_ATTEMPT";
/// Interval between heartbeats.
const HEARTBEAT: Duration = Duration::from_millis(100);
/// How often a process says for whom it waits.
pub const NOTICE: Duration = Duration::from_secs(10);
/// Interval between attempts to reach rank 0.
const RETRY: Duration = Duration::from_millis(50);
/// Number of ports to try where the job's id determines the port. Another job may have the first.
const CANDIDATES: u64 = 8;

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
    let report = variables.get(FAILURE_FILE).filter(|_| own).map(PathBuf::from);
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
    secret: SecretSource,
}

/// Where the job's secret comes from. It is never derived from what others can guess: addresses, ports, ids.
enum SecretSource {
    /// The user or this program's launcher has set it.
    Given(Secret),
    /// Rank 0 makes one, and offers it under this name to its user's processes on the host.
    OnHost(String),
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
            Some(secret) => SecretSource::Given(secret),
            None if role.launcher == Launcher::Own => return Err(missing(secret::VARIABLE)),
            None if role.local_world == role.world => SecretSource::OnHost(local_secret::name(&job)),
            None => return Err(no_secret(role, &host)),
        };
        let ports = role.master_port.map_or_else(|| candidates(&job), |port| vec![port]);
        Ok(Self { host, ports, secret })
    }
}

/// Says what is missing where ranks of several hosts have no secret, and how the launcher passes one on.
fn no_secret(role: &WorkerRole, host: &str) -> LaunchError {
    let make = "`export TRAINER_SECRET=$(openssl rand -hex 32)`";
    let hint = match role.launcher {
        Launcher::Slurm => format!("{make} before srun, in the batch script: srun passes it on to all tasks"),
        Launcher::OpenMpi => format!("{make}, then mpirun -x TRAINER_SECRET …"),
        Launcher::Mpich => format!("{make} before mpiexec, which passes it on"),
        Launcher::Own | Launcher::Torchrun | Launcher::Env => {
            "set TRAINER_SECRET to the same words on all hosts before the launcher starts, or pass --secret-file FILE; \
             `(umask 077; openssl rand -hex 32 > FILE)` makes one, for all hosts to read"
                .to_owned()
        }
    };
    LaunchError::usage(
        format!(
            "ranks of several hosts need a secret, and TRAINER_SECRET is not set: anybody who reaches {host} could join"
        ),
        hint,
    )
}

impl SecretSource {
    /// Returns the secret, and rank 0's offer of it to the other ranks.
    fn get(self, role: &WorkerRole, host: &str, wait: &RankWait) -> Result<(Secret, Option<SecretOffer>)> {
        let name = match self {
            Self::Given(secret) => return Ok((secret, None)),
            Self::OnHost(name) => name,
        };
        if role.rank == 0 {
            let secret = Secret::random().map_err(|error| LaunchError::failed(error.message, error.hint))?;
            let offer = (role.world > 1).then(|| SecretOffer::new(&name, &secret)).transpose()?;
            return Ok((secret, offer));
        }
        let mut notices = 0;
        loop {
            if let Some(secret) = local_secret::request(&name)? {
                return Ok((secret, None));
            }
            if wait.is_over() {
                return Err(LaunchError::failed(
                    format!("rank 0 did not come within {:.0} s: it offers no secret on this host", wait.seconds()),
                    "does it run, on this host and as this user? Its output may say why it does not; ranks of several hosts \
                     need LOCAL_WORLD_SIZE and TRAINER_SECRET",
                ));
            }
            wait.go_on(&mut notices, host, "it has not started on this host yet");
            std::thread::sleep(RETRY);
        }
    }
}

/// A rank's wait for rank 0.
struct RankWait {
    /// This program's launcher says on its screen who is missing.
    own: bool,
    start: Instant,
    timeouts: JoinTimeouts,
}

impl RankWait {
    fn is_over(&self) -> bool {
        self.start.elapsed() >= self.timeouts.join
    }

    fn seconds(&self) -> f64 {
        self.timeouts.join.as_secs_f64()
    }

    /// Says that the wait goes on, if it is time to. `notices` counts the messages.
    fn go_on(&self, notices: &mut u32, place: &str, reason: &str) {
        let passed = self.start.elapsed();
        if !self.own && passed >= self.timeouts.notice.saturating_mul(*notices + 1) {
            *notices += 1;
            eprintln!("{}", waiting_for("rank 0", place, passed, self.timeouts.join, Some(reason)));
        }
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

/// Joins rank 0's store, or that of this program's launcher.
fn connect(rank: usize, host: &str, ports: &[u16], config: &StoreConfig, wait: &RankWait) -> Result<StoreClient> {
    let mut notices = 0;
    loop {
        let mut last = String::new();
        for port in ports {
            let address = port::joined(host, *port);
            let tried = StoreClient::try_connect(address.as_str(), config, rank);
            match tried.map_err(|error| LaunchError::failed(error.message, error.hint))? {
                Ok(client) => return Ok(client),
                Err(ConnectError::NotThere(cause) | ConnectError::Unresolved(cause)) => {
                    last = format!("{address}: {cause}")
                }
                // Other jobs may use some of several ports
                Err(refused) if ports.len() > 1 => last = format!("{address}: {refused}"),
                Err(refused) => {
                    return Err(LaunchError::failed(
                        format!("rank {rank} cannot join the rendezvous at {address}: {refused}"),
                        "all processes of one job, and no others, share its address, secret and world size",
                    ));
                }
            }
        }
        if wait.is_over() {
            return Err(LaunchError::failed(
                format!("rank {rank} found no rendezvous within {:.0} s, at last at {last}", wait.seconds()),
                "is the launcher (or rank 0) running, and does the address lead to its host, through firewalls?",
            ));
        }
        wait.go_on(&mut notices, host, &last);
        std::thread::sleep(RETRY);
    }
}

/// Starts the store of a job that another launcher has started, in rank 0.
fn host_store(
    role: &WorkerRole,
    host: &str,
    ports: &[u16],
    config: &StoreConfig,
    timeouts: JoinTimeouts,
) -> Result<StoreServer> {
    let address = listen_address(host, role.local_world < role.world, |note| eprintln!("{note}"));
    let mut last = None;
    for port in ports {
        let announcer = Announcer {
            say: |text: &str| eprintln!("{text}"),
            member: Member::Rank,
            world: role.world,
            place: port::joined(host, *port),
            interval: timeouts.notice,
            limit: timeouts.join,
        };
        match bind(&address, *port, config.clone(), announcer.start()?) {
            Ok(server) => return Ok(server),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| LaunchError::failed("no port is left to try", "set MASTER_PORT")))
}

/// Returns the address to listen on so that others reach `host`: the address asked for, and no other. Only a name that leads
/// to this machine's own address for other hosts alone (a service's name, 127.0.1.1 in /etc/hosts) leaves no choice but all
/// addresses. `note` gets a sentence for the user if the name cannot be resolved.
pub(super) fn listen_address(host: &str, several_hosts: bool, note: impl FnOnce(&str)) -> String {
    const ALL: &str = "0.0.0.0";
    let literal = host.parse::<std::net::IpAddr>().is_ok();
    if literal || is_loopback(host) || !several_hosts {
        return host.to_owned();
    }
    match (host, 0).to_socket_addrs() {
        Ok(mut addresses) => addresses
            .find(|address| !address.ip().is_loopback() && TcpListener::bind(address).is_ok())
            .map_or_else(|| ALL.to_owned(), |address| address.ip().to_string()),
        Err(error) => {
            note(&format!("note: cannot resolve {host} (MASTER_ADDR): {error}; listening on all addresses"));
            ALL.to_owned()
        }
    }
}

/// Does the same as [`StoreServer::bind`], with errors that name the port and the process that has it.
///
/// # Errors
/// This process cannot listen on the address.
pub(super) fn bind(
    host: &str,
    port: u16,
    config: StoreConfig,
    on_event: impl FnMut(StoreEvent) + Send + 'static,
) -> Result<StoreServer> {
    let address = port::joined(host, port);
    // Tries first: the store's own error does not name the process that has the port
    if port != 0 {
        TcpListener::bind(&address).map_err(|error| port::cannot_listen(host, port, &error))?;
    }
    StoreServer::bind(address, config, on_event).map_err(|error| LaunchError::failed(error.message, error.hint))
}
