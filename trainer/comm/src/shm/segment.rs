//! The layout of the memory that all ranks of a group map. The group's first rank creates it (`mapping.rs`); the others learn
//! from the rendezvous where it is.

use super::mapping::{HEADER, Mapping};
use super::staging::NonTemporalVote;
use super::word::Counter;

/// A counter of a rank.
#[derive(Clone, Copy)]
pub(super) enum CounterKind {
    /// Collectives entered.
    Entered = 0,
    /// Slots filled.
    Filled = 1,
    /// Rounds reduced.
    Reduced = 2,
}

const LINE: usize = 128;
/// Bytes of a rank's control block: three counters, two calls and a vote.
const CONTROL: usize = 4096;
const CALLS: usize = 3 * LINE;
const VOTE: usize = 5 * LINE;
/// Bytes before the slots of a channel between two ranks: two counters.
const CHANNEL_HEAD: usize = 2 * LINE;
/// Number of slots of a channel: how many chunks a sender may be ahead of its receiver.
pub(super) const CHANNEL_SLOTS: usize = 2;
/// Bytes of a channel's slot, including the header.
pub(super) const CHANNEL_CHUNK: usize = 64 << 10;
/// Bytes of a small payload, which travels with the entry into a collective.
pub(super) const ENTRY: usize = 64 << 10;
/// Bytes of a rank's slots for long arrays. Each collective divides them in its own way.
pub(super) const DATA: usize = 4 << 20;

/// The mapped memory of a group.
pub(super) struct Segment {
    memory: Mapping,
    ranks: usize,
}

impl Segment {
    /// Returns the bytes that a group of `ranks` needs. Pages that are never touched cost nothing.
    pub(super) fn len_for(ranks: usize) -> usize {
        HEADER + ranks * (CONTROL + 2 * ENTRY + DATA) + ranks * ranks * Self::channel_len()
    }

    fn channel_len() -> usize {
        // Whole pages: only the channel's two ranks touch its pages.
        (CHANNEL_HEAD + CHANNEL_SLOTS * CHANNEL_CHUNK).next_multiple_of(4096)
    }

    /// Uses `memory`, which is all zero and has [`Segment::len_for`] bytes, for `ranks` ranks.
    pub(super) fn in_memory(memory: Mapping, ranks: usize) -> Self {
        debug_assert_eq!(memory.len(), Self::len_for(ranks));
        Self { memory, ranks }
    }

    fn counter_at(&self, offset: usize) -> &Counter {
        debug_assert!(offset.is_multiple_of(LINE));
        // SAFETY: in bounds (offsets come from the functions below) and aligned. Zero is a valid counter, and a counter is an
        // atomic.
        unsafe { self.memory.atomic(offset) }
    }

    /// Returns the number of ranks of the group.
    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    fn control(&self, rank: usize) -> usize {
        debug_assert!(rank < self.ranks);
        HEADER + rank * (CONTROL + 2 * ENTRY + DATA)
    }

    fn channel(&self, from: usize, to: usize) -> usize {
        debug_assert!(from < self.ranks && to < self.ranks);
        HEADER + self.ranks * (CONTROL + 2 * ENTRY + DATA) + (from * self.ranks + to) * Self::channel_len()
    }

    pub(super) fn counter(&self, rank: usize, which: CounterKind) -> &Counter {
        self.counter_at(self.control(rank) + which as usize * LINE)
    }

    /// Returns the vote of `rank` on how slots are written: through the caches or past them.
    pub(super) fn vote(&self, rank: usize) -> &NonTemporalVote {
        // SAFETY: in bounds and aligned, as counters are. Zero is a valid vote, and a vote is an atomic.
        unsafe { self.memory.atomic(self.control(rank) + VOTE) }
    }

    /// Returns the counter of chunks that `from` has written to its channel to `to`.
    pub(super) fn sent(&self, from: usize, to: usize) -> &Counter {
        self.counter_at(self.channel(from, to))
    }

