//! The collectives, as a stream does them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::comm::Comm;
use super::meeting::CHUNK;
use super::number::{Reduction, Type};
use super::{INVALID_ARGUMENT, refuse};
use crate::code::{Answer, ILLEGAL_ADDRESS};
use crate::log::lock;
use crate::machine::Device;
use crate::memory;

/// What is done with everybody's elements.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    AllReduce(Reduction),
    Reduce(Reduction, usize),
    ReduceScatter(Reduction),
    AllGather,
    Broadcast(usize),
}

/// A collective with its arguments.
#[derive(Debug)]
pub(crate) struct Call {
    pub(super) comm: Arc<Comm>,
    kind: Kind,
    of: Type,
    /// Elements; of one rank's part where there are parts.
    count: usize,
    send: usize,
    receive: usize,
}

impl Call {
    pub(super) fn new(
        comm: &Arc<Comm>,
        kind: Kind,
        of: Type,
        count: usize,
        send: usize,
        receive: usize,
    ) -> Answer<Arc<Self>> {
        let world = comm.meeting.world;
        if count.checked_mul(of.size()).and_then(|bytes| bytes.checked_mul(world)).is_none() {
            return Err(refuse(INVALID_ARGUMENT, &format!("{count} elements")));
        }
        match kind {
            Kind::Reduce(_, root) | Kind::Broadcast(root) if root >= world => {
                Err(refuse(INVALID_ARGUMENT, &format!("invalid root {root} (root should be in the 0..{world} range)")))
            }
            _ => Ok(Arc::new(Self { comm: comm.clone(), kind, of, count, send, receive })),
        }
    }

    /// Whether this rank's GPU reaches all that the call reads and writes.
    fn is_there(&self) -> bool {
        let (rank, world) = (self.comm.meeting.rank, self.comm.meeting.world);
        let one = self.count * self.of.size();
        let (read, written) = match self.kind {
            Kind::AllReduce(_) => (one, one),
            Kind::Reduce(_, root) => (one, if root == rank { one } else { 0 }),
            Kind::ReduceScatter(_) => (world * one, one),
            Kind::AllGather => (one, world * one),
            Kind::Broadcast(root) => (if root == rank { one } else { 0 }, one),
        };
        let is_there = |address, bytes| bytes == 0 || memory::reachable(address, bytes).is_ok();
        is_there(self.send, read) && is_there(self.receive, written)
    }

    /// Does it, here and now.
    pub(crate) fn run(&self, device: &Device) {
        let comm = &self.comm;
        let mut steps = lock(&comm.steps);
        if comm.ended.load(Ordering::Acquire) {
            return;
        }
        if !self.is_there() {
            device.break_with(ILLEGAL_ADDRESS);
            return;
        }
        let parts = if matches!(self.kind, Kind::ReduceScatter(_)) { comm.meeting.world } else { 1 };
        let room = CHUNK / self.of.size() / parts;
        for first in (0..self.count).step_by(room) {
            let piece = Piece { call: self, first, count: room.min(self.count - first), room, step: *steps + 1 };
            *steps += 1;
            // SAFETY: the memory is there, as far as the driver has given it out, and the slots of a step are this rank's
            // before the meeting, and read by all after it.
            unsafe {
                piece.write();
                if !comm.meeting.meet(piece.step, &comm.ended) {
                    return;
                }
                piece.read();
            }
        }
    }
}

/// As many elements as a slot has room for.
struct Piece<'a> {
    call: &'a Call,
    first: usize,
    count: usize,
    /// Elements from one part of a slot to the next.
    room: usize,
    step: u64,
}

impl Piece<'_> {
    /// The element of an array where the piece begins, in the part of a rank.
    fn at(&self, array: usize, part: usize) -> *mut u8 {
        (array + (part * self.call.count + self.first) * self.call.of.size()) as *mut u8
    }

    /// A part of a rank's slot.
    fn slot(&self, rank: usize, part: usize) -> *mut u8 {
        self.call.comm.meeting.slot(rank, self.step).wrapping_add(part * self.room * self.call.of.size())
    }

    /// # Safety
    /// Both are there.
    unsafe fn copy(&self, from: *const u8, to: *mut u8) {
        // SAFETY: by the caller; a slot is never in an array.
        unsafe { std::ptr::copy_nonoverlapping(from, to, self.count * self.call.of.size()) };
    }

    /// Puts into the slot what the others need of this rank.
    ///
    /// # Safety
    /// The arrays are there, and nobody reads the slot.
    unsafe fn write(&self) {
        let (rank, world, send) = (self.call.comm.meeting.rank, self.call.comm.meeting.world, self.call.send);
        let parts = match self.call.kind {
            Kind::AllReduce(_) | Kind::Reduce(..) | Kind::AllGather => 1,
            Kind::ReduceScatter(_) => world,
            Kind::Broadcast(root) => usize::from(root == rank),
        };
        for part in 0..parts {
            // SAFETY: by the caller.
            unsafe { self.copy(self.at(send, part), self.slot(rank, part)) };
        }
    }

    /// Takes from the slots what this rank needs.
    ///
    /// # Safety
    /// The arrays are there, and nobody writes to the slots.
    unsafe fn read(&self) {
        let (rank, world, receive) = (self.call.comm.meeting.rank, self.call.comm.meeting.world, self.call.receive);
        let reduce = |reduction, part| {
            let sources: Vec<*const u8> = (0..world).map(|from| self.slot(from, part).cast_const()).collect();
            // SAFETY: by the caller; slots are aligned, and so are their parts.
            unsafe { self.call.of.reduce(reduction, &sources, self.at(receive, 0), self.count) };
        };
        match self.call.kind {
            Kind::AllReduce(reduction) => reduce(reduction, 0),
            Kind::Reduce(reduction, root) if root == rank => reduce(reduction, 0),
            Kind::Reduce(..) => {}
            Kind::ReduceScatter(reduction) => reduce(reduction, rank),
            Kind::AllGather => {
                for from in 0..world {
                    // SAFETY: by the caller.
                    unsafe { self.copy(self.slot(from, 0), self.at(receive, from)) };
                }
            }
            // SAFETY: by the caller.
            Kind::Broadcast(root) => unsafe { self.copy(self.slot(root, 0), self.at(receive, 0)) },
        }
    }
}
