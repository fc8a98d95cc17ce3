//! The operations' steps in burn's graph, for any backend that has [`Kernels`].

use std::cell::RefCell;
use std::collections::VecDeque;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;

use super::extension::{
    Activation, ConvKernels, ConvOps, ConvOptions, Kernels, NormKernels, NormOps, NormOptions, PoolOptions, TrainingOps,
};

type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

thread_local! {
    /// Images that this thread's steps have lately given a gradient, the latest last.
    static GIVEN: RefCell<VecDeque<NodeId>> = const { RefCell::new(VecDeque::new()) };
}

/// Adds `grad` to a parent's gradient.
///
/// burn's own sum takes images that are channels-last in memory apart pixel by pixel, on one thread, and leaves them in
/// another order. But its table of gradients does not tell what it holds, so the nodes that got a gradient from here are
/// remembered. What is forgotten, or was given by a step of burn's, is added up by burn.
///
/// `given` takes the gradient that is there out of the table.
fn give<B: NormKernels>(
    grads: &mut Gradients,
    node: NodeId,
    is_leaf: bool,
    given: impl FnOnce(&mut Gradients) -> FloatTensor<B>,
    grad: FloatTensor<B>,
) {
    /// More than there are images whose other uses lie between two of their uses.
    const REMEMBERED: usize = 256;
    // A leaf's gradient may be taken away while the pass runs; an inner node's is there until the node's own step.
    if grad.rank() != 4 || is_leaf {
        return grads.register::<B>(node, grad);
    }
    let found = GIVEN.with_borrow_mut(|nodes| {
        let found = nodes.contains(&node);
        if !found {
            if nodes.len() == REMEMBERED {
                nodes.pop_front();
            }
            nodes.push_back(node);
        }
        found
    });
    let grad = if found { B::sum(given(grads), grad) } else { grad };
    grads.register::<B>(node, grad);
}

/// [`give`] to a parent, whose type has no public name.
macro_rules! give {
    ($backend:ty, $grads:expr, $node:expr, $grad:expr) => {{
        let (node, leaf) = ($node, $node.parents.is_empty());
        give::<$backend>($grads, node.id, leaf, |grads| grads.consume::<$backend>(node), $grad);
    }};
}

/// Parents: input, weight and, if there is one, bias.
#[derive(Debug)]
struct ConvStep;

impl<B: ConvKernels, const N: usize> Backward<B, N> for ConvStep {
    type State = B::Conv;

    fn backward(self, ops: Ops<B::Conv, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let parent = |i: usize| ops.parents.get(i).and_then(Option::as_ref);
        let wanted = [0, 1, 2].map(|i| parent(i).is_some());
        let found = B::conv_backward(ops.state, grad, wanted);
        for (i, grad) in [found.input, found.weight, found.bias].into_iter().enumerate() {
            if let (Some(node), Some(grad)) = (parent(i), grad) {
                give!(B, grads, node, grad);
            }
        }
    }
}

/// Parents: input, weight, bias and, if there is one, residual.
#[derive(Debug)]
struct NormStep;

impl<B: NormKernels, const N: usize> Backward<B, N> for NormStep {
    type State = B::Norm;

    fn backward(self, ops: Ops<B::Norm, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let found = B::norm_backward(ops.state, grad);
        let all = [found.input, found.weight, found.bias, found.residual];
        for (node, grad) in ops.parents.iter().zip(all) {
            if let Some(node) = node {
                give!(B, grads, node, grad);
            }
        }
    }
}

#[derive(Debug)]
struct PoolStep;

impl<B: Kernels> Backward<B, 1> for PoolStep {
    type State = B::Pool;

    fn backward(self, ops: Ops<B::Pool, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = B::pool_backward(ops.state, grads.consume::<B>(&ops.node));
        if let [Some(node)] = &ops.parents {
            give!(B, grads, node, grad);
        }
    }
}

#[derive(Debug)]
struct PixelMeanStep;

impl<B: Kernels> Backward<B, 1> for PixelMeanStep {
    type State = [usize; 2];

