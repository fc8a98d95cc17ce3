//! Checks interleavings and all allowed reorderings of the shared-memory protocol, for two or three ranks and few rounds.
//!
//! Slots are loom cells: an access that is not ordered after an earlier conflicting access is an error. So is a lost wake-up
//! (all threads blocked).

use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::pipeline::{MIN_EXCHANGE_SLOTS, StepCounters, TWO_SHOT_SLOTS, TwoShotStep, exchange, in_place, two_shot};
use super::word::{Counter, LEFT, NotReached, POISON};

/// The slow path of `Waiter`, without checking and spinning first.
fn wait(counter: &Counter, target: u32) -> Result<(), NotReached> {
    loop {
        match counter.reached(target) {
            Ok(()) => return Ok(()),
            Err(NotReached::NotYet(seen)) => counter.sleep(seen, Duration::MAX),
            Err(other) => return Err(other),
        }
    }
}

/// Runs `test` in every order with at most `bound` preemptions (waits are not preemptions), and with every value that each
/// load may see. Most faults need one or two preemptions. Three ranks with one preemption did not finish in 90 seconds.
fn model(bound: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(bound);
    builder.max_branches = 100_000;
    builder.check(test);
}

/// Memory of one rank.
struct Rank {
    entered: Counter,
    filled: Counter,
    reduced: Counter,
    entries: [UnsafeCell<u32>; 2],
    slots: [UnsafeCell<u32>; MIN_EXCHANGE_SLOTS],
    outputs: [UnsafeCell<u32>; TWO_SHOT_SLOTS],
}

impl Rank {
    fn new() -> Self {
        Self {
            entered: Counter::new(),
            filled: Counter::new(),
            reduced: Counter::new(),
            entries: std::array::from_fn(|_| UnsafeCell::new(0)),
            slots: std::array::from_fn(|_| UnsafeCell::new(0)),
            outputs: std::array::from_fn(|_| UnsafeCell::new(0)),
        }
    }
}

fn put(cell: &UnsafeCell<u32>, value: u32) {
    // SAFETY: loom checks that nobody else has access.
    cell.with_mut(|p| unsafe { *p = value });
}

fn get(cell: &UnsafeCell<u32>) -> u32 {
    // SAFETY: loom checks that nobody writes.
    cell.with(|p| unsafe { *p })
}

fn for_ranks(count: usize, body: impl Fn(usize, &[Rank]) + Send + Sync + Copy + 'static) {
    let ranks: Arc<Vec<Rank>> = Arc::new((0..count).map(|_| Rank::new()).collect());
    let threads: Vec<_> = (1..count)
        .map(|me| {
            let ranks = ranks.clone();
            thread::spawn(move || body(me, &ranks))
        })
        .collect();
    body(0, &ranks);
    threads.into_iter().for_each(|t| t.join().unwrap());
}

struct Steps<'a> {
    me: usize,
    ranks: &'a [Rank],
    /// Reductions before this schedule.
    reduced: usize,
}

impl StepCounters for Steps<'_> {
    type Error = NotReached;
    fn publish_filled(&self) {
        self.ranks[self.me].filled.publish();
    }
    fn wait_filled(&self, count: usize) -> Result<(), NotReached> {
        self.ranks.iter().try_for_each(|r| wait(&r.filled, count as u32))
    }
    fn publish_reduced(&self) {
        self.ranks[self.me].reduced.publish();
    }
    fn wait_reduced(&self, count: usize) -> Result<(), NotReached> {
        self.ranks.iter().try_for_each(|r| wait(&r.reduced, (self.reduced + count) as u32))
    }
}

#[test]
fn loom_no_wake_up_is_lost() {
    model(3, || {
        let counter = Arc::new(Counter::new());
        let waiters: Vec<_> = [1, 2]
            .map(|target| {
                let counter = counter.clone();
                thread::spawn(move || assert_eq!(wait(&counter, target), Ok(())))
            })
            .into();
        counter.publish();
        counter.publish();
        waiters.into_iter().for_each(|w| w.join().unwrap());
    });
}

#[test]
fn loom_flags_wake_sleepers_and_are_never_cleared() {
    for (flag, want) in [(POISON, NotReached::Poisoned), (LEFT, NotReached::Left)] {
        model(3, move || {
            let counter = Arc::new(Counter::new());
            let (a, b) = (counter.clone(), counter.clone());
            let waiter = thread::spawn(move || wait(&a, 2));
            let marker = thread::spawn(move || b.mark(flag));
            counter.publish();
            marker.join().unwrap();
            assert_eq!(waiter.join().unwrap(), Err(want));
            assert_eq!(counter.reached(1), Ok(()));
        });
    }
}

