//! Convolutions and linear layers on a GPU: the choice of the kernels for all passes.
//!
//! - [`implicit_gemm`], on tensor cores: all but depthwise convolutions, where [`implicit_gemm::supports`] the GPU (compute
//!   capability 8.0 or higher), the element type and the options.
//! - [`direct`], without tensor cores: depthwise convolutions and, where `implicit_gemm` does not run, groups of at most [`NARROW`]
//!   channels. [`depthwise_norms`] has the depthwise convolutions with deferred batch norms around them.
//! - burn's kernels: all others, one group at a time. Also the weight gradient of a convolution of [`direct`] with more than
//!   [`MAX_TAPS`] taps.
//!
//! With `TRAINER_GPU_CONV=burn`, `implicit_gemm` never runs.
//!
//! `gpu_check --ops` compares all of them with the CPU (`benches/gpu_check/convolutions.rs`).

use std::sync::Arc;

use burn::backend::ops::{FloatTensorOps, ModuleOps};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::{permute_nchw_to_nhwc, permute_nhwc_to_nchw};
use burn_cubecl::tensor::CubeTensor;

use super::deferred::Deferred;
use super::direct::ConvSource;
use super::implicit_gemm::{Fused, OutputGradient};
use super::rows::Rows;
use super::side_results::NormOutput;
use super::weight_gradient::{grouped_weight_gradient, weight_gradient};
use super::{activation, bf16_weights, depthwise_norms, direct, head, implicit_gemm};
use crate::extension::{Activation, ConvGrads, ConvOptions};
use crate::gpu_conv::GpuConv;

/// Number of input channels per group up to which one thread per output channel is faster than burn's matrix products.
pub(super) const NARROW: usize = 32;
/// Number of taps whose sums fit into a thread's registers.
pub(super) const MAX_TAPS: usize = 25;

/// Saved tensors of a convolution.
#[derive(Debug, Clone)]
pub struct SavedConv {
    input: CubeTensor,
    /// In the input's element type.
    pub(super) weight: CubeTensor,
    /// The element type of the parameter and of its gradient.
    weight_dtype: DType,
    bias: Option<CubeTensor>,
    pub(super) options: ConvOptions,
    /// The output, if the operation includes ReLU.
    output: Option<CubeTensor>,
    /// The batch norm whose output is the input.
    norm: Option<Arc<NormOutput>>,
    /// The batch norm that is applied to the input.
    input_norm: Option<Deferred>,
}

/// Returns true for a convolution that [`implicit_gemm`] computes: all but depthwise ones. `weight`:
/// `[out, in / groups, height, width]`.
pub(super) fn on_tensor_cores(input: &CubeTensor, weight: [usize; 4], options: &ConvOptions) -> bool {
    !direct::is_depthwise(weight, options)
        && GpuConv::chosen() != GpuConv::Burn
        && implicit_gemm::supports(input, options)
}

/// Returns true for a depthwise convolution whose kernels apply deferred batch norms, see [`depthwise_norms`].
pub(super) fn applies_norms(input: &CubeTensor, weight: [usize; 4], options: &ConvOptions) -> bool {
    let [_, _, height, width] = weight;
    direct::is_depthwise(weight, options) && height * width <= MAX_TAPS && implicit_gemm::supports(input, options)
}

/// Casts a tensor, unless it has the element type.
pub(super) fn cast(tensor: CubeTensor, dtype: DType) -> CubeTensor {
    if tensor.dtype == dtype { tensor } else { Cube::float_cast(tensor, dtype.into()) }
}

/// Converts the options to burn's.
pub(super) fn burn_options(options: &ConvOptions) -> burn::tensor::ops::ConvOptions<2> {
    let ConvOptions { stride, padding, dilation, groups, .. } = *options;
    burn::tensor::ops::ConvOptions::new(stride, padding, dilation, groups)
}

