//! The database of compiled kernels and tuning results that this process uses.
//!
//! cubecl opens its database with turso's experimental access by several processes. There, a process that is killed can leave
//! the database so that the next open panics (turso's issues 7213 and 8536); programs that shared one have also got wrong
//! kernels. So each process has a database of its own: it takes the first that no other process has locked.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;
#[cfg(feature = "cuda")]
use std::sync::Once;

use super::Gpus;
#[cfg(feature = "cuda")]
use super::assign::LocalRank;

/// The most databases that are tried. A machine with 16 GPUs has 16 ranks; the others are for further jobs.
const MOST: usize = 256;

/// Chooses the database of one process.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone)]
pub(super) struct KernelCache {
    /// GPUs and software for which the kernels are.
    name: String,
    local_rank: usize,
    local_world: usize,
}

#[cfg(feature = "cuda")]
impl KernelCache {
    /// Returns the database for a rank on these GPUs. Opens nothing.
    pub(super) fn of(gpus: &Gpus, ranks: &LocalRank) -> Self {
        let LocalRank { local_rank, local_world, .. } = *ranks;
        Self { name: name(gpus, ranks.crowded(gpus.all.len())), local_rank, local_world }
    }

    /// Has cubecl use the database from now on. Only the first call of a process has an effect.
    ///
    /// The variable `CUBECL_ENVIRONMENT` replaces the name of GPUs and software. If nothing can be kept, rank 0 says so: that is
    /// slow and no error.
    pub(super) fn open(&self) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            super::configure();
            super::kernel_log::block_launches();
            let chosen = std::env::var("CUBECL_ENVIRONMENT").ok().filter(|name| !name.is_empty());
            let name = chosen.as_deref().unwrap_or(&self.name);
            let folder = cubecl::environment::root();
            let opened = match take(&folder, name, self.local_rank, self.local_world) {
                Ok((name, lock)) => {
                    // The lock ends with the process.
                    std::mem::forget(lock);
                    cubecl::environment::activate(name);
                    check()
                }
                Err(cause) => {
                    // A folder that cannot exist: cubecl keeps everything in memory.
                    cubecl::environment::set_root("/dev/null/none");
                    Err(format!("{}: {cause}", folder.display()))
                }
            };
            if let (0, Err(cause)) = (self.local_rank, opened) {
                crate::console::eprint(format_args!(
                    "note: compiled kernels cannot be kept, and each start compiles and tunes them again: {cause}\n  hint: set \
                     XDG_CACHE_HOME to a folder of a local disk that this user may write to; network file systems often lack \
                     the locks of a database"
                ));
            }
        });
    }
}

/// Opens the database and writes to it. cubecl goes on without one, and says so only in its log.
///
/// # Errors
/// The database cannot be opened or written.
#[cfg(feature = "cuda")]
fn check() -> Result<(), String> {
    use cubecl_environment::{
        bytes::Bytes,
        persistence::{Insertion, Origin, Storage, TursoStorage},
    };
    let storage = TursoStorage::open("trainer".to_owned())?;
    match storage.replace(b"last start", Bytes::from_bytes_vec(vec![1]), Origin::Local) {
        Insertion::Failed(cause) => Err(cause),
        _ => Ok(()),
    }
}

