//! The operations that training spends its time in, with kernels and backward passes of our own.
//!
//! On burn's CPU backend, for `f32`, these functions run the kernels of `cpu`, registered through burn's backend
//! extension with one autodiff step each ([`Kernels`]). On an NVIDIA GPU grouped convolutions, batch norm, activations and the
//! optimizer's step run those of `gpu` ([`ConvKernels`], [`NormKernels`]). Everything else, and any other device or element
//! type, composes burn's operations. Layers call them; models do not know of them.
//!
//! # Memory order
//!
//! The kernels keep images channels-last in memory while their shape stays `[batch, channels, height, width]`; they
//! convert what arrives in another order, and any operation of burn works on what leaves.
//!
//! # Determinism
//!
//! A run repeats bit for bit on one machine with one number of threads. With another number of threads only the
//! gradients of convolution and linear weights change, in their last bits: each thread sums a part of the batch, and
//! the parts are added in order. Another instruction set rounds differently everywhere.

#![allow(unsafe_code, reason = "kernels: vector instructions, pointer tables, buffers that tasks share")]

mod autodiff;
mod compose;
mod cpu;
mod extension;
#[cfg(all(feature = "cuda", not(feature = "fusion")))]
#[allow(unsafe_code, reason = "launches that check no bounds")]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments are bound one by one")]
mod gpu;
mod shared;
mod statistics;
mod update;

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::ops::MaxPoolOptions;
use burn::tensor::{DType, Device, FloatDType, Tensor, activation, module};

pub use compose::{add, avg_pool2d, channels, concat, interleave, scale_channels};
pub use cpu::tensor_over;
pub use extension::{
    Activation, BatchNormGrads, ConvGrads, ConvKernels, ConvOptions, Kernels, NormKernels, NormOptions, PoolOptions,
    Running,
};
use extension::{ConvOps, EvalOps, NormOps, TrainingOps};
pub use statistics::StatisticsReduce;
pub use update::{ParameterUpdate, UpdateRule, UpdatedParameter, follow, square_sum, update};

/// Whether the kernels here take this tensor.
fn has_kernels<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.dtype() == DType::F32 && tensor.device().inner() == Device::flex()
}

/// Whether those of a GPU take this tensor.
#[cfg(all(feature = "cuda", not(feature = "fusion")))]
fn on_gpu<const D: usize>(tensor: &Tensor<D>) -> bool {
    matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16)
        && matches!(D, 2 | 4)
        // the kernels count elements in 32 bits
        && (1..1 << 31).contains(&tensor.shape().num_elements())
        && matches!(
            tensor.device().inner().as_dispatch(),
            burn::backend::DispatchDevice::Cube(cubecl::Device::Cuda(_))
        )
}

#[cfg(not(all(feature = "cuda", not(feature = "fusion"))))]
fn on_gpu<const D: usize>(_: &Tensor<D>) -> bool {
    false
}

/// Whether there are kernels for convolutions, batch norm and activations of this tensor.
fn has_image_kernels<const D: usize>(tensor: &Tensor<D>) -> bool {
    has_kernels(tensor) || on_gpu(tensor)
}

/// A 16-bit tensor in f32, any other as it is: what is added up over many values, or feeds a loss, is never narrower.
pub fn widened<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::BF16 | DType::F16 => tensor.cast(FloatDType::F32),
        _ => tensor,
    }
}

/// Two-dimensional cross-correlation, `torch.nn.functional.conv2d`, with `relu` behind it if told so.
///
/// # Shapes
///
/// - input `[B, in, H, W]`, weight `[out, in / groups, kh, kw]`, bias `[out]`
/// - output `[B, out, (H + 2·padding − dilation·(kh − 1) − 1) / stride + 1, …]`
///
/// # Panics
///
/// Where shapes do not fit together.
pub fn conv2d(
    input: Tensor<4>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    options: ConvOptions,
    relu: bool,
) -> Tensor<4> {
    if has_image_kernels(&input) {
        let (input, weight) = (input.into_dispatch(), weight.into_dispatch());
        return Tensor::from_dispatch(match bias {
            Some(bias) => Dispatch::conv_bias(input, weight, bias.into_dispatch(), options, relu),
            None => Dispatch::conv(input, weight, options, relu),
        });
    }
    let ConvOptions { stride, padding, dilation, groups } = options;
    let output =
        module::conv2d(input, weight, bias, burn::tensor::ops::ConvOptions::new(stride, padding, dilation, groups));
    if relu { self::relu(output) } else { output }
}

