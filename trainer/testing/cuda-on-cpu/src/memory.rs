//! All memory that the driver has given out, and what lies where.
//!
//! A GPU's memory is a file in memory, mapped shared, so that other processes can map it too. Behind each block lies a page
//! that nobody may touch.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::io::Error;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use libc::{
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE,
};

use crate::code::{Answer, INVALID_VALUE, OPERATING_SYSTEM, OUT_OF_MEMORY};
use crate::machine::{Device, machine};

/// A page of the host's; 512 bytes are what `cuMemAlloc` promises.
const PAGE: usize = 4096;

/// Blocks up to this size are filled when they are made.
const FILLED: usize = 64 << 20;

/// Memory of a GPU is not zero. A float of these bytes is a NaN.
const FILL: u8 = 0xFF;

/// Whose memory a block is.
#[derive(Debug)]
pub(crate) enum Kind {
    /// Of `cuMemAlloc`: others can open it.
    Own { file: OwnedFd, serial: u64 },
    /// Of `cuMemAllocAsync`: nobody else can.
    Pool,
    /// Another process's.
    Opened { pid: u32, serial: u64, opener: usize, times: u32 },
    /// The host's, pinned.
    Host,
}

/// A mapping, until it is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) base: usize,
    /// With the page behind it.
    bytes: usize,
}

