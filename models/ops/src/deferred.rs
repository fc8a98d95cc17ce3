//! Deferred batch norms on a GPU: the operation that reads the output applies the batch norm while it loads its input (prologue
//! fusion). The computations of a backend ([`DeferredKernels`]) and their autodiff steps.
//!
//! The output of such a batch norm is not in memory. In the graph, the batch norm's input replaces the output, and the gradient of
//! this node is the gradient of the normalised values, before the activation. So a convolution and its batch norm are one step of
//! the backward pass, and no other operation may read the node.

use std::fmt::Debug;

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn::tensor::Tensor;

use crate::accumulate::{accumulate, accumulate_all, mark_registered, take_addend};
use crate::autodiff::{ConvStep, record};
use crate::extension::{Activation, ConvKernels, ConvOptions, RunningStats};

/// A batch norm with batch statistics. The operation that reads its output applies it.
#[derive(Debug, Clone)]
pub(crate) struct DeferredNorm {
    /// `[4·C]`, without autodiff: for each channel the mean, the reciprocal of the standard deviation, scale and shift
    /// (`x · scale + shift`).
    pub(crate) statistics: Tensor<1>,
    /// Weight and bias, `[C]`, without autodiff.
    pub(crate) affine: [Tensor<1>; 2],
    /// Applied to the normalised values, or to their sum with a residual.
    pub(crate) activation: Activation,
}

/// Options of a convolution and its batch norm.
#[derive(Debug, Clone)]
pub(crate) struct ConvNormOptions {
    pub(crate) conv: ConvOptions,
    /// The batch norm that is applied to the input.
    pub(crate) input: Option<DeferredNorm>,
    pub(crate) epsilon: f64,
    pub(crate) running: RunningStats,
}

/// Options of a pass that computes the output of a batch norm.
#[derive(Debug, Clone)]
pub(crate) struct ApplyOptions {
    pub(crate) norm: DeferredNorm,
    /// The batch norm, without activation, that is applied to the residual.
    pub(crate) residual: Option<DeferredNorm>,
    /// Whether the result is the mean of the output over all pixels, `[B, C]` in f32, instead of the output.
    pub(crate) pooled: bool,
}

/// Gradients of a convolution and its batch norm; those of the convolution are `None` where not required.
#[derive(Debug)]
pub(crate) struct ConvNormGrads<B: Backend> {
    pub(crate) input: Option<FloatTensor<B>>,
    pub(crate) weight: Option<FloatTensor<B>>,
    /// Of the batch norm's weight and bias.
    pub(crate) affine: [FloatTensor<B>; 2],
}

/// Deferred batch norms of a backend without autodiff.
pub(crate) trait DeferredKernels: ConvKernels {
    /// Saved tensors of a convolution and its batch norm.
    type SavedConvNorm: Clone + Debug + Send + 'static;
    /// Saved tensors of a pass that computes the output of a batch norm.
    type SavedApply: Clone + Debug + Send + 'static;

    /// Convolves `input` `[B, in, H, W]` with `weight` `[out, in / groups, kh, kw]`. `affine` are weight and bias of the batch
    /// norm, `[out]`. Returns the convolution's output `[B, out, …]`, [`DeferredNorm::statistics`], and the new running mean and
    /// variance.
    fn conv_norm_forward(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        affine: [FloatTensor<Self>; 2],
        options: ConvNormOptions,
    ) -> ([FloatTensor<Self>; 4], Self::SavedConvNorm);
    /// Computes the gradients from `grad`, the gradient of the normalised values. `required`: whether the gradients of input and
    /// weight are required. `addend` is added to the gradient of the input.
    fn conv_norm_backward(
        saved: Self::SavedConvNorm,
        grad: FloatTensor<Self>,
        addend: Option<FloatTensor<Self>>,
        required: [bool; 2],
    ) -> ConvNormGrads<Self>;

    /// Convolves the output of a batch norm, whose input is `input`. Shapes are those of [`Self::conv_norm_forward`].
    fn conv_deferred_forward(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        options: ConvOptions,
        norm: DeferredNorm,
    ) -> (FloatTensor<Self>, Self::SavedConv);