/// `input · weightᵀ + bias`, `torch.nn.functional.linear`, with `relu` behind it if told so.
///
/// # Shapes
///
/// - input `[B, in]`, weight `[out, in]`, bias `[out]`
/// - output `[B, out]`
///
/// # Panics
///
/// Where shapes do not fit together.
pub fn linear(input: Tensor<2>, weight: Tensor<2>, bias: Tensor<1>, relu: bool) -> Tensor<2> {
    if has_kernels(&input) {
        let (input, weight, bias) = (input.into_dispatch(), weight.into_dispatch(), bias.into_dispatch());
        return Tensor::from_dispatch(Dispatch::dense(input, weight, bias, relu));
    }
    let output = module::linear(input, weight.transpose(), Some(bias));
    if relu { self::relu(output) } else { output }
}

/// What follows the normalisation of a batch norm.
#[derive(Debug, Clone, Default)]
pub struct After {
    /// Added to the normalised values, `[B, C, H, W]`.
    pub residual: Option<Tensor<4>>,
    /// At the end.
    pub activation: Activation,
}

impl After {
    fn apply(self, output: Tensor<4>) -> Tensor<4> {
        let output = match self.residual {
            Some(residual) => output + residual,
            None => output,
        };
        activate(output, self.activation)
    }

    /// With a residual of the type that `like` has.
    fn like(self, like: &Tensor<4>) -> Self {
        Self { residual: self.residual.map(|residual| residual.cast(like.dtype())), ..self }
    }
}

/// An activation as burn has it.
fn plain<const D: usize>(input: Tensor<D>, activation: Activation) -> Tensor<D> {
    match activation {
        Activation::Identity => input,
        Activation::Relu => activation::relu(input),
        Activation::Sigmoid => activation::sigmoid(input),
        Activation::Swish => activation::silu(input),
    }
}

/// What [`batch_norm_train`] gives back.
#[derive(Debug, Clone)]
pub struct BatchNormed {
    /// `[B, C, H, W]`.
    pub output: Tensor<4>,
    /// Mean of each channel, `[C]`, or where there is a running one what has become of that; no gradient flows through it.
    pub mean: Tensor<1>,
    /// Unbiased variance of each channel, `[C]`; likewise.
    pub variance: Tensor<1>,
}

/// Batch norm by the batch's statistics, then what follows it, in one operation. With `shared` the batch is all that its
/// sharers hold of it (`torch.nn.SyncBatchNorm`): sums over them pass through the host, in f64.
///
/// Statistics and what is added up for them are f32, weight and bias too; the output has the input's type. `running`
/// statistics take up the batch's, and are then what is given back in their place.
pub fn batch_norm_train(
    input: Tensor<4>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    epsilon: f64,
    after: After,
    shared: Option<Arc<dyn StatisticsReduce>>,
    running: Option<Running>,
) -> BatchNormed {
    let on_gpu = shared.is_none() && on_gpu(&input);
    let (inside, outside) = if on_gpu { (running, None) } else { (None, running) };
    let batch = normed(input, [weight, bias], epsilon, after, shared, on_gpu, inside);
    let Some(Running { mean, variance, momentum }) = outside else { return batch };
    let found = [batch.mean.without_autodiff(), batch.variance.without_autodiff()];
    let moved = follow(1.0 - momentum, [mean, variance].into_iter().zip(found).collect());
    let [mean, variance] = moved.try_into().expect("as many as went in");
    BatchNormed { output: batch.output, mean, variance }
}

