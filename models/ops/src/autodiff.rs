//! Autodiff steps of the operations, for every backend that implements [`LayerKernels`].

use std::cell::Cell;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape};

use crate::accumulate::{accumulate, accumulate_all, mark_registered, take_addend};
use crate::extension::{
    Activation, ConvKernels, ConvOps, ConvOptions, HeadKernels, HeadOps, LayerKernels, LayerOps, NormKernels, NormOps,
    NormOptions, PoolOptions,
};

type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

thread_local! {
    /// The node at which this thread's backward pass starts, see [`HeadOps::mark_backward_root`].
    static BACKWARD_ROOT: Cell<Option<NodeId>> = const { Cell::new(None) };
}

/// Parents: input, weight and, if there is a bias, the bias.
#[derive(Debug)]
pub(crate) struct ConvStep;

impl<B: ConvKernels, const N: usize> Backward<B, N> for ConvStep {
    type State = B::SavedConv;

    fn backward(self, ops: Ops<B::SavedConv, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let parent = |i: usize| ops.parents.get(i).and_then(Option::as_ref);
        let required = [0, 1, 2].map(|i| parent(i).is_some());
        let addend = take_addend!(B, grads, parent(0).filter(|_| grad.rank() == 4));
        let found = B::conv_backward(ops.state, grad, addend, required);
        if let (Some(node), Some(grad)) = (parent(0), found.input) {
            grads.register::<B>(node.id, grad);
        }
        accumulate_all!(B, grads, ops.parents[1..], [found.weight, found.bias]);
    }
}

/// Parents: input, weight, bias and, if there is a residual, the residual.
#[derive(Debug)]
struct NormStep;

impl<B: NormKernels, const N: usize> Backward<B, N> for NormStep {
    type State = B::SavedNorm;

    fn backward(self, ops: Ops<B::SavedNorm, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let found = B::norm_backward(ops.state, grad);
        let all = [found.input, found.weight, found.bias, found.residual];
        accumulate_all!(B, grads, ops.parents, all);
    }
}

#[derive(Debug)]
struct MaxPoolStep;

impl<B: LayerKernels> Backward<B, 1> for MaxPoolStep {
    type State = B::SavedMaxPool;

    fn backward(self, ops: Ops<B::SavedMaxPool, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = B::max_pool_backward(ops.state, grads.consume::<B>(&ops.node));
        accumulate_all!(B, grads, ops.parents, [grad]);
    }
}

#[derive(Debug)]
struct GlobalAvgPoolStep;

impl<B: HeadKernels> Backward<B, 1> for GlobalAvgPoolStep {
    /// The input's height, width and element type.
    type State = ([usize; 2], DType);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (size, dtype) = ops.state;
        let grad = grads.consume::<B>(&ops.node);
        let [Some(parent)] = &ops.parents else { return };
        let addend = take_addend!(B, grads, Some(parent));
        grads.register::<B>(parent.id, B::global_avg_pool_backward(size, dtype, grad, addend));
    }
}

#[derive(Debug)]
struct ActivateStep;

impl<B: NormKernels> Backward<B, 1> for ActivateStep {
    type State = (FloatTensor<B>, Activation);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (saved, activation) = ops.state;
        let grad = B::activate_backward(saved, grads.consume::<B>(&ops.node), activation);
        accumulate_all!(B, grads, ops.parents, [grad]);
    }
}

/// Parent: the logits.
#[derive(Debug)]
struct CrossEntropyStep;

impl<B: HeadKernels> Backward<B, 1> for CrossEntropyStep {
    /// The gradient of the loss in the logits.
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<FloatTensor<B>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let of_loss = grads.consume::<B>(&ops.node);
        // The gradient of the root is one.
        let grad = if BACKWARD_ROOT.take() == Some(ops.node.id) {
            ops.state
        } else {
            B::float_mul(ops.state, B::float_reshape(of_loss, Shape::from([1, 1])))
        };
        accumulate_all!(B, grads, ops.parents, [grad]);
    }
}

#[derive(Debug)]
struct ConvertStep;

impl<B: LayerKernels> Backward<B, 1> for ConvertStep {
    /// The input's element type.
    type State = DType;

    fn backward(self, ops: Ops<DType, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = B::convert_forward(grads.consume::<B>(&ops.node), ops.state);
        accumulate_all!(B, grads, ops.parents, [grad]);
    }
}

#[derive(Debug)]
struct FlattenStep;

impl<B: LayerKernels> Backward<B, 1> for FlattenStep {
    /// The input's shape.
    type State = [usize; 4];

