//! The windows of a group: one's own, exported, and the others', opened; and the words on the host beside them.

use std::sync::Arc;
use std::time::Duration;

use super::gpu::{DeviceMemory, Gpu, HANDLE, HostWords, PeerMemory};
use super::layout::{Fault, MAX_WORLD, window_bytes};
use super::sequence::LaunchContext;
use crate::Communicator;
use crate::error::{CommError, Result};

/// See the module. Fields are dropped in this order: the others' memory is closed before one's own is freed.
pub(super) struct Windows {
    opened: Vec<PeerMemory>,
    pub(super) own: DeviceMemory,
    faults: HostWords,
    abort: Arc<HostWords>,
    gpu: Arc<Gpu>,
    addresses: Vec<u64>,
    pub(super) slot: usize,
    rank: usize,
}

impl Windows {
    /// One's own, not shared with anybody: for what goes through slots to NCCL.
    pub(super) fn alone(gpu: &Arc<Gpu>, slot: usize) -> Result<Self> {
        let own = DeviceMemory::zeroed(gpu, window_bytes(slot))?;
        Ok(Self {
            opened: Vec::new(),
            addresses: vec![own.address],
            own,
            faults: HostWords::zeroed(gpu, MAX_WORLD)?,
            abort: Arc::new(HostWords::zeroed(gpu, 1)?),
            gpu: gpu.clone(),
            slot,
            rank: 0,
        })
    }

    /// Exchanges handles over `comm`, whose ranks all are on one host, and opens all windows.
    ///
    /// # Errors
    /// Every rank that fails says why, and all ranks fail.
    pub(super) fn shared(gpu: &Arc<Gpu>, slot: usize, comm: &Communicator) -> Result<Self> {
        let mut windows = agree(Self::alone(gpu, slot), comm)?;
        let own = agree(windows.own.export(), comm)?;
        let mut cards = vec![0u8; HANDLE * comm.world()];
        comm.all_gather(&own, &mut cards)?;
        windows.rank = comm.rank();
        let opened =
            cards.chunks_exact(HANDLE).enumerate().filter(|(rank, _)| *rank != comm.rank()).map(|(rank, card)| {
                let mut exact = [0; HANDLE];
                exact.copy_from_slice(card);
                PeerMemory::open(gpu, &exact).map_err(|e| {
                    let (peer, why) = (comm.ranks()[rank], e.message);
                    CommError::setup(format!(
                        "rank {} cannot open the memory of rank {peer}: {why}",
                        comm.ranks()[comm.rank()]
                    ))
                    .hint("CUDA IPC needs both processes in one container, or with its IPC and PID namespaces shared")
                })
            });
        windows.opened = agree(opened.collect::<Result<Vec<_>>>(), comm)?;
        windows.addresses = windows.opened.iter().map(|opened| opened.address).collect();
        windows.addresses.insert(comm.rank(), windows.own.address);
        Ok(windows)
    }

    /// What the launches of this rank have in common.
    pub(super) fn context(&self, limit: Duration) -> LaunchContext {
        LaunchContext {
            windows: self.addresses.clone(),
            faults: self.faults.address,
            abort: self.abort.address,
            limit_ns: limit.as_nanos().min(u128::from(u64::MAX)) as u64,
            rank: self.rank,
            slot: self.slot,
        }
    }

    /// What the kernels had to report; looks only.
    pub(super) fn faults(&self) -> Vec<Fault> {
        Fault::read(&self.faults.read())
    }

    /// What ends the kernels' waits, for whoever hears of an abort.
    pub(super) fn abort(&self) -> Arc<HostWords> {
        self.abort.clone()
    }

    /// Ends the use of the windows on all ranks of `comm`: nobody's memory goes while another reads it. Where the job has
    /// failed there is nobody to wait for, and the memory is the process's to the end.
    pub(super) fn close(self, comm: &Communicator) {
        let done = self.gpu.synchronize().is_ok() && comm.error().is_none();
        let Self { opened, own, faults, abort, .. } = self;
        if done {
            drop(opened);
        } else {
            std::mem::forget(opened);
        }
        if !done || comm.barrier().is_err() {
            std::mem::forget((own, faults, abort));
        }
    }
}

/// Makes sure that all ranks succeeded; if not, every rank returns the lowest one's error.
pub(super) fn agree<T>(result: Result<T>, comm: &Communicator) -> Result<T> {
    let text = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let all = comm.all_gather_v(text.as_bytes())?;
    match (all.counts.iter().position(|count| *count > 0), result) {
        (None, result) => result,
        (Some(first), result) => {
            let start: usize = all.counts[..first].iter().sum();
            let text = String::from_utf8_lossy(&all.data[start..start + all.counts[first]]).into_owned();
            let (message, hint) = text.split_once("\nhint: ").unwrap_or((&text, ""));
            drop(result);
            Err(CommError::setup(message).hint(hint).blame(comm.ranks()[first]))
        }
    }
}
