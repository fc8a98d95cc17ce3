//! Waiting for a counter: look, spin, yield, sleep.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;

use super::word::{Counter, Pending};
use crate::abort::Abort;

/// Why a wait ended without the counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitError {
    Timeout,
    Left,
    Aborted,
}

/// How long to stay awake. A spinning rank answers in well under a microsecond, but takes its core from a rank that has
/// work to do if there are more ranks than cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpinPolicy {
    spins: u32,
    yields: u32,
}

impl SpinPolicy {
    /// Whether there are more ranks than cores.
    pub(super) fn is_oversubscribed(self) -> bool {
        self.yields > 0
    }

    /// For `ranks` ranks that share `cores` cores.
    pub(super) fn new(ranks: usize, cores: usize) -> Self {
        if ranks <= cores { Self { spins: 2000, yields: 0 } } else { Self { spins: 20, yields: 4 } }
    }
}

/// Bytes of a processor set on its way to the other ranks.
pub(super) const CPU_BYTES: usize = 128;

/// The processors that this process may run on, a bit each.
pub(super) fn own_cpus() -> [u8; CPU_BYTES] {
    let mut bits = [0; CPU_BYTES];
    if let Ok(set) = rustix::thread::sched_getaffinity(None) {
        // A quota of a container counts as fewer processors.
        let most = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
        (0..CpuSet::MAX_CPU.min(8 * CPU_BYTES))
            .filter(|cpu| set.is_set(*cpu))
            .take(most)
            .for_each(|cpu| bits[cpu / 8] |= 1 << (cpu % 8));
    }
    bits
}

/// Waits on behalf of one rank.
pub(super) struct Waiter {
    pub(super) abort: Arc<Abort>,
    pub(super) timeout: Duration,
    pub(super) spin_policy: SpinPolicy,
}

impl Waiter {
    /// Waits until `counter` has reached `target`.
    #[inline]
    pub(super) fn wait(&self, counter: &Counter, target: u32) -> Result<(), WaitError> {
        if counter.reached(target).is_ok() { Ok(()) } else { self.wait_within(counter, target, self.timeout) }
    }

    /// The same with a limit of its own; no spinning for a limit of zero.
    pub(super) fn wait_within(&self, counter: &Counter, target: u32, limit: Duration) -> Result<(), WaitError> {
        let look = || match counter.reached(target) {
            Ok(()) => Ok(None),
            Err(Pending::NotYet(seen)) if !self.abort.is_raised() => Ok(Some(seen)),
            Err(Pending::NotYet(_) | Pending::Poisoned) => Err(WaitError::Aborted),
            Err(Pending::Left) => Err(WaitError::Left),
        };
        for _ in 0..self.spin_policy.spins {
            if look()?.is_none() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        for _ in 0..self.spin_policy.yields {
            if look()?.is_none() {
                return Ok(());
            }
            std::thread::yield_now();
        }
        let until = Instant::now() + limit;
        while let Some(seen) = look()? {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(WaitError::Timeout);
            }
            counter.sleep(seen, left);
        }
        Ok(())
    }
}
