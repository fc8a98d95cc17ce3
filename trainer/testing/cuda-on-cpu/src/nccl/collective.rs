//! The collectives, as a stream executes them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::comm::Comm;
use super::data_type::{DataType, Reduction};
use super::segment::SLOT_BYTES;
use super::{INVALID_ARGUMENT, refuse};
use crate::cu_result::{DriverResult, ILLEGAL_ADDRESS};
use crate::machine::Device;
use crate::memory;

/// Operation and root.
#[derive(Debug, Clone, Copy)]
pub(super) enum CollectiveKind {
    AllReduce(Reduction),
    Reduce(Reduction, usize),
    ReduceScatter(Reduction),
    AllGather,
    Broadcast(usize),
}

/// A collective with its arguments.
#[derive(Debug)]
pub(crate) struct Collective {
    pub(super) comm: Arc<Comm>,
    kind: CollectiveKind,
    data_type: DataType,
    /// Number of elements; per rank for reduce-scatter and all-gather.
    count: usize,
    send: usize,
    receive: usize,
}

impl Collective {
    pub(super) fn new(
        comm: &Arc<Comm>,
        kind: CollectiveKind,
        data_type: DataType,
        count: usize,
        send: usize,
        receive: usize,
    ) -> DriverResult<Arc<Self>> {
        let world_size = comm.segment.world_size;
        if count.checked_mul(data_type.size()).and_then(|bytes| bytes.checked_mul(world_size)).is_none() {
            return Err(refuse(INVALID_ARGUMENT, &format!("{count} elements")));
        }
        match kind {
            CollectiveKind::Reduce(_, root) | CollectiveKind::Broadcast(root) if root >= world_size => Err(refuse(
                INVALID_ARGUMENT,
                &format!("invalid root {root} (root should be in the 0..{world_size} range)"),
            )),
            _ => Ok(Arc::new(Self { comm: comm.clone(), kind, data_type, count, send, receive })),
        }
    }

    /// Returns whether all memory that the call reads and writes is valid.
    fn is_mapped(&self) -> bool {
        let (rank, world_size) = (self.comm.segment.rank, self.comm.segment.world_size);
        let one = self.count * self.data_type.size();
        let (read, written) = match self.kind {
            CollectiveKind::AllReduce(_) => (one, one),
            CollectiveKind::Reduce(_, root) => (one, if root == rank { one } else { 0 }),
            CollectiveKind::ReduceScatter(_) => (world_size * one, one),
            CollectiveKind::AllGather => (one, world_size * one),
            CollectiveKind::Broadcast(root) => (if root == rank { one } else { 0 }, one),
        };
        let is_mapped = |address, bytes| bytes == 0 || memory::reachable(address, bytes).is_ok();
        is_mapped(self.send, read) && is_mapped(self.receive, written)
    }

    /// Runs the collective on the calling thread.
    pub(crate) fn run(&self, device: &Device) {
        let comm = &self.comm;
        let mut steps = comm.steps.lock();
        if comm.aborted.load(Ordering::Acquire) {
            return;
        }
        if !self.is_mapped() {
            device.set_fault(ILLEGAL_ADDRESS);
            return;
        }
        let parts = if matches!(self.kind, CollectiveKind::ReduceScatter(_)) { comm.segment.world_size } else { 1 };
        let room = SLOT_BYTES / self.data_type.size() / parts;
        for first in (0..self.count).step_by(room) {
            let piece = Piece { call: self, first, count: room.min(self.count - first), room, step: *steps + 1 };
            *steps += 1;
            // SAFETY: `is_mapped` has checked the arrays. Before the barrier a step's slot belongs to its rank; after the
            // barrier all ranks only read it.
            unsafe {
                piece.write();
                if !comm.segment.barrier(piece.step, &comm.aborted) {
                    return;
                }
                piece.read();
            }
        }
    }
}

/// A part of a collective that fits into a slot.
struct Piece<'a> {
    call: &'a Collective,
    first: usize,
    count: usize,
    /// Number of elements from one part of a slot to the next.
    room: usize,
    step: u64,
}

impl Piece<'_> {
    /// Returns the address of the piece's first element in a rank's part of an array.
    fn at(&self, array: usize, part: usize) -> *mut u8 {
        (array + (part * self.call.count + self.first) * self.call.data_type.size()) as *mut u8
    }

    /// Returns the address of a part of a rank's slot.
    fn slot(&self, rank: usize, part: usize) -> *mut u8 {
        self.call.comm.segment.slot(rank, self.step).wrapping_add(part * self.room * self.call.data_type.size())
    }

    /// Copies the piece's elements.
    ///
    /// # Safety
    /// Both ranges are valid.
    unsafe fn copy(&self, from: *const u8, to: *mut u8) {
        // SAFETY: required of the caller; a slot never overlaps an array.
        unsafe { std::ptr::copy_nonoverlapping(from, to, self.count * self.call.data_type.size()) };
    }

    /// Writes the elements that other ranks need to this rank's slot.
    ///
    /// # Safety
    /// The arrays are valid, and no rank reads the slot.
    unsafe fn write(&self) {
        let (rank, world_size, send) = (self.call.comm.segment.rank, self.call.comm.segment.world_size, self.call.send);
        let parts = match self.call.kind {
            CollectiveKind::AllReduce(_) | CollectiveKind::Reduce(..) | CollectiveKind::AllGather => 1,
            CollectiveKind::ReduceScatter(_) => world_size,
            CollectiveKind::Broadcast(root) => usize::from(root == rank),
        };
        for part in 0..parts {
            // SAFETY: required of the caller.
            unsafe { self.copy(self.at(send, part), self.slot(rank, part)) };
        }
    }

    /// Computes this rank's result from the slots.
    ///
    /// # Safety
    /// The arrays are valid, and no rank writes to the slots.
    unsafe fn read(&self) {
        let (rank, world_size, receive) =
            (self.call.comm.segment.rank, self.call.comm.segment.world_size, self.call.receive);
        let reduce = |reduction, part| {
            let sources: Vec<*const u8> = (0..world_size).map(|from| self.slot(from, part).cast_const()).collect();
            // SAFETY: required of the caller; slots and their parts are aligned.
            unsafe { self.call.data_type.reduce(reduction, &sources, self.at(receive, 0), self.count) };
        };
        match self.call.kind {
            CollectiveKind::AllReduce(reduction) => reduce(reduction, 0),
            CollectiveKind::Reduce(reduction, root) if root == rank => reduce(reduction, 0),
            CollectiveKind::Reduce(..) => {}
            CollectiveKind::ReduceScatter(reduction) => reduce(reduction, rank),
            CollectiveKind::AllGather => {
                for from in 0..world_size {
                    // SAFETY: required of the caller.
                    unsafe { self.copy(self.slot(from, 0), self.at(receive, from)) };
                }
            }
            // SAFETY: required of the caller.
            CollectiveKind::Broadcast(root) => unsafe { self.copy(self.slot(root, 0), self.at(receive, 0)) },
        }
    }
}