    fn backward(self, ops: Ops<[usize; 2], 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = B::pixel_mean_backward(ops.state, grads.consume::<B>(&ops.node));
        if let [Some(node)] = &ops.parents {
            give!(B, grads, node, grad);
        }
    }
}

#[derive(Debug)]
struct ActivateStep;

impl<B: NormKernels> Backward<B, 1> for ActivateStep {
    type State = (FloatTensor<B>, Activation);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (kept, activation) = ops.state;
        let grad = B::activate_backward(kept, grads.consume::<B>(&ops.node), activation);
        if let [Some(node)] = &ops.parents {
            give!(B, grads, node, grad);
        }
    }
}

/// Parents: input and factors.
#[derive(Debug)]
struct ScaleStep;

impl<B: Kernels> Backward<B, 2> for ScaleStep {
    type State = [FloatTensor<B>; 2];

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [input, factors] = ops.state;
        let found = B::scale_backward(input, factors, grads.consume::<B>(&ops.node));
        for (node, grad) in ops.parents.iter().zip(found) {
            if let Some(node) = node {
                give!(B, grads, node, grad);
            }
        }
    }
}

/// Parents: both sides.
#[derive(Debug)]
struct AddStep;

impl<B: Kernels> Backward<B, 2> for AddStep {
    type State = ();

    fn backward(self, ops: Ops<(), 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        for node in ops.parents.iter().flatten() {
            give!(B, grads, node, grad.clone());
        }
    }
}

/// Parents: the parts.
#[derive(Debug)]
struct JoinStep;

impl<B: Kernels, const N: usize> Backward<B, N> for JoinStep {
    /// The parts' channels, and whether they are in turn.
    type State = (Vec<usize>, bool);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (channels, in_turn) = ops.state;
        let found = B::join_backward(&channels, grads.consume::<B>(&ops.node), in_turn);
        for (node, grad) in ops.parents.iter().zip(found) {
            if let Some(node) = node {
                give!(B, grads, node, grad);
            }
        }
    }
}

#[derive(Debug)]
struct SomeStep;

impl<B: Kernels> Backward<B, 1> for SomeStep {
    /// Channels of the input, and the first one that is taken.
    type State = [usize; 2];

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [all, first] = ops.state;
        let grad = B::some_backward(all, first, grads.consume::<B>(&ops.node));
        if let [Some(node)] = &ops.parents {
            give!(B, grads, node, grad);
        }
    }
}

/// Records `$step` behind the parents' nodes: `record!(step, C, [nodes], kept, output)`.
macro_rules! record {
    ($step:expr, $strategy:ty, $nodes:expr, $kept:expr, $output:expr) => {
        match $step.prepare::<$strategy>($nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish($kept, $output),
            OpsKind::UnTracked(prep) => prep.finish($output),
        }
    };
}

impl<B: NormKernels + NormOps, C: CheckpointStrategy> NormOps for Autodiff<B, C> {
    fn norm(
        input: Tracked<B, C>,
        weight: Tracked<B, C>,
        bias: Tracked<B, C>,
        options: NormOptions,
    ) -> (Tracked<B, C>, Tracked<B, C>, Tracked<B, C>) {
        let ((input, input_node), (weight, weight_node)) = (input.into_parts(), weight.into_parts());
        let (bias, bias_node) = bias.into_parts();
        let ([output, mean, variance], kept) = B::norm_forward(input, weight, bias, None, options);
        let output = record!(NormStep, C, [input_node, weight_node, bias_node], kept, output);
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
        let ([output, mean, variance], kept) = B::norm_forward(input, weight, bias, Some(residual), options);
        let output = record!(NormStep, C, [input_node, weight_node, bias_node, residual_node], kept, output);
        (output, Tracked::<B, C>::new(mean), Tracked::<B, C>::new(variance))
    }

