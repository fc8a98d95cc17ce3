//! A node's part of a job, from start to exit code.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use super::cores::{self, Split};
use super::environment;
use super::error::{LaunchError, Result, WORKER_DIED};
use super::node_rendezvous::{Node, NodeRendezvous, Nodes, RendezvousError};
use super::output::Screen;
use super::process::{Process, Start};
use super::secret::{self, derived};
use super::signals::{self, STOPPING, Signals};
use super::supervisor::{Outcome, Supervisor, Timeouts};
use super::worker::{self, bind, listen_address};
use comm::{Secret, StoreEvent};

/// A job to start.
#[derive(Debug, Clone)]
pub struct Job {
    /// Workers on this node.
    pub workers: usize,
    /// The workers' executable: this one.
    pub program: PathBuf,
    /// Their arguments: this process's own.
    pub arguments: Vec<OsString>,
    /// Variables that each worker gets besides those that say which one it is, by local rank; may be shorter.
    pub variables: Vec<Vec<(String, String)>>,
    /// `logs/`: gets a folder `rank-N` a worker, and `attempt-K/` of those of attempts that failed.
    pub logs: PathBuf,
    /// A worker that gives no sign of life for this long has stalled.
    pub timeout: Duration,
    /// How long nodes and workers wait for each other at the start.
    pub join_timeout: Duration,
    /// How long a worker that is told to end has before it is killed.
    pub grace: Duration,
    /// How long workers have to save a checkpoint after a signal.
    pub stop_timeout: Duration,
    /// How often a job that failed is started again.
    pub max_restarts: usize,
    /// Whether workers are kept to cores of their own, where there are enough.
    pub pin: bool,
    /// Set for a job on several nodes.
    pub nodes: Option<Nodes>,
    /// Where the workers of a job on one node meet: loopback, and a port that the kernel chooses, unless somebody insists.
    pub address: (String, u16),
}

impl Job {
    /// `workers` processes of this executable with this process's arguments, on this machine.
    ///
    /// # Errors
    /// The executable cannot be found.
    pub fn of_this_program(workers: usize, logs: PathBuf) -> Result<Self> {
        let program = std::env::current_exe().map_err(|error| {
            LaunchError::failed(format!("cannot find this program's own file: {error}"), "is /proc mounted?")
        })?;
        Ok(Self {
            workers,
            program,
            arguments: std::env::args_os().skip(1).collect(),
            variables: Vec::new(),
            logs,
            timeout: Duration::from_secs(300),
            join_timeout: Duration::from_secs(300),
            grace: Duration::from_secs(2),
            stop_timeout: Duration::from_secs(120),
            max_restarts: 0,
            pin: true,
            nodes: None,
            address: ("127.0.0.1".to_owned(), 0),
        })
    }

    /// Runs the job; returns the exit code: 0 done, 3 a worker died (and a report is on stderr), 128 + n stopped by signal
    /// n. To be called by the main thread: workers die with the thread that starts them.
    ///
    /// # Errors
    /// There is no job: the port is taken, nodes do not come, processes cannot be started.
    pub fn run(&self) -> Result<u8> {
        if self.workers == 0 {
            return Err(LaunchError::usage("a job of 0 workers", "ask for at least one: --cpus 1"));
        }
        let screen = Arc::new(Screen::default());
        let mut signals = Signals::install().map_err(|error| system("catch signals", &error))?;
        for attempt in 0.. {
            let outcome = match self.attempt(attempt, &mut signals, &screen) {
                Ok(outcome) => outcome,
                Err(RendezvousError::Interrupted(signal)) => Outcome::Stopped(signal),
                Err(RendezvousError::Failed(error)) => return Err(error),
            };
            match outcome {
                Outcome::Done => return Ok(0),
                Outcome::Stopped(signal) => {
                    screen.say(&format!("stopped by {}", signals::name(signal)));
                    return Ok(128 + signal as u8);
                }
                Outcome::Failed { again: true } if attempt < self.max_restarts => {
                    self.archive(attempt)?;
                    screen.say(&format!(
                        "starting all workers again: attempt {} of {}",
                        attempt + 2,
                        self.max_restarts + 1
                    ));
                }
                Outcome::Failed { .. } => return Ok(WORKER_DIED),
            }
        }
        Ok(WORKER_DIED)
    }

