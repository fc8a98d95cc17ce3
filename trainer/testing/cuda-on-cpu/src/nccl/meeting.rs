//! Where ranks meet: a file that all of them map. In front lies what they tell each other, behind it two slots a rank.
//!
//! A step is: each rank writes to its slot, says that it has come, waits for the others, and reads their slots. The next step
//! takes the other slots, and when all have come to that one, nobody reads the first ones any more.

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

use super::{INVALID_ARGUMENT, INVALID_USAGE, REMOTE, SYSTEM, of_driver, refuse};
use crate::code::Answer;
use crate::log::Argument;
use crate::machine::Device;
use crate::memory::Mapping;

/// Bytes of a slot.
pub(super) const CHUNK: usize = 1 << 20;

/// Most ranks.
const MOST: usize = 256;

const PAGE: usize = 4096;

const MAGIC: &[u8] = b"NCCLoCPU";

/// What a meeting's file is called; a number follows.
const NAME: &str = "nccl-on-cpu-";

/// `ncclUniqueId`: 128 bytes, which C passes by value. Here it is the file's path.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UniqueId {
    /// Nothing to anybody but this library.
    pub internal: [u8; 128],
}

impl Argument for UniqueId {
    fn number(&self) -> u64 {
        0
    }
}

impl UniqueId {
    /// Makes the file.
    pub(super) fn create() -> Answer<Self> {
        let random = RandomState::new().hash_one(std::process::id());
        let name = format!("{NAME}{}-{random:016x}", std::process::id());
        let path = Path::new("/dev/shm").join(&name);
        let path = match make(&path) {
            Ok(()) => Ok(path),
            Err(_) => {
                let path = std::env::temp_dir().join(&name);
                make(&path).map(|()| path)
            }
        };
        let path = path.map_err(|error| refuse(SYSTEM, &format!("no file to meet in: {error}")))?;
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
        let is_ours = path.file_name().is_some_and(|name| name.as_bytes().starts_with(NAME.as_bytes()));
        is_ours.then_some(path)
    }
}

/// Zeros up to the slots, which come when all ranks are there.
fn make(path: &Path) -> Result<(), Error> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.set_len(HEADER as u64)
}

/// What a rank tells the others.
#[repr(C, align(128))]
struct Cell {
    /// 0, [`COMES`] or [`HERE`].
    state: AtomicU32,
    gpu: AtomicU64,
    host: AtomicU64,
    /// The last step that it has come to.
    step: AtomicU64,
}

/// A rank has the cell.
const COMES: u32 = 1;
/// And has written where it is.
const HERE: u32 = 2;

/// The front of the file; all zero at first.
#[repr(C)]
struct Header {
    world: AtomicU32,
    /// The error that all ranks get.
    refused: AtomicI32,
    cells: [Cell; MOST],
}

const HEADER: usize = size_of::<Header>().next_multiple_of(PAGE);

/// A rank's view of it.
#[derive(Debug)]
pub(super) struct Meeting {
    mapping: Mapping,
    pub(super) rank: usize,
    pub(super) world: usize,
}

