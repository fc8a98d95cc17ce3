//! All memory that the driver has allocated, by address.
//!
//! Memory of a GPU is a memfd, mapped shared, so that other processes can map it too. A guard page follows each block.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::io::Error;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use libc::{
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE,
};

use crate::cu_result::{DriverResult, INVALID_VALUE, OPERATING_SYSTEM, OUT_OF_MEMORY};
use crate::machine::{Device, machine};

/// A page of the host. `cuMemAlloc` guarantees an alignment of 512 bytes only.
const PAGE: usize = 4096;

/// Blocks up to this size, in bytes, are filled when they are allocated.
const FILLED: usize = 64 << 20;

/// Fill byte: new memory of a GPU is not zero. A float of these bytes is a NaN.
const FILL: u8 = 0xFF;

/// Origin of a block.
#[derive(Debug)]
pub(crate) enum BlockKind {
    /// `cuMemAlloc`: other processes can open the memory.
    Own { file: OwnedFd, serial: u64 },
    /// `cuMemAllocAsync`: other processes cannot open the memory.
    Pool,
    /// Opened from another process.
    Opened { pid: u32, serial: u64, opener: usize, times: u32 },
    /// Pinned host memory.
    Host,
}

/// A mapping, which is removed on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) base: usize,
    /// Bytes including the guard page.
    bytes: usize,
}