    fn backward(self, ops: Ops<[usize; 4], 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = B::flatten_backward(ops.state, grads.consume::<B>(&ops.node));
        accumulate_all!(B, grads, ops.parents, [grad]);
    }
}

/// Parents: both terms.
#[derive(Debug)]
struct AddStep;

impl<B: LayerKernels> Backward<B, 2> for AddStep {
    type State = ();

    fn backward(self, ops: Ops<(), 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        accumulate_all!(B, grads, ops.parents, [grad.clone(), grad]);
    }
}

/// Parents: the parts.
#[derive(Debug)]
struct ConcatStep;

impl<B: LayerKernels, const N: usize> Backward<B, N> for ConcatStep {
    /// The parts' channels, and whether they are interleaved.
    type State = (Vec<usize>, bool);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (channels, interleaved) = ops.state;
        let found = B::concat_backward(&channels, grads.consume::<B>(&ops.node), interleaved);
        accumulate_all!(B, grads, ops.parents, found);
    }
}

#[derive(Debug)]
struct SliceChannelsStep;

impl<B: LayerKernels> Backward<B, 1> for SliceChannelsStep {
    /// The input's channels, and the first channel of the slice.
    type State = [usize; 2];

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [all, first] = ops.state;
        let grad = B::slice_channels_backward(all, first, grads.consume::<B>(&ops.node));
        accumulate_all!(B, grads, ops.parents, [grad]);
    }
}

/// Records `$step` as the child of the parents' nodes: `record!(step, C, [nodes], saved, output)`.
macro_rules! record {
    ($step:expr, $strategy:ty, $nodes:expr, $saved:expr, $output:expr) => {
        match $step.prepare::<$strategy>($nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish($saved, $output),
            OpsKind::UnTracked(prep) => prep.finish($output),
        }
    };
}
pub(crate) use record;

impl<B: NormKernels + NormOps, C: CheckpointStrategy> NormOps for Autodiff<B, C> {
    fn norm(
        input: Tracked<B, C>,
        weight: Tracked<B, C>,
        bias: Tracked<B, C>,
        options: NormOptions,
    ) -> (Tracked<B, C>, Tracked<B, C>, Tracked<B, C>) {
        let ((input, input_node), (weight, weight_node)) = (input.into_parts(), weight.into_parts());
        let (bias, bias_node) = bias.into_parts();
        let ([output, mean, variance], saved) = B::norm_forward(input, weight, bias, None, options);
        let output = record!(NormStep, C, [input_node, weight_node, bias_node], saved, output);
        (output, Tracked::<B, C>::new(mean), Tracked::<B, C>::new(variance))
    }

    fn norm_add(
        input: Tracked<B, C>,
        weight: Tracked<B, C>,
        bias: Tracked<B, C>,
        residual: Tracked<B, C>,
        options: NormOptions,
    ) -> (Tracked<B, C>, Tracked<B, C>, Tracked<B, C>) {
        let ((input, input_node), (weight, weight_node)) = (input.into_parts(), weight.into_parts());
        let ((bias, bias_node), (residual, residual_node)) = (bias.into_parts(), residual.into_parts());
        let ([output, mean, variance], saved) = B::norm_forward(input, weight, bias, Some(residual), options);
        let output = record!(NormStep, C, [input_node, weight_node, bias_node, residual_node], saved, output);
        (output, Tracked::<B, C>::new(mean), Tracked::<B, C>::new(variance))
    }

    fn activate(input: Tracked<B, C>, activation: Activation) -> Tracked<B, C> {
        let (input, node) = input.into_parts();
        let output = B::activate_forward(input.clone(), activation);
        // ReLU's derivative follows from its output, which the next operation saves anyway.
        let saved = if activation == Activation::Relu { output.clone() } else { input };
        record!(ActivateStep, C, [node], (saved, activation), output)
    }
}

impl<B: HeadKernels + HeadOps, C: CheckpointStrategy> HeadOps for Autodiff<B, C> {
    fn global_avg_pool(input: Tracked<B, C>) -> Tracked<B, C> {
        let (input, node) = input.into_parts();
        let shape = input.shape();
        let saved = ([shape[2], shape[3]], input.dtype());
        let output = B::global_avg_pool_forward(input);
        record!(GlobalAvgPoolStep, C, [node], saved, output)
    }

