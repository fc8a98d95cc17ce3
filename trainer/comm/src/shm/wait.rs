//! Waiting for a counter: check, spin, yield, sleep.

use std::sync::Arc;
use std::time::Duration;

use rustix::thread::CpuSet;

use super::word::{Counter, NotReached};
use crate::abort::AbortFlag;
use crate::deadline::WaitDeadline;

/// Why a wait ended before the counter reached its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitError {
    /// The time limit is over.
    Timeout,
    /// The counter's owner has left the job.
    Left,
    /// The job is aborted.
    Aborted,
}

/// Number of checks before a waiting rank sleeps. A spinning rank reacts in well under a microsecond. With more ranks than cores,
/// a spinning rank would occupy the core of a rank that has work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpinPolicy {
    spins: u32,
    yields: u32,
}

impl SpinPolicy {
    /// Returns whether there are more ranks than cores.
    pub(super) fn is_oversubscribed(self) -> bool {
        self.yields > 0
    }

    /// Returns the policy for `ranks` ranks that share `cores` cores.
    pub(super) fn new(ranks: usize, cores: usize) -> Self {
        if ranks <= cores { Self { spins: 2000, yields: 0 } } else { Self { spins: 20, yields: 4 } }
    }
}

/// Bytes of a set of CPUs that is sent to the other ranks.
pub(super) const CPU_BYTES: usize = 128;

/// Returns the CPUs that this process may run on, one bit each.
pub(super) fn own_cpus() -> [u8; CPU_BYTES] {
    let mut bits = [0; CPU_BYTES];
    if let Ok(set) = rustix::thread::sched_getaffinity(None) {
        // A container's quota counts as fewer CPUs.
        let most = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
        (0..CpuSet::MAX_CPU.min(8 * CPU_BYTES))
            .filter(|cpu| set.is_set(*cpu))
            .take(most)
            .for_each(|cpu| bits[cpu / 8] |= 1 << (cpu % 8));
    }
    bits
}

/// The waits of one rank.
pub(super) struct Waiter {
    pub(super) abort: Arc<AbortFlag>,
    pub(super) timeout: Duration,
    pub(super) spin_policy: SpinPolicy,
}

impl Waiter {
    /// Waits until `counter` has reached `target`.
    #[inline]
    pub(super) fn wait(&self, counter: &Counter, target: u32) -> Result<(), WaitError> {
        if counter.reached(target).is_ok() { Ok(()) } else { self.wait_within(counter, target, self.timeout) }
    }

    /// Does what [`wait`](Self::wait) does, with `limit` instead of the timeout.
    pub(super) fn wait_within(&self, counter: &Counter, target: u32, limit: Duration) -> Result<(), WaitError> {
        let look = || match counter.reached(target) {
            Ok(()) => Ok(None),
            Err(NotReached::NotYet(seen)) if !self.abort.is_raised() => Ok(Some(seen)),
            Err(NotReached::NotYet(_) | NotReached::Poisoned) => Err(WaitError::Aborted),
            Err(NotReached::Left) => Err(WaitError::Left),
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
        let mut deadline = WaitDeadline::after(limit);
        while let Some(seen) = look()? {
            let slice = deadline.next_sleep();
            if slice.is_zero() {
                return Err(WaitError::Timeout);
            }
            counter.sleep(seen, slice);
        }
        Ok(())
    }
}
