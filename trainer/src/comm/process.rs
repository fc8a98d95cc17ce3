//! What all groups of one process share, and the way an error takes to all ranks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::abort::Abort;
use super::descriptor::Descriptor;
use super::error::{CommError, ErrorKind, Result};
use super::queue::Queue;
use super::rendezvous::TransportKind;
use super::shm::ShmGroup;
use super::solo::Solo;
use super::store::StoreClient;
use super::tcp::{Mesh, TcpGroup};
use super::transport::{Members, Transport};

/// How long to wait for other ranks to say what they are doing when something has timed out.
const ANSWER_LIMIT: Duration = Duration::from_millis(500);

/// What this rank is doing, for others that wonder.
#[derive(Default)]
pub(super) struct Doing {
    call: Option<(Descriptor, Arc<str>)>,
    since: Option<Instant>,
    inside: bool,
}

impl Doing {
    fn describe(&self) -> String {
        let Some((call, group)) = &self.call else { return "has called no collective yet".into() };
        let seconds = self.since.map_or(0.0, |s| s.elapsed().as_secs_f64());
        let (verb, place) = (if self.inside { "is in" } else { "has left" }, call.place(group));
        format!("{verb} {call}, {place}, for {seconds:.1} s")
    }
}

/// One process of the job.
pub(crate) struct Process {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) kind: TransportKind,
    pub(super) timeout: Duration,
    pub(super) connect_timeout: Duration,
    pub(super) abort: Arc<Abort>,
    pub(super) queue: Queue,
    pub(super) mesh: Option<Arc<Mutex<Mesh>>>,
    doing: Arc<Mutex<Doing>>,
    /// Last, so that everything else has been dropped when the goodbye is said. None for a job of one.
    pub(super) store: Option<StoreClient>,
}

impl Process {
    pub(super) fn new(
        rank: usize,
        world: usize,
        kind: TransportKind,
        timeout: Duration,
        connect_timeout: Duration,
        store: Option<StoreClient>,
    ) -> Self {
        let doing = Arc::new(Mutex::new(Doing::default()));
        let abort = store.as_ref().map_or_else(Abort::new, StoreClient::abort_flag);
        if let Some(store) = &store {
            let doing = doing.clone();
            store.set_status(move || doing.lock().unwrap_or_else(PoisonError::into_inner).describe());
        }
        Self { rank, world, kind, timeout, connect_timeout, abort, queue: Queue::default(), mesh: None, doing, store }
    }

    /// The transport of a group of this process.
    pub(super) fn transport(&self, members: &Members) -> Result<Box<dyn Transport>> {
        match (&self.store, &self.mesh) {
            (Some(store), None) if members.len() > 1 => {
                Ok(Box::new(ShmGroup::new(members.clone(), store, self.connect_timeout, self.timeout)?))
            }
            (_, Some(mesh)) if members.len() > 1 => Ok(Box::new(TcpGroup::new(mesh.clone(), members.clone()))),
            _ => Ok(Box::new(Solo)),
        }
    }

    fn doing(&self) -> MutexGuard<'_, Doing> {
        self.doing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, call: &Descriptor, group: &Arc<str>) {
        *self.doing() = Doing { call: Some((*call, group.clone())), since: Some(Instant::now()), inside: true };
    }

    pub(super) fn end(&self) {
        let mut doing = self.doing();
        doing.since = Some(Instant::now());
        doing.inside = false;
    }

    /// Ends the job with `error` and returns the error that the job ended with: the first one, on every rank.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        let error = if error.kind == ErrorKind::Timeout { self.explain(error) } else { error };
        match &self.store {
            Some(store) => store.abort(error.clone()),
            None => _ = self.abort.raise(error.clone()),
        }
        self.abort.error().unwrap_or(error)
    }

    /// Adds what the other ranks are doing to a timeout.
    fn explain(&self, mut error: CommError) -> CommError {
        let Some(store) = &self.store else { return error };
        if self.abort.is_raised() {
            return error;
        }
        let answers = store.query(self.world - 1, ANSWER_LIMIT);
        for rank in (0..self.world).filter(|rank| *rank != self.rank) {
            let doing = answers.iter().find(|(r, _)| *r == rank).map(|(_, text)| text.as_str());
            let doing = doing.unwrap_or("does not answer: its process is stopped, or its host out of reach");
            error.message.push_str(&format!("\n  rank {rank} {doing}"));
        }
        if error.hint.is_empty() {
            error.hint = "if the ranks are only slow, a longer timeout helps".into();
        }
        error
    }
}
