//! Between windows: each rank's part of a slot is summed with the same part on other hosts, or with all ranks' whole slots.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::gpu::{DeviceMemory, Gpu};
use super::layout::WireType;
use super::nccl::Nccl;
use super::route::Route;
use super::supports::Topology;
use crate::abort::Abort;
use crate::error::{CommError, Result};
use crate::{Communicator, ReduceOp};

/// What carries it.
pub(super) enum InterHost {
    Nccl(Nccl),
    /// Through the host's memory.
    Host(Communicator),
}

impl InterHost {
    /// Connects the ranks that sum the same part; `None` where windows reach everybody.
    pub(super) fn new(route: &Route, topology: &Topology, comm: &Communicator, gpu: &Arc<Gpu>) -> Result<Option<Self>> {
        match route {
            Route::Kernels { .. } => Ok(None),
            Route::Nccl => Ok(Some(Self::Nccl(Nccl::new(gpu, comm)?))),
            Route::Hierarchical { nccl } => {
                let hosts = topology.hosts();
                let mut own = None;
                // the ranks in the same place on every host; every rank takes part in making each group
                for place in 0..hosts[0].len() {
                    let peers: Vec<usize> = hosts.iter().filter_map(|ranks| ranks.get(place).copied()).collect();
                    own = comm.group(&peers)?.or(own);
                }
                let own = own.ok_or_else(|| CommError::setup("this rank has no place among those of its host"))?;
                Ok(Some(if *nccl { Self::Nccl(Nccl::new(gpu, &own)?) } else { Self::Host(own) }))
            }
        }
    }

    /// Sums bytes `range` of the window; returns when the sum is there.
    pub(super) fn all_reduce(
        &self,
        window: &DeviceMemory,
        range: Range<usize>,
        wire: WireType,
        abort: &Abort,
        limit: Duration,
    ) -> Result<()> {
        match self {
            Self::Nccl(nccl) => {
                nccl.all_reduce(window.address + range.start as u64, range.len() / wire.size(), wire, abort, limit)
            }
            Self::Host(comm) => {
                // of u64, so that it is aligned for every type
                let mut words = vec![0u64; range.len() / 8];
                let bytes = bytemuck::cast_slice_mut(&mut words);
                window.read(range.start, bytes)?;
                comm.all_reduce_bytes(bytes, wire.dtype(), ReduceOp::Sum)?;
                window.write(range.start, bytes)
            }
        }
    }
}