/// See [`ConvKernels::conv_forward`](crate::ConvKernels::conv_forward): `[B, in, H, W]` → `[B, out, …]`, in the input's type.
pub(super) fn forward(
    input: CubeTensor,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    options: ConvOptions,
    relu: bool,
) -> (CubeTensor, SavedConv) {
    if on_tensor_cores(&input, weight.shape().dims(), &options) {
        let (output, saved, _) = tensor_core_forward(input, weight, bias, &options, relu, Fused::default());
        return (output, saved);
    }
    let (x, b, weight_dtype) = (input.clone(), bias.clone(), weight.dtype);
    let weight = bf16_weights::cast(weight, input.dtype);
    let in_type = |bias: Option<CubeTensor>| bias.map(|bias| cast(bias, x.dtype));
    let (output, weight) = if options.groups == 1 {
        // Convert the weight to the order of burn's kernels once, for both passes.
        let weight = permute_nhwc_to_nchw(into_contiguous(permute_nchw_to_nhwc(weight)));
        let b = in_type(b);
        (Cube::conv2d(x, weight.clone(), b, burn_options(&options)), weight)
    } else {
        let b = in_type(b);
        (direct::forward(x, weight.clone(), b, &options), weight)
    };
    let output = if relu { activation::forward(output, Activation::Relu) } else { output };
    let saved = relu.then(|| output.clone());
    // These kernels compute no sums for the batch norm, but the batch norm must count all readers of its output.
    let norm = Rows::view(&input).and_then(|images| NormOutput::register_reader(&images));
    (output, SavedConv { input, weight, weight_dtype, bias, options, output: saved, norm, input_norm: None })
}

/// Convolves on tensor cores. Also returns the statistics of the batch norm that follows, if it is fused.
pub(super) fn tensor_core_forward(
    input: CubeTensor,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    options: &ConvOptions,
    relu: bool,
    fused: Fused,
) -> (CubeTensor, SavedConv, Option<CubeTensor>) {
    let weight_dtype = weight.dtype;
    let weight = implicit_gemm::to_kernel_order(bf16_weights::cast(weight, input.dtype));
    let b = bias.clone().map(|bias| cast(bias, DType::F32));
    let images = Rows::new(input);
    let input_norm = fused.input.clone();
    let norm = if input_norm.is_none() { NormOutput::register_reader(&images) } else { None };
    let (output, statistics) = implicit_gemm::forward(&images, &weight, b, options, relu, fused);
    let saved = SavedConv {
        input: images.into_tensor(),
        weight,
        weight_dtype,
        bias,
        options: *options,
        output: relu.then(|| output.clone()),
        norm,
        input_norm,
    };
    (output, saved, statistics)
}

/// Computes a depthwise convolution. Returns the same values as [`tensor_core_forward`].
pub(super) fn depthwise(
    input: CubeTensor,
    weight: CubeTensor,
    options: &ConvOptions,
    fused: Fused,
) -> (CubeTensor, SavedConv, Option<CubeTensor>) {
    let weight_dtype = weight.dtype;
    let weight = bf16_weights::cast(weight, input.dtype);
    let images = Rows::new(input);
    let Fused { input: input_norm, statistics } = fused;
    let norm = if input_norm.is_none() { NormOutput::register_reader(&images) } else { None };
    let (output, statistics) = match statistics {
        Some(norm) => {
            let (output, of_batch) =
                depthwise_norms::forward(&images, input_norm.as_ref(), weight.clone(), options, norm);
            (output, Some(of_batch))
        }
        None => {
            let from = ConvSource::images(input_norm.as_ref());
            (direct::depthwise_forward(&images, from, weight.clone(), None, options), None)
        }
    };
    let input = images.into_tensor();
    let saved =
        SavedConv { input, weight, weight_dtype, bias: None, options: *options, output: None, norm, input_norm };
    (output, saved, statistics)
}

