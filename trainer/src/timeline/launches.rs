//! What a GPU does when: the kernels that are launched while somebody watches, each timed by the device itself.
//!
//! cubecl tells of each launch on the thread that makes it, and puts two events of the device around the kernel that nobody
//! waits for: kernels go on back to back. An event costs the host a few microseconds a launch, so steps that are watched
//! take longer; the kernels in them do not.

use std::cell::Cell;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Instant;

use cubecl::config::{TypeNameFormatLevel, type_name_format};
use cubecl::future::block_on;
use cubecl::logging::{Duration, LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest};
use parking_lot::{Mutex, MutexGuard};

/// A kernel that ran.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The path of its type, in cubecl's crates or ours.
    pub kernel: &'static str,
    /// Who launched it; each thread has a stream of its own.
    pub thread: ThreadId,
    /// When it was launched.
    pub issued: Instant,
    /// When the device began it, on the host's clock as the device's is translated to it.
    pub start: Instant,
    /// When it was done.
    pub end: Instant,
}

impl Launch {
    /// The kernel's name without the paths of types.
    pub fn short_name(&self) -> String {
        type_name_format(self.kernel, TypeNameFormatLevel::Short)
    }
}

/// Watches all launches of this process until it is dropped, or has seen as many as it keeps.
#[derive(Debug)]
pub struct Watch {
    seen: Arc<Seen>,
    observation: Mutex<Option<LaunchObservation>>,
}

/// A launch whose events nobody has read yet.
struct Pending {
    kernel: &'static str,
    thread: ThreadId,
    issued: Instant,
    profile: ProfileDuration,
}

struct Seen {
    began: Instant,
    pending: Mutex<Vec<Pending>>,
    limit: usize,
}

thread_local! {
    /// When this thread's latest launch was made.
    static ISSUED: Cell<Option<Instant>> = const { Cell::new(None) };
}

impl std::fmt::Debug for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seen").field("launches", &self.pending().len()).field("limit", &self.limit).finish()
    }
}

impl Seen {
    fn pending(&self) -> MutexGuard<'_, Vec<Pending>> {
        self.pending.lock()
    }
}

impl LaunchObserver for Seen {
    fn launched(&self, _kernel: &'static str) {
        ISSUED.set(Some(Instant::now()));
    }

    fn timing(&self) -> TimingRequest {
        TimingRequest::Deferred
    }

    fn profiled(&self, kernel: &'static str, profile: ProfileDuration) {
        let mut pending = self.pending();
        // a time of the host's clock says nothing of the kernel
        if pending.len() < self.limit && profile.timing_method() == TimingMethod::Device {
            let issued = ISSUED.take().unwrap_or_else(Instant::now);
            pending.push(Pending { kernel, thread: std::thread::current().id(), issued, profile });
        }
    }

    /// The profiling log reads the measurement itself and has its own summary: with it on, there is nothing here.
    fn timed(&self, _kernel: &'static str, _duration: Duration, _method: TimingMethod) {}
}

impl Watch {
    /// From now on, for the next `limit` launches.
    pub fn start(limit: usize) -> Self {
        let seen = Arc::new(Seen { began: Instant::now(), pending: Mutex::default(), limit });
        let observation = Mutex::new(Some(LaunchObservation::new(seen.clone())));
        Self { seen, observation }
    }

    /// Stops watching once there are as many launches as are kept; the next ones cost nothing then. Not to be called while
    /// a kernel is being launched by the same thread.
    pub fn stop_if_full(&self) {
        if self.seen.pending().len() >= self.seen.limit {
            self.observation.lock().take();
        }
    }

    /// Stops, waits for the device, and gives the launches in their order.
    pub fn finish(&self) -> Vec<Launch> {
        self.observation.lock().take();
        let pending = std::mem::take(&mut *self.seen.pending());
        let read = pending.into_iter().filter_map(|Pending { kernel, thread, issued, profile }| {
            let ticks = block_on(profile.resolve())?;
            let began = self.seen.began;
            let (start, end) = (began + ticks.start_duration_since(began), began + ticks.end_duration_since(began));
            Some(Launch { kernel, thread, issued, start, end })
        });
        read.collect()
    }
}
