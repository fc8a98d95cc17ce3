//! Synchronised batch norm of burn's operations, for devices and types that have no kernels here.
//!
//! One operation is all that burn lacks for it: a small vector's sum over all that share the batch, whose gradient is summed
//! in the same way. The vector passes through the host, so a GPU is waited for twice in each pass: correct, and slow.
//! Source: `torch/nn/modules/_functions.py`, `SyncBatchNorm`, but with the mean taken off before squares are added up.

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

use super::{After, BatchNormed};
use crate::StatisticsReduce;

#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cuda"))]
trait SharedSum: Backend {
    /// The sum of a vector over all that share the batch.
    fn shared_sum(values: FloatTensor<Self>, shared: Arc<dyn StatisticsReduce>) -> FloatTensor<Self>;
}

/// By way of the host.
fn exchanged(values: Tensor<1>, shared: &dyn StatisticsReduce) -> Tensor<1> {
    let (device, dtype) = (values.device(), values.dtype());
    let mut host = values.try_into_vec_as::<f64>().expect("a device that computed the sums can copy them back");
    shared.all_reduce_sum(&mut host);
    let length = host.len();
    Tensor::from_data(TensorData::new(host, [length]), (&device, dtype))
}

macro_rules! on_the_host {
    ($backend:ty) => {
        impl SharedSum for $backend {
            fn shared_sum(values: FloatTensor<Self>, shared: Arc<dyn StatisticsReduce>) -> FloatTensor<Self> {
                let sum = exchanged(Tensor::from_primitive::<Self>(values), &*shared);
                sum.try_into_primitive::<Self>().expect("the tensor was made on this backend's device")
            }
        }
    };
}

on_the_host!(Flex);
#[cfg(feature = "cuda")]
on_the_host!(Cube);

#[derive(Debug)]
struct SharedSumStep;

impl<B: SharedSum> Backward<B, 1> for SharedSumStep {
    type State = Arc<dyn StatisticsReduce>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        // a value here is a part of everybody's sum: everybody's gradients are this one's
        let grad = B::shared_sum(grads.consume::<B>(&ops.node), ops.state);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, grad);
        }
    }
}

impl<B: SharedSum, C: CheckpointStrategy> SharedSum for Autodiff<B, C> {
    fn shared_sum(values: FloatTensor<Self>, shared: Arc<dyn StatisticsReduce>) -> FloatTensor<Self> {
        let (values, node) = values.into_parts();
        let sum = B::shared_sum(values, Arc::clone(&shared));
        match SharedSumStep.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(shared, sum),
            OpsKind::UnTracked(prep) => prep.finish(sum),
        }
    }
}

/// See [`batch_norm_train`](super::batch_norm_train).
pub(super) fn batch_norm(
    input: Tensor<4>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    epsilon: f64,
    after: After,
    shared: &Arc<dyn StatisticsReduce>,
) -> BatchNormed {
    let [batch, channels, height, width] = input.dims();
    let own = batch * height * width;
    let sums = |x: Tensor<4>| x.swap_dims(0, 1).reshape([channels, own]).sum_dim(1).reshape([channels]);
    let wide = |x: Tensor<1>| x.reshape([1, channels, 1, 1]);
    let over_all =
        |x: Tensor<1>| Tensor::<1>::from_dispatch(Dispatch::shared_sum(x.into_dispatch(), Arc::clone(shared)));

    let count = Tensor::<1>::from_data(TensorData::new(vec![own as f64], [1]), (&input.device(), input.dtype()));
    let first = over_all(Tensor::cat(vec![sums(input.clone()), count], 0));
    let count = first.clone().slice(channels..channels + 1).detach();
    let mean = first.slice(0..channels) / count.clone();
    let centred = input - wide(mean.clone());
    let variance = over_all(sums(centred.clone() * centred.clone())) / count.clone();
    let scale = weight * variance.clone().add_scalar(epsilon).sqrt().recip();
    let output = centred * wide(scale) + wide(bias);
    BatchNormed {
        output: after.apply(output),
        mean: mean.detach(),
        variance: (variance * (count.clone() / count.sub_scalar(1.0))).detach(),
    }
}
