//! The state that all groups of a process share, and the path of an error to all ranks.

use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::abort::AbortFlag;
use super::auth::Secret;
use super::call::CollectiveCall;
use super::error::{CommError, ErrorKind, Result};
use super::queue::Queue;
use super::rendezvous::TransportKind;
use super::shm;
use super::solo::Solo;
use super::store::StoreClient;
use super::tcp::{Mesh, MeshSetup, TcpGroup};
use super::transport::{GroupRanks, Transport};

/// Longest wait for the other ranks' activities after a timeout. A rank that runs answers at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The current or last collective of a stream. Other ranks print it in their timeout messages.
struct Activity {
    call: CollectiveCall,
    group: Arc<str>,
    since: Instant,
    inside: bool,
}

impl Activity {
    fn describe(&self) -> String {
        let (verb, place) = (if self.inside { "is in" } else { "has left" }, self.call.position(&self.group));
        format!("{verb} {}, {place}, for {:.1} s", self.call, self.since.elapsed().as_secs_f64())
    }
}

/// `None` before the first collective.
type StreamActivity = Mutex<Option<Activity>>;

/// The activities of all streams.
type AllActivities = Mutex<Vec<Weak<StreamActivity>>>;

fn describe(all: &AllActivities) -> String {
    let streams: Vec<String> = all
        .lock()
        .iter()
        .filter_map(Weak::upgrade)
        .filter_map(|stream| Some(stream.lock().as_ref()?.describe()))
        .collect();
    if streams.is_empty() { "has called no collective yet".into() } else { streams.join(" and ") }
}

/// One process of the job.
pub(crate) struct Process {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) kind: TransportKind,
    pub(super) timeout: Duration,
    pub(super) connect_timeout: Duration,
    /// For connections between ranks: the address to listen on, whether ranks are on several hosts, and the secret that
    /// authenticates peers.
    pub(super) bind: Option<IpAddr>,
    pub(super) several_hosts: bool,
    pub(super) secret: Option<Secret>,
    pub(super) abort: Arc<AbortFlag>,
    activity: Arc<AllActivities>,
    /// The MPI library, which a process starts once.
    #[cfg(feature = "mpi")]
    mpi: Mutex<Option<Arc<super::mpi::Runtime>>>,
    /// Dropped last, since its drop sends the goodbye to the server. `None` for a job of one process.
    pub(super) store: Option<StoreClient>,
}

/// An order of collectives in a process, like a CUDA stream. A communicator and the groups made from it share a stream, so their
/// collectives run one after the other. A duplicate has its own stream, and no lock is held across streams while a collective
/// waits.
pub(super) struct CommStream {
    pub(super) queue: Queue,
    mesh: Option<Arc<Mutex<Mesh>>>,
    activity: Arc<StreamActivity>,
}

impl CommStream {
    /// Makes a stream for `group`. All ranks of the group call this function together.
    pub(super) fn new(process: &Process, group: &GroupRanks) -> Result<Self> {
        let mesh = match (process.kind, &process.store, &process.secret) {
            (TransportKind::Tcp, Some(store), Some(secret)) if group.len() > 1 => {
                let Process { bind, several_hosts, connect_timeout: limit, .. } = *process;
                let setup = MeshSetup { group, store, secret, bind, several_hosts, limit };
                Some(Arc::new(Mutex::new(Mesh::new(&setup, process.world_size, process.timeout)?)))
            }
            _ => None,
        };
        let activity = Arc::new(StreamActivity::default());
        let mut all = process.activity.lock();
        all.retain(|stream| stream.strong_count() > 0);
        all.push(Arc::downgrade(&activity));
        Ok(Self { queue: Queue::default(), mesh, activity })
    }