#[test]
fn loom_entries_of_consecutive_collectives_do_not_overlap() {
    // As `ShmGroup::enter`: two alternating areas, no barrier at the end.
    fn rank(me: usize, ranks: &[Rank]) {
        for sequence in 1..=3u32 {
            put(&ranks[me].entries[sequence as usize % 2], sequence * 10 + me as u32);
            ranks[me].entered.publish();
            for (r, rank) in ranks.iter().enumerate() {
                wait(&rank.entered, sequence).unwrap();
                assert_eq!(get(&rank.entries[sequence as usize % 2]), sequence * 10 + r as u32);
            }
        }
    }
    model(3, || for_ranks(2, rank));
    model(0, || for_ranks(3, rank));
}

#[test]
fn loom_exchange_never_overwrites_what_is_being_read() {
    fn rank(me: usize, ranks: &[Rank]) {
        let steps = Steps { me, ranks, reduced: 0 };
        let fill = |round: usize, slot: usize| put(&ranks[me].slots[slot], (round * 10 + me) as u32);
        let drain = |round: usize, slot: usize| {
            for (r, rank) in ranks.iter().enumerate() {
                assert_eq!(get(&rank.slots[slot]), (round * 10 + r) as u32);
            }
        };
        exchange(5, MIN_EXCHANGE_SLOTS, &steps, fill, drain).unwrap();
    }
    model(2, || for_ranks(2, rank));
    model(0, || for_ranks(3, rank));
}

#[test]
fn loom_two_shot_never_overwrites_what_is_being_read() {
    fn rank(me: usize, ranks: &[Rank]) {
        let steps = Steps { me, ranks, reduced: 0 };
        let turn = |step: TwoShotStep, round: usize, slot: usize| match step {
            TwoShotStep::Scatter => put(&ranks[me].slots[slot], (round * 10 + me) as u32),
            TwoShotStep::Reduce => {
                let sum = ranks.iter().map(|r| get(&r.slots[slot])).sum();
                put(&ranks[me].outputs[slot], sum);
            }
            TwoShotStep::Gather => {
                let want = (0..ranks.len()).map(|r| (round * 10 + r) as u32).sum::<u32>();
                assert!(ranks.iter().all(|r| get(&r.outputs[slot]) == want));
            }
        };
        two_shot(4, &steps, turn).unwrap();
    }
    model(2, || for_ranks(2, rank));
    model(0, || for_ranks(3, rank));
}

#[test]
#[should_panic]
fn loom_finds_a_missing_slot() {
    // The same schedule with three slots instead of four shows that the test above can fail.
    fn rank(me: usize, ranks: &[Rank]) {
        let steps = Steps { me, ranks, reduced: 0 };
        let fill = |round: usize, _: usize| put(&ranks[me].slots[round % 3], (round * 10 + me) as u32);
        let drain = |round: usize, _: usize| {
            for (r, rank) in ranks.iter().enumerate() {
                assert_eq!(get(&rank.slots[round % 3]), (round * 10 + r) as u32);
            }
        };
        exchange(6, MIN_EXCHANGE_SLOTS, &steps, fill, drain).unwrap();
    }
    model(2, || for_ranks(2, rank));
}

/// As `ShmGroup::all_reduce_window`, twice: a rank writes its array, enters, reduces its part of all arrays, waits, and reads
/// its array. Without `wait_for_all` the wait is left out.
fn windows(me: usize, ranks: &[Rank], wait_for_all: bool) {
    let n = ranks.len();
    for call in 0..2 {
        (0..n).for_each(|part| put(&ranks[me].slots[part], (call * 100 + part * 10 + me) as u32));
        ranks[me].entered.publish();
        ranks.iter().for_each(|r| wait(&r.entered, call as u32 + 1).unwrap());
        let reduce = || {
            let sum = ranks.iter().map(|r| get(&r.slots[me])).sum();
            ranks.iter().for_each(|r| put(&r.slots[me], sum));
        };
        if wait_for_all {
            in_place(&Steps { me, ranks, reduced: call }, reduce).unwrap();
        } else {
            reduce();
        }
        for part in 0..n {
            let want = (0..n).map(|r| (call * 100 + part * 10 + r) as u32).sum::<u32>();
            assert_eq!(get(&ranks[me].slots[part]), want);
        }
    }
}

#[test]
fn loom_windows_have_one_user_at_a_time() {
    model(3, || for_ranks(2, |me, ranks| windows(me, ranks, true)));
    model(0, || for_ranks(3, |me, ranks| windows(me, ranks, true)));
}

#[test]
#[should_panic]
fn loom_finds_a_missing_wait() {
    model(2, || for_ranks(2, |me, ranks| windows(me, ranks, false)));
}