/// [`batch_norm_train`]; running statistics only `on_gpu`.
fn normed(
    input: Tensor<4>,
    [weight, bias]: [Tensor<1>; 2],
    epsilon: f64,
    after: After,
    shared: Option<Arc<dyn StatisticsReduce>>,
    on_gpu: bool,
    running: Option<Running>,
) -> BatchNormed {
    let dtype = input.dtype();
    if has_kernels(&input) || on_gpu {
        let after = after.like(&input);
        // Of what is added, the normalised values tell nothing: what needs them for its slope comes after.
        let (inside, behind) = match (&after.residual, after.activation) {
            (None, inside) | (Some(_), inside @ Activation::Relu) => (inside, Activation::Identity),
            (Some(_), behind) => (Activation::Identity, behind),
        };
        let options = NormOptions { epsilon, activation: inside, shared, running };
        let (input, weight, bias) = (input.into_dispatch(), weight.into_dispatch(), bias.into_dispatch());
        let (output, mean, variance) = match after.residual {
            Some(residual) => Dispatch::norm_add(input, weight, bias, residual.into_dispatch(), options),
            None => Dispatch::norm(input, weight, bias, options),
        };
        return BatchNormed {
            output: activate(Tensor::from_dispatch(output), behind),
            mean: Tensor::from_dispatch(mean),
            variance: Tensor::from_dispatch(variance),
        };
    }
    let input = widened(input);
    let after = after.like(&input);
    if let Some(shared) = shared {
        let batch = shared::batch_norm(input, weight, bias, epsilon, after, &shared);
        return BatchNormed { output: batch.output.cast(dtype), ..batch };
    }
    let [batch, _, height, width] = input.dims();
    let count = (batch * height * width) as f64;
    let batch = module::batch_norm_train(input, weight, bias, epsilon);
    let variance = batch.variance * (count / (count - 1.0));
    BatchNormed { output: after.apply(batch.output).cast(dtype), mean: batch.mean, variance }
}

/// Batch norm by given statistics, then what follows it.
///
/// Evaluation is not differentiated as a rule: with autodiff burn's operations run. Types are as in [`batch_norm_train`].
pub fn batch_norm_eval(
    input: Tensor<4>,
    [weight, bias]: [Tensor<1>; 2],
    [mean, variance]: [Tensor<1>; 2],
    epsilon: f64,
    after: After,
) -> Tensor<4> {
    let dtype = input.dtype();
    if !has_image_kernels(&input) || input.is_autodiff() || weight.is_autodiff() {
        let input = widened(input);
        let after = after.like(&input);
        return after.apply(module::batch_norm(input, weight, bias, mean, variance, epsilon)).cast(dtype);
    }
    let after = after.like(&input);
    let [weight, bias, mean, variance] = [weight, bias, mean, variance].map(Tensor::into_dispatch);
    let input = input.into_dispatch();
    Tensor::from_dispatch(match after.residual {
        Some(residual) => Dispatch::norm_by_add(
            input,
            weight,
            bias,
            mean,
            variance,
            residual.into_dispatch(),
            epsilon,
            after.activation,
        ),
        None => Dispatch::norm_by(input, weight, bias, mean, variance, epsilon, after.activation),
    })
}

/// Largest value of each window, `torch.nn.functional.max_pool2d` without dilation.
///
/// # Panics
///
/// Windows of more than 256 pixels, padding of more than half a window, and images smaller than a window.
pub fn max_pool2d(input: Tensor<4>, options: PoolOptions) -> Tensor<4> {
    if has_kernels(&input) {
        return Tensor::from_dispatch(Dispatch::pool(input.into_dispatch(), options));
    }
    let PoolOptions { kernel, stride, padding } = options;
    module::max_pool2d(input, MaxPoolOptions::new(kernel).with_stride(stride).with_padding(padding))
}

/// Mean over all pixels in f32, `[B, C, H, W]` → `[B, C]`.
pub fn global_avg_pool(input: Tensor<4>) -> Tensor<2> {
    if has_kernels(&input) {
        return Tensor::from_dispatch(Dispatch::pixel_mean(input.into_dispatch()));
    }
    let [batch, channels, height, width] = input.dims();
    widened(input).reshape([batch, channels, height * width]).mean_dim(2).reshape([batch, channels])
}

/// Negative values become zero.
pub fn relu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    activate(input, Activation::Relu)
}

/// `1 / (1 + e^-x)`.
pub fn sigmoid<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    activate(input, Activation::Sigmoid)
}

/// `x · sigmoid(x)`, `torch.nn.functional.silu` (<https://arxiv.org/abs/1710.05941>).
pub fn swish<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    activate(input, Activation::Swish)
}

fn activate<const D: usize>(input: Tensor<D>, activation: Activation) -> Tensor<D> {
    match activation {
        Activation::Identity => input,
        _ if has_image_kernels(&input) => Tensor::from_dispatch(Dispatch::activate(input.into_dispatch(), activation)),
        _ => plain(input, activation),
    }
}
