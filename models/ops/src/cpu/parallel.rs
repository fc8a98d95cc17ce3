//! Tasks over rayon's threads, and the one place where they share a mutable pointer.

use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};

/// Threads that a parallel section may use.
pub(crate) fn threads() -> usize {
    rayon::current_num_threads()
}

/// Runs `task(0..count)`, each index once, on as many threads as there are.
pub(crate) fn for_each(count: usize, task: impl Fn(usize) + Send + Sync) {
    if count <= 1 {
        (0..count).for_each(task);
    } else {
        (0..count).into_par_iter().with_max_len(1).for_each(task);
    }
}

/// Part `index` of `0..len` cut into `parts` pieces whose lengths are multiples of `unit` (but for the last) and differ
/// by at most one unit.
pub(crate) fn part(len: usize, unit: usize, parts: usize, index: usize) -> std::ops::Range<usize> {
    let units = len.div_ceil(unit);
    let cut = |i: usize| (units * i / parts * unit).min(len);
    cut(index)..cut(index + 1)
}

/// Pieces for [`part`] of an elementwise pass: about `target` elements each, so that stealing evens out the load while
/// a small tensor stays on one thread.
pub(crate) fn pieces(len: usize, target: usize) -> usize {
    len.div_ceil(target).clamp(1, 4 * threads())
}

/// A pointer into a buffer whose parts different tasks write.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T>(*mut T);

// SAFETY: tasks touch disjoint parts; every use says which.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr())
    }

    pub(crate) fn ptr(&self) -> *mut T {
        self.0
    }

    /// # Safety
    ///
    /// The range lies in the buffer, which outlives the result, and no other task touches it meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller keeps the parts apart")]
    pub(crate) unsafe fn slice(&self, range: std::ops::Range<usize>) -> &mut [T] {
        // SAFETY: the caller's promise.
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
                let range = part(len, unit, parts, index);
                assert_eq!(range.start, next);
                assert!(range.end == len || range.len().is_multiple_of(unit));
                next = range.end;
            }
            assert_eq!(next, len);
        }
    }
}
