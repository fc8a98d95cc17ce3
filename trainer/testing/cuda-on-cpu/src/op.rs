//! What a stream is given to do.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::code::ILLEGAL_ADDRESS;
use crate::event::Event;
use crate::kernel::Launch;
use crate::machine::{Device, Peers, machine};
use crate::memory::{self, Place};
use crate::module;
use crate::nccl::Call;

/// What is read back where nothing runs: a small positive number in every type.
const IDLE_BYTE: u8 = 0x3c;

/// A host function of `cuLaunchHostFunc`.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);

/// See the module. A graph keeps them, and gives clones of them to a stream.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Kernel(Arc<Launch>),
    Copy(Rows),
    /// A copy of what was read from the host when the copy was asked for.
    Staged(Rows, Arc<[u8]>),
    Set(Fill),
    Record(Arc<Event>, u64),
    Wait(Arc<Event>, u64),
    /// Ends a block of memory.
    Free(usize),
    Host(HostFunction, usize),
    /// A collective of NCCL's.
    Collective(Arc<Call>),
    /// Memory nodes of a graph. The memory is that of the time of the capture, and stays.
    Allocated,
    Freed,
}

/// Rows of bytes to be copied.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) to: Side,
    pub(crate) from: Side,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// One side of a copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Side {
    pub(crate) address: usize,
    /// From one row to the next.
    pub(crate) pitch: usize,
    pub(crate) place: Place,
}

impl Rows {
    /// Bytes from the first to the last one of a side.
    pub(crate) fn extent(&self, side: &Side) -> usize {
        match self.height {
            0 => 0,
            height => (height - 1).saturating_mul(side.pitch).saturating_add(self.width),
        }
    }

    /// Memory that the driver has given out is still there, wherever one side lies in it.
    fn is_there(&self, side: &Side) -> bool {
        side.place == Place::Pageable || memory::reachable(side.address, self.extent(side)).is_ok()
    }

    /// # Safety
    /// Both sides are there.
    unsafe fn copy(&self, from: *const u8) {
        let to = self.to.address as *mut u8;
        if self.height == 1 {
            // SAFETY: by the caller. The sides of a copy may overlap.
            unsafe { std::ptr::copy(from, to, self.width) };
            return;
        }
        for row in 0..self.height {
            // SAFETY: as above.
            unsafe { std::ptr::copy(from.add(row * self.from.pitch), to.add(row * self.to.pitch), self.width) };
        }
    }
}

/// Elements to be set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fill {
    pub(crate) to: usize,
    /// Its lowest `width` bytes.
    pub(crate) value: u32,
    /// 1, 2 or 4.
    pub(crate) width: usize,
    pub(crate) count: usize,
}

impl Fill {
    /// # Safety
    /// The memory is there, and aligned.
    unsafe fn run(&self) {
        // SAFETY: by the caller.
        unsafe {
            match self.width {
                1 => (self.to as *mut u8).write_bytes(self.value as u8, self.count),
                2 => std::slice::from_raw_parts_mut(self.to as *mut u16, self.count).fill(self.value as u16),
                _ => std::slice::from_raw_parts_mut(self.to as *mut u32, self.count).fill(self.value),
            }
        }
    }
}

impl Op {
    /// `CUgraphNodeType`.
    pub(crate) fn node_type(&self) -> c_int {
        match self {
            // NCCL's are kernels
            Self::Kernel(_) | Self::Collective(_) => 0,
            Self::Copy(_) | Self::Staged(..) => 1,
            Self::Set(_) => 2,
            Self::Host(..) => 3,
            Self::Wait(..) => 6,
            Self::Record(..) => 7,
            Self::Allocated => 10,
            Self::Freed | Self::Free(_) => 11,
        }
    }

    /// Does it, here and now, as `device` does. A context that is broken only keeps its events going.
    pub(crate) fn run(&self, device: &Device) {
        match self {
            Self::Record(event, ticket) => event.execute(*ticket),
            Self::Wait(event, ticket) => event.wait(*ticket),
            _ if device.healthy().is_err() => {}
            Self::Set(_) | Self::Kernel(_) | Self::Staged(..) if module::idle() => {}
            Self::Copy(rows) if module::idle() => {
                if !matches!(rows.to.place, Place::Device) {
                    // SAFETY: as below.
                    unsafe { rows.copy([IDLE_BYTE].repeat(rows.extent(&rows.from)).as_ptr()) };
                }
            }
            Self::Kernel(launch) => run_kernel(launch, device),
            Self::Copy(rows) if rows.is_there(&rows.to) && rows.is_there(&rows.from) => {
                // SAFETY: what the driver has given out is there; for the rest its user vouches.
                unsafe { rows.copy(rows.from.address as *const u8) };
            }
            Self::Staged(rows, data) if rows.is_there(&rows.to) => {
                // SAFETY: as above; the data is as long as the rows' extent.
                unsafe { rows.copy(data.as_ptr()) };
            }
            Self::Set(fill) if memory::reachable(fill.to, fill.count * fill.width).is_ok() => {
                // SAFETY: as above; aligned, which was checked at the call.
                unsafe { fill.run() };
            }
            // memory that was there at the call, or at the capture, has been freed
            Self::Copy(_) | Self::Staged(..) | Self::Set(_) => device.break_with(ILLEGAL_ADDRESS),
            Self::Free(address) => {
                let _ = memory::remove(*address, memory::is_own);
            }
            // SAFETY: the driver's user vouches for function and argument.
            Self::Host(function, data) => unsafe { function(*data as *mut c_void) },
            Self::Collective(call) => call.run(device),
            Self::Allocated | Self::Freed => {}
        }
    }
}

fn run_kernel(launch: &Launch, device: &Device) {
    let lies = machine().is_ok_and(|machine| machine.peers() == Peers::Lies);
    let kept = if lies { Kept::of(launch, device) } else { Kept::default() };
    // SAFETY: the driver's user vouches for what the parameters point to.
    unsafe { launch.run() };
    kept.restore();
}

/// What peers' memory held before a launch whose writes get lost there.
#[derive(Default)]
struct Kept(BTreeMap<usize, Vec<u8>>);

impl Kept {
    /// Of the other GPUs' blocks that any word of the parameters points to.
    fn of(launch: &Launch, device: &Device) -> Self {
        let blocks = memory::blocks();
        let mut kept = BTreeMap::new();
        for word in launch.words() {
            let Some(block) = memory::around(&blocks, word as usize) else { continue };
            if matches!(block.kind, memory::Kind::Host) || block.physical == device.physical {
                continue;
            }
            kept.entry(block.mapping.base).or_insert_with(|| {
                // SAFETY: a block that is there: the table is locked.
                unsafe { std::slice::from_raw_parts(block.mapping.base as *const u8, block.bytes) }.to_vec()
            });
        }
        Self(kept)
    }

    fn restore(self) {
        let blocks = memory::blocks();
        for (base, bytes) in self.0 {
            if blocks.get(&base).is_some_and(|block| block.bytes == bytes.len()) {
                // SAFETY: as in `of`.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base as *mut u8, bytes.len()) };
            }
        }
    }
}