/// Locks the first free database of this name for a process. A rank tries the one of its own number first, so that a run that
/// is alone has the same databases each time, and then further ones that no rank of its job tries first.
///
/// Returns the database's name, and the lock, which the process holds as long as it has the file open.
///
/// # Errors
/// The folder cannot be written, has no locks, or all databases are locked.
fn take(folder: &Path, name: &str, local_rank: usize, local_world: usize) -> io::Result<(String, File)> {
    std::fs::create_dir_all(folder)?;
    // As cubecl makes a file name of it.
    let name = name.replace(|c: char| !(c.is_ascii_alphanumeric() || "-_.".contains(c)), "_");
    for number in (local_rank..).step_by(local_world.max(1)).take_while(|number| *number < MOST) {
        let name = if number == 0 { name.clone() } else { format!("{name}-{number}") };
        let lock = OpenOptions::new().create(true).append(true).open(folder.join(format!("{name}.lock")))?;
        match lock.try_lock() {
            Ok(()) => {
                // turso's record of the processes that have the database open: none has. Left by a killed process, it can
                // contradict the database, and without it the database is read as it is.
                match std::fs::remove_file(folder.join(format!("{name}.db-tshm"))) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => return Ok((name, lock)),
                }
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Err(io::Error::other(format!("all of its {MOST} databases are in use")))
}

/// Returns the name of the databases: the GPUs in their order, NVRTC's version and the driver's.
///
/// cubecl finds results by the number of the GPU in this process, and a choice for one model may not run on another. A stored
/// kernel that the driver refuses would stay refused. `crowded`: several processes share the GPU, so their timings mean nothing.
fn name(gpus: &Gpus, crowded: bool) -> String {
    let mut models: Vec<String> = gpus
        .all
        .iter()
        .map(|gpu| format!("{}-sm{}{}", gpu.name.replace(' ', "-"), gpu.compute[0], gpu.compute[1]))
        .collect();
    if models.windows(2).all(|pair| pair[0] == pair[1]) {
        models.truncate(1);
    }
    let nvrtc = gpus.nvrtc.version.as_deref().unwrap_or("unknown");
    let [major, minor] = gpus.cuda;
    let shared = if crowded { "-shared" } else { "" };
    format!("{}-nvrtc{nvrtc}-driver{major}.{minor}{shared}", models.join("_"))
}

#[cfg(test)]
mod tests {
    use super::super::{Gpus, Library};
    use super::{MOST, name, take};
    use comm::cuda::driver::Gpu;

    #[test]
    fn the_database_is_that_of_the_gpus_and_their_software() {
        let gpu = |(index, (name, major)): (usize, (&str, u32))| Gpu {
            index,
            name: name.into(),
            memory_bytes: 1 << 30,
            compute: [major, 0],
            multiprocessors: 4,
            uuid: String::new(),
            exclusive: false,
            limits_kernels: false,
        };
        let of = |models: &[(&str, u32)], cuda, nvrtc: &str| Gpus {
            all: models.iter().copied().enumerate().map(gpu).collect(),
            cuda,
            nvrtc: Library { version: Some(nvrtc.into()), ..Library::default() },
            visible: None,
        };
        let h200 = ("NVIDIA H200", 9);
        let one = of(&[h200], [13, 0], "12.8");
        assert_eq!(name(&one, false), "NVIDIA-H200-sm90-nvrtc12.8-driver13.0");
        assert_eq!(name(&of(&[h200; 8], [13, 0], "12.8"), false), name(&one, false), "equal GPUs share");
        let a100 = ("NVIDIA A100", 8);
        let others = [
            name(&one, true),
            name(&of(&[h200], [13, 2], "12.8"), false),
            name(&of(&[h200], [13, 0], "13.0"), false),
            name(&of(&[a100], [13, 0], "12.8"), false),
            name(&of(&[h200, a100], [13, 0], "12.8"), false),
            name(&of(&[a100, h200], [13, 0], "12.8"), false),
        ];
        let all: std::collections::BTreeSet<_> = others.iter().cloned().chain([name(&one, false)]).collect();
        assert_eq!(all.len(), others.len() + 1, "{all:?}");
    }

    #[test]
    fn no_two_processes_use_one_database() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("cubecl");
        // Two ranks of one job, and a program beside it.
        let (first, second) = (take(&folder, "gpu", 0, 2).unwrap(), take(&folder, "gpu", 1, 2).unwrap());
        let beside = take(&folder, "gpu", 0, 1).unwrap();
        assert_eq!([&*first.0, &*second.0, &*beside.0], ["gpu", "gpu-1", "gpu-2"]);
        // A second job of two ranks takes others, whichever of its ranks is first.
        let (fourth, third) = (take(&folder, "gpu", 1, 2).unwrap(), take(&folder, "gpu", 0, 2).unwrap());
        assert_eq!([&*third.0, &*fourth.0], ["gpu-4", "gpu-3"]);
        assert_eq!(take(&folder, "other", 0, 1).unwrap().0, "other");
        // What a killed process has left is removed with the lock, and not before.
        let left = folder.join("gpu-1.db-tshm");
        std::fs::write(&left, "1").unwrap();
        assert_eq!(take(&folder, "gpu", 1, 2).unwrap().0, "gpu-5");
        assert!(left.exists());
        drop(second);
        assert_eq!(take(&folder, "gpu", 1, 2).unwrap().0, "gpu-1");
        assert!(!left.exists());
        let error = take(&folder, "gpu", MOST, 1).unwrap_err();
        assert!(error.to_string().contains("databases are in use"), "{error}");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error() {
        assert!(take(std::path::Path::new("/dev/null/cubecl"), "gpu", 0, 1).is_err());
    }
}
