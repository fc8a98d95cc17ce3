//! Batch norm with a fused epilogue: an added residual and an activation.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::{Tensor, module};

use crate::dispatch::{has_cpu_kernels, has_gpu_kernels, has_image_kernels, upcast};
use crate::extension::{Activation, ConvOptions, EvalOps, NormOps, NormOptions, RunningStats};
use crate::features::conv2d;
use crate::functional::{activate, add};
use crate::statistics::StatisticsReduce;
use crate::sync_batch_norm;
use crate::trace::{Operand, Operation, start_fused};
use crate::update::ema_update;

/// Epilogue of a batch norm: operations on the normalised values.
#[derive(Debug, Clone, Default)]
pub struct Epilogue {
    /// Is added to the normalised values, `[B, C, H, W]`.
    pub residual: Option<Tensor<4>>,
    /// Is applied last.
    pub activation: Activation,
}

impl Epilogue {
    /// Applies the epilogue with burn's operations.
    fn apply(self, output: Tensor<4>) -> Tensor<4> {
        let output = match self.residual {
            Some(residual) => output + residual,
            None => output,
        };
        activate(output, self.activation)
    }

    /// Casts the residual to the element type of `input`.
    fn cast_like(self, input: &Tensor<4>) -> Self {
        Self { residual: self.residual.map(|residual| residual.cast(input.dtype())), ..self }
    }
}

/// Results of [`batch_norm_train`].
#[derive(Debug, Clone)]
pub struct BatchNormOutput {
    /// `[B, C, H, W]`.
    pub output: Tensor<4>,
    /// The batch's mean of each channel, `[C]`, or the updated running mean if running statistics were given. It has no
    /// gradient.
    pub mean: Tensor<1>,
    /// The batch's unbiased variance of each channel, `[C]`, or the updated running variance.
    pub variance: Tensor<1>,
}

/// Applies batch norm in training mode and the epilogue in one operation, `torch.nn.functional.batch_norm(training=True)`.
///
/// With `process_group`, the statistics are those of all ranks' batches (`torch.nn.SyncBatchNorm`). Their sums stay on GPUs that
/// can exchange them ([`StatisticsReduce::on_device`]), and pass through the host in f64 elsewhere. With `running`, the result has
/// the updated running statistics instead of the batch's.
///
/// Statistics, weight and bias are f32, and sums are at least f32. The output has the input's element type.
///
/// # Shapes
///
/// - input `[B, C, H, W]`, weight and bias `[C]`
pub fn batch_norm_train(
    input: Tensor<4>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    epsilon: f64,
    epilogue: Epilogue,
    process_group: Option<Arc<dyn StatisticsReduce>>,
    running: Option<RunningStats>,
) -> BatchNormOutput {
    let on_gpu = process_group.as_ref().is_none_or(|process_group| process_group.on_device().is_some())
        && has_gpu_kernels(&input);
    // The GPU kernels update the running statistics themselves.
    let (fused, separate) = if on_gpu { (running, None) } else { (None, running) };
    let batch = normalise(input, [weight, bias], epsilon, epilogue, process_group, on_gpu, fused);
    let Some(RunningStats { mean, variance, momentum }) = separate else { return batch };
    let of_batch = [batch.mean.without_autodiff(), batch.variance.without_autodiff()];
    let updated = ema_update(1.0 - momentum, [mean, variance].into_iter().zip(of_batch).collect());
    let [mean, variance] = updated.try_into().expect("as many as went in");
    BatchNormOutput { output: batch.output, mean, variance }
}

/// Computes [`batch_norm_train`]. `running` may be given only if `on_gpu` is true, because only the GPU kernels update it.
fn normalise(
    input: Tensor<4>,
    [weight, bias]: [Tensor<1>; 2],
    epsilon: f64,
    epilogue: Epilogue,
    process_group: Option<Arc<dyn StatisticsReduce>>,
    on_gpu: bool,
    running: Option<RunningStats>,
) -> BatchNormOutput {
    let (dtype, dims) = (input.dtype(), input.dims());
    let [vectors, channels] = [[weight.dims(), bias.dims()], [[dims[1]]; 2]];
    assert!(vectors == channels, "batch norm of {dims:?} with weight and bias of {vectors:?}");
    let residual = epilogue.residual.as_ref().map(Tensor::dims);
    assert!(residual.is_none_or(|residual| residual == dims), "batch norm of {dims:?} with a residual of {residual:?}");
    if has_cpu_kernels(&input) || on_gpu {
        let epilogue = epilogue.cast_like(&input);
        // With a residual, the input of the activation is not kept for the backward pass. ReLU's derivative follows from its
        // output; any other activation is a separate operation.
        let (fused, separate) = match (&epilogue.residual, epilogue.activation) {
            (None, fused) | (Some(_), fused @ Activation::Relu) => (fused, Activation::Identity),
            (Some(_), separate) => (Activation::Identity, separate),
        };
        let options = NormOptions { epsilon, activation: fused, process_group, running };
        let (input, weight, bias) = (input.into_dispatch(), weight.into_dispatch(), bias.into_dispatch());
        let (output, mean, variance) = match epilogue.residual {
            Some(residual) => Dispatch::norm_add(input, weight, bias, residual.into_dispatch(), options),
            None => Dispatch::norm(input, weight, bias, options),
        };
        return BatchNormOutput {
            output: activate(Tensor::from_dispatch(output), separate),
            mean: Tensor::from_dispatch(mean),
            variance: Tensor::from_dispatch(variance),
        };
    }
    let input = upcast(input);
    let epilogue = epilogue.cast_like(&input);
    if let Some(process_group) = process_group {
        let (output, [mean, variance]) = sync_batch_norm::normalise(input, weight, bias, epsilon, &process_group);
        return BatchNormOutput { output: epilogue.apply(output).cast(dtype), mean, variance };
    }
    let [batch, _, height, width] = input.dims();
    let count = (batch * height * width) as f64;
    let batch = module::batch_norm_train(input, weight, bias, epsilon);
    let variance = batch.variance * (count / (count - 1.0));
    BatchNormOutput { output: epilogue.apply(batch.output).cast(dtype), mean: batch.mean, variance }
}

