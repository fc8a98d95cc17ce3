//! A memory file without a name (memfd), mapped by several processes.
//!
//! One process creates the file with `memfd_create`, so the file never appears in `/dev/shm`. The other processes open it through
//! `/proc/PID/fd/N` of the creator. The kernel frees the file with the last process that maps it, also after SIGKILL. The file is
//! sealed against shrinking: no process can remove pages that another process uses (SIGBUS).

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::host;

/// Bytes of the header, a whole page. The header holds the [`Nonce`].
pub(crate) const HEADER: usize = 4096;

/// A random number in the header, which proves that the right file was opened.
pub(super) type Nonce = [u8; 16];

/// Returns a random number, which no other memory has.
fn nonce() -> rustix::io::Result<Nonce> {
    let mut nonce = Nonce::default();
    rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
    Ok(nonce)
}

/// Returns the number of the file descriptor, by which other processes find `file`.
fn number(file: &OwnedFd) -> i32 {
    file.as_raw_fd()
}

/// A mapping of the memory.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is shared between processes in any case. All access goes through atomics, or through `slice` and
// `slice_mut`, whose callers guarantee exclusion.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Makes memory of `len` bytes, all zero, marked with `nonce`. Pages that are never touched cost nothing. The other processes
    /// open the returned file descriptor.
    pub(super) fn create(len: usize, nonce: &Nonce) -> rustix::io::Result<(Self, OwnedFd)> {
        let file = memfd_create("trainer-comm", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mapping = Self::map(&file, len)?;
        // SAFETY: no other process has opened the file yet. The header is in bounds.
        unsafe { mapping.slice_mut(0, nonce.len()) }.copy_from_slice(nonce);
        Ok((mapping, file))
    }

    /// Makes memory as [`Mapping::create`] does, and returns the text by which other processes find the memory while the file is
    /// open.
    pub(crate) fn announce(len: usize) -> rustix::io::Result<(Self, OwnedFd, String)> {
        let nonce = nonce()?;
        let (memory, file) = Self::create(len, &nonce)?;
        let (host, process, number) = (host::shared_memory_domain(), std::process::id(), number(&file));
        Ok((memory, file, format!("{host}\n{process}\n{number}\n{}\n", u128::from_le_bytes(nonce))))
    }

    /// Opens the memory of `len` bytes that another process has announced. Bytes after the text are ignored.
    pub(crate) fn find(announced: &[u8], len: usize) -> Result<Self, String> {
        let damaged = || "its announcement is damaged".to_owned();
        let text = String::from_utf8_lossy(announced);
        let lines: Vec<&str> = text.lines().take(4).collect();
        let [there, pid, fd, nonce] = lines.as_slice() else { return Err(damaged()) };
        if *there != host::shared_memory_domain() {
            return Err("that rank runs on another host or in another container".into());
        }
        let (Ok(pid), Ok(fd), Ok(nonce)) = (pid.parse(), fd.parse(), nonce.parse::<u128>()) else {
            return Err(damaged());
        };
        Self::open(pid, fd, len, &nonce.to_le_bytes())
    }

    /// Opens the memory that process `pid` has as descriptor `fd`, and checks its size and its nonce.
    fn open(pid: u32, fd: i32, len: usize, nonce: &Nonce) -> Result<Self, String> {
        let path =
            if pid == std::process::id() { format!("/proc/self/fd/{fd}") } else { format!("/proc/{pid}/fd/{fd}") };
        let file = File::options().read(true).write(true).open(&path).map_err(|e| format!("{path}: {e}"))?;
        let stat = fstat(&file).map_err(|e| format!("{path}: {e}"))?;
        if stat.st_size as usize != len {
            return Err(format!("{path} has {} bytes, not {len}", stat.st_size));
        }
        let mapping = Self::map(&file, len).map_err(|e| format!("{path}: {e}"))?;
        // SAFETY: the creator wrote the header before it announced the file, and no process writes it again.
        if unsafe { mapping.slice(0, nonce.len()) } != nonce {
            return Err(format!("{path} is not this job's memory"));
        }
        Ok(mapping)
    }

    fn map(file: &impl AsFd, len: usize) -> rustix::io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice does not affect existing memory.
        let base =
            unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)? };
        // Small pages would cost a fault and a TLB entry every 4 KB. Without huge pages in the kernel, this does nothing.
        // SAFETY: the range is the mapping just made, and the advice changes no contents.
        let _ = unsafe { rustix::mm::madvise(base, len, rustix::mm::Advice::LinuxHugepage) };
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { base, len })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the `T` at `offset`.
    ///
    /// # Safety
    /// The offset is in bounds and aligned (the base is aligned to pages), zero bytes are a valid `T`, and `T` is an atomic, so
    /// every process may have shared references to the value.
    pub(super) unsafe fn atomic<T>(&self, offset: usize) -> &T {
        debug_assert!(offset + size_of::<T>() <= self.len);
        // SAFETY: the caller's guarantee. The mapping lives as long as `self`.
        unsafe { self.base.add(offset).cast::<T>().as_ref() }
    }

    /// # Safety
    /// The range is in bounds, and no process writes to it while the slice lives.
    pub(crate) unsafe fn slice(&self, offset: usize, len: usize) -> &[u8] {
        debug_assert!(offset + len <= self.len);
        // SAFETY: the caller's guarantee. The mapping lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.base.add(offset).as_ptr(), len) }
    }

    /// # Safety
    /// The range is in bounds, and no other code reads or writes it while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        debug_assert!(offset + len <= self.len);
        // SAFETY: the caller's guarantee. The mapping lives as long as `self`.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(offset).as_ptr(), len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `mmap` returned `base` and `len`, and no reference outlives `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_are_the_same_memory_and_other_files_are_refused() {
        let nonce = [7; 16];
        let (a, file) = Mapping::create(3 * HEADER, &nonce).unwrap();
        let open = |len, nonce| Mapping::open(std::process::id(), number(&file), len, nonce);
        let b = open(3 * HEADER, &nonce).unwrap();
        // SAFETY: one thread, one reference at a time.
        unsafe { a.slice_mut(3 * HEADER - 4, 4) }.copy_from_slice(b"last");
        // SAFETY: as above.
        assert_eq!(unsafe { b.slice(3 * HEADER - 4, 4) }, b"last");
        assert!(open(3 * HEADER, &[8; 16]).is_err());
        assert!(open(4 * HEADER, &nonce).is_err());
        assert!(ftruncate(&file, 4096).is_err(), "the file can be pulled from under its readers");
    }
}
