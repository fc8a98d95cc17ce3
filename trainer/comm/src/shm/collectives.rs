//! The collectives over shared memory.
//!
//! Each collective runs one of two schedules (`pipeline.rs`): ranks write data to their slots, wait, and read other ranks' slots.
//! Data that fits into the entry area is sent as the payload of the entry, which takes a single wait.

use std::ops::Range;

use bytemuck::cast_slice_mut;

use super::group::ShmGroup;
use super::pipeline::{TWO_SHOT_SLOTS, TwoShotStep, exchange, two_shot};
use super::segment::{DATA, ENTRY};
use super::staging::put;
use super::window::Window;
use crate::call::CollectiveCall;
use crate::dtype::{ReduceOp, split};
use crate::error::Result;
use crate::kernels;
use crate::transport::{MessageOp, Transport};

/// Bytes of a slot in `exchange`, and the number of slots. A slot is small compared with a second-level cache, and all slots
/// together are as large as such a cache. Measured for 45 MB over two ranks: 6.1 ms; 8.5 ms with 8 slots of 32 KB.
const EXCHANGE_CHUNK: usize = 64 << 10;
const EXCHANGE_SLOT_COUNT: usize = 16;
/// Bytes of one rank's part in a round of `two_shot`. The first value applies if every rank has a core, the second if ranks share
/// cores.
const TWO_SHOT_PART: usize = 64 << 10;
const TWO_SHOT_OVERSUBSCRIBED: usize = 256 << 10;
/// Bytes that are reduced at once. A multiple of every element's size.
const SUMS: usize = 16 << 10;
/// Slots start on cache lines. Also a multiple of every element's size.
const LINE: usize = 64;

/// This rank's slot of one round, which this rank fills.
struct Slot<'a> {
    area: &'a mut [u8],
    stride: usize,
    non_temporal: bool,
}

impl Slot<'_> {
    /// Copies `source` to the part for `lane`.
    fn put(&mut self, lane: usize, source: &[u8]) {
        put(&mut self.area[lane * self.stride..][..source.len()], source, self.non_temporal);
    }
}

/// All ranks' slots of one round, which this rank drains. Lane `l` of rank `r` is the part that `r` has for `l`.
struct Slots<'a> {
    group: &'a ShmGroup,
    /// Slot number; `None` for the entry area.
    slot: Option<usize>,
    lanes: usize,
    stride: usize,
}

impl Slots<'_> {
    fn get(&self, rank: usize, lane: usize, len: usize) -> &[u8] {
        let at = lane * self.stride;
        let segment = &self.group.segment;
        match self.slot {
            // SAFETY: read between the wait for all ranks' publication and this rank's next publication (`pipeline.rs`).
            Some(slot) => unsafe { segment.read(segment.data(rank, slot * self.lanes * self.stride + at, len)) },
            None => {
                // SAFETY: every rank has entered, and no rank overwrites its entry before this rank enters again (`enter`).
                let area = unsafe { segment.read(self.group.entry(rank)) };
                &area[at..at + len]
            }
        }
    }
}

/// Reduces `data` of rank `me` with the other ranks' data, in rank order, block by block. `theirs(rank, range)` returns another
/// rank's data. Each block's result goes from the first-level cache to `also` and to `data`.
///
/// The reduction is not in place, so that all ranks have the same bits: the compiler may swap the operands of an in-place
/// addition. Then one rank would keep the first of two NaNs, and another rank the second.
fn reduce_with_peers<'a>(
    call: &CollectiveCall,
    op: ReduceOp,
    data: &mut [u8],
    me: usize,
    n: usize,
    theirs: impl Fn(usize, Range<usize>) -> &'a [u8],
    mut also: impl FnMut(Range<usize>, &[u8]),
) {
    let mut sums = [0u64; SUMS / 8];
    for start in (0..data.len()).step_by(SUMS) {
        let at = start..(start + SUMS).min(data.len());
        let sums = &mut cast_slice_mut(&mut sums)[..at.len()];
        let sources: Vec<&[u8]> =
            (0..n).map(|rank| if rank == me { &data[at.clone()] } else { theirs(rank, at.clone()) }).collect();
        kernels::reduce_into(call.dtype, op, sums, &sources);
        also(at.clone(), sums);
        data[at].copy_from_slice(sums);
    }
}

