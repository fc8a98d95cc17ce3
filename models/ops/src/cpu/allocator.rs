//! Caching allocator for the operations' outputs and workspace, like PyTorch's `CUDACachingAllocator`.
//!
//! A training step allocates the same gigabyte of tensors every time. The system's allocator would map, zero and unmap
//! the large ones in each step, which costs more than batch norm. Here a released block merges at once with its free neighbours
//! in the segment. The next request takes the smallest free range that is large enough, or a part of it. If blocks kept their
//! size for later requests of the same size, fragmentation would take up to twice the memory.
//!
//! If no free range is large enough, the pool allocates a new segment. The segments may exceed the peak of used memory by an
//! eighth of the peak, at most by 256 MiB. Beyond that, segments without blocks in use are first returned to the system. So a
//! change of the batch size does not accumulate memory.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use bytemuck::Pod;
use parking_lot::Mutex;

use super::free_ranges::{FreeRanges, Range};

/// Alignment in bytes: a cache line, and the widest vector register.
const ALIGN: usize = 64;
/// Size in bytes up to which blocks are in the pool of small ones. It is a multiple of [`ALIGN`].
const SMALL: usize = 1 << 20;
/// Size in bytes of a huge page. Segments are aligned to it and advised to use such pages.
const HUGE_PAGE: usize = 2 << 20;
/// Maximum number of bytes by which the segments may exceed the peak of used memory. The limit is an eighth of the peak if that is
/// less.
const SPARE: usize = 256 << 20;

/// A part of a segment. Its memory is zeroed or was used before, so it is always initialised.
#[derive(Debug)]
struct Block {
    data: NonNull<u8>,
    range: Range,
}

// SAFETY: a block is plain memory with a single owner.
unsafe impl Send for Block {}
// SAFETY: shared access only reads plain bytes.
unsafe impl Sync for Block {}

/// Memory of the system, of which blocks are parts.
struct Segment {
    data: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a segment is a plain allocation, which only the pool frees.
unsafe impl Send for Segment {}

impl Segment {
    /// Allocates and zeroes `bytes`, a multiple of [`HUGE_PAGE`].
    fn new(bytes: usize) -> Self {
        let layout = Self::layout(bytes);
        // SAFETY: the layout's size is not zero.
        let data = unsafe { alloc(layout) };
        let data = NonNull::new(data).unwrap_or_else(|| handle_alloc_error(layout));
        #[cfg(target_os = "linux")]
        // SAFETY: the range is this allocation; the advice changes no content, and its failure is harmless.
        unsafe {
            libc::madvise(data.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE);
        }
        // SAFETY: the whole new allocation. It is zeroed here, because `alloc_zeroed` would touch its pages before the advice.
        unsafe { data.as_ptr().write_bytes(0, bytes) };
        Self { data, bytes }
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, HUGE_PAGE).expect("tensor sizes are far below isize::MAX")
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with the same layout; the pool drops a segment only when no block is a part of it.
        unsafe { dealloc(self.data.as_ptr(), Self::layout(self.bytes)) };
    }
}

/// Segments and their free ranges. Small and large blocks have separate pools: a small parameter lives as long as the program,
/// and would split a large segment for all that time.
struct Pool {
    /// Sizes of blocks are multiples of this.
    grain: usize,
    /// Smallest size of a segment in bytes, a multiple of [`HUGE_PAGE`].
    segment: usize,
    segments: BTreeMap<usize, Segment>,
    /// Number of segments made so far, and the key of the next one.
    made: usize,
    free: FreeRanges,
    /// Bytes of all segments.
    reserved: usize,
    used: usize,
    peak: usize,
}

static SMALL_POOL: Mutex<Pool> = Mutex::new(Pool::new(ALIGN, 4 * HUGE_PAGE));
static LARGE_POOL: Mutex<Pool> = Mutex::new(Pool::new(4096, 16 * HUGE_PAGE));

impl Pool {
    const fn new(grain: usize, segment: usize) -> Self {
        Self {
            grain,
            segment,
            segments: BTreeMap::new(),
            made: 0,
            free: FreeRanges::new(),
            reserved: 0,
            used: 0,
            peak: 0,
        }
    }

    /// Returns a block of at least `bytes` bytes.
    fn acquire(&mut self, bytes: usize) -> Block {
        let bytes = bytes.max(1).next_multiple_of(self.grain);
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        let range = self.free.take(bytes).unwrap_or_else(|| {
            self.grow(bytes);
            self.free.take(bytes).expect("the new segment has as many bytes")
        });
        // SAFETY: free ranges lie inside their segments.
        let data = unsafe { self.segments[&range.segment].data.add(range.start) };
        Block { data, range }
    }