    fn attempt(
        &self,
        attempt: usize,
        signals: &mut Signals,
        screen: &Arc<Screen>,
    ) -> std::result::Result<Outcome, RendezvousError> {
        let link = self.nodes.as_ref().map(|nodes| self.meet(nodes, attempt, signals)).transpose()?;
        let (world, first) = link.as_ref().map_or((self.workers, 0), NodeRendezvous::world);
        let secret = match &self.nodes {
            Some(nodes) => derived(&nodes.secret, "workers", attempt),
            None => Secret::random().map_err(|error| LaunchError::failed(error.message, error.hint))?,
        };
        let (events, told) = channel();
        let on_event = move |event: StoreEvent| {
            // the other end is gone only when the job is over
            let _ = events.send(event);
        };
        // node 0 hosts the store of all workers
        let node = self.nodes.as_ref().map_or(0, |nodes| nodes.node_rank);
        let (host, port) = match &self.nodes {
            Some(nodes) => (nodes.master_addr.clone(), 0),
            None => self.address.clone(),
        };
        let store = match node {
            0 => Some(bind(&listen_address(&host, link.is_some()), port, &secret, world, on_event)?),
            _ => None,
        };
        let port = match (&store, &link) {
            (Some(store), link) => {
                let port = store.local_addr().port();
                link.as_ref().map_or(Ok(()), |link| link.publish(port))?;
                port
            }
            (None, Some(link)) => link.workers_port(self.join_timeout, &mut || stopping(signals))?,
            (None, None) => port,
        };
        let place = Place { world, first, node, attempt, host, port, secret };
        let mut workers = self.start(&place, screen)?;
        let supervisor = Supervisor {
            workers: &mut workers,
            store: store.as_ref(),
            events: told,
            link: link.as_ref(),
            node: self.nodes.as_ref().map(|nodes| nodes.node_rank),
            signals,
            screen,
            timeouts: Timeouts { stall: self.timeout, grace: self.grace, stop: self.stop_timeout },
        };
        let outcome = supervisor.run().map_err(|error| system("watch the workers", &error))?;
        if let Some(link) = &link {
            link.finish(&mut || stopping(signals));
        }
        Ok(outcome)
    }

    fn meet(
        &self,
        nodes: &Nodes,
        attempt: usize,
        signals: &mut Signals,
    ) -> std::result::Result<NodeRendezvous, RendezvousError> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let own = Node { workers: self.workers, host, max_restarts: self.max_restarts };
        NodeRendezvous::open(nodes, &own, attempt, self.join_timeout, &mut || stopping(signals))
    }

    fn start(&self, place: &Place, screen: &Arc<Screen>) -> Result<Vec<Process>> {
        let cores = cores::available();
        let Split { threads, pins } = cores::split(&cores, cores::quota(), self.workers);
        let pins = pins.filter(|_| self.pin);
        let mut workers = Vec::with_capacity(self.workers);
        for local in 0..self.workers {
            let rank = place.first + local;
            let mut variables = place.variables(rank, local, self.workers);
            // whoever sets it knows better
            if std::env::var_os("RAYON_NUM_THREADS").is_none() {
                variables.push(("RAYON_NUM_THREADS".to_owned(), threads.to_string()));
            }
            variables.extend(self.variables.get(local).into_iter().flatten().cloned());
            let start = Start {
                rank,
                program: &self.program,
                arguments: &self.arguments,
                variables,
                cores: pins.as_ref().map(|pins| &pins[local]),
                folder: self.folder(rank),
                screen: (rank == 0).then_some(screen),
            };
            // those that run already end when the list is dropped
            workers.push(Process::start(start).map_err(|error| {
                LaunchError::failed(
                    format!("cannot start rank {rank} ({}): {error}", self.program.display()),
                    format!("see {} and `ulimit -u -n`", self.folder(rank).display()),
                )
            })?);
        }
        Ok(workers)
    }

    fn folder(&self, rank: usize) -> PathBuf {
        self.logs.join(format!("rank-{rank}"))
    }

    /// Moves the logs of an attempt that failed out of the next one's way.
    fn archive(&self, attempt: usize) -> Result<()> {
        let target = self.logs.join(format!("attempt-{attempt}"));
        let moved = || -> io::Result<()> {
            fs::create_dir_all(&target)?;
            for entry in fs::read_dir(&self.logs)? {
                let entry = entry?;
                if entry.file_name().to_string_lossy().starts_with("rank-") {
                    fs::rename(entry.path(), target.join(entry.file_name()))?;
                }
            }
            Ok(())
        };
        moved().map_err(|error| cannot_keep(&target, &error))
    }
}

/// What the workers of a node have to know.
struct Place {
    world: usize,
    first: usize,
    node: usize,
    attempt: usize,
    host: String,
    port: u16,
    secret: Secret,
}

impl Place {
    fn variables(&self, rank: usize, local: usize, local_world: usize) -> Vec<(String, String)> {
        [
            (environment::WORKER, std::process::id().to_string()),
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", local.to_string()),
            ("WORLD_SIZE", self.world.to_string()),
            ("LOCAL_WORLD_SIZE", local_world.to_string()),
            ("GROUP_RANK", self.node.to_string()),
            ("MASTER_ADDR", self.host.clone()),
            ("MASTER_PORT", self.port.to_string()),
            (worker::ATTEMPT, self.attempt.to_string()),
            // readable for this user's processes alone, unlike a command line
            (secret::VARIABLE, self.secret.to_hex()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }
}

/// The signal that asks for an end while nodes wait for each other.
fn stopping(signals: &mut Signals) -> Option<i32> {
    signals.take().into_iter().find(|signal| STOPPING.contains(signal))
}

fn system(what: &str, error: &io::Error) -> LaunchError {
    LaunchError::failed(format!("cannot {what}: {error}"), "see `ulimit -a` and `dmesg | tail`")
}

fn cannot_keep(path: &Path, error: &io::Error) -> LaunchError {
    LaunchError::failed(
        format!("{}: cannot keep the logs of the attempt that failed: {error}", path.display()),
        "make the folder writable, or free some space",
    )
}