impl ShmGroup {
    /// Moves `lanes` parts of `len` bytes per rank through the slots, one range of each part at a time. `fill(range, slot)`
    /// copies this rank's data to its slot. `drain(range, slots)` reads all ranks' slots.
    fn exchange_through_slots(
        &mut self,
        call: &CollectiveCall,
        lanes: usize,
        len: usize,
        mut fill: impl FnMut(Range<usize>, Slot<'_>),
        mut drain: impl FnMut(Range<usize>, Slots<'_>),
    ) -> Result<()> {
        let stride = len.next_multiple_of(LINE);
        if lanes * stride <= ENTRY {
            self.enter(call, |area| fill(0..len, Slot { area, stride, non_temporal: false }))?;
            drain(0..len, Slots { group: self, slot: None, lanes, stride });
            return Ok(());
        }
        self.enter(call, |_| {})?;
        let chunk = EXCHANGE_CHUNK.min(DATA / EXCHANGE_SLOT_COUNT / lanes / LINE * LINE);
        let rounds = len.div_ceil(chunk);
        let window = |round: usize| round * chunk..((round + 1) * chunk).min(len);
        let steps = self.steps();
        let group = &*self;
        let put = |round: usize, slot: usize| {
            let area = group.segment.data(group.me(), slot * lanes * chunk, lanes * chunk);
            // SAFETY: this rank's own slot, which no rank reads (`exchange`).
            let area = unsafe { group.segment.write(area) };
            fill(window(round), Slot { area, stride: chunk, non_temporal: group.uses_non_temporal_stores(round) });
        };
        let take = |round: usize, slot: usize| {
            let window = window(round);
            let bytes = window.len();
            drain(window, Slots { group, slot: Some(slot), lanes, stride: chunk });
            group.moved(round, bytes);
        };
        exchange(rounds, EXCHANGE_SLOT_COUNT, &steps, put, take).map_err(|error| self.wait_failed(call, error))?;
        self.advance(rounds, 0);
        Ok(())
    }

    fn is_root(&self, call: &CollectiveCall) -> bool {
        call.root == Some(self.me() as u32)
    }

    /// Reduces a long array over three or more ranks: each rank reduces its part of every round.
    fn all_reduce_two_shot(&mut self, call: &CollectiveCall, op: ReduceOp, data: &mut [u8]) -> Result<()> {
        self.enter(call, |_| {})?;
        let (n, me, element) = (self.len(), self.me(), call.dtype.size());
        // A rank's slots: three rounds of n input parts, then three of one output part.
        let part = if self.waiter.spin_policy.is_oversubscribed() { TWO_SHOT_OVERSUBSCRIBED } else { TWO_SHOT_PART };
        let part = part.min(DATA / TWO_SHOT_SLOTS / (n + 1) / LINE * LINE);
        let rounds = data.len().div_ceil(n * part);
        let steps = self.steps();
        let group = &*self;
        let segment = &group.segment;
        let input = |slot: usize, lane: usize| (slot * n + lane) * part;
        let output = |slot: usize| (TWO_SHOT_SLOTS * n + slot) * part;
        // Start of round `k`, and its cut between the ranks. Parts are at most `part` bytes.
        let cut = |round: usize| {
            let start = round * n * part;
            let len = (data.len() - start).min(n * part);
            split(len, element, n).into_iter().map(|at| start + at).collect::<Vec<_>>()
        };
        let cuts: Vec<Vec<usize>> = (0..rounds).map(cut).collect();
        let turn = |step: TwoShotStep, round: usize, slot: usize| {
            let cut = &cuts[round];
            let range = |rank: usize| cut[rank]..cut[rank + 1];
            match step {
                TwoShotStep::Scatter => {
                    for rank in (0..n).filter(|rank| *rank != me) {
                        let source = &data[range(rank)];
                        // SAFETY: this rank's own slot, which no rank reads (`two_shot`).
                        let area = unsafe { segment.write(segment.data(me, input(slot, rank), source.len())) };
                        put(area, source, group.uses_non_temporal_stores(round));
                    }
                }
                TwoShotStep::Reduce => {
                    let own = range(me);
                    let non_temporal = group.uses_non_temporal_stores(round);
                    // SAFETY: published and waited for (`two_shot`). It does not change before this rank has reduced.
                    let theirs = |rank: usize, at: Range<usize>| unsafe {
                        segment.read(segment.data(rank, input(slot, me) + at.start, at.len()))
                    };
                    let publish = |at: Range<usize>, sums: &[u8]| {
                        // SAFETY: this rank's own slot, which no rank reads (`two_shot`).
                        let area = unsafe { segment.write(segment.data(me, output(slot) + at.start, at.len())) };
                        put(area, sums, non_temporal);
                    };
                    reduce_with_peers(call, op, &mut data[own], me, n, theirs, publish);
                }
                TwoShotStep::Gather => {
                    for rank in (1..n).map(|step| (me + step) % n) {
                        let target = &mut data[range(rank)];
                        // SAFETY: published and waited for (`two_shot`). It does not change before this rank has gathered.
                        target.copy_from_slice(unsafe { segment.read(segment.data(rank, output(slot), target.len())) });
                    }
                    group.moved(round, cut[n] - cut[0]);
                }
            }
        };
        two_shot(rounds, &steps, turn).map_err(|error| self.wait_failed(call, error))?;
        self.advance(rounds, rounds);
        Ok(())
    }
}

impl Transport for ShmGroup {
    fn all_reduce(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()> {
        let (n, op, len) = (self.len(), call.reduction()?, data.len());
        if n > 2 && len > ENTRY {
            return self.all_reduce_two_shot(call, op, data);
        }
        // Two ranks read each other's whole array. Two phases would move as many bytes, with twice as many waits.
        let (me, data) = (self.me(), std::cell::RefCell::new(data));
        self.exchange_through_slots(
            call,
            1,
            len,
            |window, mut slot| slot.put(0, &data.borrow()[window]),
            |window, slots| {
                let into = &mut data.borrow_mut()[window];
                let len = into.len();
                if slots.slot.is_none() {
                    let sources: Vec<&[u8]> = (0..n).map(|rank| slots.get(rank, 0, len)).collect();
                    kernels::reduce_into(call.dtype, op, into, &sources);
                } else {
                    reduce_with_peers(call, op, into, me, n, |rank, at| &slots.get(rank, 0, len)[at], |_, _| {});
                }
            },
        )
    }

    fn broadcast(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()> {
        let (len, is_root) = (data.len(), self.is_root(call));
        let root = call.root_or_peer();
        let data = std::cell::RefCell::new(data);
        self.exchange_through_slots(
            call,
            1,
            len,
            |window, mut slot| {
                if is_root {
                    slot.put(0, &data.borrow()[window]);
                }
            },
            |window, slots| {
                if !is_root {
                    let source = slots.get(root, 0, window.len());
                    data.borrow_mut()[window].copy_from_slice(source);
                }
            },
        )
    }

    fn reduce(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()> {
        let (n, op, len, is_root) = (self.len(), call.reduction()?, data.len(), self.is_root(call));
        let data = std::cell::RefCell::new(data);
        self.exchange_through_slots(
            call,
            1,
            len,
            |window, mut slot| slot.put(0, &data.borrow()[window]),
            |window, slots| {
                if is_root {
                    let sources: Vec<&[u8]> = (0..n).map(|rank| slots.get(rank, 0, window.len())).collect();
                    kernels::reduce_into(call.dtype, op, &mut data.borrow_mut()[window], &sources);
                }
            },
        )
    }

    fn all_gather(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8], lens: &[usize]) -> Result<()> {
        let starts: Vec<usize> = lens.iter().scan(0, |at, len| Some(std::mem::replace(at, *at + len))).collect();
        let longest = lens.iter().copied().max().unwrap_or_default();
        // Clips `window`, a range of the longest array, to an array of `len` bytes.
        let clip = |window: &Range<usize>, len: usize| window.start.min(len)..window.end.min(len);
        let n = self.len();
        self.exchange_through_slots(
            call,
            1,
            longest,
            |window, mut slot| {
                let window = clip(&window, send.len());
                slot.put(0, &send[window]);
            },
            |window, slots| {
                for rank in 0..n {
                    let window = clip(&window, lens[rank]);
                    let source = slots.get(rank, 0, window.len());
                    recv[starts[rank] + window.start..starts[rank] + window.end].copy_from_slice(source);
                }
            },
        )
    }

    fn gather(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let (n, len, is_root) = (self.len(), send.len(), self.is_root(call));
        self.exchange_through_slots(
            call,
            1,
            len,
            |window, mut slot| slot.put(0, &send[window]),
            |window, slots| {
                for rank in (0..n).filter(|_| is_root) {
                    let source = slots.get(rank, 0, window.len());
                    recv[rank * len + window.start..rank * len + window.end].copy_from_slice(source);
                }
            },
        )
    }

    fn scatter(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let (n, me, len, is_root) = (self.len(), self.me(), recv.len(), self.is_root(call));
        let root = call.root_or_peer();
        self.exchange_through_slots(
            call,
            n,
            len,
            |window, mut slot| {
                for rank in (0..n).filter(|_| is_root) {
                    slot.put(rank, &send[rank * len + window.start..rank * len + window.end]);
                }
            },
            |window, slots| {
                let source = slots.get(root, me, window.len());
                recv[window].copy_from_slice(source);
            },
        )
    }

    fn reduce_scatter(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let (n, me, len, op) = (self.len(), self.me(), recv.len(), call.reduction()?);
        self.exchange_through_slots(
            call,
            n,
            len,
            |window, mut slot| {
                for rank in 0..n {
                    slot.put(rank, &send[rank * len + window.start..rank * len + window.end]);
                }
            },
            |window, slots| {
                let sources: Vec<&[u8]> = (0..n).map(|rank| slots.get(rank, me, window.len())).collect();
                kernels::reduce_into(call.dtype, op, &mut recv[window], &sources);
            },
        )
    }

    fn all_to_all(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let (n, me) = (self.len(), self.me());
        let len = send.len() / n;
        self.exchange_through_slots(
            call,
            n,
            len,
            |window, mut slot| {
                for rank in 0..n {
                    slot.put(rank, &send[rank * len + window.start..rank * len + window.end]);
                }
            },
            |window, slots| {
                for rank in 0..n {
                    let source = slots.get(rank, me, window.len());
                    recv[rank * len + window.start..rank * len + window.end].copy_from_slice(source);
                }
            },
        )
    }

    fn barrier(&mut self, call: &CollectiveCall) -> Result<()> {
        self.enter(call, |_| {})
    }

    fn share(&mut self, call: &CollectiveCall) -> Result<Option<Window>> {
        self.make_window(call).map(Some)
    }

    fn all_reduce_shared(&mut self, call: &CollectiveCall, window: Window) -> Result<Window> {
        self.all_reduce_window(call, window)
    }

    fn send(&mut self, call: &CollectiveCall, tag: u64, data: &[u8]) -> Result<()> {
        self.send_message(call, tag, data)
    }

    fn recv(&mut self, call: &CollectiveCall, tag: u64, data: &mut [u8]) -> Result<()> {
        self.recv_message(call, tag, data)
    }

    fn progress(&mut self, messages: &mut [MessageOp<'_>]) -> Result<bool> {
        self.progress_messages(messages)
    }
}