    /// Makes a segment of at least `bytes` bytes. First frees unused segments if the total would exceed the limit.
    fn grow(&mut self, bytes: usize) {
        let bytes = bytes.max(self.segment).next_multiple_of(HUGE_PAGE);
        let limit = self.peak + (self.peak / 8).min(SPARE);
        while self.reserved + bytes > limit {
            let segments = &self.segments;
            let Some(unused) = self.free.take_largest(|range| range.bytes == segments[&range.segment].bytes) else {
                break;
            };
            self.segments.remove(&unused.segment);
            self.reserved -= unused.bytes;
        }
        self.segments.insert(self.made, Segment::new(bytes));
        self.free.release(Range { segment: self.made, start: 0, bytes });
        self.made += 1;
        self.reserved += bytes;
    }

    fn release(&mut self, range: Range) {
        self.used -= range.bytes;
        self.free.release(range);
    }
}

/// The pool of blocks of `bytes` bytes.
fn pool(bytes: usize) -> &'static Mutex<Pool> {
    if bytes <= SMALL { &SMALL_POOL } else { &LARGE_POOL }
}

fn acquire(bytes: usize) -> Block {
    pool(bytes).lock().acquire(bytes)
}

fn release(block: Block) {
    pool(block.range.bytes).lock().release(block.range);
}

/// A buffer of `len` elements, aligned to a cache line. A new buffer has the contents of its last use.
#[derive(Debug)]
pub(crate) struct Buffer<T = f32> {
    block: Option<Block>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// Makes a buffer of `len` elements with arbitrary values.
    ///
    /// # Panics
    ///
    /// If no address space has as many bytes. A product that wraps around would be a block that is too small.
    pub(crate) fn new(len: usize) -> Self {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize / 2);
        let bytes = bytes.unwrap_or_else(|| panic!("a tensor of {len} elements exceeds the address space"));
        Self { block: Some(acquire(bytes)), len, element: PhantomData }
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
        Ok(unsafe { std::slice::from_raw_parts_mut(block.data.as_ptr().cast(), block.range.bytes) })
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let block = self.block();
        // SAFETY: the block holds that many bytes.
        Ok(unsafe { std::slice::from_raw_parts(block.data.as_ptr().cast(), block.range.bytes) })
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
    #[should_panic(expected = "exceeds the address space")]
    fn a_size_that_wraps_around_is_refused() {
        let _ = Buffer::<f32>::new((1 << 62) + 1);
    }

    /// Acquires and releases blocks in the order of a training step.
    fn step(pool: &mut Pool, sizes: &[usize]) {
        let mut blocks = Vec::new();
        // Forward keeps every second block, as a network keeps activations; backward releases them in the opposite order.
        for (i, &bytes) in sizes.iter().enumerate() {
            let block = pool.acquire(bytes);
            if i % 2 == 0 { blocks.push(block) } else { pool.release(block.range) }
        }
        while let Some(block) = blocks.pop() {
            let gradient = pool.acquire(block.range.bytes);
            pool.release(block.range);
            pool.release(gradient.range);
        }
    }

    #[test]
    fn a_repeated_step_makes_no_segments() {
        let sizes: Vec<usize> = (1..40).map(|i| (i * 1_234_567) % 9_000_000 + SMALL).collect();
        let mut pool = Pool::new(4096, 4 * HUGE_PAGE);
        step(&mut pool, &sizes);
        step(&mut pool, &sizes);
        let made = pool.made;
        (0..5).for_each(|_| step(&mut pool, &sizes));
        assert_eq!(pool.made, made);
        assert_eq!(pool.used, 0);
        assert_eq!(pool.reserved, pool.segments.values().map(|segment| segment.bytes).sum::<usize>());
    }

    #[test]
    fn changing_sizes_do_not_accumulate_segments() {
        let mut pool = Pool::new(4096, 4 * HUGE_PAGE);
        for size in 1..60 {
            let blocks = [pool.acquire(size * SMALL), pool.acquire(size * SMALL / 2)];
            blocks.into_iter().for_each(|block| pool.release(block.range));
            assert!(pool.reserved <= pool.peak + pool.peak / 8 + 4 * HUGE_PAGE, "{} of {}", pool.reserved, pool.peak);
        }
        assert!(pool.made > pool.segments.len());
    }

    #[test]
    fn blocks_are_aligned_and_disjoint() {
        let mut pool = Pool::new(ALIGN, HUGE_PAGE);
        let blocks: Vec<Block> = (0..2000).map(|i| pool.acquire(i * 7)).collect();
        let mut places: Vec<_> = blocks.iter().map(|block| (block.data.as_ptr() as usize, block.range.bytes)).collect();
        places.sort_unstable();
        assert!(places.iter().all(|place| place.0 % ALIGN == 0));
        assert!(places.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        assert!(pool.segments.len() > 1);
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
