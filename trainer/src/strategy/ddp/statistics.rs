//! Synchronised batch norm: the ranks' statistics added up.

use std::sync::{Mutex, PoisonError};

use ops::StatisticsReduce;

use comm::{CommError, Communicator, ReduceOp};

/// Adds up over a connection of its own: buckets are reduced at the same time, and the order of the two differs between
/// ranks.
#[derive(Debug)]
pub(super) struct SharedStatistics {
    comm: Communicator,
    failed: Mutex<Option<CommError>>,
}

impl SharedStatistics {
    pub(super) fn new(comm: Communicator) -> Self {
        Self { comm, failed: Mutex::new(None) }
    }

    /// # Errors
    /// The first failure of a reduction: what was computed since is void.
    pub(super) fn check(&self) -> Result<(), CommError> {
        match &*self.failed.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

impl StatisticsReduce for SharedStatistics {
    fn all_reduce_sum(&self, values: &mut [f64]) {
        if self.check().is_err() {
            return;
        }
        if let Err(error) = self.comm.all_reduce(values, ReduceOp::Sum) {
            *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    }
}