    /// Returns the counter of chunks that `to` has taken from its channel from `from`.
    pub(super) fn received(&self, from: usize, to: usize) -> &Counter {
        self.counter_at(self.channel(from, to) + LINE)
    }

    /// Returns all counters that `rank` owns.
    pub(super) fn owned_by(&self, rank: usize) -> impl Iterator<Item = &Counter> {
        let own =
            [CounterKind::Entered, CounterKind::Filled, CounterKind::Reduced].map(|which| self.counter(rank, which));
        let peers = (0..self.ranks).flat_map(move |peer| [self.sent(rank, peer), self.received(peer, rank)]);
        own.into_iter().chain(peers)
    }

    /// Returns the region of the call of `rank`'s collective number `sequence`.
    pub(super) fn call_region(&self, rank: usize, sequence: u32) -> Region {
        Region { offset: self.control(rank) + CALLS + (sequence as usize % 2) * LINE, len: LINE }
    }

    /// Returns the region of the small payload of `rank`'s collective number `sequence`.
    pub(super) fn entry(&self, rank: usize, sequence: u32) -> Region {
        Region { offset: self.control(rank) + CONTROL + (sequence as usize % 2) * ENTRY, len: ENTRY }
    }

    /// Returns `len` bytes at `offset` of `rank`'s slots for long arrays.
    pub(super) fn data(&self, rank: usize, offset: usize, len: usize) -> Region {
        debug_assert!(offset + len <= DATA);
        Region { offset: self.control(rank) + CONTROL + 2 * ENTRY + offset, len }
    }

    /// Returns the slot of chunk number `chunk` of the channel `from` → `to`.
    pub(super) fn chunk(&self, from: usize, to: usize, chunk: u32) -> Region {
        let slot = chunk as usize % CHANNEL_SLOTS;
        Region { offset: self.channel(from, to) + CHANNEL_HEAD + slot * CHANNEL_CHUNK, len: CHANNEL_CHUNK }
    }

    /// # Safety
    /// The region's writer has published the region, this rank has waited for the publication, and the writer will not write the
    /// region again before this rank has published its next step.
    pub(super) unsafe fn read(&self, area: Region) -> &[u8] {
        // SAFETY: the functions above make regions, which are in bounds. The rest is the caller's guarantee.
        unsafe { self.memory.slice(area.offset, area.len) }
    }

    /// # Safety
    /// The region belongs to this rank, which holds no other reference to it, and no rank reads it until this rank has published
    /// its next step.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn write(&self, area: Region) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { self.memory.slice_mut(area.offset, area.len) }
    }
}

/// A range inside a segment.
#[derive(Clone, Copy)]
pub(super) struct Region {
    offset: usize,
    len: usize,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Counter>() == LINE && align_of::<Counter>() == LINE);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn areas_do_not_overlap() {
        let s = Segment::in_memory(Mapping::create(Segment::len_for(3), &[0; 16]).unwrap().0, 3);
        let mut areas: Vec<(usize, usize)> = vec![(0, HEADER)];
        for r in 0..3 {
            areas.extend((0..3).map(|w| (s.control(r) + w * LINE, LINE)));
            areas.push((s.control(r) + VOTE, LINE));
            for seq in 0..2 {
                areas.extend([s.call_region(r, seq), s.entry(r, seq)].map(|a| (a.offset, a.len)));
            }
            let data = s.data(r, 0, DATA);
            areas.push((data.offset, data.len));
            for to in 0..3 {
                areas.push((s.channel(r, to), CHANNEL_HEAD));
                areas.extend((0..2).map(|c| s.chunk(r, to, c)).map(|a| (a.offset, a.len)));
            }
        }
        areas.sort_unstable();
        for pair in areas.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
        }
        assert!(areas.last().is_some_and(|(at, len)| at + len <= s.memory.len()));
    }
}
