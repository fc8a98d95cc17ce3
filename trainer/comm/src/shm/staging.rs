//! Copying bytes to a slot: through the caches, or past them.
//!
//! If writer and readers share a cache, ordinary stores are fastest: the slot never leaves the cache. Writer and readers may also
//! have different caches (other sockets, other chiplets, or a hypervisor that moves virtual CPUs). Then each cache line that a
//! reader takes from the writer's cache costs a round trip between the caches. Non-temporal stores put the slot into main memory
//! instead, and readers prefetch main memory at full speed. Measured for 45 MB over two ranks without a shared cache: 9.5 ms past
//! the caches, 22 ms through them. With a shared cache: 6.1 ms through the caches.
//!
//! The faster path cannot be queried and may change, so ranks measure it repeatedly. Of every [`ROUNDS_PER_CYCLE`] rounds, a few go
//! through the caches and a few past them. All ranks use the same rounds for these trials. Each rank times its trials, and votes in
//! its own word for the path of the other rounds. All ranks write past the caches while any rank votes for non-temporal stores. The
//! vote affects the speed only, not the bytes.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use super::group::ShmGroup;

/// Rounds from one trial to the next.
const ROUNDS_PER_CYCLE: u32 = 1024;
/// Rounds of a trial through the caches, and as many past them.
const TRIAL_ROUNDS: u32 = 8;
/// Number of latest trials, of which the fastest counts: the others may have been interrupted.
const KEPT_TRIALS: usize = 3;

/// The measurements of one rank.
#[derive(Default)]
pub(super) struct StagingTrials {
    /// Start of the current trial, and the bytes moved since then.
    since: Option<(Instant, usize)>,
    /// Nanoseconds per byte, through the caches and past them.
    cached: [f64; KEPT_TRIALS],
    non_temporal: [f64; KEPT_TRIALS],
    count: usize,
}

impl StagingTrials {
    /// Discards a trial that has begun, since its end would be in another collective.
    pub(super) fn interrupt(&mut self) {
        self.since = None;
    }

    /// Records the end of round number `round`, which moved `bytes`. At the end of a trial, returns whether to vote for non-temporal
    /// stores.
    fn note(&mut self, round: u32, bytes: usize, now: impl Fn() -> Instant) -> Option<bool> {
        let phase = round % ROUNDS_PER_CYCLE;
        if phase >= 2 * TRIAL_ROUNDS {
            return None;
        }
        match (phase % TRIAL_ROUNDS, &mut self.since) {
            // The first rounds of a trial are still affected by the rounds before.
            (2, since) => *since = Some((now(), 0)),
            (3.., Some((_, moved))) => *moved += bytes,
            _ => {}
        }
        if phase % TRIAL_ROUNDS != TRIAL_ROUNDS - 1 {
            return None;
        }
        let (start, moved) = self.since.take()?;
        let cost = now().duration_since(start).as_nanos() as f64 / moved.max(1) as f64;
        let place = self.count % KEPT_TRIALS;
        if phase < TRIAL_ROUNDS {
            self.cached[place] = cost;
            return None;
        }
        self.non_temporal[place] = cost;
        self.count += 1;
        let best = |costs: &[f64]| costs.iter().copied().filter(|c| *c > 0.0).fold(f64::INFINITY, f64::min);
        Some(best(&self.non_temporal) < best(&self.cached))
    }
}

/// A word that other ranks read, and for which no rank waits.
#[repr(transparent)]
pub(super) struct NonTemporalVote(AtomicU32);

impl ShmGroup {
    fn number(&self, round: usize) -> u32 {
        self.filled().wrapping_add(round as u32)
    }

    /// Returns whether slots of `round` are written past the caches.
    pub(super) fn uses_non_temporal_stores(&self, round: usize) -> bool {
        match self.number(round) % ROUNDS_PER_CYCLE / TRIAL_ROUNDS {
            0 => false,
            1 => true,
            _ => (0..self.len()).any(|rank| self.segment.vote(rank).0.load(Ordering::Relaxed) != 0),
        }
    }

