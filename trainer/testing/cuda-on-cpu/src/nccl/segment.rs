//! The shared-memory segment of a communicator: a file that all ranks map. A header for control data comes first, followed by
//! two slots per rank.
//!
//! In a step each rank writes to its slot, enters a barrier, and reads the slots of all ranks. Steps alternate between the two
//! slots: when all ranks have entered the barrier of one step, no rank reads the slots of the step before.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::io::{Error, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::{INVALID_ARGUMENT, INVALID_USAGE, REMOTE, SYSTEM, driver_error, refuse};
use crate::cu_result::DriverResult;
use crate::log::Argument;
use crate::machine::Device;
use crate::memory::Mapping;

/// Bytes per slot.
pub(super) const SLOT_BYTES: usize = 1 << 20;

/// Maximum number of ranks.
const MAX_RANKS: usize = 256;

const PAGE: usize = 4096;

const MAGIC: &[u8] = b"NCCLoCPU";

/// Prefix of the file's name; a number follows.
const NAME_PREFIX: &str = "nccl-on-cpu-";

/// `ncclUniqueId`: 128 bytes, passed by value. Contains the file's path.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UniqueId {
    /// Only this library interprets these bytes.
    pub internal: [u8; 128],
}

impl Argument for UniqueId {
    fn number(&self) -> u64 {
        0
    }
}

impl UniqueId {
    /// Creates the file.
    pub(super) fn create() -> DriverResult<Self> {
        let random = RandomState::new().hash_one(std::process::id());
        let name = format!("{NAME_PREFIX}{}-{random:016x}", std::process::id());
        let path = Path::new("/dev/shm").join(&name);
        let path = match create_file(&path) {
            Ok(()) => Ok(path),
            Err(_) => {
                let path = std::env::temp_dir().join(&name);
                create_file(&path).map(|()| path)
            }
        };
        let path = path.map_err(|error| refuse(SYSTEM, &format!("no file for the ranks' shared memory: {error}")))?;
        let mut internal = [0; 128];
        let bytes = path.as_os_str().as_bytes();
        let Some(room) = internal.get_mut(MAGIC.len()..MAGIC.len() + bytes.len()) else {
            let _ = fs::remove_file(&path);
            return Err(refuse(SYSTEM, &format!("{}: too long for an id", path.display())));
        };
        room.copy_from_slice(bytes);
        internal[..MAGIC.len()].copy_from_slice(MAGIC);
        Ok(Self { internal })
    }

    fn path(&self) -> Option<PathBuf> {
        let bytes = self.internal.strip_prefix(MAGIC)?.split(|byte| *byte == 0).next()?;
        let path = PathBuf::from(OsStr::from_bytes(bytes));
        let is_ours = path.file_name().is_some_and(|name| name.as_bytes().starts_with(NAME_PREFIX.as_bytes()));
        is_ours.then_some(path)
    }
}

/// Creates the file with a zeroed header. The slots are added when all ranks have joined.
fn create_file(path: &Path) -> Result<(), Error> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.set_len(HEADER as u64)
}

/// A rank's entry in the header.
#[repr(C, align(128))]
struct RankEntry {
    /// 0, [`CLAIMED`] or [`JOINED`].
    state: AtomicU32,
    gpu: AtomicU64,
    host: AtomicU64,
    /// The last step whose barrier the rank has entered.
    step: AtomicU64,
}

/// A rank has claimed the entry.
const CLAIMED: u32 = 1;
/// The rank has written its GPU and host.
const JOINED: u32 = 2;

/// The start of the file; initially zero.
#[repr(C)]
struct Header {
    world_size: AtomicU32,
    /// The error that all ranks return.
    refused: AtomicI32,
    ranks: [RankEntry; MAX_RANKS],
}

const HEADER: usize = size_of::<Header>().next_multiple_of(PAGE);

/// A rank's mapping of the segment.
#[derive(Debug)]
pub(super) struct Segment {
    mapping: Mapping,
    pub(super) rank: usize,
    pub(super) world_size: usize,
}

