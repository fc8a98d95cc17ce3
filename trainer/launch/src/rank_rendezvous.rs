//! The rendezvous of the ranks of a job: its address, its secret, and the waits for other ranks.

use std::time::{Duration, Instant};

use rustix::process::getppid;

use super::announcer::{Announcer, Notices, waiting_for};
use super::environment::{Launcher, Variables, WorkerRole};
use super::error::{LaunchError, Result};
use super::job_secret::random_secret;
use super::listen::{bind, listen_address};
use super::local_secret::{self, SecretOffer};
use super::port;
use super::screen::Screen;
use super::secret;
use super::worker::{self, JoinTimeouts};
use comm::{ConnectError, MemberKind, Secret, StoreClient, StoreConfig, StoreServer, fnv};

/// Interval between attempts to reach rank 0.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Number of ports to try if the job's id determines the port. Another job may use the first port.
const CANDIDATES: u64 = 8;

/// The address of a job's rendezvous, and the source of its secret.
pub(super) struct RendezvousAddress {
    pub(super) host: String,
    pub(super) ports: Vec<u16>,
    pub(super) secret: SecretSource,
}

/// The source of the job's secret. A secret is never derived from values that others can guess: addresses, ports, ids.
pub(super) enum SecretSource {
    /// The user or this program's launcher has set it.
    Given(Secret),
    /// Rank 0 makes the secret, and offers it under this name to processes of the same user on this host.
    OnHost(String),
}

impl RendezvousAddress {
    pub(super) fn find(role: &WorkerRole, variables: &Variables) -> Result<Self> {
        let host = role.master_addr.clone().ok_or_else(|| {
            LaunchError::usage(
                format!("{} has started ranks on several hosts, and nothing says where rank 0 is", role.launcher),
                "set MASTER_ADDR to the address of rank 0's host in all of them (mpirun -x MASTER_ADDR=…)",
            )
        })?;
        let job = job_id(role)?;
        let secret = match secret::of_job(variables)? {
            Some(secret) => SecretSource::Given(secret),
            None if role.launcher == Launcher::Builtin => return Err(worker::missing(secret::VARIABLE)),
            None if role.local_world_size == role.world_size => SecretSource::OnHost(local_secret::name(&job)),
            None => return Err(no_secret(role, &host)),
        };
        let ports = role.master_port.map_or_else(|| candidate_ports(&job), |port| vec![port]);
        Ok(Self { host, ports, secret })
    }
}

