//! A counter in shared memory that ranks of different processes can wait for.
//!
//! A counter is one word, and only its owner changes its count. The upper 29 bits count what the owner has published, modulo
//! 2^29; the lower three bits are flags. All changes are read-modify-writes of this one word, so the protocol needs no ordering
//! between locations:
//!
//! - **publish** adds one to the count with release ordering. A rank that reads the new count with acquire ordering sees all that
//!   the owner wrote before. This is what makes the plain data beside the counters free of races.
//! - **sleep**: a waiter that saw a count `v` below its target sets `WAITING` by compare-and-swap from exactly `v`, and sleeps in
//!   the kernel (futex) only while the word still is `v | WAITING`. An earlier publish changes the word, so the swap or the
//!   kernel's comparison fails and the waiter checks again. A later publish sees `WAITING` in the value that it replaced, clears
//!   the flag and wakes all sleepers. So no wake-up is lost (`trainer/testing/loom`).
//! - **mark** sets `POISON` (the job is aborted) or `LEFT` (the owner has ended without an error) and wakes all sleepers. Any
//!   process may set these flags, and no process clears them.

use std::time::Duration;

use self::shim::Word;

const WAITING: u32 = 1;
/// The job is aborted.
pub(super) const POISON: u32 = 2;
/// The owner has ended without an error and will publish no more.
pub(super) const LEFT: u32 = 4;
const FLAGS: u32 = WAITING | POISON | LEFT;
const ONE: u32 = 8;

/// Why a counter has not reached its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotReached {
    /// Not yet. Holds the word that was read, for [`Counter::sleep`].
    NotYet(u32),
    Poisoned,
    Left,
}

/// A counter of one owner, for which other ranks can wait. Each counter has two cache lines to itself (the prefetcher fetches
/// pairs), so polling one counter does not slow down another counter.
#[repr(C, align(128))]
pub(super) struct Counter(Word);

impl Counter {
    #[cfg(any(loom, test))]
    pub(super) fn new() -> Self {
        Self(Word::new(0))
    }

    /// Adds one. A rank that waits for the new count sees everything written before.
    pub(super) fn publish(&self) {
        if self.0.add(ONE) & WAITING != 0 {
            self.0.clear(WAITING);
            self.0.wake();
        }
    }

    /// Sets `POISON` or `LEFT`, which no process clears, and wakes all sleepers.
    pub(super) fn mark(&self, flag: u32) {
        self.0.set(flag);
        self.0.wake();
    }

    /// Checks whether the owner has published `target` times (modulo 2^29, at most 2^28 apart).
    #[inline]
    pub(super) fn reached(&self, target: u32) -> Result<(), NotReached> {
        let seen = self.0.load();
        let ahead = (seen & !FLAGS).wrapping_sub(target.wrapping_mul(ONE));
        if (ahead as i32) >= 0 {
            Ok(())
        } else if seen & POISON != 0 {
            Err(NotReached::Poisoned)
        } else if seen & LEFT != 0 {
            Err(NotReached::Left)
        } else {
            Err(NotReached::NotYet(seen))
        }
    }

    /// Returns whether the owner has left.
    pub(super) fn has_left(&self) -> bool {
        self.0.load() & LEFT != 0
    }

    /// Returns whether the owner has published less than the owner of `other`.
    pub(super) fn is_behind(&self, other: &Counter) -> bool {
        let ahead = (self.0.load() & !FLAGS).wrapping_sub(other.0.load() & !FLAGS);
        (ahead as i32) < 0
    }

    /// Sleeps until the word differs from `seen` or `limit` is over. May also return spuriously.
    pub(super) fn sleep(&self, seen: u32, limit: Duration) {
        if seen & WAITING != 0 || self.0.swap_if(seen, seen | WAITING) {
            self.0.sleep(seen | WAITING, limit);
        }
    }
}

#[cfg(not(loom))]
mod shim {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use rustix::thread::futex;

