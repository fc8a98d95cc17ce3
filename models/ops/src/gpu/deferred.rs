//! Deferred batch norms: convolutions apply them to the values that they load (`implicit_gemm/prologue.cu`).
//!
//! Number of launches: no launch for the batch norm if only a 1x1 or depthwise convolution reads its output. One launch if other
//! operations read the output ([`apply_forward`]); it also computes the pooled mean if only pooling reads it. The backward pass
//! takes one more launch if no convolution has computed the sums over the gradient, and one more if the convolution before the
//! batch norm has windows ([`launch_input_gradient`]).

use std::sync::Arc;

use burn::backend::{BackendTensor, Cube, DispatchTensorKind, TensorMetadata};
use burn::tensor::{Shape, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::conv::{SavedConv, applies_norms, backward_of, depthwise, on_tensor_cores, tensor_core_forward};
use super::deferred_apply::{Applied, launch_apply};
use super::deferred_gradient::GradientPass;
use super::direct::is_depthwise;
use super::implicit_gemm::{Fused, Groups, NormFactors, OutputGradient, StatisticsOfBatch, supports_activation};
use super::norm_input_gradient::launch_input_gradient;
use super::rows::Rows;
use super::side_results::{NormGradientResult, NormOutput, ResidualNorm};
use super::storage::{storage_of, writable_storage};
use crate::deferred::{ApplyOptions, ConvNormGrads, ConvNormOptions, DeferredNorm};
use crate::extension::{Activation, ConvGrads, ConvOptions};
use crate::gpu_conv::GpuConv;

/// A deferred batch norm on a GPU, see [`DeferredNorm`].
#[derive(Debug, Clone)]
pub(super) struct Deferred {
    /// `[4·C]`, see [`Self::statistic`].
    statistics: CubeTensor,
    pub(super) affine: [CubeTensor; 2],
    pub(super) activation: Activation,
}

/// The statistics of a batch norm, in the order of their vectors.
#[derive(Debug, Clone, Copy)]
pub(super) enum Statistic {
    Mean,
    /// Reciprocal of the standard deviation.
    InvStd,
    Scale,
    Shift,
}

impl Deferred {
    fn new(norm: &DeferredNorm) -> Self {
        let on_gpu =
            |vector: &Tensor<1>| storage_of(vector).expect("statistics and parameters are f32 and on the input's GPU");
        let DeferredNorm { statistics, affine, activation } = norm;
        Self { statistics: on_gpu(statistics), affine: affine.each_ref().map(on_gpu), activation: *activation }
    }

    /// Returns one of the statistics of all channels, `[C]`.
    pub(super) fn statistic(&self, which: Statistic) -> CubeTensor {
        let CubeTensor { client, handle, meta, device, dtype, .. } = self.statistics.clone();
        let channels = meta.num_elements() / 4;
        let handle = handle.offset_start((which as usize * channels * dtype.size()) as u64);
        CubeTensor::new_contiguous(client, device, Shape::from([channels]), handle, dtype)
    }

    pub(super) fn statistics(&self) -> &CubeTensor {
        &self.statistics
    }

    /// Returns the batch norm for the operations that read its output and compute the output's gradient. `out` is `x` if the output
    /// is not in memory.
    pub(super) fn output(&self, [x, out]: [&Rows; 2], from_output: bool) -> NormOutput {
        let [mean, inv_std] = [Statistic::Mean, Statistic::InvStd].map(|which| self.statistic(which));
        let mut output = NormOutput::new([x, out], [&mean, &inv_std], &self.affine, self.activation, from_output);
        output.masked = true;
        output
    }
}

/// Saved tensors of a convolution and its batch norm.
#[derive(Debug, Clone)]
pub struct SavedConvNorm {
    conv: SavedConv,
    /// The convolution's output.
    x: Rows,
    norm: Deferred,
}

/// Saved tensors of a pass that computes the output of a batch norm.
#[derive(Debug, Clone)]
pub struct SavedApply {
    x: Rows,
    /// The output, if ReLU's derivative is computed from it.
    out: Option<Rows>,
    norm: Deferred,
    /// The input of the residual's batch norm, if the pass has applied this batch norm.
    residual: Option<(Rows, Deferred)>,
    /// The batch norm whose output is the residual.
    source: Option<Arc<NormOutput>>,
    /// Whether the result is the mean over all pixels.
    pooled: bool,
}

/// Returns the storage of images on a GPU, without autodiff.
fn storage(images: &Tensor<4>) -> Option<CubeTensor> {
    match images.clone().without_autodiff().into_dispatch().kind {
        DispatchTensorKind::Cube(BackendTensor::Float(tensor)) => Some(tensor),
        _ => None,
    }
}

/// Returns true if the kernels of a convolution can apply a batch norm to its input (`side` 0) or output (1): on tensor cores, and
/// those of depthwise convolutions.
fn fits(input: &Tensor<4>, weight: [usize; 4], options: &ConvOptions, side: usize) -> bool {
    crate::dispatch::has_gpu_kernels(input)
        && Groups::of(weight, options).has_whole_chunks(side, input.dtype())
        && storage(input)
            .is_some_and(|input| on_tensor_cores(&input, weight, options) || applies_norms(&input, weight, options))
}

/// Returns true for a convolution on tensor cores that reads each pixel for several taps. Applying a batch norm to each of these
/// values takes longer than a pass that writes the normalised images once.
fn has_windows(weight: [usize; 4], options: &ConvOptions) -> bool {
    let [.., height, width] = weight;
    height * width > 1 && !is_depthwise(weight, options)
}

/// Returns true if a convolution can apply a deferred batch norm to its input.
pub(crate) fn reads_deferred(input: &Tensor<4>, weight: [usize; 4], options: &ConvOptions) -> bool {
    !has_windows(weight, options) && fits(input, weight, options, 0)
}

/// Returns true if the batch norm after a convolution can be deferred.
pub(crate) fn defers_norm(
    input: &Tensor<4>,
    weight: [usize; 4],
    options: &ConvOptions,
    activation: Activation,
) -> bool {
    GpuConv::chosen() == GpuConv::Custom && supports_activation(activation) && fits(input, weight, options, 1)
}

/// Convolves without bias.
fn convolve(
    input: CubeTensor,
    weight: CubeTensor,
    options: &ConvOptions,
    fused: Fused,
) -> (CubeTensor, SavedConv, Option<CubeTensor>) {
    match on_tensor_cores(&input, weight.shape().dims(), options) {
        true => tensor_core_forward(input, weight, None, options, false, fused),
        false => depthwise(input, weight, options, fused),
    }
}

/// See [`DeferredKernels`](crate::deferred::DeferredKernels).
pub(super) fn conv_norm_forward(
    input: CubeTensor,
    weight: CubeTensor,
    affine: [CubeTensor; 2],
    options: ConvNormOptions,
) -> ([CubeTensor; 4], SavedConvNorm) {
    let ConvNormOptions { conv, input: input_norm, epsilon, running } = options;
    // Update running statistics in place: a recorded graph of the step runs again on the same memory.
    let running_vectors = [running.mean, running.variance]
        .map(|tensor| writable_storage(tensor).expect("running statistics are f32 and on the input's device"));
    let statistics = StatisticsOfBatch {
        affine: affine.map(into_contiguous),
        running: running_vectors,
        epsilon: epsilon as f32,
        momentum: running.momentum as f32,
    };
    let fused = Fused { input: input_norm.as_ref().map(Deferred::new), statistics: Some(&statistics) };
    let (output, saved, of_batch) = convolve(input, weight, &conv, fused);
    let of_batch = of_batch.expect("statistics were requested");
    let StatisticsOfBatch { affine, running: [mean, variance], .. } = statistics;
    // The gradient of the normalised values does not depend on the activation, which the reader applies.
    let norm = Deferred { statistics: of_batch.clone(), affine, activation: Activation::Identity };
    let x = Rows::new(output.clone());
    ([output, of_batch, mean, variance], SavedConvNorm { conv: saved, x, norm })
}

/// Computes the gradients of a convolution and its batch norm.
pub(super) fn conv_norm_backward(
    saved: SavedConvNorm,
    grad: CubeTensor,
    addend: Option<CubeTensor>,
    [input, weight]: [bool; 2],
) -> ConvNormGrads<Cube> {
    NormOutput::clear();
    let SavedConvNorm { conv, x, norm } = saved;
    let grad = Rows::new(grad);
    let NormGradientResult { affine, factors } = NormGradientResult::take(&grad, &x).unwrap_or_else(|| {
        let pass =
            GradientPass { x: &x, norm: &norm, residual: None, dy: &grad, pooled: false, out: None, masked: None };
        pass.launch().0
    });
    let gradient = if input && has_windows(conv.weight.shape().dims(), &conv.options) {
        OutputGradient { grad: launch_input_gradient(&x, &grad, &factors), norm: None }
    } else {
        // The kernel reads both matrices at the same offsets, in whole chunks.
        let grad = if grad.pitch(1) == x.pitch(1) && grad.is_aligned() { grad } else { grad.dense_copy() };
        assert_eq!(grad.pitch(1), x.pitch(1), "the output of a deferred batch norm has rows without gaps");
        OutputGradient { grad, norm: Some(NormFactors { input: x, factors }) }
    };
    let ConvGrads { input, weight, .. } = backward_of(conv, gradient, addend, [input, weight, false]);
    ConvNormGrads { input, weight, affine }
}

/// Convolves the output of a batch norm.
pub(super) fn conv_deferred_forward(
    input: CubeTensor,
    weight: CubeTensor,
    options: &ConvOptions,
    norm: &DeferredNorm,
) -> (CubeTensor, SavedConv) {
    let fused = Fused { input: Some(Deferred::new(norm)), statistics: None };
    let (output, saved, _) = convolve(input, weight, options, fused);
    (output, saved)
}

/// Computes `activation(norm(input) + residual)` or, if pooled, its mean over all pixels.
pub(super) fn apply_forward(
    input: CubeTensor,
    residual: Option<CubeTensor>,
    options: &ApplyOptions,
) -> (CubeTensor, SavedApply) {
    let (x, residual) = (Rows::new(input), residual.map(Rows::new));
    let norm = Deferred::new(&options.norm);
    let residual_norm = options.residual.as_ref().map(Deferred::new);
    let source = residual.as_ref().filter(|_| residual_norm.is_none()).and_then(NormOutput::register_reader);
    let (from_output, pooled) = (residual.is_some() && norm.activation == Activation::Relu, options.pooled);
    let Applied { out, means } =
        launch_apply(&x, residual.as_ref(), &norm, residual_norm.as_ref(), [pooled, from_output]);
    let saved_out = out.clone().filter(|_| from_output);
    let residual = residual.zip(residual_norm);
    // Other readers of the output do not count themselves. If such a reader adds its gradient later, this operation masks the sum a
    // second time, which has no effect for these activations.
    let known = matches!(norm.activation, Activation::Identity | Activation::Relu | Activation::Relu6);
    if let Some(out) = out.as_ref().filter(|_| known && !pooled) {
        let mut output = norm.output([&x, out], from_output);
        output.residual = residual.as_ref().map(|(x, norm)| ResidualNorm {
            x: x.clone(),
            mean: norm.statistic(Statistic::Mean),
            inv_std: norm.statistic(Statistic::InvStd),
            weight: norm.affine[0].clone(),
        });
        output.keep();
    }
    let result = means.or(out).expect("a pass without means computes the output").into_tensor();
    (result, SavedApply { x, out: saved_out, norm, residual, source, pooled })
}

/// Computes the gradient of the normalised values.
pub(super) fn apply_backward(saved: SavedApply, grad: CubeTensor) -> CubeTensor {
    NormOutput::clear();
    let SavedApply { x, out, norm, residual, source, pooled } = saved;
    // The batch norm in front counts this operation as a reader, but it computes no sums for it.
    if let Some(source) = source {
        source.finish_reader();
    }
    let dy = Rows::new(grad.clone());
    if !pooled && (norm.activation == Activation::Identity || NormGradientResult::is_kept(&dy, &x)) {
        return grad;
    }
    let (masked, residual) = (x.empty_like(), residual.as_ref().map(|(x, norm)| (x, norm)));
    let pass = GradientPass { x: &x, norm: &norm, residual, dy: &dy, pooled, out: out.as_ref(), masked: Some(&masked) };
    let (values, of_residual) = pass.launch();
    NormGradientResult::keep(&masked, &x, values);
    if let Some(((input, _), values)) = residual.zip(of_residual) {
        NormGradientResult::keep(&masked, input, values);
    }
    masked.into_tensor()
}