    fn activate(input: Tracked<B, C>, activation: Activation) -> Tracked<B, C> {
        let (input, node) = input.into_parts();
        let output = B::activate_forward(input.clone(), activation);
        // A ReLU's result tells its slope, and is kept anyway by what follows.
        let kept = if activation == Activation::Relu { output.clone() } else { input };
        record!(ActivateStep, C, [node], (kept, activation), output)
    }
}

impl<B: ConvKernels + ConvOps, C: CheckpointStrategy> ConvOps for Autodiff<B, C> {
    fn conv(input: Tracked<B, C>, weight: Tracked<B, C>, options: ConvOptions, relu: bool) -> Tracked<B, C> {
        let ((input, input_node), (weight, weight_node)) = (input.into_parts(), weight.into_parts());
        let (output, kept) = B::conv_forward(input, weight, None, options, relu);
        record!(ConvStep, C, [input_node, weight_node], kept, output)
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
        let (output, kept) = B::conv_forward(input, weight, Some(bias), options, relu);
        record!(ConvStep, C, [input_node, weight_node, bias_node], kept, output)
    }
}

impl<B: Kernels + TrainingOps, C: CheckpointStrategy> TrainingOps for Autodiff<B, C> {
    fn dense(input: Tracked<B, C>, weight: Tracked<B, C>, bias: Tracked<B, C>, relu: bool) -> Tracked<B, C> {
        let ((input, input_node), (weight, weight_node)) = (input.into_parts(), weight.into_parts());
        let (bias, bias_node) = bias.into_parts();
        let (output, kept) = B::dense_forward(input, weight, bias, relu);
        record!(ConvStep, C, [input_node, weight_node, bias_node], kept, output)
    }

    fn pool(input: Tracked<B, C>, options: PoolOptions) -> Tracked<B, C> {
        let (input, node) = input.into_parts();
        let (output, kept) = B::pool_forward(input, options);
        record!(PoolStep, C, [node], kept, output)
    }

    fn pixel_mean(input: Tracked<B, C>) -> Tracked<B, C> {
        let (input, node) = input.into_parts();
        let shape = input.shape();
        let size = [shape[2], shape[3]];
        let output = B::pixel_mean_forward(input);
        record!(PixelMeanStep, C, [node], size, output)
    }

    fn scale(input: Tracked<B, C>, factors: Tracked<B, C>) -> Tracked<B, C> {
        let ((input, input_node), (factors, factors_node)) = (input.into_parts(), factors.into_parts());
        let output = B::scale_forward(input.clone(), factors.clone());
        record!(ScaleStep, C, [input_node, factors_node], [input, factors], output)
    }

    fn join_two(a: Tracked<B, C>, b: Tracked<B, C>, in_turn: bool) -> Tracked<B, C> {
        let kept = (vec![a.shape()[1], b.shape()[1]], in_turn);
        let ((a, a_node), (b, b_node)) = (a.into_parts(), b.into_parts());
        let output = B::join_forward(vec![a, b], in_turn);
        record!(JoinStep, C, [a_node, b_node], kept, output)
    }

    fn join_three(a: Tracked<B, C>, b: Tracked<B, C>, c: Tracked<B, C>) -> Tracked<B, C> {
        let kept = (vec![a.shape()[1], b.shape()[1], c.shape()[1]], false);
        let ((a, a_node), (b, b_node), (c, c_node)) = (a.into_parts(), b.into_parts(), c.into_parts());
        let output = B::join_forward(vec![a, b, c], false);
        record!(JoinStep, C, [a_node, b_node, c_node], kept, output)
    }

    fn some(input: Tracked<B, C>, first: usize, count: usize) -> Tracked<B, C> {
        let (input, node) = input.into_parts();
        let all = input.shape()[1];
        let output = B::some_forward(input, first, count);
        record!(SomeStep, C, [node], [all, first], output)
    }

    fn add(left: Tracked<B, C>, right: Tracked<B, C>) -> Tracked<B, C> {
        let ((left, left_node), (right, right_node)) = (left.into_parts(), right.into_parts());
        let output = B::sum(left, right);
        record!(AddStep, C, [left_node, right_node], (), output)
    }
}
