//! The windows of a group: this rank's exported window, the opened windows of the other ranks, and the words in host memory that
//! kernels access.

use std::sync::Arc;
use std::time::Duration;

use super::driver::{Context, HostWords, IpcHandle, Memory};
use super::layout::{Fault, MAX_WORLD, window_bytes, word};
use super::sequence::LaunchConstants;
use crate::Communicator;
use crate::error::{CommError, Result};

/// Bytes of an exported window: CUDA's handle, and the position of the window in the allocation that CUDA exports.
const EXPORT_BYTES: usize = size_of::<IpcHandle>() + size_of::<u64>();

/// See the module. Fields are dropped in this order: the other ranks' memory is closed before this rank's memory is freed.
pub(super) struct Windows {
    opened: Vec<Memory>,
    pub(super) own: Memory,
    faults: HostWords,
    host_words: Arc<HostWords>,
    gpu: Arc<Context>,
    addresses: Vec<u64>,
    pub(super) slot_bytes: usize,
    rank: usize,
}

impl Windows {
    /// Makes this rank's window with slots of `slot_bytes` bytes, shared with no other rank. With NCCL, kernels pack tensors into
    /// the slot and NCCL sums the slot.
    ///
    /// # Errors
    /// The driver's error, as [`System`](crate::ErrorKind::System).
    pub(super) fn alone(gpu: &Arc<Context>, slot_bytes: usize) -> Result<Self> {
        let bytes = window_bytes(slot_bytes);
        let allocated = gpu.allocate(bytes).and_then(|own| {
            // Zero the window before its handle exists: no other rank may see old values.
            own.zero()?;
            Ok((own, HostWords::zeroed(gpu, MAX_WORLD)?, HostWords::zeroed(gpu, word::COUNT)?))
        });
        let (own, faults, host_words) = allocated
            .map_err(|error| CommError::system(format!("GPU {}: a window of {bytes} bytes: {error}", gpu.index)))?;
        let addresses = vec![own.address()];
        Ok(Self {
            opened: Vec::new(),
            own,
            faults,
            host_words: Arc::new(host_words),
            gpu: gpu.clone(),
            addresses,
            slot_bytes,
            rank: 0,
        })
    }

    /// Exchanges handles over `comm`, whose ranks are all on one host, and opens all windows.
    ///
    /// # Errors
    /// Every rank returns the error of the lowest rank that failed.
    pub(super) fn shared(gpu: &Arc<Context>, slot_bytes: usize, comm: &Communicator) -> Result<Self> {
        let mut windows = agree(Self::alone(gpu, slot_bytes), comm)?;
        let own = agree(windows.export(), comm)?;
        let mut exports = vec![0u8; EXPORT_BYTES * comm.world_size()];
        comm.all_gather(&own, &mut exports)?;
        windows.rank = comm.rank();
        let opened = exports.chunks_exact(EXPORT_BYTES).enumerate().filter(|(rank, _)| *rank != comm.rank());
        let opened = opened.map(|(rank, export)| windows.open(export).map_err(|why| cannot_open(comm, rank, &why)));
        let opened = agree(opened.collect::<Result<Vec<_>>>(), comm)?;
        windows.addresses = opened.iter().map(|(memory, offset)| memory.address() + offset).collect();
        windows.addresses.insert(comm.rank(), windows.own.address());
        windows.opened = opened.into_iter().map(|(memory, _)| memory).collect();
        Ok(windows)
    }

    /// Returns the handle of this rank's window and the window's position in the exported allocation.
    fn export(&self) -> Result<[u8; EXPORT_BYTES]> {
        let exported = self.own.offset().and_then(|offset| Ok((self.own.handle()?, offset)));
        let (handle, offset) = exported.map_err(|error| self.gpu.failed(&error))?;
        let mut export = [0; EXPORT_BYTES];
        export[..handle.len()].copy_from_slice(&handle);
        export[handle.len()..].copy_from_slice(&offset.to_le_bytes());
        Ok(export)
    }

    /// Opens another rank's window; returns the allocation and the window's position in it.
    fn open(&self, export: &[u8]) -> std::result::Result<(Memory, u64), String> {
        let (Some(handle), Some(offset)) = (export.first_chunk(), export.last_chunk()) else {
            return Err(format!("{} bytes are not a window's handle", export.len()));
        };
        let memory = self.gpu.open(*handle, self.own.bytes()).map_err(|error| self.gpu.failed(&error).message)?;
        Ok((memory, u64::from_le_bytes(*offset)))
    }

    /// Returns the parameters that all launches of this rank share.
    pub(super) fn constants(&self, limit: Duration) -> LaunchConstants {
        LaunchConstants {
            windows: self.addresses.clone(),
            faults: self.faults.address(),
            host_words: self.host_words.address(),
            limit_ns: limit.as_nanos().min(u128::from(u64::MAX)) as u64,
            rank: self.rank,
            slot_bytes: self.slot_bytes,
        }
    }

    /// Returns the faults that the kernels have reported so far. Does not wait.
    pub(super) fn faults(&self) -> Vec<Fault> {
        Fault::read(&self.faults.read())
    }

    /// Returns the words that end or order the kernels' waits. [`word`] has their indices.
    pub(super) fn host_words(&self) -> Arc<HostWords> {
        self.host_words.clone()
    }

    /// Frees the windows on all ranks of `comm`. No rank frees memory that another rank still reads. If the job has failed,
    /// this rank does not wait for the other ranks, and its memory is freed when the process ends.
    pub(super) fn close(self, comm: &Communicator) {
        let done = self.gpu.synchronize().is_ok() && comm.error().is_none();
        let Self { opened, own, faults, host_words, .. } = self;
        if done {
            drop(opened);
        } else {
            std::mem::forget(opened);
        }
        if !done || comm.barrier().is_err() {
            std::mem::forget((own, faults, host_words));
        }
    }
}

fn cannot_open(comm: &Communicator, rank: usize, why: &str) -> CommError {
    let (me, peer) = (comm.ranks()[comm.rank()], comm.ranks()[rank]);
    CommError::setup(format!("rank {me} cannot open the memory of rank {peer}: {why}"))
        .hint("CUDA IPC needs both processes in one container, or with its IPC and PID namespaces shared")
}

/// Exchanges the results of all ranks. If any rank failed, every rank returns the error of the lowest rank that failed.
pub(super) fn agree<T>(result: Result<T>, comm: &Communicator) -> Result<T> {
    let text = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
    match comm.first_failure(&text)? {
        None => result,
        Some((rank, text)) => {
            let (message, hint) = text.split_once("\nhint: ").unwrap_or((&text, ""));
            Err(CommError::setup(message).hint(hint).blame(rank))
        }
    }
}