/// Returns the error for ranks of several hosts without a secret, with the way to pass a secret through the launcher.
fn no_secret(role: &WorkerRole, host: &str) -> LaunchError {
    let make = "`export TRAINER_SECRET=$(openssl rand -hex 32)`";
    let hint = match role.launcher {
        Launcher::Slurm => format!("{make} before srun, in the batch script: srun passes it on to all tasks"),
        Launcher::OpenMpi => format!("{make}, then mpirun -x TRAINER_SECRET …"),
        Launcher::Mpich => format!("{make} before mpiexec, which passes it on"),
        Launcher::Jsrun => format!("{make} before jsrun, which passes it on"),
        Launcher::Builtin | Launcher::Torchrun | Launcher::Env => {
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
    /// Returns the secret. On rank 0, also returns the offer of the secret to the other ranks.
    pub(super) fn get(self, role: &WorkerRole, host: &str, wait: &RankWait) -> Result<(Secret, Option<SecretOffer>)> {
        let name = match self {
            Self::Given(secret) => return Ok((secret, None)),
            Self::OnHost(name) => name,
        };
        if role.rank == 0 {
            let secret = random_secret()?;
            let offer = (role.world_size > 1).then(|| SecretOffer::new(&name, &secret)).transpose()?;
            return Ok((secret, offer));
        }
        let mut notices = wait.notices();
        loop {
            if let Some(secret) = local_secret::request(&name)? {
                return Ok((secret, None));
            }
            if wait.is_over() {
                return Err(LaunchError::failed(
                    format!("rank 0 did not join within {:.0} s: it offers no secret on this host", wait.seconds()),
                    "does it run, on this host and as this user? Its output may say why it does not; ranks of several hosts \
                     need LOCAL_WORLD_SIZE and TRAINER_SECRET",
                ));
            }
            wait.notify_if_due(&mut notices, host, "it has not started on this host yet");
            std::thread::sleep(RETRY_INTERVAL);
        }
    }
}

/// A rank's wait for rank 0.
pub(super) struct RankWait {
    /// Whether this program's launcher started the rank. Then the launcher prints who is missing, and the rank does not.
    pub(super) launcher_announces: bool,
    pub(super) start: Instant,
    pub(super) timeouts: JoinTimeouts,
}

impl RankWait {
    fn is_over(&self) -> bool {
        self.start.elapsed() >= self.timeouts.join
    }

    fn seconds(&self) -> f64 {
        self.timeouts.join.as_secs_f64()
    }

    fn notices(&self) -> Notices {
        Notices::new(self.start, self.timeouts.notice)
    }

    /// Prints a message about the wait if one is due.
    fn notify_if_due(&self, notices: &mut Notices, place: &str, reason: &str) {
        if !self.launcher_announces
            && let Some(passed) = notices.due()
        {
            Screen::default().say(&waiting_for("rank 0", place, passed, self.timeouts.join, Some(reason)));
        }
    }
}

/// Returns words that distinguish this job from others, the same in all of its processes.
fn job_id(role: &WorkerRole) -> Result<Vec<String>> {
    if !role.job.is_empty() || role.launcher == Launcher::Builtin {
        return Ok(role.job.clone());
    }
    if role.local_world_size == role.world_size {
        // All ranks are children of one process on this host, so the parent's id distinguishes the job.
        let parent = getppid().map_or(0, |parent| parent.as_raw_nonzero().get());
        return Ok(vec![role.launcher.to_string(), format!("children of {parent}")]);
    }
    Err(LaunchError::usage(
        format!("{} gives the job neither an id nor a port, and has started ranks on several hosts", role.launcher),
        "set MASTER_PORT to a free port of rank 0's host, the same in all of them",
    ))
}

/// Derives ports from the job's words: the same in all processes of the job, and below the ephemeral ports of the kernel.
fn candidate_ports(job: &[String]) -> Vec<u16> {
    let hash = fnv::hash(job.iter().flat_map(|word| word.bytes().chain([0])));
    // Combine all bits of the hash.
    let hash = hash ^ hash >> 32;
    (0..CANDIDATES).map(|i| 15_000 + (hash.wrapping_add(i * 1009) % 15_000) as u16).collect()
}

/// Joins the store, which rank 0 or this program's launcher hosts.
pub(super) fn connect(
    rank: usize,
    host: &str,
    ports: &[u16],
    config: &StoreConfig,
    wait: &RankWait,
) -> Result<StoreClient> {
    let mut notices = wait.notices();
    loop {
        let mut last = String::new();
        for port in ports {
            let address = port::host_port(host, *port);
            let tried = StoreClient::try_connect(address.as_str(), config, rank);
            match tried.map_err(LaunchError::from)? {
                Ok(client) => return Ok(client),
                Err(ConnectError::Unreachable(cause) | ConnectError::Unresolved(cause)) => {
                    last = format!("{address}: {cause}")
                }
                // Another job may use this port, so try the next one.
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
        wait.notify_if_due(&mut notices, host, &last);
        std::thread::sleep(RETRY_INTERVAL);
    }
}

/// Starts the store in rank 0, for a job that another launcher has started.
pub(super) fn host_store(
    role: &WorkerRole,
    host: &str,
    ports: &[u16],
    config: &StoreConfig,
    timeouts: JoinTimeouts,
) -> Result<StoreServer> {
    let address = listen_address(host, role.local_world_size < role.world_size, |note| Screen::default().say(note));
    let mut last = None;
    for port in ports {
        let announcer = Announcer {
            say: |text: &str| Screen::default().say(text),
            member: MemberKind::Rank,
            world_size: role.world_size,
            place: port::host_port(host, *port),
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