impl Mapping {
    /// Maps `bytes` bytes of a file, or anonymous memory without one.
    pub(crate) fn new(bytes: usize, file: Option<&OwnedFd>) -> DriverResult<Self> {
        let inner = bytes.checked_next_multiple_of(PAGE).ok_or(INVALID_VALUE)?;
        let outer = inner.checked_add(PAGE).ok_or(INVALID_VALUE)?;
        // SAFETY: reserves new address space, at an address that the kernel chooses.
        let base =
            unsafe { libc::mmap(null_mut(), outer, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) };
        if base == MAP_FAILED {
            return Err(OUT_OF_MEMORY);
        }
        let mapping = Self { base: base as usize, bytes: outer };
        let (flags, file) = match file {
            Some(file) => (MAP_SHARED | MAP_FIXED, file.as_raw_fd()),
            None => (MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1),
        };
        // SAFETY: replaces a part of the mapping above, which nobody else uses yet.
        let mapped = unsafe { libc::mmap(base, inner, PROT_READ | PROT_WRITE, flags, file, 0) };
        if mapped == MAP_FAILED { Err(OUT_OF_MEMORY) } else { Ok(mapping) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`. The driver's user has freed the memory, and operations queued before that have finished.
        unsafe { libc::munmap(self.base as *mut c_void, self.bytes) };
    }
}

/// An allocation.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) mapping: Mapping,
    /// Bytes as requested.
    pub(crate) bytes: usize,
    /// Physical index of the GPU that has the memory. For host memory, the GPU that was current.
    pub(crate) physical: usize,
    pub(crate) kind: BlockKind,
}

/// Blocks by address.
type Blocks = BTreeMap<usize, Block>;

static BLOCKS: RwLock<Blocks> = RwLock::new(BTreeMap::new());

/// Locks all blocks for reading.
pub(crate) fn blocks() -> RwLockReadGuard<'static, Blocks> {
    BLOCKS.read()
}

/// Locks all blocks for writing.
pub(crate) fn blocks_mut() -> RwLockWriteGuard<'static, Blocks> {
    BLOCKS.write()
}

/// Returns the block that contains an address.
pub(crate) fn block_at(blocks: &Blocks, address: usize) -> Option<&Block> {
    let (base, block) = blocks.range(..=address).next_back()?;
    (address - base < block.bytes).then_some(block)
}

/// Kind of memory at an address, as a copy sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemorySpace {
    /// Memory of a GPU.
    Device,
    /// Host memory allocated by the driver.
    Pinned,
    /// Other host memory.
    Pageable,
}

/// Returns the kind of memory of `bytes` bytes at `address`. A range that leaves its block is refused.
pub(crate) fn space_of(address: usize, bytes: usize) -> DriverResult<MemorySpace> {
    let blocks = blocks();
    let Some(block) = block_at(&blocks, address) else { return Ok(MemorySpace::Pageable) };
    if address - block.mapping.base > block.bytes.checked_sub(bytes).ok_or(INVALID_VALUE)? {
        return Err(INVALID_VALUE);
    }
    Ok(if matches!(block.kind, BlockKind::Host) { MemorySpace::Pinned } else { MemorySpace::Device })
}

/// Checks that a GPU can address the range: it lies in memory of the driver.
pub(crate) fn reachable(address: usize, bytes: usize) -> DriverResult<MemorySpace> {
    match space_of(address, bytes)? {
        MemorySpace::Pageable => Err(INVALID_VALUE),
        space => Ok(space),
    }
}

fn create_file(name: &str, bytes: usize) -> DriverResult<OwnedFd> {
    let name = CString::new(name).map_err(|_| OPERATING_SYSTEM)?;
    // SAFETY: a C string; the result is checked.
    let file = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        eprintln!("cuda-on-cpu: memfd_create: {}", Error::last_os_error());
        return Err(OPERATING_SYSTEM);
    }
    // SAFETY: a descriptor that was just opened and has no other owner.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    let length = libc::off_t::try_from(bytes).map_err(|_| OUT_OF_MEMORY)?;
    // SAFETY: plain numbers.
    match unsafe { libc::ftruncate(file.as_raw_fd(), length) } {
        0 => Ok(file),
        _ => Err(OUT_OF_MEMORY),
    }
}

/// Returns the name of a block's memfd.
pub(crate) fn file_name(pid: u32, serial: u64) -> String {
    format!("cuda-on-cpu-{pid}-{serial}")
}

/// Returns the bytes of GPU memory that a block uses.
fn footprint(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

/// Implements `cuMemAlloc`, and with `pool` `cuMemAllocAsync`.
pub(crate) fn allocate(device: &Device, bytes: usize, pool: bool) -> DriverResult<usize> {
    static SERIAL: AtomicU64 = AtomicU64::new(1);
    let limit = machine()?.memory();
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    if bytes > limit {
        return Err(OUT_OF_MEMORY);
    }
    let footprint = footprint(bytes);
    let fits = |used: usize| used.checked_add(footprint).filter(|used| *used <= limit);
    device.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).map_err(|_| OUT_OF_MEMORY)?;
    let made: DriverResult<_> = (|| {
        if pool {
            return Ok((Mapping::new(bytes, None)?, BlockKind::Pool));
        }
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let file = create_file(&file_name(std::process::id(), serial), footprint)?;
        Ok((Mapping::new(bytes, Some(&file))?, BlockKind::Own { file, serial }))
    })();
    let (mapping, kind) = made.inspect_err(|_| {
        device.used.fetch_sub(footprint, Ordering::AcqRel);
    })?;
    if bytes <= FILLED {
        // SAFETY: memory of this size, mapped above, which nobody else uses yet.
        unsafe { (mapping.base as *mut u8).write_bytes(FILL, bytes) };
    }
    Ok(add(Block { mapping, bytes, physical: device.physical, kind }))
}

/// Allocates pinned host memory.
pub(crate) fn allocate_host(device: &Device, bytes: usize) -> DriverResult<usize> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let mapping = Mapping::new(bytes, None)?;
    Ok(add(Block { mapping, bytes, physical: device.physical, kind: BlockKind::Host }))
}

/// Adds a block; returns its address.
pub(crate) fn add(block: Block) -> usize {
    let base = block.mapping.base;
    blocks_mut().insert(base, block);
    base
}

/// Removes the block that begins at `address`, if `accepts` its kind.
pub(crate) fn remove(address: usize, accepts: impl FnOnce(&BlockKind) -> bool) -> DriverResult {
    let mut blocks = blocks_mut();
    let block = blocks.get(&address).filter(|block| accepts(&block.kind)).ok_or(INVALID_VALUE)?;
    if is_own(&block.kind)
        && let Some(device) = machine()?.of_physical(block.physical)
    {
        device.used.fetch_sub(footprint(block.bytes), Ordering::AcqRel);
    }
    blocks.remove(&address);
    Ok(())
}

/// Returns the GPU of the block that begins at `address`, if this process allocated the block and may free it.
pub(crate) fn owner(address: usize) -> DriverResult<&'static Device> {
    let blocks = blocks();
    let block = blocks.get(&address).filter(|block| is_own(&block.kind)).ok_or(INVALID_VALUE)?;
    machine()?.of_physical(block.physical).ok_or(INVALID_VALUE)
}

/// Returns whether this process allocated the block on a GPU.
pub(crate) fn is_own(kind: &BlockKind) -> bool {
    matches!(kind, BlockKind::Own { .. } | BlockKind::Pool)
}