    fn soft_cross_entropy(logits: Tracked<B, C>, targets: Tracked<B, C>, scale: f32) -> Tracked<B, C> {
        let ((logits, node), (targets, _)) = (logits.into_parts(), targets.into_parts());
        let [loss, gradient] = B::cross_entropy_forward(logits, targets, scale);
        record!(CrossEntropyStep, C, [node], gradient, loss)
    }

    fn mark_backward_root(loss: Tracked<B, C>) -> Tracked<B, C> {
        let (_, node) = loss.clone().into_parts();
        BACKWARD_ROOT.set(Some(node.id()));
        loss
    }
}

impl<B: ConvKernels + ConvOps, C: CheckpointStrategy> ConvOps for Autodiff<B, C> {
    fn conv(input: Tracked<B, C>, weight: Tracked<B, C>, options: ConvOptions, relu: bool) -> Tracked<B, C> {
        let ((input, input_node), (weight, weight_node)) = (input.into_parts(), weight.into_parts());
        let (output, saved) = B::conv_forward(input, weight, None, options, relu);
        record!(ConvStep, C, [input_node, weight_node], saved, output)
    }

    fn conv_bias(
        input: Tracked<B, C>,
        weight: Tracked<B, C>,
        bias: Tracked<B, C>,
        options: ConvOptions,
        relu: bool,
    ) -> Tracked<B, C> {
        let ((input, input_node), (weight, weight_node)) = (input.into_parts(), weight.into_parts());
        let (bias, bias_node) = bias.into_parts();
        let (output, saved) = B::conv_forward(input, weight, Some(bias), options, relu);
        record!(ConvStep, C, [input_node, weight_node, bias_node], saved, output)
    }
}

impl<B: LayerKernels + LayerOps, C: CheckpointStrategy> LayerOps for Autodiff<B, C> {
    fn linear_bias(input: Tracked<B, C>, weight: Tracked<B, C>, bias: Tracked<B, C>, relu: bool) -> Tracked<B, C> {
        let ((input, input_node), (weight, weight_node)) = (input.into_parts(), weight.into_parts());
        let (bias, bias_node) = bias.into_parts();
        let (output, saved) = B::linear_forward(input, weight, bias, relu);
        record!(ConvStep, C, [input_node, weight_node, bias_node], saved, output)
    }

    fn convert(input: Tracked<B, C>, dtype: DType) -> Tracked<B, C> {
        let (input, node) = input.into_parts();
        let from = input.dtype();
        let output = B::convert_forward(input, dtype);
        record!(ConvertStep, C, [node], from, output)
    }

    fn flatten(input: Tracked<B, C>) -> Tracked<B, C> {
        let (input, node) = input.into_parts();
        let dims = input.shape().dims();
        let output = B::flatten_forward(input);
        record!(FlattenStep, C, [node], dims, output)
    }

    fn max_pool(input: Tracked<B, C>, options: PoolOptions) -> Tracked<B, C> {
        let (input, node) = input.into_parts();
        let (output, saved) = B::max_pool_forward(input, options);
        record!(MaxPoolStep, C, [node], saved, output)
    }

    fn concat_two(a: Tracked<B, C>, b: Tracked<B, C>, interleaved: bool) -> Tracked<B, C> {
        let saved = (vec![a.shape()[1], b.shape()[1]], interleaved);
        let ((a, a_node), (b, b_node)) = (a.into_parts(), b.into_parts());
        let output = B::concat_forward(vec![a, b], interleaved);
        record!(ConcatStep, C, [a_node, b_node], saved, output)
    }

    fn concat_three(a: Tracked<B, C>, b: Tracked<B, C>, c: Tracked<B, C>) -> Tracked<B, C> {
        let saved = (vec![a.shape()[1], b.shape()[1], c.shape()[1]], false);
        let ((a, a_node), (b, b_node), (c, c_node)) = (a.into_parts(), b.into_parts(), c.into_parts());
        let output = B::concat_forward(vec![a, b, c], false);
        record!(ConcatStep, C, [a_node, b_node, c_node], saved, output)
    }

    fn slice_channels(input: Tracked<B, C>, first: usize, count: usize) -> Tracked<B, C> {
        let (input, node) = input.into_parts();
        let all = input.shape()[1];
        let output = B::slice_channels_forward(input, first, count);
        record!(SliceChannelsStep, C, [node], [all, first], output)
    }

    fn add(left: Tracked<B, C>, right: Tracked<B, C>) -> Tracked<B, C> {
        let ((left, left_node), (right, right_node)) = (left.into_parts(), right.into_parts());
        let output = B::elementwise_add(left, right);
        record!(AddStep, C, [left_node, right_node], (), output)
    }
}
