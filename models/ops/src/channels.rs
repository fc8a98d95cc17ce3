//! Operations on the channels of images, on CPUs and GPUs: scaling for squeeze-and-excitation, and joining for DenseNet and DPN.
//! The computations of a backend ([`ChannelKernels`]) and their autodiff steps.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use crate::accumulate::{accumulate, accumulate_all};
use crate::autodiff::record;
use crate::extension::NormKernels;

/// How two images are joined: the sums of the first `shared` channels of both, the other channels of the left image, then those of
/// the right one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Join {
    pub(crate) shared: usize,
    /// Whether ReLU is applied to the result.
    pub(crate) relu: bool,
}

/// Operations on channels of a backend without autodiff.
pub(crate) trait ChannelKernels: NormKernels {
    /// See [`scale_channels`](crate::scale_channels).
    fn scale_channels_forward(input: FloatTensor<Self>, factors: FloatTensor<Self>) -> FloatTensor<Self>;
    /// Computes the gradients of the input, `[B, C, H, W]`, and of the factors, `[B, C]`.
    fn scale_channels_backward(
        input: FloatTensor<Self>,
        factors: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2];

    /// Joins two images: `[B, left, H, W]` and `[B, right, H, W]` → `[B, left + right - shared, H, W]`.
    fn join_forward(left: FloatTensor<Self>, right: FloatTensor<Self>, join: Join) -> FloatTensor<Self>;
    /// Computes the gradients of both images, which have `channels` channels. `output`: the result of [`Self::join_forward`], if
    /// the operation includes ReLU.
    fn join_backward(
        output: Option<FloatTensor<Self>>,
        channels: [usize; 2],
        shared: usize,
        grad: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2];
}

/// Operations on channels, differentiable.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cuda"))]
pub(crate) trait ChannelOps: Backend {
    /// See [`scale_channels`](crate::scale_channels).
    fn scale_channels(input: FloatTensor<Self>, factors: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`ChannelKernels::join_forward`].
    fn join(left: FloatTensor<Self>, right: FloatTensor<Self>, join: Join) -> FloatTensor<Self>;
}

type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// Parents: input and factors.
#[derive(Debug)]
struct ScaleChannelsStep;

impl<B: ChannelKernels> Backward<B, 2> for ScaleChannelsStep {
    type State = [FloatTensor<B>; 2];

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [input, factors] = ops.state;
        let found = B::scale_channels_backward(input, factors, grads.consume::<B>(&ops.node));
        accumulate_all!(B, grads, ops.parents, found);
    }
}

/// Parents: the left and the right image.
#[derive(Debug)]
struct JoinStep;

impl<B: ChannelKernels> Backward<B, 2> for JoinStep {
    /// The output, if it has a ReLU; the channels of both images; the shared channels.
    type State = (Option<FloatTensor<B>>, [usize; 2], usize);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (output, channels, shared) = ops.state;
        let found = B::join_backward(output, channels, shared, grads.consume::<B>(&ops.node));
        accumulate_all!(B, grads, ops.parents, found);
    }
}

impl<B: ChannelKernels + ChannelOps, C: CheckpointStrategy> ChannelOps for Autodiff<B, C> {
    fn scale_channels(input: Tracked<B, C>, factors: Tracked<B, C>) -> Tracked<B, C> {
        let ((input, input_node), (factors, factors_node)) = (input.into_parts(), factors.into_parts());
        let output = B::scale_channels_forward(input.clone(), factors.clone());
        record!(ScaleChannelsStep, C, [input_node, factors_node], [input, factors], output)
    }

    fn join(left: Tracked<B, C>, right: Tracked<B, C>, join: Join) -> Tracked<B, C> {
        let ((left, left_node), (right, right_node)) = (left.into_parts(), right.into_parts());
        let channels = [left.shape()[1], right.shape()[1]];
        let output = B::join_forward(left, right, join);
        let saved = (join.relu.then(|| output.clone()), channels, join.shared);
        record!(JoinStep, C, [left_node, right_node], saved, output)
    }
}

/// Implements [`ChannelOps`] for a backend without autodiff, whose tensors are `$tensor`.
macro_rules! impl_channels_without_autodiff {
    ($backend:ty, $tensor:ty) => {
        impl $crate::channels::ChannelOps for $backend {
            fn scale_channels(input: $tensor, factors: $tensor) -> $tensor {
                Self::scale_channels_forward(input, factors)
            }

            fn join(left: $tensor, right: $tensor, join: $crate::channels::Join) -> $tensor {
                Self::join_forward(left, right, join)
            }
        }
    };
}
pub(crate) use impl_channels_without_autodiff;