impl Segment {
    /// Maps the segment and waits for all ranks. The file is unlinked when all have joined.
    pub(super) fn join(id: &UniqueId, world_size: usize, rank: usize, device: &Device) -> DriverResult<Self> {
        if world_size > MAX_RANKS {
            return Err(refuse(
                INVALID_ARGUMENT,
                &format!("{world_size} ranks: the stand-in has room for {MAX_RANKS}"),
            ));
        }
        let path = id.path().ok_or_else(|| refuse(INVALID_ARGUMENT, "the id was not made by ncclGetUniqueId"))?;
        let failed = |error: Error| refuse(SYSTEM, &format!("{}: {error}", path.display()));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(&path).map_err(failed)?;
        if file.metadata().map_err(failed)?.len() < HEADER as u64 {
            return Err(failed(ErrorKind::UnexpectedEof.into()));
        }
        let file = OwnedFd::from(file);
        let bytes = HEADER + 2 * world_size * SLOT_BYTES;
        let segment = Self { mapping: Mapping::new(bytes, Some(&file)).map_err(driver_error)?, rank, world_size };
        let joined =
            segment.claim_entry(device).and_then(|()| segment.wait_for_all()).and_then(|()| segment.check_gpus());
        // All ranks have opened the file, or joining has failed and nobody may open it.
        let _ = fs::remove_file(&path);
        joined?;
        // SAFETY: plain numbers. Every rank allocates the slots, so they exist even if other ranks are not this far yet.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
            0 => Ok(segment),
            error => Err(failed(Error::from_raw_os_error(error))),
        }
    }

    fn header(&self) -> &Header {
        // SAFETY: the file has this length, the mapping is page-aligned, and all fields are atomic.
        unsafe { &*(self.mapping.base as *const Header) }
    }

    fn entries(&self) -> &[RankEntry] {
        &self.header().ranks[..self.world_size]
    }

    /// Makes joining an error on all ranks.
    fn refuse_all(&self, text: &str) -> i32 {
        self.header().refused.store(INVALID_ARGUMENT, Ordering::Release);
        refuse(INVALID_ARGUMENT, text)
    }

    /// Claims this rank's entry and writes its GPU and host.
    fn claim_entry(&self, device: &Device) -> DriverResult {
        let (rank, world_size) = (self.rank, self.world_size);
        let first =
            self.header().world_size.compare_exchange(0, world_size as u32, Ordering::AcqRel, Ordering::Acquire);
        if let Err(theirs) = first
            && theirs as usize != world_size
        {
            return Err(self.refuse_all(&format!("rank {rank} says {world_size} ranks, another one {theirs}")));
        }
        let entry = &self.entries()[rank];
        if entry.state.compare_exchange(0, CLAIMED, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Err(self.refuse_all(&format!("rank {rank} of {world_size} ranks has already joined")));
        }
        entry.gpu.store(device.physical as u64, Ordering::Relaxed);
        entry.host.store(host_id(), Ordering::Relaxed);
        entry.state.store(JOINED, Ordering::Release);
        Ok(())
    }

    /// Waits until all ranks have joined.
    fn wait_for_all(&self) -> DriverResult {
        let mut backoff = Backoff::default();
        while self.entries().iter().any(|entry| entry.state.load(Ordering::Acquire) != JOINED) {
            match self.header().refused.load(Ordering::Acquire) {
                0 => backoff.wait(),
                code => return Err(refuse(code, "the ranks do not agree on ranks and world size")),
            }
        }
        Ok(())
    }

    /// Refuses a GPU that two ranks share. Every other rank reports that these ranks have left.
    fn check_gpus(&self) -> DriverResult {
        let location = |entry: &RankEntry| (entry.host.load(Ordering::Relaxed), entry.gpu.load(Ordering::Relaxed));
        let locations: Vec<_> = self.entries().iter().map(location).collect();
        let other =
            |rank: usize| (0..self.world_size).find(|other| *other != rank && locations[*other] == locations[rank]);
        if let Some(other) = other(self.rank) {
            let (rank, gpu) = (self.rank, locations[self.rank].1);
            let text =
                format!("Duplicate GPU detected : rank {rank} and rank {other} both on GPU {gpu} of the machine");
            return Err(refuse(INVALID_USAGE, &text));
        }
        match (0..self.world_size).find(|rank| other(*rank).is_some()) {
            Some(rank) => Err(refuse(REMOTE, &format!("rank {rank} has left: its GPU is another rank's too"))),
            None => Ok(()),
        }
    }

    /// Returns the address of a rank's slot for a step: [`SLOT_BYTES`] bytes.
    pub(super) fn slot(&self, rank: usize, step: u64) -> *mut u8 {
        let index = 2 * rank + (step % 2) as usize;
        (self.mapping.base + HEADER + index * SLOT_BYTES) as *mut u8
    }

    /// Enters the barrier of a step and waits for the other ranks. Returns `false` if the communicator was aborted.
    pub(super) fn barrier(&self, step: u64, aborted: &AtomicBool) -> bool {
        self.entries()[self.rank].step.store(step, Ordering::Release);
        self.entries().iter().all(|entry| {
            let mut backoff = Backoff::default();
            while entry.step.load(Ordering::Acquire) < step {
                if aborted.load(Ordering::Acquire) {
                    return false;
                }
                backoff.wait();
            }
            true
        })
    }
}

/// Returns a hash of what NCCL takes as the identity of a host.
fn host_id() -> u64 {
    let read = |name: &str| fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
    let mut hasher = DefaultHasher::new();
    match std::env::var_os("NCCL_HOSTID") {
        Some(id) if !id.is_empty() => id.hash(&mut hasher),
        _ => (read("hostname"), read("random/boot_id")).hash(&mut hasher),
    }
    hasher.finish()
}

/// Backoff of a polling loop: the rank that is waited for may need this core.
#[derive(Default)]
struct Backoff(u32);

impl Backoff {
    fn wait(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            0..=100 => std::thread::yield_now(),
            101..=2000 => std::thread::sleep(Duration::from_micros(50)),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}
