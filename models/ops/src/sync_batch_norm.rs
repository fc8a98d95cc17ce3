//! Synchronised batch norm from burn's operations, for devices and element types without a custom kernel.
//!
//! burn lacks one operation: the all-reduce of a small vector, whose gradient is an all-reduce too. This file defines it. The
//! vector passes through the host, so each pass waits twice for a GPU. The result is correct, but slow. GPUs that can exchange
//! statistics run the kernels of `gpu` instead.
//!
//! Source: `torch/nn/modules/_functions.py`, `SyncBatchNorm`. PyTorch gathers each rank's mean and invstd. This code all-reduces
//! twice: first the sums, then the squares around the mean of all ranks.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use burn::backend::Cube;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, Flex, backend_extension};
use burn::tensor::{Tensor, TensorData};

use crate::statistics::StatisticsReduce;

#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cuda"))]
trait AllReduce: Backend {
    /// Sums a vector over all ranks that share the batch.
    fn all_reduce_sum(values: FloatTensor<Self>, process_group: Arc<dyn StatisticsReduce>) -> FloatTensor<Self>;
}

/// Copies `values` to the host, sums them over all ranks and copies the result back.
fn all_reduce_on_host(values: Tensor<1>, process_group: &dyn StatisticsReduce) -> Tensor<1> {
    let (device, dtype) = (values.device(), values.dtype());
    let mut host = values.try_into_vec_as::<f64>().expect("a device that computed the sums can copy them back");
    process_group.all_reduce_sum(&mut host);
    let length = host.len();
    Tensor::from_data(TensorData::new(host, [length]), (&device, dtype))
}

macro_rules! impl_on_host {
    ($backend:ty) => {
        impl AllReduce for $backend {
            fn all_reduce_sum(
                values: FloatTensor<Self>,
                process_group: Arc<dyn StatisticsReduce>,
            ) -> FloatTensor<Self> {
                let sum = all_reduce_on_host(Tensor::from_primitive::<Self>(values), &*process_group);
                sum.try_into_primitive::<Self>().expect("the tensor was made on this backend's device")
            }
        }
    };
}

impl_on_host!(Flex);
#[cfg(feature = "cuda")]
impl_on_host!(Cube);

#[derive(Debug)]
struct AllReduceStep;

impl<B: AllReduce> Backward<B, 1> for AllReduceStep {
    type State = Arc<dyn StatisticsReduce>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        // Each rank's value is a term of every rank's sum, so its gradient is the sum of all ranks' gradients.
        let grad = B::all_reduce_sum(grads.consume::<B>(&ops.node), ops.state);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, grad);
        }
    }
}

impl<B: AllReduce, C: CheckpointStrategy> AllReduce for Autodiff<B, C> {
    fn all_reduce_sum(values: FloatTensor<Self>, process_group: Arc<dyn StatisticsReduce>) -> FloatTensor<Self> {
        let (values, node) = values.into_parts();
        let sum = B::all_reduce_sum(values, Arc::clone(&process_group));
        match AllReduceStep.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(process_group, sum),
            OpsKind::UnTracked(prep) => prep.finish(sum),
        }
    }
}

/// Normalises `[B, C, H, W]` with the statistics of all ranks' batches, then scales and shifts it. Returns the output, and
/// each channel's mean and unbiased variance, `[C]`, without gradient.
pub(crate) fn normalise(
    input: Tensor<4>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    epsilon: f64,
    process_group: &Arc<dyn StatisticsReduce>,
) -> (Tensor<4>, [Tensor<1>; 2]) {
    let [batch, channels, height, width] = input.dims();
    let local_count = batch * height * width;
    let sums = |x: Tensor<4>| x.swap_dims(0, 1).reshape([channels, local_count]).sum_dim(1).reshape([channels]);
    let broadcast = |x: Tensor<1>| x.reshape([1, channels, 1, 1]);
    let all_reduce = |x: Tensor<1>| {
        Tensor::<1>::from_dispatch(Dispatch::all_reduce_sum(x.into_dispatch(), Arc::clone(process_group)))
    };

    let count =
        Tensor::<1>::from_data(TensorData::new(vec![local_count as f64], [1]), (&input.device(), input.dtype()));
    let first = all_reduce(Tensor::cat(vec![sums(input.clone()), count], 0));
    let count = first.clone().slice(channels..channels + 1).detach();
    let mean = first.slice(0..channels) / count.clone();
    let centred = input - broadcast(mean.clone());
    let variance = all_reduce(sums(centred.clone() * centred.clone())) / count.clone();
    let scale = weight * variance.clone().add_scalar(epsilon).sqrt().recip();
    let output = centred * broadcast(scale) + broadcast(bias);
    let unbiased = variance * (count.clone() / count.sub_scalar(1.0));
    (output, [mean.detach(), unbiased.detach()])
}
