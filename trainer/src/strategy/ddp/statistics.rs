//! Synchronised batch norm: adds up the ranks' statistics, as `torch.nn.SyncBatchNorm` does over its process group.

use ops::StatisticsReduce;
use parking_lot::Mutex;

use comm::{CommError, Communicator, ReduceOp};

/// Adds up over its own connection: buckets are reduced at the same time, and the order of the two differs between ranks.
#[derive(Debug)]
pub(super) struct SharedStatistics {
    comm: Communicator,
    failed: Mutex<Option<CommError>>,
}

impl SharedStatistics {
    /// Uses `comm` for nothing but statistics.
    pub(super) fn new(comm: Communicator) -> Self {
        Self { comm, failed: Mutex::new(None) }
    }

    /// Checks the reductions since the start.
    ///
    /// # Errors
    /// The first failure of a reduction: everything computed after it is invalid.
    pub(super) fn check(&self) -> Result<(), CommError> {
        self.failed.lock().clone().map_or(Ok(()), Err)
    }
}

impl StatisticsReduce for SharedStatistics {
    fn all_reduce_sum(&self, values: &mut [f64]) {
        if self.check().is_err() {
            return;
        }
        if let Err(error) = self.comm.all_reduce(values, ReduceOp::Sum) {
            *self.failed.lock() = Some(error);
        }
    }
}
