//! The order of steps in which ranks stream a long array through slots of shared memory.
//!
//! The schedules run between two entries of a collective (`group.rs`), so all slots are free when they start. In them a
//! rank never looks at a slot before it has waited for the counter of its writer (acquire), and never writes one before it
//! knows that all readers of the former content are done. The second is the interesting part: there are no "slot is free"
//! flags; it follows from the order of steps and from waiting for *all* ranks every time, as each function argues.

/// The counters of a schedule, as one rank sees them.
pub(super) trait StepCounters {
    type Error;
    /// Says that this rank has filled its next slot.
    fn publish_filled(&self);
    /// Waits until every rank has filled `count` slots in this schedule.
    fn wait_filled(&self, count: usize) -> Result<(), Self::Error>;
    /// Says that this rank has reduced its part of the next round.
    fn publish_reduced(&self);
    /// Waits until every rank has reduced its part of `count` rounds.
    fn wait_reduced(&self, count: usize) -> Result<(), Self::Error>;
}

/// Slots that [`exchange`] turns through at least.
pub(super) const EXCHANGE_SLOTS: usize = 4;

/// One phase: each rank fills a slot a round, and drains everybody's slots of that round.
///
/// Steps of a rank: `fill(0) fill(1) drain(0) fill(2) drain(1) fill(3) drain(2) …`, so filling runs one round ahead.
/// `fill(k+1)` overwrites the slot of round `k-3`. The rank has by then waited, before `drain(k-1)`, for everybody's
/// `fill(k-1)`, which in everybody's order comes after its `drain(k-3)`: the slot has no reader left. More slots than these
/// four may pay: a line comes back to its writer when it has left the readers' caches.
pub(super) fn exchange<P: StepCounters>(
    rounds: usize,
    slots: usize,
    progress: &P,
    mut fill: impl FnMut(usize, usize),
    mut drain: impl FnMut(usize, usize),
) -> Result<(), P::Error> {
    debug_assert!(slots >= EXCHANGE_SLOTS);
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

/// Slots of each kind that [`two_shot`] turns through.
pub(super) const TWO_SHOT_SLOTS: usize = 3;

/// What a rank does in a step of [`two_shot`].
pub(super) enum TwoShotStep {
    /// Puts the other ranks' parts of its data into its input slot.
    Scatter,
    /// Reduces its own part from everybody's input slots into its output slot.
    Reduce,
    /// Takes all parts from everybody's output slots.
    Gather,
}

/// Two phases, reduce-scatter and all-gather, with everything one round apart so that waits rarely wait:
/// `scatter(k+1) reduce(k) gather(k-1)` is one turn, `k = 0, 1, …`.
///
/// - `scatter(k+1)` overwrites the input slot of round `k-2`, whose readers are everybody's `reduce(k-2)`. The turn before
///   waited for everybody's reduction of round `k-2` (before `gather(k-2)`).
/// - `reduce(k)` overwrites the output slot of round `k-3`, whose readers are everybody's `gather(k-3)`. The rank has just
///   waited for everybody's `scatter(k)`, which in everybody's order comes after `gather(k-3)`.
pub(super) fn two_shot<P: StepCounters>(
    rounds: usize,
    progress: &P,
    mut step: impl FnMut(TwoShotStep, usize, usize),
) -> Result<(), P::Error> {
    if rounds > 0 {
        step(TwoShotStep::Scatter, 0, 0);
        progress.publish_filled();
    }
    // One turn more than rounds, for the last gather.
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

/// No slots: ranks work on each other's own arrays, each on its part of all of them. The entry of all has said that the arrays
/// are theirs to take; when all have published, each has its own back.
pub(super) fn in_place<P: StepCounters>(progress: &P, reduce: impl FnOnce()) -> Result<(), P::Error> {
    reduce();
    progress.publish_reduced();
    progress.wait_reduced(1)
}
