//! One piece of memory that all ranks of a group map, without a name in any file system.
//!
//! The group's first rank creates it with `memfd_create`, which never appears in `/dev/shm`; the others open it through
//! `/proc/PID/fd/N` of its creator, which they learn from the rendezvous. The kernel frees it with the last process that
//! maps it, so there is no moment at which SIGKILL could leave something behind. The file is sealed against shrinking:
//! no process can pull pages from under another (SIGBUS).
//!
//! Everything that turns addresses into references is in this file.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::staging::Wish;
use super::word::Counter;

/// Which counter of a rank.
#[derive(Clone, Copy)]
pub(super) enum Which {
    /// Collectives entered.
    Entered = 0,
    /// Slots filled.
    Filled = 1,
    /// Rounds reduced.
    Reduced = 2,
}

const LINE: usize = 128;
/// First in the segment: proof that the right file was opened.
const HEADER: usize = 4096;
/// A rank's control block: three counters, two descriptors and a wish.
const CONTROL: usize = 4096;
const DESCRIPTORS: usize = 3 * LINE;
const WISH: usize = 5 * LINE;
/// A channel between two ranks: two counters, then [`CHANNEL_SLOTS`] slots.
const CHANNEL_HEAD: usize = 2 * LINE;
/// Chunks that a sender may be ahead of its receiver.
pub(super) const CHANNEL_SLOTS: usize = 2;
/// Bytes of a channel's slot, its header included.
pub(super) const CHANNEL_CHUNK: usize = 64 << 10;
/// Bytes of a small payload, which travels together with the entry into a collective.
pub(super) const ENTRY: usize = 64 << 10;
/// Bytes of a rank's slots for long arrays, divided by each collective as it likes.
pub(super) const DATA: usize = 4 << 20;

/// The mapped memory of a group.
pub(super) struct Segment {
    base: NonNull<u8>,
    len: usize,
    ranks: usize,
}