/// Applies batch norm with the given statistics and the epilogue, `torch.nn.functional.batch_norm(training=False)`.
///
/// Without gradients, custom kernels compute the output in one pass, if there are kernels for the device and the element type. With
/// gradients, a frozen batch norm (no gradient for weight and bias) runs as a depthwise convolution on the CPU. All other cases use
/// burn's operations. Shapes and element types are those of [`batch_norm_train`].
///
/// # Panics
///
/// When a vector has not one value for each channel, or the residual has another shape than the input.
pub fn batch_norm_eval(
    input: Tensor<4>,
    affine: [Tensor<1>; 2],
    statistics: [Tensor<1>; 2],
    epsilon: f64,
    epilogue: Epilogue,
) -> Tensor<4> {
    let ([weight, bias], [mean, variance]) = (&affine, &statistics);
    let operands: [&dyn Operand; 5] = [&input, weight, bias, mean, variance];
    let operation = Operation::BatchNorm { epsilon };
    let call = start_fused(operation, &operands, epilogue.residual.as_ref(), epilogue.activation);
    call.end(batch_norm_eval_unrecorded(input, affine, statistics, epsilon, epilogue))
}

/// Computes [`batch_norm_eval`] without recording the call.
fn batch_norm_eval_unrecorded(
    input: Tensor<4>,
    [weight, bias]: [Tensor<1>; 2],
    [mean, variance]: [Tensor<1>; 2],
    epsilon: f64,
    epilogue: Epilogue,
) -> Tensor<4> {
    let channels = input.dims()[1];
    for vector in [&weight, &bias, &mean, &variance] {
        assert_eq!(vector.dims(), [channels], "batch norm of {channels} channels");
    }
    let residual = epilogue.residual.as_ref().map(Tensor::dims);
    assert!(
        residual.is_none_or(|residual| residual == input.dims()),
        "a residual of {residual:?} for {:?}",
        input.dims()
    );
    let (dtype, autodiff) = (input.dtype(), input.is_autodiff());
    let trained = weight.is_tracked() || bias.is_tracked();
    let tracked = trained || input.is_tracked() || epilogue.residual.as_ref().is_some_and(Tensor::is_tracked);
    if tracked && !trained && has_cpu_kernels(&input) {
        return scale_and_shift(input, [weight, bias], [mean, variance], epsilon, epilogue);
    }
    if tracked || !has_image_kernels(&input) {
        let input = upcast(input);
        let epilogue = epilogue.cast_like(&input);
        return epilogue.apply(module::batch_norm(input, weight, bias, mean, variance, epsilon)).cast(dtype);
    }
    let epilogue = epilogue.cast_like(&input);
    let [weight, bias, mean, variance] =
        [weight, bias, mean, variance].map(|vector| vector.without_autodiff().into_dispatch());
    let input = input.without_autodiff().into_dispatch();
    let residual = epilogue.residual.map(Tensor::without_autodiff);
    let output = Tensor::from_dispatch(match residual {
        Some(residual) => Dispatch::norm_eval_add(
            input,
            weight,
            bias,
            mean,
            variance,
            residual.into_dispatch(),
            epsilon,
            epilogue.activation,
        ),
        None => Dispatch::norm_eval(input, weight, bias, mean, variance, epsilon, epilogue.activation),
    });
    if autodiff { output.autodiff() } else { output }
}

/// Applies a batch norm with constant statistics, weight and bias, as a factor and a summand of each channel. A depthwise
/// convolution of one pixel has kernels for both passes, and does not round its weights.
fn scale_and_shift(
    input: Tensor<4>,
    [weight, bias]: [Tensor<1>; 2],
    [mean, variance]: [Tensor<1>; 2],
    epsilon: f64,
    epilogue: Epilogue,
) -> Tensor<4> {
    let Epilogue { residual, activation } = epilogue.cast_like(&input);
    let [weight, bias, mean, variance] = [weight, bias, mean, variance].map(Tensor::without_autodiff);
    let channels = weight.dims()[0];
    let scale = weight / variance.add_scalar(epsilon).sqrt();
    let shift = bias - mean * scale.clone();
    let options = ConvOptions::stride_one(channels);
    let relu = residual.is_none() && activation == Activation::Relu;
    let output = conv2d(input, scale.reshape([channels, 1, 1, 1]), Some(shift), options, relu);
    match residual {
        Some(residual) => activate(add(output, residual), activation),
        None if relu => output,
        None => activate(output, activation),
    }
}