    /// Records the end of `round`, in which this rank has moved `bytes`.
    pub(super) fn moved(&self, round: usize, bytes: usize) {
        let vote = self.trials.borrow_mut().note(self.number(round), bytes, Instant::now);
        if let Some(vote) = vote {
            self.segment.vote(self.me()).0.store(u32::from(vote), Ordering::Relaxed);
        }
    }
}

/// Copies `source` to `slot`, which has the same length. With `non_temporal` the copy goes past the caches. Other ranks see the copy
/// once this function has returned and the rank has published its counter.
pub(super) fn put(slot: &mut [u8], source: &[u8], non_temporal: bool) {
    if non_temporal { copy_non_temporal(slot, source) } else { slot.copy_from_slice(source) }
}

#[cfg(target_arch = "x86_64")]
fn copy_non_temporal(slot: &mut [u8], source: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    let len = slot.len();
    assert_eq!(len, source.len());
    // Whole lines only: each goes out as one write.
    let head = slot.as_ptr().align_offset(LINE).min(len);
    let body = (len - head) / LINE * LINE;
    slot[..head].copy_from_slice(&source[..head]);
    for at in (head..head + body).step_by(LINE) {
        for part in (at..at + LINE).step_by(16) {
            // SAFETY: both are within slices of length `len >= head + body`, the target is aligned to 16 bytes since `head` ends
            // on a line, and SSE2 is part of x86-64.
            unsafe {
                let value = _mm_loadu_si128(source.as_ptr().add(part).cast::<__m128i>());
                _mm_stream_si128(slot.as_mut_ptr().add(part).cast::<__m128i>(), value);
            }
        }
    }
    slot[head + body..].copy_from_slice(&source[head + body..]);
    // SAFETY: SSE is part of x86-64. The release of the publication does not order non-temporal stores; this fence does.
    unsafe { _mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_non_temporal(slot: &mut [u8], source: &[u8]) {
    slot.copy_from_slice(source);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn non_temporal_copies_write_every_byte_and_no_other() {
        let source: Vec<u8> = (0..1000u32).map(|i| (i * 7 + 1) as u8).collect();
        for at in [0, 1, 16, 63, 64, 65] {
            for len in [0, 1, 15, 63, 64, 65, 127, 128, 500, 900] {
                let mut slot = vec![0xAA; 1000];
                put(&mut slot[at..at + len], &source[3..3 + len], true);
                assert_eq!(slot[at..at + len], source[3..3 + len], "{len} bytes at {at}");
                assert!(slot[..at].iter().chain(&slot[at + len..]).all(|b| *b == 0xAA), "{len} bytes at {at}");
            }
        }
    }

    #[test]
    fn the_path_of_the_fastest_trials_is_chosen() {
        let start = Instant::now();
        let mut trials = StagingTrials::default();
        let mut clock = 0;
        let mut cycle = |cached: u64, streamed: u64| {
            let rounds = (0..ROUNDS_PER_CYCLE).filter_map(|round| {
                clock += if round < TRIAL_ROUNDS { cached } else { streamed };
                trials.note(round, 1 << 16, || start + Duration::from_nanos(clock))
            });
            rounds.collect::<Vec<_>>()
        };
        assert_eq!(cycle(5000, 8000), [false]);
        assert_eq!(cycle(30_000, 8000), [false], "the first trial was faster");
        assert_eq!(cycle(30_000, 8000), [false]);
        assert_eq!(cycle(30_000, 8000), [true], "the first trial is forgotten");
        assert_eq!(cycle(5000, 90_000), [false]);
    }

    #[test]
    fn a_trial_that_ends_in_another_collective_is_discarded() {
        let mut trials = StagingTrials::default();
        for round in 0..TRIAL_ROUNDS + 5 {
            assert_eq!(trials.note(round, 9, Instant::now), None);
        }
        trials.interrupt();
        for round in TRIAL_ROUNDS + 5..2 * TRIAL_ROUNDS {
            assert_eq!(trials.note(round, 9, Instant::now), None);
        }
    }
}
