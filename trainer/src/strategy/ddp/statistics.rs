//! Synchronised batch norm: sums the ranks' statistics, as `torch.nn.SyncBatchNorm` does over its process group.

use std::{
    fmt::{Debug, Formatter},
    sync::Arc,
};

use burn::tensor::Tensor;
use ops::{DeviceGather, StatisticsReduce};
use parking_lot::Mutex;

use super::reducer::DeviceCollectives;
use comm::{CommError, Communicator, ReduceOp};

/// Sums statistics over the ranks. On the CPU it uses its own communicator: buckets are reduced at the same time, and the order
/// of the two differs between ranks. If the ranks' GPUs are connected, statistics stay on the GPUs, and are gathered in one
/// order with the buckets ([`ReducerOptions::in_order`](super::reducer::ReducerOptions)).
pub(super) struct StatisticsGroup {
    comm: Communicator,
    collectives: Option<Arc<Mutex<dyn DeviceCollectives>>>,
    failed: Mutex<Option<CommError>>,
}

impl StatisticsGroup {
    /// Makes the group over `comm`, which must be used for statistics only. `collectives` are set if the ranks' GPUs are connected.
    pub(super) fn new(comm: Communicator, collectives: Option<Arc<Mutex<dyn DeviceCollectives>>>) -> Self {
        Self { comm, collectives, failed: Mutex::new(None) }
    }

    /// Checks the reductions since the start.
    ///
    /// # Errors
    /// The first failure of a reduction. All results computed after the failure are invalid.
    pub(super) fn check(&self) -> Result<(), CommError> {
        self.failed.lock().clone().map_or(Ok(()), Err)
    }
}

impl Debug for StatisticsGroup {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let on_device = self.collectives.is_some();
        f.debug_struct("StatisticsGroup").field("comm", &self.comm).field("on_device", &on_device).finish()
    }
}

impl StatisticsReduce for StatisticsGroup {
    fn all_reduce_sum(&self, values: &mut [f64]) {
        if self.check().is_err() {
            return;
        }
        if let Err(error) = self.comm.all_reduce(values, ReduceOp::Sum) {
            *self.failed.lock() = Some(error);
        }
    }

    fn on_device(&self) -> Option<&dyn DeviceGather> {
        self.collectives.as_ref().map(|_| self as &dyn DeviceGather)
    }
}

impl DeviceGather for StatisticsGroup {
    fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    fn all_gather(&self, vectors: Vec<Tensor<1>>) -> Tensor<1> {
        let each: usize = vectors.iter().map(|vector| vector.dims()[0]).sum();
        let device = vectors[0].device();
        let gathered = match (self.check(), &self.collectives) {
            (Ok(()), Some(collectives)) => collectives.lock().all_gather(vectors),
            (Ok(()), None) => Err(CommError::usage("statistics stayed on a device that cannot gather them")),
            (Err(error), _) => Err(error),
        };
        gathered.unwrap_or_else(|error| {
            self.failed.lock().get_or_insert(error);
            Tensor::zeros([self.world_size() * each], &device)
        })
    }
}
