//! Checks the protocol of windows of device memory. Ranks are threads; the parts of a slot are loom cells. An access that the
//! flags do not order after an earlier conflicting access is an error.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use super::protocol::{FlagSet, FlagState, Kernel, KernelStep, SLOTS, flag, flag_state, slot};

const FINGERPRINT: u32 = 7;
/// Maximum number of ranks.
const MAX_RANKS: usize = 3;

/// Memory of one rank: flags by area and sender, slots by part.
struct Window {
    flags: [[AtomicU64; MAX_RANKS]; 2],
    slots: [[UnsafeCell<u64>; MAX_RANKS]; SLOTS as usize],
}

impl Window {
    fn new() -> Self {
        let cells = || std::array::from_fn(|_| UnsafeCell::new(0));
        Self {
            flags: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))),
            slots: std::array::from_fn(|_| cells()),
        }
    }
}

fn put(cell: &UnsafeCell<u64>, value: u64) {
    // SAFETY: loom checks that nobody else has access.
    cell.with_mut(|p| unsafe { *p = value });
}

fn get(cell: &UnsafeCell<u64>) -> u64 {
    // SAFETY: loom checks that nobody writes.
    cell.with(|p| unsafe { *p })
}

fn device_barrier(me: usize, windows: &[Window], area: FlagSet, launch_number: u64) {
    for window in windows {
        window.flags[area as usize][me].store(flag(launch_number, FINGERPRINT), Ordering::Release);
    }
    for word in &windows[me].flags[area as usize][..windows.len()] {
        loop {
            match flag_state(word.load(Ordering::Acquire), launch_number, FINGERPRINT) {
                FlagState::Arrived => break,
                FlagState::NotYet => thread::yield_now(),
                FlagState::Mismatch => panic!("all call the same"),
            }
        }
    }
}

/// Returns the value that `rank` writes to part `part` in launch `launch_number`.
fn value(rank: usize, launch_number: u64, part: usize) -> u64 {
    launch_number * 100 + part as u64 * 10 + rank as u64
}

fn launch(me: usize, windows: &[Window], kernel: Kernel, launch_number: u64, slot: usize) {
    let n = windows.len();
    let sum = |part: usize| windows.iter().map(|window| get(&window.slots[slot][part])).sum::<u64>();
    let want = |part: usize| (0..n).map(|rank| value(rank, launch_number, part)).sum::<u64>();
    for step in kernel.steps() {
        match (step, kernel) {
            (KernelStep::Pack, _) => {
                (0..n).for_each(|part| put(&windows[me].slots[slot][part], value(me, launch_number, part)))
            }
            (KernelStep::Barrier(area), _) => device_barrier(me, windows, *area, launch_number),
            (KernelStep::Reduce, Kernel::TwoShot) => put(&windows[me].slots[slot][me], sum(me)),
            (KernelStep::Reduce, Kernel::ReduceScatter) => assert_eq!(sum(me), want(me)),
            (KernelStep::Reduce, _) => (0..n).for_each(|part| assert_eq!(sum(part), want(part))),
            (KernelStep::Gather, Kernel::TwoShot) => {
                (0..n).for_each(|part| assert_eq!(get(&windows[part].slots[slot][part]), want(part)));
            }
            (KernelStep::Gather, _) => {
                (0..n).for_each(|rank| assert_eq!(get(&windows[rank].slots[slot][0]), value(rank, launch_number, 0)));
            }
        }
    }
}

fn model(
    ranks: usize,
    bound: usize,
    kernels: &'static [Kernel],
    slot: impl Fn(u64) -> u64 + Send + Sync + Copy + 'static,
) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(bound);
    builder.max_branches = 100_000;
    builder.check(move || {
        let windows: Arc<Vec<Window>> = Arc::new((0..ranks).map(|_| Window::new()).collect());
        let run = move |me: usize, windows: &[Window]| {
            for (launch_number, kernel) in (1..).zip(kernels) {
                launch(me, windows, *kernel, launch_number, slot(launch_number) as usize);
            }
        };
        let threads: Vec<_> = (1..ranks)
            .map(|me| {
                let windows = windows.clone();
                thread::spawn(move || run(me, &windows))
            })
            .collect();
        run(0, &windows);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn loom_one_shot_never_overwrites_what_is_being_read() {
    model(2, 2, &[Kernel::OneShot; 4], slot);
    model(3, 0, &[Kernel::OneShot; 3], slot);
}

#[test]
fn loom_two_shot_never_overwrites_what_is_being_read() {
    model(2, 2, &[Kernel::TwoShot; 4], slot);
    model(3, 0, &[Kernel::TwoShot; 3], slot);
}

#[test]
fn loom_collectives_of_all_kinds_follow_one_another() {
    const MIXED: &[Kernel] =
        &[Kernel::TwoShot, Kernel::AllGather, Kernel::OneShot, Kernel::ReduceScatter, Kernel::TwoShot];
    model(2, 2, MIXED, slot);
}

#[test]
#[should_panic]
fn loom_finds_a_window_with_one_slot() {
    // Shows that the tests above can fail.
    model(2, 3, &[Kernel::OneShot; 3], |_| 0);
}

#[test]
#[should_panic]
fn loom_finds_a_reduction_without_its_second_barrier() {
    fn gather_at_once(me: usize, windows: &[Window]) {
        (0..2).for_each(|part| put(&windows[me].slots[0][part], 1));
        device_barrier(me, windows, FlagSet::Filled, 1);
        let sum = windows.iter().map(|window| get(&window.slots[0][me])).sum();
        put(&windows[me].slots[0][me], sum);
        (0..2).for_each(|part| assert_eq!(get(&windows[part].slots[0][part]), 2));
    }
    loom::model(|| {
        let windows: Arc<Vec<Window>> = Arc::new((0..2).map(|_| Window::new()).collect());
        let other = windows.clone();
        let thread = thread::spawn(move || gather_at_once(1, &other));
        gather_at_once(0, &windows);
        thread.join().unwrap();
    });
}
