//! Observes the kernels that this process launches on GPUs: prints a report while kernels are compiled and tuned, and names the
//! kernel in which a GPU has failed.

use std::{
    fmt::Debug,
    mem,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle, ThreadId},
    time::{Duration, Instant},
};

use cubecl::config::{TypeNameFormatLevel, type_name_format};
use cubecl::logging::{Duration as KernelTime, LaunchObservation, LaunchObserver, TimingMethod, TimingRequest};
use parking_lot::Mutex;

use crate::{console, failure};

/// Time between two lines of a [`KernelCompileReporter`].
const NOTICE_INTERVAL: Duration = Duration::from_secs(10);

static LOG: LazyLock<std::sync::Arc<KernelLog>> = LazyLock::new(|| {
    std::sync::Arc::new(KernelLog {
        blocking: super::launches_block(),
        launches: AtomicU64::new(0),
        state: Mutex::default(),
    })
});

/// The launches of this process while it is observed.
struct KernelLog {
    /// Whether `CUDA_LAUNCH_BLOCKING` is 1. Then each launch waits for its kernel, so the log knows which kernels have ended.
    blocking: bool,
    launches: AtomicU64,
    state: Mutex<LogState>,
}

#[derive(Default)]
struct LogState {
    last: &'static str,
    /// Threads with a kernel that has not ended.
    running: Vec<(ThreadId, &'static str)>,
    /// The first kernel that has never ended.
    stuck: Option<&'static str>,
}

impl LaunchObserver for KernelLog {
    fn launched(&self, kernel: &'static str) {
        self.launches.fetch_add(1, Ordering::Relaxed);
        let state = &mut *self.state.lock();
        state.last = kernel;
        if self.blocking {
            let here = thread::current().id();
            // A thread launches its next kernel after the last one has ended or failed. If the last one is still listed, it
            // failed.
            if let Some(place) = state.running.iter().position(|(thread, _)| *thread == here) {
                state.stuck = state.stuck.or(Some(state.running.swap_remove(place).1));
            }
            state.running.push((here, kernel));
        }
    }

    fn timing(&self) -> TimingRequest {
        if self.blocking { TimingRequest::Resolved } else { TimingRequest::None }
    }

    fn timed(&self, _: &'static str, _: KernelTime, _: TimingMethod) {
        let here = thread::current().id();
        self.state.lock().running.retain(|(thread, _)| *thread != here);
    }
}

impl KernelLog {
    /// Returns the name of the kernel that has not ended, without the paths of types.
    fn stopped_in(&self) -> Option<String> {
        let state = self.state.lock();
        let kernel = state.stuck.or(state.running.first().map(|(_, kernel)| *kernel))?;
        Some(type_name_format(kernel, TypeNameFormatLevel::Short))
    }
}

/// With `CUDA_LAUNCH_BLOCKING=1`, as in PyTorch, makes each launch wait for its kernel, so that an error names the kernel.
pub(super) fn block_launches() {
    if LOG.blocking {
        failure::set_stopped_kernel_lookup(|| LOG.stopped_in());
        // Keep the observation until the process ends.
        mem::forget(LaunchObservation::new(LOG.clone()));
    }
}

/// While this value lives, prints every ten seconds that kernels are compiled and tuned. The first step of a network may take
/// minutes, and would look like a hang without this message.
pub struct KernelCompileReporter {
    done: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _observation: Option<LaunchObservation>,
}

impl Debug for KernelCompileReporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KernelCompileReporter")
    }
}

impl KernelCompileReporter {
    /// Starts the report if `device` is a GPU. `what` names the work.
    pub fn start(device: &burn::tensor::Device, what: &'static str) -> Option<Self> {
        if !comm::cuda::is_cuda(device) {
            return None;
        }
        // cubecl allows only one observer. With `CUDA_LAUNCH_BLOCKING` it is already installed.
        let observation = (!LOG.blocking).then(|| LaunchObservation::new(LOG.clone()));
        let (done, waiting) = channel();
        let (start, before) = (Instant::now(), LOG.launches.load(Ordering::Relaxed));
        let report = move || {
            while waiting.recv_timeout(NOTICE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let launches = LOG.launches.load(Ordering::Relaxed) - before;
                let last = type_name_format(LOG.state.lock().last, TypeNameFormatLevel::Short);
                console::eprint(format_args!(
                    "{what}: compiling and tuning kernels for {} s, {launches} launches so far, the last of {last}",
                    start.elapsed().as_secs()
                ));
            }
        };
        // If the thread cannot start, only the report is missing.
        let thread = thread::Builder::new().name("warm-up".into()).spawn(report).ok();
        Some(Self { done: Some(done), thread, _observation: observation })
    }
}

impl Drop for KernelCompileReporter {
    fn drop(&mut self) {
        drop(self.done.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_that_has_not_ended_is_named() {
        let log = KernelLog { blocking: true, launches: AtomicU64::new(0), state: Mutex::default() };
        let ended = || log.timed("", KernelTime::ZERO, TimingMethod::Device);
        log.launched("ops::first");
        ended();
        assert_eq!(log.stopped_in(), None);
        log.launched("ops::second");
        assert_eq!(log.stopped_in().as_deref(), Some("second"));
        // Later launches fail, and none of them ends.
        log.launched("ops::third");
        log.launched("ops::fourth");
        assert_eq!(log.stopped_in().as_deref(), Some("second"));
        assert_eq!(log.launches.load(Ordering::Relaxed), 4);
    }
}
