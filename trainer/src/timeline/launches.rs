//! Records the kernels that are launched on a GPU while a [`KernelProfiler`] exists. The device itself times each kernel.
//!
//! cubecl reports each launch on the thread that makes it, and records two device events around the kernel. No thread waits for the
//! events, so kernels still run back to back. The events cost the host a few microseconds per launch. So recorded steps take
//! longer, but their kernels do not.

use std::cell::Cell;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Instant;

use cubecl::config::{TypeNameFormatLevel, type_name_format};
use cubecl::future::block_on;
use cubecl::logging::{Duration, LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest};
use parking_lot::{Mutex, MutexGuard};

/// A kernel that has run, with its times.
#[derive(Debug, Clone)]
pub struct KernelLaunch {
    /// Path of the kernel's type, in cubecl's crates or in this workspace's.
    pub kernel: &'static str,
    /// The thread that launched the kernel. Each thread has its own stream.
    pub thread: ThreadId,
    /// Time of the launch.
    pub issued: Instant,
    /// Time when the device began the kernel, translated from the device's clock to the host's clock.
    pub start: Instant,
    /// Time when the kernel was done.
    pub end: Instant,
}

impl KernelLaunch {
    /// Returns the kernel's name without the paths of types.
    pub fn short_name(&self) -> String {
        type_name_format(self.kernel, TypeNameFormatLevel::Short)
    }
}

/// Records all launches of this process until the profiler is dropped or has recorded `limit` launches.
#[derive(Debug)]
pub struct KernelProfiler {
    seen: Arc<LaunchRecorder>,
    observation: Mutex<Option<LaunchObservation>>,
}

/// A launch whose events have not been read yet.
struct PendingLaunch {
    kernel: &'static str,
    thread: ThreadId,
    issued: Instant,
    profile: ProfileDuration,
}

struct LaunchRecorder {
    began: Instant,
    pending: Mutex<Vec<PendingLaunch>>,
    limit: usize,
}

thread_local! {
    /// Time of this thread's latest launch.
    static ISSUED: Cell<Option<Instant>> = const { Cell::new(None) };
}

impl std::fmt::Debug for LaunchRecorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LaunchRecorder").field("launches", &self.pending().len()).field("limit", &self.limit).finish()
    }
}

impl LaunchRecorder {
    fn pending(&self) -> MutexGuard<'_, Vec<PendingLaunch>> {
        self.pending.lock()
    }
}

impl LaunchObserver for LaunchRecorder {
    fn launched(&self, _kernel: &'static str) {
        ISSUED.set(Some(Instant::now()));
    }

    fn timing(&self) -> TimingRequest {
        TimingRequest::Deferred
    }

    fn profiled(&self, kernel: &'static str, profile: ProfileDuration) {
        let mut pending = self.pending();
        // A time of the CPU's clock is the time of the launch, not of the kernel.
        if pending.len() < self.limit && profile.timing_method() == TimingMethod::Device {
            let issued = ISSUED.take().unwrap_or_else(Instant::now);
            pending.push(PendingLaunch { kernel, thread: std::thread::current().id(), issued, profile });
        }
    }

    /// Does nothing. If cubecl's profiling log is on, the log consumes the measurement and prints its own summary.
    fn timed(&self, _kernel: &'static str, _duration: Duration, _method: TimingMethod) {}
}

impl KernelProfiler {
    /// Starts recording. Keeps the next `limit` launches.
    pub fn start(limit: usize) -> Self {
        let seen = Arc::new(LaunchRecorder { began: Instant::now(), pending: Mutex::default(), limit });
        let observation = Mutex::new(Some(LaunchObservation::new(seen.clone())));
        Self { seen, observation }
    }

    /// Stops recording once the limit is reached, so that later launches cost nothing. Do not call this function while the same
    /// thread is launching a kernel.
    pub fn stop_if_full(&self) {
        if self.seen.pending().len() >= self.seen.limit {
            self.observation.lock().take();
        }
    }

    /// Stops recording, waits for the device and returns the launches in their order.
    pub fn finish(&self) -> Vec<KernelLaunch> {
        self.observation.lock().take();
        let pending = std::mem::take(&mut *self.seen.pending());
        let read = pending.into_iter().filter_map(|PendingLaunch { kernel, thread, issued, profile }| {
            let ticks = block_on(profile.resolve())?;
            let began = self.seen.began;
            let (start, end) = (began + ticks.start_duration_since(began), began + ticks.end_duration_since(began));
            Some(KernelLaunch { kernel, thread, issued, start, end })
        });
        read.collect()
    }
}
