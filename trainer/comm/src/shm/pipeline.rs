//! The order of steps in which ranks stream a long array through slots of shared memory.
//!
//! The schedules run between two entries of a collective (`group.rs`), so all slots are free when they start. In a schedule a
//! rank never reads a slot before it has waited for the counter of the slot's writer (acquire). A rank never writes a slot
//! before all readers of the former content are done. No "slot is free" flags are needed: the order of steps, and waiting for
//! *all* ranks every time, guarantee it. Each function explains why.

/// The counters of a schedule, as one rank sees them.
pub(super) trait StepCounters {
    type Error;
    /// Publishes that this rank has filled its next slot.
    fn publish_filled(&self);
    /// Waits until every rank has filled `count` slots in this schedule.
    fn wait_filled(&self, count: usize) -> Result<(), Self::Error>;
    /// Publishes that this rank has reduced its part of the next round.
    fn publish_reduced(&self);
    /// Waits until every rank has reduced its part of `count` rounds.
    fn wait_reduced(&self, count: usize) -> Result<(), Self::Error>;
}

/// Minimum number of slots in [`exchange`].
pub(super) const MIN_EXCHANGE_SLOTS: usize = 4;

/// One phase: each rank fills one slot per round, and reads all ranks' slots of that round.
///
/// Steps of a rank: `fill(0) fill(1) drain(0) fill(2) drain(1) fill(3) drain(2) …`, so filling runs one round ahead. With four
/// slots, `fill(k+1)` overwrites the slot of round `k-3`. Before `drain(k-1)` the rank has waited for every rank's `fill(k-1)`.
/// In every rank's order `fill(k-1)` comes after `drain(k-3)`, so no rank reads the slot of round `k-3` any more. More than four
/// slots may be faster: the writer gets a cache line back faster once the line has left the readers' caches.
pub(super) fn exchange<P: StepCounters>(
    rounds: usize,
    slots: usize,
    progress: &P,
    mut fill: impl FnMut(usize, usize),
    mut drain: impl FnMut(usize, usize),
) -> Result<(), P::Error> {
    debug_assert!(slots >= MIN_EXCHANGE_SLOTS);
    if rounds > 0 {
        fill(0, 0);
        progress.publish_filled();
    }
    for round in 0..rounds {
        if round + 1 < rounds {
            fill(round + 1, (round + 1) % slots);
            progress.publish_filled();
        }
        progress.wait_filled(round + 1)?;
        drain(round, round % slots);
    }
    Ok(())
}

/// Number of slots of each kind in [`two_shot`].
pub(super) const TWO_SHOT_SLOTS: usize = 3;

/// A rank's step in [`two_shot`].
pub(super) enum TwoShotStep {
    /// Copies the other ranks' parts of this rank's data to its input slot.
    Scatter,
    /// Reduces this rank's part from all ranks' input slots into its output slot.
    Reduce,
    /// Copies all parts from all ranks' output slots.
    Gather,
}

/// Runs two phases, reduce-scatter and all-gather, one round apart so that waits are short: turn `k = 0, 1, …` is
/// `scatter(k+1) reduce(k) gather(k-1)`.
///
/// - `scatter(k+1)` overwrites the input slot of round `k-2`, which all ranks read in `reduce(k-2)`. In turn `k-1` the rank has
///   already waited for all ranks' `reduce(k-2)`, before its own `gather(k-2)`.
/// - `reduce(k)` overwrites the output slot of round `k-3`, which all ranks read in `gather(k-3)`. The rank has just waited for
///   all ranks' `scatter(k)`, which in every rank's order comes after `gather(k-3)`.
pub(super) fn two_shot<P: StepCounters>(
    rounds: usize,
    progress: &P,
    mut step: impl FnMut(TwoShotStep, usize, usize),
) -> Result<(), P::Error> {
    if rounds > 0 {
        step(TwoShotStep::Scatter, 0, 0);
        progress.publish_filled();
    }
    // One more turn than rounds, for the last gather.
    for turn in 0..=rounds {
        if turn + 1 < rounds {
            step(TwoShotStep::Scatter, turn + 1, (turn + 1) % TWO_SHOT_SLOTS);
            progress.publish_filled();
        }
        if turn < rounds {
            progress.wait_filled(turn + 1)?;
            step(TwoShotStep::Reduce, turn, turn % TWO_SHOT_SLOTS);
            progress.publish_reduced();
        }
        if turn > 0 {
            progress.wait_reduced(turn)?;
            step(TwoShotStep::Gather, turn - 1, (turn - 1) % TWO_SHOT_SLOTS);
        }
    }
    Ok(())
}

/// Runs one phase without slots: each rank reduces its part of all ranks' arrays. By entering the collective, every rank has
/// given the other ranks access to its array. Once all ranks have published, each rank owns its array again.
pub(super) fn in_place<P: StepCounters>(progress: &P, reduce: impl FnOnce()) -> Result<(), P::Error> {
    reduce();
    progress.publish_reduced();
    progress.wait_reduced(1)
}