    /// An atomic word on which threads of all processes that map it can sleep.
    #[repr(transparent)]
    pub(super) struct Word(AtomicU32);

    impl Word {
        #[cfg(test)]
        pub(super) fn new(value: u32) -> Self {
            Self(AtomicU32::new(value))
        }
        #[inline]
        pub(super) fn load(&self) -> u32 {
            self.0.load(Ordering::Acquire)
        }
        pub(super) fn add(&self, n: u32) -> u32 {
            self.0.fetch_add(n, Ordering::AcqRel)
        }
        pub(super) fn set(&self, bits: u32) {
            self.0.fetch_or(bits, Ordering::AcqRel);
        }
        pub(super) fn clear(&self, bits: u32) {
            self.0.fetch_and(!bits, Ordering::AcqRel);
        }
        pub(super) fn swap_if(&self, from: u32, to: u32) -> bool {
            self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
        }
        pub(super) fn sleep(&self, expected: u32, limit: Duration) {
            let limit =
                futex::Timespec { tv_sec: limit.as_secs().min(1 << 30) as i64, tv_nsec: limit.subsec_nanos().into() };
            // The result does not matter: the caller checks the word again in every case.
            let _ = futex::wait(&self.0, futex::Flags::empty(), expected, Some(&limit));
        }
        pub(super) fn wake(&self) {
            // Fails only for a bad address, and this one is a reference.
            let _ = futex::wake(&self.0, futex::Flags::empty(), i32::MAX as u32);
        }
    }
}

#[cfg(loom)]
mod shim {
    use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};
    use std::time::Duration;

    /// The kernel's guarantee in loom's terms: for a waker, comparing and falling asleep are one step.
    pub(super) struct Word {
        word: AtomicU32,
        queue: Mutex<()>,
        awake: Condvar,
    }

    impl Word {
        pub(super) fn new(value: u32) -> Self {
            Self { word: AtomicU32::new(value), queue: Mutex::new(()), awake: Condvar::new() }
        }
        pub(super) fn load(&self) -> u32 {
            self.word.load(Ordering::Acquire)
        }
        pub(super) fn add(&self, n: u32) -> u32 {
            self.word.fetch_add(n, Ordering::AcqRel)
        }
        pub(super) fn set(&self, bits: u32) {
            self.word.fetch_or(bits, Ordering::AcqRel);
        }
        pub(super) fn clear(&self, bits: u32) {
            self.word.fetch_and(!bits, Ordering::AcqRel);
        }
        pub(super) fn swap_if(&self, from: u32, to: u32) -> bool {
            self.word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
        }
        pub(super) fn sleep(&self, expected: u32, _limit: Duration) {
            let queue = self.queue.lock().unwrap();
            if self.word.load(Ordering::Acquire) == expected {
                // May also wake spuriously. The caller checks again.
                drop(self.awake.wait(queue).unwrap());
            }
        }
        pub(super) fn wake(&self) {
            let _queue = self.queue.lock().unwrap();
            self.awake.notify_all();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn counts_wrap_around() {
        let counter = Counter::new();
        counter.0.add(0u32.wrapping_sub(2 * ONE)); // two before the end
        let before = (1u32 << 29) - 2;
        assert_eq!(counter.reached(before), Ok(()));
        assert!(counter.reached(before + 1).is_err());
        (0..3).for_each(|_| counter.publish());
        assert_eq!(counter.reached(before.wrapping_add(3)), Ok(()));
        assert_eq!(counter.reached(1), Ok(()));
        assert!(counter.reached(2).is_err());
    }

    #[test]
    fn marks_do_not_hide_what_was_published() {
        let counter = Counter::new();
        counter.publish();
        counter.mark(LEFT);
        assert_eq!((counter.reached(1), counter.reached(2)), (Ok(()), Err(NotReached::Left)));
        counter.mark(POISON);
        assert_eq!((counter.reached(1), counter.reached(2)), (Ok(()), Err(NotReached::Poisoned)));
    }
}
