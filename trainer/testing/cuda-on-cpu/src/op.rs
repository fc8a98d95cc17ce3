//! Operations of a stream: kernels, copies, fills, events, host functions, collectives.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::cu_result::ILLEGAL_ADDRESS;
use crate::event::Event;
use crate::kernel::Launch;
use crate::machine::{Device, Peers, machine};
use crate::memory::{self, MemorySpace};
use crate::module;
use crate::nccl::Collective;

/// Byte that copies to the host return when kernels are not executed: a small positive number in every type.
const IDLE_BYTE: u8 = 0x3c;

/// Time between two reads of a word that a stream waits for.
const POLL: Duration = Duration::from_micros(20);

/// The host function of `cuLaunchHostFunc`.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);

/// An operation. A graph keeps its operations and submits clones of them to a stream.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Kernel(Arc<Launch>),
    Copy(Rows),
    /// A copy from pageable host memory: the data was read when the call was made.
    Staged(Rows, Arc<[u8]>),
    Set(Fill),
    Record(Arc<Event>, u64),
    Wait(Arc<Event>, u64),
    /// Waits until the word at an address is at least a value, modulo 2^64.
    WaitValue(usize, u64),
    /// Writes a word.
    WriteValue(usize, u64),
    /// Frees a block of memory.
    Free(usize),
    Host(HostFunction, usize),
    /// An NCCL collective.
    Collective(Arc<Collective>),
    /// Memory nodes of a graph. The memory was allocated during the capture and is kept.
    Allocated,
    Freed,
}

/// Rows of bytes to copy.
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
    /// Bytes from one row to the next.
    pub(crate) pitch: usize,
    pub(crate) space: MemorySpace,
}

impl Rows {
    /// Returns the bytes from the first to the last byte of a side.
    pub(crate) fn extent(&self, side: &Side) -> usize {
        match self.height {
            0 => 0,
            height => (height - 1).saturating_mul(side.pitch).saturating_add(self.width),
        }
    }

    /// Returns whether a side is valid: pageable, or inside memory that the driver has allocated and not freed.
    fn is_mapped(&self, side: &Side) -> bool {
        side.space == MemorySpace::Pageable || memory::reachable(side.address, self.extent(side)).is_ok()
    }

    /// Copies the rows.
    ///
    /// # Safety
    /// Both sides are valid.
    unsafe fn copy(&self, from: *const u8) {
        let to = self.to.address as *mut u8;
        if self.height == 1 {
            // SAFETY: required of the caller. `copy` allows the sides to overlap.
            unsafe { std::ptr::copy(from, to, self.width) };
            return;
        }
        for row in 0..self.height {
            // SAFETY: as above.
            unsafe { std::ptr::copy(from.add(row * self.from.pitch), to.add(row * self.to.pitch), self.width) };
        }
    }
}

/// Elements to set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fill {
    pub(crate) to: usize,
    /// The lowest `width` bytes are used.
    pub(crate) value: u32,
    /// 1, 2 or 4.
    pub(crate) width: usize,
    pub(crate) count: usize,
}