impl Mapping {
    /// `bytes` bytes of a file, or of nothing.
    pub(crate) fn new(bytes: usize, file: Option<&OwnedFd>) -> Answer<Self> {
        let inner = bytes.checked_next_multiple_of(PAGE).ok_or(INVALID_VALUE)?;
        let outer = inner.checked_add(PAGE).ok_or(INVALID_VALUE)?;
        // SAFETY: new address space, wherever there is room.
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
        // SAFETY: replaces a part of the mapping just made, which nobody else knows of.
        let mapped = unsafe { libc::mmap(base, inner, PROT_READ | PROT_WRITE, flags, file, 0) };
        if mapped == MAP_FAILED { Err(OUT_OF_MEMORY) } else { Ok(mapping) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`; the driver's user has freed it, and what was queued before that is done.
        unsafe { libc::munmap(self.base as *mut c_void, self.bytes) };
    }
}

/// Memory that the driver has given out.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) mapping: Mapping,
    /// As many as were asked for.
    pub(crate) bytes: usize,
    /// The GPU that has it, as the machine counts. The GPU that was current, for memory of the host.
    pub(crate) physical: usize,
    pub(crate) kind: Kind,
}

/// By their addresses.
type Blocks = BTreeMap<usize, Block>;

static BLOCKS: RwLock<Blocks> = RwLock::new(BTreeMap::new());

/// All blocks.
pub(crate) fn blocks() -> RwLockReadGuard<'static, Blocks> {
    BLOCKS.read().unwrap_or_else(PoisonError::into_inner)
}

/// All blocks, to change them.
pub(crate) fn change() -> RwLockWriteGuard<'static, Blocks> {
    BLOCKS.write().unwrap_or_else(PoisonError::into_inner)
}

/// The block that an address lies in.
pub(crate) fn around(blocks: &Blocks, address: usize) -> Option<&Block> {
    let (base, block) = blocks.range(..=address).next_back()?;
    (address - base < block.bytes).then_some(block)
}

/// What an address is to a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// A GPU's memory.
    Device,
    /// The host's, from the driver.
    Pinned,
    /// The host's, from elsewhere.
    Pageable,
}

/// Where `bytes` bytes at `address` lie. Those that leave a block are refused.
pub(crate) fn place(address: usize, bytes: usize) -> Answer<Place> {
    let blocks = blocks();
    let Some(block) = around(&blocks, address) else { return Ok(Place::Pageable) };
    if address - block.mapping.base > block.bytes.checked_sub(bytes).ok_or(INVALID_VALUE)? {
        return Err(INVALID_VALUE);
    }
    Ok(if matches!(block.kind, Kind::Host) { Place::Pinned } else { Place::Device })
}

/// Memory that a GPU can reach at its address.
pub(crate) fn reachable(address: usize, bytes: usize) -> Answer<Place> {
    match place(address, bytes)? {
        Place::Pageable => Err(INVALID_VALUE),
        place => Ok(place),
    }
}

fn create_file(name: &str, bytes: usize) -> Answer<OwnedFd> {
    let name = CString::new(name).map_err(|_| OPERATING_SYSTEM)?;
    // SAFETY: a C string; the answer is checked.
    let file = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        eprintln!("cuda-on-cpu: memfd_create: {}", Error::last_os_error());
        return Err(OPERATING_SYSTEM);
    }
    // SAFETY: a file that was just opened, and belongs to nobody else.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    let length = libc::off_t::try_from(bytes).map_err(|_| OUT_OF_MEMORY)?;
    // SAFETY: plain numbers.
    match unsafe { libc::ftruncate(file.as_raw_fd(), length) } {
        0 => Ok(file),
        _ => Err(OUT_OF_MEMORY),
    }
}

/// What the file of a block is called.
pub(crate) fn file_name(pid: u32, serial: u64) -> String {
    format!("cuda-on-cpu-{pid}-{serial}")
}

/// What a block takes of its GPU's memory.
fn taken(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

/// `cuMemAlloc`, and with `pool` `cuMemAllocAsync`.
pub(crate) fn allocate(device: &Device, bytes: usize, pool: bool) -> Answer<usize> {
    static SERIAL: AtomicU64 = AtomicU64::new(1);
    let limit = machine()?.memory();
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    if bytes > limit {
        return Err(OUT_OF_MEMORY);
    }
    let taken = taken(bytes);
    let fits = |used: usize| used.checked_add(taken).filter(|used| *used <= limit);
    device.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).map_err(|_| OUT_OF_MEMORY)?;
    let made: Answer<_> = (|| {
        if pool {
            return Ok((Mapping::new(bytes, None)?, Kind::Pool));
        }
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let file = create_file(&file_name(std::process::id(), serial), taken)?;
        Ok((Mapping::new(bytes, Some(&file))?, Kind::Own { file, serial }))
    })();
    let (mapping, kind) = made.inspect_err(|_| {
        device.used.fetch_sub(taken, Ordering::AcqRel);
    })?;
    if bytes <= FILLED {
        // SAFETY: memory of that size, mapped above, which nobody else knows of.
        unsafe { (mapping.base as *mut u8).write_bytes(FILL, bytes) };
    }
    Ok(add(Block { mapping, bytes, physical: device.physical, kind }))
}

/// Memory of the host, pinned.
pub(crate) fn allocate_host(device: &Device, bytes: usize) -> Answer<usize> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let mapping = Mapping::new(bytes, None)?;
    Ok(add(Block { mapping, bytes, physical: device.physical, kind: Kind::Host }))
}

/// Enters a block; gives its address.
pub(crate) fn add(block: Block) -> usize {
    let base = block.mapping.base;
    change().insert(base, block);
    base
}

/// Takes a block out whose address this is, if `is` likes it.
pub(crate) fn remove(address: usize, is: impl FnOnce(&Kind) -> bool) -> Answer {
    let mut blocks = change();
    let block = blocks.get(&address).filter(|block| is(&block.kind)).ok_or(INVALID_VALUE)?;
    if is_own(&block.kind)
        && let Some(device) = machine()?.of_physical(block.physical)
    {
        device.used.fetch_sub(taken(block.bytes), Ordering::AcqRel);
    }
    blocks.remove(&address);
    Ok(())
}

/// The GPU whose own block begins at this address: of what may be freed.
pub(crate) fn owner(address: usize) -> Answer<&'static Device> {
    let blocks = blocks();
    let block = blocks.get(&address).filter(|block| is_own(&block.kind)).ok_or(INVALID_VALUE)?;
    machine()?.of_physical(block.physical).ok_or(INVALID_VALUE)
}

/// Memory that this process has got from a GPU of its own.
pub(crate) fn is_own(kind: &Kind) -> bool {
    matches!(kind, Kind::Own { .. } | Kind::Pool)
}
