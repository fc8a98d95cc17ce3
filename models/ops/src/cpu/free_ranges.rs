//! Free ranges of large segments of memory: the bookkeeping of the CPU's caching allocator.
//!
//! A request takes the smallest free range that is large enough and splits it; a returned range merges with its free neighbours.
//! PyTorch's `CUDACachingAllocator` does the same. So memory that was a block of one size serves blocks of other sizes. With a
//! free list per size, a training step with many sizes would return memory to the system and map it again in every step.

use std::collections::{BTreeMap, BTreeSet};

/// A range of bytes in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) segment: usize,
    pub(super) start: usize,
    pub(super) bytes: usize,
}

/// The free ranges of all segments. No two of them are adjacent.
#[derive(Debug)]
pub(super) struct FreeRanges {
    /// Bytes by segment and start.
    by_place: BTreeMap<(usize, usize), usize>,
    /// The same ranges as (bytes, segment, start).
    by_size: BTreeSet<(usize, usize, usize)>,
}

impl FreeRanges {
    pub(super) const fn new() -> Self {
        Self { by_place: BTreeMap::new(), by_size: BTreeSet::new() }
    }

    /// Takes `bytes` from the smallest range that is large enough. Among ranges of one size, the oldest segment comes first.
    pub(super) fn take(&mut self, bytes: usize) -> Option<Range> {
        let &(available, segment, start) = self.by_size.range((bytes, 0, 0)..).next()?;
        self.remove(Range { segment, start, bytes: available });
        if available > bytes {
            self.insert(Range { segment, start: start + bytes, bytes: available - bytes });
        }
        Some(Range { segment, start, bytes })
    }

    /// Returns a range and merges it with the adjacent free ranges.
    pub(super) fn release(&mut self, range: Range) {
        let Range { segment, mut start, mut bytes } = range;
        if let Some((&(_, before), &length)) = self.by_place.range((segment, 0)..(segment, start)).next_back()
            && before + length == start
        {
            self.remove(Range { segment, start: before, bytes: length });
            start = before;
            bytes += length;
        }
        if let Some(&length) = self.by_place.get(&(segment, start + bytes)) {
            self.remove(Range { segment, start: start + bytes, bytes: length });
            bytes += length;
        }
        self.insert(Range { segment, start, bytes });
    }

    /// Removes and returns the largest range for which `whole` is true.
    pub(super) fn take_largest(&mut self, whole: impl Fn(&Range) -> bool) -> Option<Range> {
        let mut ranges = self.by_size.iter().rev().map(|&(bytes, segment, start)| Range { segment, start, bytes });
        let range = ranges.find(whole)?;
        self.remove(range);
        Some(range)
    }

    fn insert(&mut self, range: Range) {
        self.by_place.insert((range.segment, range.start), range.bytes);
        self.by_size.insert((range.bytes, range.segment, range.start));
    }

    fn remove(&mut self, range: Range) {
        self.by_place.remove(&(range.segment, range.start));
        self.by_size.remove(&(range.bytes, range.segment, range.start));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_smallest_sufficient_range_is_split() {
        let mut free = FreeRanges::new();
        free.release(Range { segment: 0, start: 0, bytes: 1000 });
        free.release(Range { segment: 1, start: 0, bytes: 300 });
        assert_eq!(free.take(200), Some(Range { segment: 1, start: 0, bytes: 200 }));
        assert_eq!(free.take(101), Some(Range { segment: 0, start: 0, bytes: 101 }));
        assert_eq!(free.take(100), Some(Range { segment: 1, start: 200, bytes: 100 }));
        assert_eq!(free.take(900), None);
        assert_eq!(free.take(899), Some(Range { segment: 0, start: 101, bytes: 899 }));
    }

    #[test]
    fn only_neighbours_of_one_segment_merge() {
        let mut free = FreeRanges::new();
        free.release(Range { segment: 0, start: 0, bytes: 64 });
        free.release(Range { segment: 1, start: 64, bytes: 64 });
        free.release(Range { segment: 0, start: 128, bytes: 64 });
        assert_eq!(free.by_place.len(), 3);
        free.release(Range { segment: 0, start: 64, bytes: 64 });
        assert_eq!(free.by_place, BTreeMap::from([((0, 0), 192), ((1, 64), 64)]));
        assert_eq!(free.take_largest(|range| range.segment == 1).map(|range| range.bytes), Some(64));
        assert_eq!(free.take(64).map(|range| range.segment), Some(0));
    }

    proptest! {
        /// The ranges in use and the free ones cover every segment without gap or overlap, and when all are returned each
        /// segment is one free range again.
        #[test]
        fn ranges_are_disjoint(steps in prop::collection::vec((any::<bool>(), 0..1000_usize), 1..400)) {
            const SEGMENT: usize = 1 << 14;
            let mut free = FreeRanges::new();
            (0..3).for_each(|segment| free.release(Range { segment, start: 0, bytes: SEGMENT }));
            let mut used = Vec::<Range>::new();
            for (take, number) in steps {
                if take {
                    if let Some(range) = free.take(64 * (1 + number % 100)) {
                        prop_assert_eq!(range.bytes, 64 * (1 + number % 100));
                        used.push(range);
                    }
                } else if !used.is_empty() {
                    free.release(used.swap_remove(number % used.len()));
                }
                let mut all: Vec<_> = used.iter().map(|range| (range.segment, range.start, range.bytes)).collect();
                all.extend(free.by_place.iter().map(|(&(segment, start), &bytes)| (segment, start, bytes)));
                all.sort_unstable();
                prop_assert_eq!(all.iter().map(|range| range.2).sum::<usize>(), 3 * SEGMENT);
                prop_assert!(all.windows(2).all(|pair| pair[0].0 != pair[1].0 || pair[0].1 + pair[0].2 == pair[1].1));
                prop_assert_eq!(free.by_place.len(), free.by_size.len());
            }
            used.drain(..).for_each(|range| free.release(range));
            prop_assert_eq!(free.by_place.values().copied().collect::<Vec<_>>(), [SEGMENT; 3]);
        }
    }
}
