//! Caching allocator for the operations' outputs and workspace, like PyTorch's `CUDACachingAllocator`.
//!
//! A training step allocates the same gigabyte of tensors every time. The system's allocator would map, zero and unmap
//! the large ones in each step, which costs more than batch norm. Here a released buffer goes to the free list of its
//! size class, and the next step reuses it.
//!
//! Cached and used memory together never exceed the peak of used memory by more than an eighth, nor by more than 256
//! MiB. A change of the batch size therefore does not accumulate memory. The margin is for sizes that a step needs at
//! different times.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::LazyLock;

use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use bytemuck::Pod;
use parking_lot::Mutex;

/// Alignment in bytes: a cache line, and the widest vector register.
const ALIGN: usize = 64;
/// Size in bytes from which buffers are aligned to huge pages and advised to use them.
const HUGE: usize = 4 << 20;
const HUGE_PAGE: usize = 2 << 20;
/// Limit in bytes of the cache beyond the peak of used memory, which is an eighth of the peak up to this.
const SPARE: usize = 256 << 20;
/// Limit of a reused block's size, as a multiple of the requested size class.
const MAX_OVERSIZE: usize = 2;

/// An allocation that is zeroed or was used before: its memory is always initialised.
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

/// Rounds up to a quarter of a power of two. At most a fifth is wasted, and similar sizes share a list.
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
        let mut pool = POOL.lock();
        // Accept a larger block if no exact one is cached: a new block would soon evict another one.
        let found = pool.free.range_mut(class..=MAX_OVERSIZE * class).find_map(|(_, blocks)| blocks.pop());
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
        // SAFETY: the range is this allocation; the advice changes no content, and its failure is harmless.
        unsafe { libc::madvise(data.as_ptr().cast(), class, libc::MADV_HUGEPAGE) };
    }
    // SAFETY: the whole new allocation. It is zeroed here, because `alloc_zeroed` would touch its pages before the advice.
    unsafe { data.as_ptr().write_bytes(0, class) };
    Block { data, bytes: class }
}

fn release(block: Block) {
    let mut pool = POOL.lock();
    pool.used -= block.bytes;
    if pool.used + pool.cached + block.bytes <= pool.peak + (pool.peak / 8).min(SPARE) {
        pool.cached += block.bytes;
        pool.free.entry(block.bytes).or_default().push(block);
    } else {
        drop(pool);
        // SAFETY: allocated by `acquire` with the same layout.
        unsafe { dealloc(block.data.as_ptr(), layout(block.bytes)) };
    }
}

/// A buffer of `len` elements, aligned to a cache line. A new buffer has the contents of its last use.
#[derive(Debug)]
pub(crate) struct Buffer<T = f32> {
    block: Option<Block>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    pub(crate) fn new(len: usize) -> Self {
        Self { block: Some(acquire(len * size_of::<T>())), len, element: PhantomData }
    }

    pub(crate) fn zeroed(len: usize) -> Self {
        let mut buffer = Self::new(len);
        buffer.fill(T::zeroed());
        buffer
    }

    /// Converts the buffer to a tensor's storage, which returns the memory to the pool when it is dropped.
    pub(crate) fn into_bytes(mut self) -> Bytes {
        let block = self.block.take().expect("only into_bytes and drop take the block");
        let len = self.len * size_of::<T>();
        // SAFETY: blocks are initialised memory of at least `len` bytes.
        unsafe { Bytes::from_controller(Box::new(Pooled(Some(block))), len) }
    }
}

impl<T> Buffer<T> {
    fn data(&self) -> *mut T {
        self.block.as_ref().expect("only into_bytes and drop take the block").data.as_ptr().cast()
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the block is initialised (any bytes are a `T`), aligned, holds `len` elements and is borrowed as long as the
        // slice.
        unsafe { std::slice::from_raw_parts(self.data(), self.len) }
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.data(), self.len) }
    }
}

impl<T> Drop for Buffer<T> {
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
    fn size_classes_are_tight_upper_bounds() {
        for bytes in [1, 4095, 4096, 4097, 70_000, 1 << 20, (1 << 20) + 1, 33_554_433] {
            let class = size_class(bytes);
            assert!(class >= bytes && class <= (bytes * 5 / 4).max(4096), "{bytes} -> {class}");
            assert_eq!(size_class(class), class);
        }
    }

    #[test]
    fn storage_can_be_cloned_by_burn() {
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