// SAFETY: the memory is shared between processes anyway; all access goes through atomics or through `read` and `write`,
// whose callers promise exclusion.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// Bytes that a group of `ranks` needs. Pages that are never touched cost nothing.
    fn len_for(ranks: usize) -> usize {
        HEADER + ranks * (CONTROL + 2 * ENTRY + DATA) + ranks * ranks * Self::channel_len()
    }

    fn channel_len() -> usize {
        // Whole pages, so that a channel's pages are touched by its two ranks alone.
        (CHANNEL_HEAD + CHANNEL_SLOTS * CHANNEL_CHUNK).next_multiple_of(4096)
    }

    /// Makes a fresh segment, all zero, marked with `nonce`. The file descriptor is for the other ranks to open.
    pub(super) fn create(ranks: usize, nonce: &[u8; 16]) -> rustix::io::Result<(Self, OwnedFd)> {
        let file = memfd_create("trainer-comm", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, Self::len_for(ranks) as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let segment = Self::map(&file, ranks)?;
        // SAFETY: nobody else has opened the file yet; the header is in bounds.
        unsafe { segment.slice_mut(0, 16) }.copy_from_slice(nonce);
        Ok((segment, file))
    }

    /// Opens the segment that process `pid` has as descriptor `fd`.
    pub(super) fn open(pid: u32, fd: i32, ranks: usize, nonce: &[u8; 16]) -> Result<Self, String> {
        let path =
            if pid == std::process::id() { format!("/proc/self/fd/{fd}") } else { format!("/proc/{pid}/fd/{fd}") };
        let file = File::options().read(true).write(true).open(&path).map_err(|e| format!("{path}: {e}"))?;
        let stat = fstat(&file).map_err(|e| format!("{path}: {e}"))?;
        if stat.st_size as usize != Self::len_for(ranks) {
            return Err(format!("{path} has {} bytes, not {}", stat.st_size, Self::len_for(ranks)));
        }
        let segment = Self::map(&file, ranks).map_err(|e| format!("{path}: {e}"))?;
        // SAFETY: the creator wrote the header before it announced the file, and nobody writes it again.
        if unsafe { segment.slice(0, 16) } != nonce {
            return Err(format!("{path} is not this job's memory"));
        }
        Ok(segment)
    }

    fn map(file: &impl AsFd, ranks: usize) -> rustix::io::Result<Self> {
        let len = Self::len_for(ranks);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base =
            unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)? };
        // Small pages would cost a fault and a TLB entry every 4 KB; where the kernel has no huge ones this does nothing.
        // SAFETY: the range is the mapping just made, and the advice changes no contents.
        let _ = unsafe { rustix::mm::madvise(base, len, rustix::mm::Advice::LinuxHugepage) };
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { base, len, ranks })
    }

    /// The number by which other processes find `file`.
    pub(super) fn number(file: &OwnedFd) -> i32 {
        file.as_raw_fd()
    }

    fn counter_at(&self, offset: usize) -> &Counter {
        debug_assert!(offset.is_multiple_of(LINE) && offset + LINE <= self.len);
        // SAFETY: in bounds (offsets come from the functions below), aligned to 128 since the base is page-aligned, zero is
        // a valid counter, and a counter is an atomic: shared references to it may exist in every process.
        unsafe { self.base.add(offset).cast::<Counter>().as_ref() }
    }

    /// # Safety
    /// The range is in bounds, and nobody writes to it while the slice lives.
    unsafe fn slice(&self, offset: usize, len: usize) -> &[u8] {
        debug_assert!(offset + len <= self.len);
        // SAFETY: the caller's promise; the mapping lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.base.add(offset).as_ptr(), len) }
    }

    /// # Safety
    /// The range is in bounds, and nobody else reads or writes it while the slice lives.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        debug_assert!(offset + len <= self.len);
        // SAFETY: the caller's promise; the mapping lives as long as `self`.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(offset).as_ptr(), len) }
    }

    /// Ranks of the group.
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

    pub(super) fn counter(&self, rank: usize, which: Which) -> &Counter {
        self.counter_at(self.control(rank) + which as usize * LINE)
    }

    /// How `rank` wants slots to be written.
    pub(super) fn wish(&self, rank: usize) -> &Wish {
        let offset = self.control(rank) + WISH;
        // SAFETY: in bounds and aligned as counters are, zero is a valid wish, and a wish is an atomic.
        unsafe { self.base.add(offset).cast::<Wish>().as_ref() }
    }

    /// Counts chunks that `from` has put into its channel to `to`.
    pub(super) fn sent(&self, from: usize, to: usize) -> &Counter {
        self.counter_at(self.channel(from, to))
    }

    /// Counts chunks that `to` has taken from its channel from `from`.
    pub(super) fn taken(&self, from: usize, to: usize) -> &Counter {
        self.counter_at(self.channel(from, to) + LINE)
    }

    /// All counters whose owner is `rank`.
    pub(super) fn owned_by(&self, rank: usize) -> impl Iterator<Item = &Counter> {
        let own = [Which::Entered, Which::Filled, Which::Reduced].map(|which| self.counter(rank, which));
        let peers = (0..self.ranks).flat_map(move |peer| [self.sent(rank, peer), self.taken(peer, rank)]);
        own.into_iter().chain(peers)
    }

    /// Offset and length of the descriptor of `rank`'s collective number `sequence`.
    pub(super) fn descriptor(&self, rank: usize, sequence: u32) -> Area {
        Area { offset: self.control(rank) + DESCRIPTORS + (sequence as usize % 2) * LINE, len: LINE }
    }

    /// Small payload of `rank`'s collective number `sequence`.
    pub(super) fn entry(&self, rank: usize, sequence: u32) -> Area {
        Area { offset: self.control(rank) + CONTROL + (sequence as usize % 2) * ENTRY, len: ENTRY }
    }

    /// `len` bytes at `offset` of `rank`'s slots for long arrays.
    pub(super) fn data(&self, rank: usize, offset: usize, len: usize) -> Area {
        debug_assert!(offset + len <= DATA);
        Area { offset: self.control(rank) + CONTROL + 2 * ENTRY + offset, len }
    }

    /// Slot of chunk number `chunk` on the way `from` → `to`.
    pub(super) fn chunk(&self, from: usize, to: usize, chunk: u32) -> Area {
        let slot = chunk as usize % CHANNEL_SLOTS;
        Area { offset: self.channel(from, to) + CHANNEL_HEAD + slot * CHANNEL_CHUNK, len: CHANNEL_CHUNK }
    }

    /// # Safety
    /// The writer of this area has published it, this rank has waited for that, and the writer will not touch it again
    /// before this rank has published its next step.
    pub(super) unsafe fn read(&self, area: Area) -> &[u8] {
        // SAFETY: areas are made by the functions above and are in bounds; the rest is the caller's promise.
        unsafe { self.slice(area.offset, area.len) }
    }

    /// # Safety
    /// The area belongs to this rank, it holds no other reference to it, and no rank reads it until this rank has
    /// published its next step.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn write(&self, area: Area) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { self.slice_mut(area.offset, area.len) }
    }
}

/// A range inside a segment.
#[derive(Clone, Copy)]
pub(super) struct Area {
    offset: usize,
    len: usize,
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are what `mmap` returned, and no reference outlives `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Counter>() == LINE && align_of::<Counter>() == LINE);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_are_the_same_memory_and_strangers_are_noticed() {
        let nonce = [7; 16];
        let (a, file) = Segment::create(2, &nonce).unwrap();
        let number = Segment::number(&file);
        let b = Segment::open(std::process::id(), number, 2, &nonce).unwrap();
        // SAFETY: one thread, one reference at a time.
        unsafe { a.write(a.data(1, DATA - 4, 4)) }.copy_from_slice(b"last");
        // SAFETY: as above.
        assert_eq!(unsafe { b.read(b.data(1, DATA - 4, 4)) }, b"last");
        a.counter(0, Which::Filled).publish();
        assert_eq!(b.counter(0, Which::Filled).reached(1), Ok(()));
        assert!(Segment::open(std::process::id(), number, 2, &[8; 16]).is_err());
        assert!(Segment::open(std::process::id(), number, 3, &nonce).is_err());
        assert!(rustix::fs::ftruncate(&file, 4096).is_err(), "the file can be pulled from under its readers");
    }

    #[test]
    fn areas_do_not_overlap() {
        let (s, _file) = Segment::create(3, &[0; 16]).unwrap();
        let mut areas: Vec<(usize, usize)> = vec![(0, HEADER)];
        for r in 0..3 {
            areas.extend((0..3).map(|w| (s.control(r) + w * LINE, LINE)));
            areas.push((s.control(r) + WISH, LINE));
            for seq in 0..2 {
                areas.extend([s.descriptor(r, seq), s.entry(r, seq)].map(|a| (a.offset, a.len)));
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
        assert!(areas.last().is_some_and(|(at, len)| at + len <= s.len));
    }
}
