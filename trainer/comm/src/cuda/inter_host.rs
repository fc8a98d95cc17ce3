//! The all-reduce between ranks that share no windows. On the hierarchical route, the ranks with the same index on each host reduce
//! their part of the slot. On the NCCL route, all ranks reduce whole slots.

use std::ops::Range;
use std::sync::Arc;

use super::driver::{Context, Memory};
use super::layout::WireType;
use super::nccl::Nccl;
use super::route::Route;
use super::topology::Topology;
use crate::error::{CommError, Result};
use crate::{Communicator, ReduceOp};

/// The transport between ranks whose windows are not connected.
pub(super) enum InterHost {
    Nccl(Nccl),
    /// TCP, through CPU memory.
    Cpu(Communicator),
}

impl InterHost {
    /// Connects the ranks that sum the same part. Returns `None` if the windows of all ranks are connected.
    ///
    /// # Errors
    /// As [`Nccl::new`] and [`Communicator::group`].
    pub(super) fn new(
        route: &Route,
        topology: &Topology,
        comm: &Communicator,
        gpu: &Arc<Context>,
    ) -> Result<Option<Self>> {
        match route {
            Route::Kernels { .. } => Ok(None),
            Route::Nccl => Ok(Some(Self::Nccl(Nccl::new(gpu, comm)?))),
            Route::Hierarchical { nccl } => {
                let hosts = topology.hosts();
                let mut own = None;
                // Ranks with the same index on every host. Every rank takes part in making each group.
                for place in 0..hosts[0].len() {
                    let peers: Vec<usize> = hosts.iter().filter_map(|ranks| ranks.get(place).copied()).collect();
                    own = comm.group(&peers)?.or(own);
                }
                let own = own.ok_or_else(|| CommError::setup("this rank is missing in the topology of its host"))?;
                Ok(Some(if *nccl { Self::Nccl(Nccl::new(gpu, &own)?) } else { Self::Cpu(own) }))
            }
        }
    }

    /// Returns an error if the transport has noticed one since the last call. Does not wait.
    ///
    /// # Errors
    /// As [`Nccl::check`].
    pub(super) fn check(&self) -> Result<()> {
        match self {
            Self::Nccl(nccl) => nccl.check(),
            Self::Cpu(_) => Ok(()),
        }
    }
}

/// Sums the bytes `range` of the window over the ranks of `comm`, through CPU memory. Returns when the sum is in the window. No
/// kernel may access these bytes meanwhile.
///
/// # Errors
/// The driver's error, or as [`Communicator::all_reduce`].
pub(super) fn all_reduce_on_cpu(
    comm: &Communicator,
    window: &Memory,
    range: Range<usize>,
    wire: WireType,
) -> Result<()> {
    // `u64` words have the alignment of every element type.
    let mut words = vec![0u64; range.len() / 8];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
    let failed = |error| window.context().failed(&error);
    window.read(range.start, bytes).map_err(failed)?;
    comm.all_reduce_bytes(bytes, wire.dtype(), ReduceOp::Sum)?;
    window.write(range.start, bytes).map_err(failed)
}
