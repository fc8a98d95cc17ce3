//! Buffers that are used again: outputs of the operations, and their scratch space.
//!
//! A training step makes the same gigabyte of tensors every time. Left to the system's allocator, each of the large ones
//! is mapped, zeroed page by page and unmapped again, which costs more than batch norm. Here a released buffer goes to a
//! free list of its size class and the next step takes it from there. Lists and what is in use together never exceed
//! nine eighths of the most that was in use at one time, nor 256 MiB more, so that a change of the batch size does not pile up
//! memory; the rest is for sizes that a step wants at different times.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{LazyLock, Mutex, PoisonError};

use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};

/// A cache line, and the width of the widest vector register.
const ALIGN: usize = 64;
/// Buffers from this size on are aligned to huge pages, which the kernel is asked for.
const HUGE: usize = 4 << 20;
const HUGE_PAGE: usize = 2 << 20;
/// What lists may hold beyond the most that was in use: an eighth of that, up to this.
const SPARE: usize = 256 << 20;
/// How many times as large as needed a block may be.
const MOST_LARGER: usize = 2;

/// A zero-initialised or previously used allocation: never uninitialised memory.
#[derive(Debug)]
struct Block {
    data: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a block is a plain allocation with a single owner.
unsafe impl Send for Block {}
// SAFETY: shared access only reads plain bytes.
unsafe impl Sync for Block {}

#[derive(Default)]
struct Pool {
    free: BTreeMap<usize, Vec<Block>>,
    cached: usize,
    used: usize,
    peak: usize,
}

static POOL: LazyLock<Mutex<Pool>> = LazyLock::new(Mutex::default);

/// Rounds up to a quarter of a power of two: at most a fifth is wasted, and sizes that differ little share a list.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(4096);
    let step = bytes.next_power_of_two() / 8;
    bytes.next_multiple_of(step.max(ALIGN))
}

fn layout(bytes: usize) -> Layout {
    let align = if bytes >= HUGE { HUGE_PAGE } else { ALIGN };
    Layout::from_size_align(bytes, align).expect("tensor sizes are far below isize::MAX")
}

fn acquire(bytes: usize) -> Block {
    let class = size_class(bytes);
    {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        // A larger block where none fits: a new one would soon push another out of the lists.
        let found = pool.free.range_mut(class..=MOST_LARGER * class).find_map(|(_, blocks)| blocks.pop());
        pool.used += found.as_ref().map_or(class, |block| block.bytes);
        pool.peak = pool.peak.max(pool.used);
        if let Some(block) = found {
            pool.cached -= block.bytes;
            return block;
        }
    }
    let layout = layout(class);
    // SAFETY: the layout's size is at least a page.
    let data = unsafe { alloc(layout) };
    let data = NonNull::new(data).unwrap_or_else(|| handle_alloc_error(layout));
    #[cfg(target_os = "linux")]
    if class >= HUGE {
        // SAFETY: the range is this allocation; the advice changes no content, and a refusal is harmless.
        unsafe { libc::madvise(data.as_ptr().cast(), class, libc::MADV_HUGEPAGE) };
    }
    // SAFETY: the whole new allocation; zeroed here and not by the allocator, which would touch its pages too early.
    unsafe { data.as_ptr().write_bytes(0, class) };
    Block { data, bytes: class }
}

fn release(block: Block) {
    let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    pool.used -= block.bytes;
    if pool.used + pool.cached + block.bytes <= pool.peak + (pool.peak / 8).min(SPARE) {
        pool.cached += block.bytes;
        pool.free.entry(block.bytes).or_default().push(block);
    } else {
        drop(pool);
        // SAFETY: allocated by `acquire` with this very layout.
        unsafe { dealloc(block.data.as_ptr(), layout(block.bytes)) };
    }
}

/// `len` floats, aligned to a cache line, whose contents are whatever the last user left.
#[derive(Debug)]
pub(crate) struct Buffer {
    block: Option<Block>,
    len: usize,
}

impl Buffer {
    pub(crate) fn new(len: usize) -> Self {
        Self { block: Some(acquire(len * size_of::<f32>())), len }
    }

    pub(crate) fn zeroed(len: usize) -> Self {
        let mut buffer = Self::new(len);
        buffer.fill(0.0);
        buffer
    }

    fn block(&self) -> &Block {
        self.block.as_ref().expect("only into_bytes and drop take the block")
    }

    /// The same memory as bytes, four for each float.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the block is initialised, holds that many bytes and is borrowed as long as the slice.
        unsafe { std::slice::from_raw_parts(self.block().data.as_ptr(), self.len * size_of::<f32>()) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive. Any four bytes are a float.
        unsafe { std::slice::from_raw_parts_mut(self.block().data.as_ptr(), self.len * size_of::<f32>()) }
    }

    /// The buffer as the storage of a tensor, which gives it back to the pool when it is dropped.
    pub(crate) fn into_bytes(mut self) -> Bytes {
        let block = self.block.take().expect("only into_bytes and drop take the block");
        let len = self.len * size_of::<f32>();
        // SAFETY: blocks are initialised memory of at least `len` bytes.
        unsafe { Bytes::from_controller(Box::new(Pooled(Some(block))), len) }
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: the block is initialised, aligned, holds `len` floats and is borrowed as long as the slice.
        unsafe { std::slice::from_raw_parts(self.block().data.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.block().data.as_ptr().cast(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            release(block);
        }
    }
}

/// A block that burn's storage type owns.
struct Pooled(Option<Block>);

impl Pooled {
    fn block(&self) -> &Block {
        self.0.as_ref().expect("only drop takes the block")
    }
}

impl AllocationController for Pooled {
    fn alloc_align(&self) -> usize {
        ALIGN
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(&mut self, _: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let block = self.block();
        // SAFETY: the block holds that many bytes, and `self` is borrowed exclusively.
        Ok(unsafe { std::slice::from_raw_parts_mut(block.data.as_ptr().cast(), block.bytes) })
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let block = self.block();
        // SAFETY: the block holds that many bytes.
        Ok(unsafe { std::slice::from_raw_parts(block.data.as_ptr().cast(), block.bytes) })
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if let Some(block) = self.0.take() {
            release(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_are_near_and_hold_the_size() {
        for bytes in [1, 4095, 4096, 4097, 70_000, 1 << 20, (1 << 20) + 1, 33_554_433] {
            let class = size_class(bytes);
            assert!(class >= bytes && class <= (bytes * 5 / 4).max(4096), "{bytes} -> {class}");
            assert_eq!(size_class(class), class);
        }
    }

    #[test]
    fn storage_survives_the_way_through_burn() {
        let mut buffer = Buffer::new(1000);
        for (i, value) in buffer.iter_mut().enumerate() {
            *value = i as f32;
        }
        let bytes = buffer.into_bytes();
        assert_eq!(bytes.len(), 4000);
        let copy = bytes.clone();
        drop(bytes);
        assert_eq!(copy.len(), 4000);
        assert_eq!(f32::from_ne_bytes(copy[3996..4000].try_into().unwrap()), 999.0);
    }
}
