//! How batch norm adds up its statistics over several processes or devices.

use std::fmt::Debug;

/// Adds up batch-norm statistics over all that share a batch: synchronised batch norm, `torch.nn.SyncBatchNorm`.
///
/// Every batch norm calls it in a training forward pass and as often in the backward pass, on the thread that runs the pass
/// (once each with the kernels for CPUs, twice elsewhere), so all that share the batch must run the same network on devices
/// of one kind. A failure to add up is the implementation's to
/// remember: a forward or backward pass cannot be stopped in the middle, and its result is then void.
pub trait StatisticsReduce: Debug + Send + Sync {
    /// Every element of `values` becomes its sum over all that share the batch, the same bits for all of them.
    fn all_reduce_sum(&self, values: &mut [f64]);
}