impl Fill {
    /// Fills the memory.
    ///
    /// # Safety
    /// The memory is valid and aligned.
    unsafe fn run(&self) {
        // SAFETY: required of the caller.
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
    /// Returns the `CUgraphNodeType`.
    pub(crate) fn node_type(&self) -> c_int {
        match self {
            // NCCL's collectives are kernel nodes.
            Self::Kernel(_) | Self::Collective(_) => 0,
            Self::Copy(_) | Self::Staged(..) => 1,
            Self::Set(_) => 2,
            Self::Host(..) => 3,
            Self::Wait(..) => 6,
            Self::Record(..) => 7,
            Self::Allocated => 10,
            Self::Freed | Self::Free(_) => 11,
            Self::WaitValue(..) | Self::WriteValue(..) => 12,
        }
    }

    /// Runs the operation on the calling thread. A context with a sticky error still executes its event operations, so
    /// that nobody waits forever.
    pub(crate) fn run(&self, device: &Device) {
        match self {
            Self::Record(event, ticket) => event.execute(*ticket),
            Self::Wait(event, ticket) => event.wait(*ticket),
            _ if device.check_fault().is_err() => {}
            Self::Set(_) | Self::Kernel(_) | Self::Staged(..) if module::kernels_disabled() => {}
            Self::Copy(rows) if module::kernels_disabled() => {
                if !matches!(rows.to.space, MemorySpace::Device) {
                    // SAFETY: as below.
                    unsafe { rows.copy([IDLE_BYTE].repeat(rows.extent(&rows.from)).as_ptr()) };
                }
            }
            Self::Kernel(launch) => run_kernel(launch, device),
            Self::Copy(rows) if rows.is_mapped(&rows.to) && rows.is_mapped(&rows.from) => {
                // SAFETY: memory of the driver is valid (checked above); the driver's user is responsible for pageable memory.
                unsafe { rows.copy(rows.from.address as *const u8) };
            }
            Self::Staged(rows, data) if rows.is_mapped(&rows.to) => {
                // SAFETY: as above; the data is as long as the rows' extent.
                unsafe { rows.copy(data.as_ptr()) };
            }
            Self::Set(fill) if memory::reachable(fill.to, fill.count * fill.width).is_ok() => {
                // SAFETY: as above; the call checked the alignment.
                unsafe { fill.run() };
            }
            // Memory that was valid at the call, or during the capture, has been freed.
            Self::Copy(_) | Self::Staged(..) | Self::Set(_) => device.set_fault(ILLEGAL_ADDRESS),
            Self::Free(address) => {
                let _ = memory::remove(*address, memory::is_own);
            }
            // SAFETY: the driver's user is responsible for function and argument.
            Self::Host(function, data) => unsafe { function(*data as *mut c_void) },
            Self::Collective(call) => call.run(device),
            Self::WaitValue(at, value) => wait_value(*at, *value, device),
            // SAFETY: as in `wait_value`.
            Self::WriteValue(at, value) => unsafe { word(*at) }.store(*value, Ordering::Release),
            Self::Allocated | Self::Freed => {}
        }
    }
}

/// Returns the word at an address.
///
/// # Safety
/// The word is aligned and in memory of the driver, which its user keeps while operations use it.
unsafe fn word(at: usize) -> &'static AtomicU64 {
    // SAFETY: required of the caller. All accesses by the driver are atomic.
    unsafe { AtomicU64::from_ptr(at as *mut u64) }
}

/// Waits as the hardware does: without an event that another operation signals.
fn wait_value(at: usize, value: u64, device: &Device) {
    // SAFETY: the address was checked when the operation was submitted.
    let word = unsafe { word(at) };
    // Nothing writes the word if kernels are not executed.
    while !module::kernels_disabled()
        && device.check_fault().is_ok()
        && (word.load(Ordering::Acquire).wrapping_sub(value) as i64) < 0
    {
        std::thread::sleep(POLL);
    }
}

fn run_kernel(launch: &Launch, device: &Device) {
    let lies = machine().is_ok_and(|machine| machine.peers() == Peers::Lies);
    let peers = if lies { PeerSnapshot::take(launch, device) } else { PeerSnapshot::default() };
    // SAFETY: the driver's user is responsible for the memory that the parameters point to.
    unsafe { launch.run() };
    peers.restore();
    if let Some(code) = machine().ok().and_then(|machine| machine.fault_of(launch.name())) {
        device.set_fault(code);
    }
}

/// Contents of peers' memory before a launch, restored afterwards so that the launch's writes are lost.
#[derive(Default)]
struct PeerSnapshot(BTreeMap<usize, Vec<u8>>);

impl PeerSnapshot {
    /// Copies every block of another GPU that any word of the parameters points to.
    fn take(launch: &Launch, device: &Device) -> Self {
        let blocks = memory::blocks();
        let mut contents = BTreeMap::new();
        for word in launch.words() {
            let Some(block) = memory::block_at(&blocks, word as usize) else { continue };
            if matches!(block.kind, memory::BlockKind::Host) || block.physical == device.physical {
                continue;
            }
            contents.entry(block.mapping.base).or_insert_with(|| {
                // SAFETY: the block is mapped while the table is locked.
                unsafe { std::slice::from_raw_parts(block.mapping.base as *const u8, block.bytes) }.to_vec()
            });
        }
        Self(contents)
    }

    fn restore(self) {
        let blocks = memory::blocks();
        for (base, bytes) in self.0 {
            if blocks.get(&base).is_some_and(|block| block.bytes == bytes.len()) {
                // SAFETY: as in `take`.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base as *mut u8, bytes.len()) };
            }
        }
    }
}
