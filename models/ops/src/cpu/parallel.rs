//! Parallel tasks on rayon's threads, and the mutable pointer that they share.

use std::ops::Range;

use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};

use super::allocator::Buffer;
use super::element::Element;

/// Elements per task of an elementwise pass.
pub(crate) const PIECE: usize = 1 << 16;
/// Elements of the widest vector register. An elementwise pass without rows is divided at multiples of this number.
pub(crate) const VECTOR: usize = 16;

/// Returns the number of threads of a parallel section.
pub(crate) fn threads() -> usize {
    rayon::current_num_threads()
}

/// Runs `task` once for each index in `0..count`, in parallel.
pub(crate) fn for_each(count: usize, task: impl Fn(usize) + Send + Sync) {
    if count <= 1 {
        (0..count).for_each(task);
    } else {
        (0..count).into_par_iter().with_max_len(1).for_each(task);
    }
}

/// Returns chunk `index` of `0..len`, divided into `parts` chunks. Their lengths are multiples of `unit` (except the
/// last) and differ by at most one unit.
pub(crate) fn chunk(len: usize, unit: usize, parts: usize, index: usize) -> Range<usize> {
    let units = len.div_ceil(unit);
    let cut = |i: usize| (units * i / parts * unit).min(len);
    cut(index)..cut(index + 1)
}

/// Returns the number of chunks for an elementwise pass: one per `target` elements, at most four per thread. Work stealing
/// then balances the load, and a small tensor stays on one thread.
pub(crate) fn chunk_count(len: usize, target: usize) -> usize {
    len.div_ceil(target).clamp(1, 4 * threads())
}

/// Makes a buffer of `len` elements by an elementwise pass: `fill` writes the elements of a range, whose length is a multiple of
/// `unit` except at the end.
pub(crate) fn elementwise<E: Element>(
    len: usize,
    unit: usize,
    fill: impl Fn(Range<usize>, &mut [E]) + Send + Sync,
) -> Buffer<E> {
    let mut y = Buffer::new(len);
    let target = SharedSlice::new(&mut y);
    let parts = chunk_count(len, PIECE);
    for_each(parts, |index| {
        let range = chunk(len, unit, parts, index);
        // SAFETY: each task has its own range.
        fill(range.clone(), unsafe { target.slice(range) });
    });
    y
}

/// A pointer to a buffer whose disjoint ranges are written by different tasks.
#[derive(Clone, Copy)]
pub(crate) struct SharedSlice<T>(*mut T);

// SAFETY: tasks access disjoint ranges; the comment at every use states them.
unsafe impl<T: Send> Send for SharedSlice<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedSlice<T> {}

impl<T> SharedSlice<T> {
    pub(crate) fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr())
    }

    pub(crate) fn ptr(&self) -> *mut T {
        self.0
    }

    /// Borrows a range of the buffer mutably.
    ///
    /// # Safety
    ///
    /// The range is inside the buffer, the buffer outlives the result, and no other task accesses the range meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller keeps the ranges disjoint")]
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        // SAFETY: guaranteed by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once() {
        for (len, unit, parts) in [(100, 12, 3), (5, 12, 4), (96, 12, 2), (0, 1, 2), (7, 1, 7)] {
            let mut next = 0;
            for index in 0..parts {
                let range = chunk(len, unit, parts, index);
                assert_eq!(range.start, next);
                assert!(range.end == len || range.len().is_multiple_of(unit));
                next = range.end;
            }
            assert_eq!(next, len);
        }
    }
}
