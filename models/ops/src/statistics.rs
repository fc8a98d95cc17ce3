//! All-reduce of batch-norm statistics over processes or devices.

use std::fmt::Debug;

use burn::tensor::Tensor;

/// Sums batch-norm statistics over all ranks that share a batch: synchronised batch norm, `torch.nn.SyncBatchNorm`.
///
/// Every batch norm in training mode calls the reduction on the thread that runs the pass. With the CPU and GPU kernels, a batch
/// norm calls it once in the forward and once in the backward pass; with burn's operations, twice in each. All ranks must
/// therefore run the same network on devices of the same kind.
///
/// A pass cannot be stopped halfway. An implementation whose reduction fails must record the failure, and the result of the
/// pass is void.
pub trait StatisticsReduce: Debug + Send + Sync {
    /// Replaces every element of `values` by its sum over all ranks. All ranks get the same bits.
    fn all_reduce_sum(&self, values: &mut [f64]);

    /// Returns the exchange between the ranks' GPUs. `None`: statistics pass through the host.
    fn on_device(&self) -> Option<&dyn DeviceGather> {
        None
    }
}

/// Exchanges statistics between the GPUs of all ranks that share a batch. Nothing waits on the host.
pub trait DeviceGather {
    /// Returns the number of ranks.
    fn world_size(&self) -> usize;

    /// Returns all ranks' `vectors`, which are f32 and without autodiff: those of rank 0 one after the other, then those of
    /// rank 1, and so on. All ranks have vectors of the same lengths. The result has the same length if the exchange fails.
    fn all_gather(&self, vectors: Vec<Tensor<1>>) -> Tensor<1>;
}