impl Meeting {
    /// Waits for all ranks. The file has no name any more when they are there.
    pub(super) fn join(id: &UniqueId, world: usize, rank: usize, device: &Device) -> Answer<Self> {
        if world > MOST {
            return Err(refuse(INVALID_ARGUMENT, &format!("{world} ranks: the stand-in has room for {MOST}")));
        }
        let path = id.path().ok_or_else(|| refuse(INVALID_ARGUMENT, "the id is none of ncclGetUniqueId"))?;
        let failed = |error: Error| refuse(SYSTEM, &format!("{}: {error}", path.display()));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(&path).map_err(failed)?;
        if file.metadata().map_err(failed)?.len() < HEADER as u64 {
            return Err(failed(ErrorKind::UnexpectedEof.into()));
        }
        let file = OwnedFd::from(file);
        let bytes = HEADER + 2 * world * CHUNK;
        let meeting = Self { mapping: Mapping::new(bytes, Some(&file)).map_err(of_driver)?, rank, world };
        let joined = meeting.check_in(device).and_then(|()| meeting.wait_for_all()).and_then(|()| meeting.compare());
        // all have it open, or nobody shall open it
        let _ = fs::remove_file(&path);
        joined?;
        // SAFETY: plain numbers. All ranks do this: what they write to is there even if others have not come so far.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
            0 => Ok(meeting),
            error => Err(failed(Error::from_raw_os_error(error))),
        }
    }

    fn header(&self) -> &Header {
        // SAFETY: the file is that long, the mapping begins with a page, and all of it is atomic.
        unsafe { &*(self.mapping.base as *const Header) }
    }

    fn cells(&self) -> &[Cell] {
        &self.header().cells[..self.world]
    }

    /// Makes the call an error on all ranks.
    fn refuse_all(&self, text: &str) -> i32 {
        self.header().refused.store(INVALID_ARGUMENT, Ordering::Release);
        refuse(INVALID_ARGUMENT, text)
    }

    fn check_in(&self, device: &Device) -> Answer {
        let (rank, world) = (self.rank, self.world);
        let first = self.header().world.compare_exchange(0, world as u32, Ordering::AcqRel, Ordering::Acquire);
        if let Err(theirs) = first
            && theirs as usize != world
        {
            return Err(self.refuse_all(&format!("rank {rank} says {world} ranks, another one {theirs}")));
        }
        let cell = &self.cells()[rank];
        if cell.state.compare_exchange(0, COMES, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Err(self.refuse_all(&format!("rank {rank} of {world} ranks has already checked in")));
        }
        cell.gpu.store(device.physical as u64, Ordering::Relaxed);
        cell.host.store(host(), Ordering::Relaxed);
        cell.state.store(HERE, Ordering::Release);
        Ok(())
    }

    fn wait_for_all(&self) -> Answer {
        let mut pause = Pause::default();
        while self.cells().iter().any(|cell| cell.state.load(Ordering::Acquire) != HERE) {
            match self.header().refused.load(Ordering::Acquire) {
                0 => pause.wait(),
                code => return Err(refuse(code, "ranks do not agree on who they are")),
            }
        }
        Ok(())
    }

    /// Refuses a GPU that two ranks have. Who is not one of the two sees them leave.
    fn compare(&self) -> Answer {
        let place = |cell: &Cell| (cell.host.load(Ordering::Relaxed), cell.gpu.load(Ordering::Relaxed));
        let places: Vec<_> = self.cells().iter().map(place).collect();
        let other = |rank: usize| (0..self.world).find(|other| *other != rank && places[*other] == places[rank]);
        if let Some(other) = other(self.rank) {
            let (rank, gpu) = (self.rank, places[self.rank].1);
            let text =
                format!("Duplicate GPU detected : rank {rank} and rank {other} both on GPU {gpu} of the machine");
            return Err(refuse(INVALID_USAGE, &text));
        }
        match (0..self.world).find(|rank| other(*rank).is_some()) {
            Some(rank) => Err(refuse(REMOTE, &format!("rank {rank} has left: its GPU is another rank's too"))),
            None => Ok(()),
        }
    }

    /// A rank's slot for a step: [`CHUNK`] bytes.
    pub(super) fn slot(&self, rank: usize, step: u64) -> *mut u8 {
        let index = 2 * rank + (step % 2) as usize;
        (self.mapping.base + HEADER + index * CHUNK) as *mut u8
    }

    /// Says that this rank has come to a step, and waits for the others; `false` if it gave that up.
    pub(super) fn meet(&self, step: u64, given_up: &AtomicBool) -> bool {
        self.cells()[self.rank].step.store(step, Ordering::Release);
        self.cells().iter().all(|cell| {
            let mut pause = Pause::default();
            while cell.step.load(Ordering::Acquire) < step {
                if given_up.load(Ordering::Acquire) {
                    return false;
                }
                pause.wait();
            }
            true
        })
    }
}

/// What NCCL takes for a host, as a number.
fn host() -> u64 {
    let read = |name: &str| fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
    let mut hasher = DefaultHasher::new();
    match std::env::var_os("NCCL_HOSTID") {
        Some(id) if !id.is_empty() => id.hash(&mut hasher),
        _ => (read("hostname"), read("random/boot_id")).hash(&mut hasher),
    }
    hasher.finish()
}

/// Somebody else has to run meanwhile, perhaps on this very core.
#[derive(Default)]
struct Pause(u32);

impl Pause {
    fn wait(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            0..=100 => std::thread::yield_now(),
            101..=2000 => std::thread::sleep(Duration::from_micros(50)),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}
