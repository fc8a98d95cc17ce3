//! Keeps compiled kernels and results of tuning in a file between runs.
//!
//! cubecl can store both in a turso database, with experimental access by several processes. This access has races, even
//! between the threads of one process (turso's pull request 8851): processes panicked, and a database that killed processes had
//! left led to wrong sums. So in this program cubecl has no database and keeps both in memory. This module stores them in a
//! file, which all processes with the same GPUs and software share (`kernel_file.rs`).

use std::{path::Path, sync::Once, thread, time::Duration};

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};
use cubecl_environment::{
    bytes::Bytes,
    persistence::{self, MemoryStorage, Origin},
};
use parking_lot::Mutex;

use super::Gpus;
use super::assign::LocalRank;
use super::kernel_file::{KernelFile, RecordVisitor};

/// A folder that cannot exist, so that cubecl keeps everything in memory.
pub(super) const MEMORY_ONLY_PATH: &str = "/dev/null/none";
/// Interval at which new kernels are written.
const SAVE_INTERVAL: Duration = Duration::from_secs(2);

/// The file of this process, and the number of entries at the last write.
static KERNEL_FILE: Mutex<Option<(KernelFile, u64)>> = Mutex::new(None);

/// Selects the file of compiled kernels, and the number of threads that compile kernels.
#[derive(Debug, Clone)]
pub(super) struct KernelCacheConfig {
    /// Name of the GPUs and the software for which kernels are compiled.
    name: String,
    local_rank: usize,
    /// Threads that compile kernels ahead of their launches.
    threads: usize,
}

impl KernelCacheConfig {
    /// Returns the configuration of a rank on these GPUs. Does not open the file.
    pub(super) fn of(gpus: &Gpus, ranks: &LocalRank) -> Self {
        /// Maximum number of threads. With more, the last kernels are divided unevenly, and each thread needs memory.
        const MOST: usize = 16;
        let cores = thread::available_parallelism().map_or(1, Into::into);
        Self {
            name: gpus.kernel_name(ranks.oversubscribed(gpus.all.len())),
            local_rank: ranks.local_rank,
            threads: (cores / ranks.local_world_size).clamp(1, MOST),
        }
    }

    /// Reads the stored kernels, and starts to store new ones. Only the first call of a process has an effect.
    ///
    /// The variable `CUBECL_ENVIRONMENT` replaces the name of GPUs and software. If kernels cannot be stored, the local rank 0
    /// prints a note. Starts are then slow. This is not an error.
    pub(super) fn open(&self) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            super::kernel_log::block_launches();
            if cubecl_uses_memory() {
                ops::compile_ahead(self.threads);
            }
            let chosen = std::env::var("CUBECL_ENVIRONMENT").ok().filter(|name| !name.is_empty());
            let folder = CacheConfig::Global.root();
            match KernelFile::open(&folder, chosen.as_deref().unwrap_or(&self.name), &mut insert_into_cubecl) {
                Ok(file) => {
                    *KERNEL_FILE.lock() = Some((file, entries()));
                    // If the thread cannot start, the kernels are still written at the end.
                    let _ = thread::Builder::new().name("kernel-cache".into()).spawn(|| {
                        while KERNEL_FILE.lock().is_some() {
                            thread::sleep(SAVE_INTERVAL);
                            keep();
                        }
                    });
                }
                Err(error) if self.local_rank == 0 => note(&format!("{}: {error}", folder.display())),
                Err(_) => {}
            }
        });
    }
}

/// Appends the kernels that are new since the last call to the file. Does nothing while another process appends.
pub(super) fn keep() {
    let mut kept = KERNEL_FILE.lock();
    let Some((file, before)) = &mut *kept else { return };
    let now = entries();
    if now == *before {
        return;
    }
    let all = |visit: &mut RecordVisitor| {
        for summary in MemoryStorage::namespaces() {
            let namespace = summary.namespace;
            persistence::open(&namespace).scan(&mut |key, value| visit(&namespace, key, value));
        }
    };
    match file.exchange(&mut insert_into_cubecl, all) {
        // Store the number from before the scan: other threads may have compiled kernels meanwhile.
        Ok(true) => *before = now,
        Ok(false) => {}
        Err(error) => {
            *kept = None;
            note(&error.to_string());
        }
    }
}

/// Returns whether cubecl keeps kernels in memory. Other code can have set a configuration with a database before
/// [`configure`](super::configure()).
fn cubecl_uses_memory() -> bool {
    let config = CubeClRuntimeConfig::get();
    matches!(&config.environment.path, CacheConfig::Directory(path) if path == Path::new(MEMORY_ONLY_PATH))
}

/// Returns the number of entries in memory.
fn entries() -> u64 {
    MemoryStorage::namespaces().iter().map(|summary| summary.entries).sum()
}

/// Passes an entry to cubecl.
fn insert_into_cubecl(namespace: &str, key: &[u8], value: &[u8]) {
    let value = Bytes::from_bytes_vec(value.to_vec());
    persistence::open(namespace).insert(key, value, Origin::Local);
}

fn note(cause: &str) {
    crate::console::eprint(format_args!(
        "note: compiled kernels cannot be kept, and each start compiles and tunes them again: {cause}\n  hint: set XDG_CACHE_HOME \
         to a folder of a local disk that this user may write to; some network file systems have no locks"
    ));
}
