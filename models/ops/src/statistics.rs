//! All-reduce of batch-norm statistics over processes or devices.

use std::fmt::Debug;

/// Sums batch-norm statistics over all ranks that share a batch: synchronised batch norm, `torch.nn.SyncBatchNorm`.
///
/// In a training pass, every batch norm calls it on the thread that runs the pass: as often in the backward pass as in the
/// forward pass, once each with the CPU kernels and twice each elsewhere. All ranks must therefore run the same network on
/// devices of the same kind.
///
/// A pass cannot be stopped halfway. An implementation whose reduction fails must record the failure, and the result of the
/// pass is void.
pub trait StatisticsReduce: Debug + Send + Sync {
    /// Replaces every element of `values` by its sum over all ranks. All ranks get the same bits.
    fn all_reduce_sum(&self, values: &mut [f64]);
}