/// See [`ConvKernels::conv_backward`](crate::ConvKernels::conv_backward).
pub(super) fn backward(
    saved: SavedConv,
    grad: CubeTensor,
    addend: Option<CubeTensor>,
    required: [bool; 3],
) -> ConvGrads<Cube> {
    let grad = match saved.output.clone() {
        Some(output) => activation::backward(output, grad, Activation::Relu),
        None => grad,
    };
    let weight = saved.weight.shape().dims();
    if on_tensor_cores(&saved.input, weight, &saved.options) || saved.input_norm.is_some() {
        return backward_of(saved, OutputGradient { grad: Rows::new(grad), norm: None }, addend, required);
    }
    let SavedConv { input, weight, weight_dtype, bias, options, norm, .. } = saved;
    // These kernels compute no sums for the batch norm.
    if let Some(norm) = norm {
        norm.finish_reader();
    }
    let bias_grad = bias.filter(|_| required[2]).map(|bias| cast(head::bias_gradient(grad.clone()), bias.dtype));
    let input_grad = required[0].then(|| {
        let (x, w, dy) = (input.clone(), weight.clone(), grad.clone());
        let gradient = match options.groups {
            1 => Cube::conv2d_x_backward(x, w, dy, burn_options(&options)),
            _ => direct::data_gradient(x.shape().dims(), w, dy, &options),
        };
        match addend {
            Some(addend) => Cube::float_add(addend, gradient),
            None => gradient,
        }
    });
    let weight_grad = required[1].then(|| weight_gradient(input, weight, grad, &options, weight_dtype));
    ConvGrads { input: input_grad, weight: weight_grad, bias: bias_grad }
}

/// Computes the gradients of a depthwise convolution.
fn depthwise_gradients(
    saved: SavedConv,
    grad: &OutputGradient,
    addend: Option<CubeTensor>,
    required: [bool; 3],
) -> ConvGrads<Cube> {
    let SavedConv { input, weight, weight_dtype, options, norm, input_norm, .. } = saved;
    // These kernels compute no sums for a batch norm that is not deferred.
    if let Some(norm) = norm {
        norm.finish_reader();
    }
    let (images, dy) = (Rows::new(input), &grad.grad);
    let sources = [ConvSource::images(input_norm.as_ref()), ConvSource::gradient(grad.norm.as_ref())];
    let input_grad = required[0].then(|| {
        if let Some(norm) = &input_norm {
            assert!(addend.is_none(), "this convolution is the only reader of a deferred batch norm");
            return depthwise_norms::data_gradient(&images, norm, dy, sources[1], weight.clone(), &options);
        }
        let [batch, height, width, channels] = images.dims();
        let shape = [batch, channels, height, width];
        let gradient = direct::depthwise_data_gradient(shape, dy, sources[1], weight.clone(), &options);
        match addend {
            Some(addend) => Cube::float_add(addend, gradient),
            None => gradient,
        }
    });
    let weight_grad =
        required[1].then(|| grouped_weight_gradient(&images, &weight, dy, sources, &options, weight_dtype));
    ConvGrads { input: input_grad, weight: weight_grad, bias: None }
}

/// Computes the gradients of a convolution on tensor cores, or of [`depthwise`].
pub(super) fn backward_of(
    saved: SavedConv,
    grad: OutputGradient,
    addend: Option<CubeTensor>,
    required: [bool; 3],
) -> ConvGrads<Cube> {
    if !on_tensor_cores(&saved.input, saved.weight.shape().dims(), &saved.options) {
        return depthwise_gradients(saved, &grad, addend, required);
    }
    let SavedConv { input, weight, weight_dtype, bias, options, norm, input_norm, .. } = saved;
    let bias_grad =
        bias.filter(|_| required[2]).map(|bias| cast(head::bias_gradient(grad.grad.clone().into_tensor()), bias.dtype));
    let images = Rows::new(input);
    let norm = match &input_norm {
        // This convolution is the only reader.
        Some(input_norm) => Some(Arc::new(input_norm.output([&images, &images], false))),
        None => norm.filter(|norm| norm.finish_reader()),
    };
    let required = implicit_gemm::Required { input: required[0], weight: required[1], addend, norm, input_norm };
    let [input, weight] = implicit_gemm::gradients(&images, &weight, grad, &options, required);
    ConvGrads { input, weight: weight.map(|gradient| cast(gradient, weight_dtype)), bias: bias_grad }
}