    /// Computes the output of a batch norm, `[B, C, H, W]`, with a residual added before the activation; or, if
    /// [`ApplyOptions::pooled`], the mean of this output over all pixels, `[B, C]`.
    fn apply_norm_forward(
        input: FloatTensor<Self>,
        residual: Option<FloatTensor<Self>>,
        options: ApplyOptions,
    ) -> (FloatTensor<Self>, Self::SavedApply);
    /// Computes the gradient of the normalised values and of the residual, which are equal, from that of the result.
    fn apply_norm_backward(saved: Self::SavedApply, grad: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Deferred batch norms, differentiable.
#[backend_extension(Autodiff, Cube)]
pub(crate) trait DeferredOps: Backend {
    /// See [`DeferredKernels::conv_norm_forward`].
    fn conv_norm(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        norm_bias: FloatTensor<Self>,
        options: ConvNormOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
    /// See [`DeferredKernels::conv_deferred_forward`].
    fn conv_deferred(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        options: ConvOptions,
        norm: DeferredNorm,
    ) -> FloatTensor<Self>;
    /// See [`DeferredKernels::apply_norm_forward`].
    fn apply_norm(input: FloatTensor<Self>, options: ApplyOptions) -> FloatTensor<Self>;
    /// [`Self::apply_norm`] with a residual.
    fn apply_norm_add(
        input: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        options: ApplyOptions,
    ) -> FloatTensor<Self>;
}

type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// Parents: input, weight, and weight and bias of the batch norm.
#[derive(Debug)]
struct ConvNormStep;

impl<B: DeferredKernels> Backward<B, 4> for ConvNormStep {
    type State = B::SavedConvNorm;

    fn backward(self, ops: Ops<B::SavedConvNorm, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let [input, weight, ..] = &ops.parents;
        let addend = take_addend!(B, grads, input.as_ref());
        let required = [input.is_some(), weight.is_some()];
        let found = B::conv_norm_backward(ops.state, grad, addend, required);
        if let (Some(node), Some(grad)) = (input, found.input) {
            grads.register::<B>(node.id, grad);
        }
        let [of_weight, of_bias] = found.affine;
        accumulate_all!(B, grads, ops.parents[1..], [found.weight, Some(of_weight), Some(of_bias)]);
    }
}

/// Parents: the batch norm's input and, if there is a residual, the residual.
#[derive(Debug)]
struct ApplyStep;

impl<B: DeferredKernels, const N: usize> Backward<B, N> for ApplyStep {
    type State = B::SavedApply;

    fn backward(self, ops: Ops<B::SavedApply, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = B::apply_norm_backward(ops.state, grads.consume::<B>(&ops.node));
        accumulate_all!(B, grads, ops.parents, [grad.clone(), grad]);
    }
}

impl<B: DeferredKernels + DeferredOps, C: CheckpointStrategy> DeferredOps for Autodiff<B, C> {
    fn conv_norm(
        input: Tracked<B, C>,
        weight: Tracked<B, C>,
        norm_weight: Tracked<B, C>,
        norm_bias: Tracked<B, C>,
        options: ConvNormOptions,
    ) -> (Tracked<B, C>, Tracked<B, C>, Tracked<B, C>, Tracked<B, C>) {
        let ((input, input_node), (weight, weight_node)) = (input.into_parts(), weight.into_parts());
        let ((scale, scale_node), (shift, shift_node)) = (norm_weight.into_parts(), norm_bias.into_parts());
        let ([output, statistics, mean, variance], saved) =
            B::conv_norm_forward(input, weight, [scale, shift], options);
        let output = record!(ConvNormStep, C, [input_node, weight_node, scale_node, shift_node], saved, output);
        let [statistics, mean, variance] = [statistics, mean, variance].map(Tracked::<B, C>::new);
        (output, statistics, mean, variance)
    }

    fn conv_deferred(
        input: Tracked<B, C>,
        weight: Tracked<B, C>,
        options: ConvOptions,
        norm: DeferredNorm,
    ) -> Tracked<B, C> {
        let ((input, input_node), (weight, weight_node)) = (input.into_parts(), weight.into_parts());
        let (output, saved) = B::conv_deferred_forward(input, weight, options, norm);
        record!(ConvStep, C, [input_node, weight_node], saved, output)
    }

    fn apply_norm(input: Tracked<B, C>, options: ApplyOptions) -> Tracked<B, C> {
        let (input, node) = input.into_parts();
        let (output, saved) = B::apply_norm_forward(input, None, options);
        record!(ApplyStep, C, [node], saved, output)
    }

    fn apply_norm_add(input: Tracked<B, C>, residual: Tracked<B, C>, options: ApplyOptions) -> Tracked<B, C> {
        let ((input, node), (residual, residual_node)) = (input.into_parts(), residual.into_parts());
        let (output, saved) = B::apply_norm_forward(input, Some(residual), options);
        record!(ApplyStep, C, [node, residual_node], saved, output)
    }
}