    /// Makes the transport of a group on this stream.
    pub(super) fn transport(&self, process: &Process, group: &GroupRanks) -> Result<Box<dyn Transport>> {
        match (&process.store, &self.mesh) {
            _ if group.len() == 1 => Ok(Box::new(Solo)),
            _ if process.kind == TransportKind::Mpi => process.mpi_group(group),
            (_, Some(mesh)) => Ok(Box::new(TcpGroup::new(mesh.clone(), group.clone()))),
            (Some(store), None) => shm::transport(group.clone(), store, process.connect_timeout, process.timeout),
            (None, None) => Err(CommError::setup(format!("{} has no rendezvous", group.name()))),
        }
    }

    pub(super) fn begin(&self, call: &CollectiveCall, group: &Arc<str>) {
        *self.activity.lock() =
            Some(Activity { call: *call, group: group.clone(), since: Instant::now(), inside: true });
    }

    pub(super) fn end(&self) {
        if let Some(activity) = self.activity.lock().as_mut() {
            activity.since = Instant::now();
            activity.inside = false;
        }
    }
}

impl Process {
    pub(super) fn new(
        rank: usize,
        world_size: usize,
        kind: TransportKind,
        timeout: Duration,
        connect_timeout: Duration,
        store: Option<StoreClient>,
    ) -> Self {
        let activity = Arc::new(AllActivities::default());
        let abort = store.as_ref().map_or_else(AbortFlag::new, StoreClient::abort_flag);
        if let Some(store) = &store {
            let activity = activity.clone();
            store.set_status(move || describe(&activity));
        }
        Self {
            rank,
            world_size,
            kind,
            timeout,
            connect_timeout,
            bind: None,
            several_hosts: false,
            secret: None,
            abort,
            activity,
            #[cfg(feature = "mpi")]
            mpi: Mutex::default(),
            store,
        }
    }

    #[cfg(feature = "mpi")]
    fn mpi_group(&self, group: &GroupRanks) -> Result<Box<dyn Transport>> {
        use super::mpi::{MpiGroup, Runtime};
        let (limit, mut mpi) = (self.connect_timeout, self.mpi.lock());
        let runtime = match &*mpi {
            Some(runtime) => runtime.clone(),
            None => mpi.insert(Arc::new(Runtime::start(self.rank, self.world_size, &self.abort, limit)?)).clone(),
        };
        drop(mpi);
        Ok(Box::new(MpiGroup::new(group.clone(), runtime, self.abort.clone(), limit, self.timeout)?))
    }

    #[cfg(not(feature = "mpi"))]
    fn mpi_group(&self, _group: &GroupRanks) -> Result<Box<dyn Transport>> {
        self.kind.built()?;
        Err(CommError::setup("the mpi backend is missing"))
    }

    /// Ends the job with `error`. Returns the error that the job ended with: the first error, the same on every rank.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        let mut error = if error.kind == ErrorKind::Timeout { self.explain(error) } else { error };
        if matches!(error.kind, ErrorKind::Usage | ErrorKind::Setup | ErrorKind::System) {
            // These errors are found by the rank that has the cause. The other ranks only receive them.
            error.culprit.get_or_insert(self.rank);
        }
        match &self.store {
            Some(store) => store.abort(error.clone()),
            None => _ = self.abort.raise(error.clone()),
        }
        self.abort.error().unwrap_or(error)
    }

    /// Adds the other ranks' activities to a timeout.
    fn explain(&self, mut error: CommError) -> CommError {
        let Some(store) = &self.store else { return error };
        if self.abort.is_raised() {
            return error;
        }
        let answers = store.query(self.world_size - 1, ANSWER_TIMEOUT);
        for rank in (0..self.world_size).filter(|rank| *rank != self.rank) {
            let activity = answers.iter().find(|(r, _)| *r == rank).map(|(_, text)| text.as_str());
            let activity = activity.unwrap_or("does not answer: its process is stopped, or its host out of reach");
            error.message.push_str(&format!("\n  rank {rank} {activity}"));
        }
        if error.hint.is_empty() {
            error.hint = "if the ranks are only slow, a longer timeout helps".into();
        }
        error
    }
}
