//! Convolutions and linear layers on a GPU: the choice of the kernels for all passes.
//!
//! - [`implicit_gemm`], on tensor cores: all but depthwise convolutions, where [`implicit_gemm::supports`] the GPU (compute
//!   capability 8.0 or higher), the element type and the options.
//! - [`direct`], without tensor cores: depthwise convolutions and, where `implicit_gemm` does not run, groups of at most [`NARROW`]
//!   channels. [`depthwise_norms`] has the depthwise convolutions with deferred batch norms around them.
//! - burn's kernels: all others, group by group if there are several, and the weight gradient where the line above applies and a
//!   window has more than [`MAX_TAPS`] pixels.
//!
//! With `TRAINER_GPU_CONV=burn`, `implicit_gemm` never runs.
//!
//! `gpu_check --ops` compares all of them with the CPU (`benches/gpu_check/convolutions.rs`).
//!
//! burn has no kernel for the weight gradient of a grouped convolution. It runs group by group, with about six launches each:
//! thousands of launches in a training step of RegNet. For depthwise convolutions, burn uses few threads, each of which adds up
//! all pixels of the batch.

use std::sync::Arc;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::{FloatTensorOps, ModuleOps};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::{numeric::empty_device_contiguous_dtype, permute_nchw_to_nhwc, permute_nhwc_to_nchw};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::deferred::Deferred;
use super::direct::ConvSource;
use super::implicit_gemm::{Fused, OutputGradient};
use super::rows::{Rows, THREADS_PER_BLOCK, all, arg};
use super::side_results::NormOutput;
use super::weight_kernels::{SizesLaunch, Taps, add_pieces, depthwise_pieces, grouped_pieces};
use super::{activation, bf16_weights, depthwise_norms, direct, head, implicit_gemm};
use crate::extension::{Activation, ConvGrads, ConvOptions};
use crate::gpu_conv::GpuConv;

/// Number of input channels per group up to which one thread per output channel is faster than burn's matrix products.
pub(super) const NARROW: usize = 32;
/// Number of taps whose sums fit into a thread's registers.
const MAX_TAPS: usize = 25;

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

/// Returns true for a depthwise convolution whose kernels apply deferred batch norms, see [`direct`].
pub(super) fn applies_norms(input: &CubeTensor, weight: [usize; 4], options: &ConvOptions) -> bool {
    let [_, _, height, width] = weight;
    direct::is_depthwise(weight, options) && height * width <= MAX_TAPS && implicit_gemm::supports(input, options)
}

/// Casts a tensor, unless it has the element type.
fn cast(tensor: CubeTensor, dtype: DType) -> CubeTensor {
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
        let (output, saved, _) = on_cores(input, weight, bias, &options, relu, Fused::default());
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
    let norm = Rows::of(&input).and_then(|images| NormOutput::read(&images));
    (output, SavedConv { input, weight, weight_dtype, bias, options, output: saved, norm, input_norm: None })
}

/// Convolves on tensor cores. Also returns the statistics of the batch norm that follows, if it is fused.
pub(super) fn on_cores(
    input: CubeTensor,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    options: &ConvOptions,
    relu: bool,
    fused: Fused,
) -> (CubeTensor, SavedConv, Option<CubeTensor>) {
    let weight_dtype = weight.dtype;
    let weight = implicit_gemm::ordered(bf16_weights::cast(weight, input.dtype));
    let b = bias.clone().map(|bias| cast(bias, DType::F32));
    let images = Rows::new(input);
    let input_norm = fused.input.clone();
    let norm = if input_norm.is_none() { NormOutput::read(&images) } else { None };
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

/// Computes a depthwise convolution. Returns the same values as [`on_cores`].
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
    let norm = if input_norm.is_none() { NormOutput::read(&images) } else { None };
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
        norm.done();
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
        norm.done();
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
        None => norm.filter(|norm| norm.done()),
    };
    let required = implicit_gemm::Required { input: required[0], weight: required[1], addend, norm, input_norm };
    let [input, weight] = implicit_gemm::gradients(&images, &weight, grad, &options, required);
    ConvGrads { input, weight: weight.map(|gradient| cast(gradient, weight_dtype)), bias: bias_grad }
}

/// Computes the weight gradient in type `dtype`, with burn's kernels for wide groups and large windows.
fn weight_gradient(
    input: CubeTensor,
    weight: CubeTensor,
    grad: CubeTensor,
    options: &ConvOptions,
    dtype: DType,
) -> CubeTensor {
    let [_, each, height, width]: [usize; 4] = weight.shape().dims();
    if options.groups == 1 || each > NARROW || height * width > MAX_TAPS {
        return cast(Cube::conv2d_weight_backward(input, weight, grad, burn_options(options)), dtype);
    }
    grouped_weight_gradient(&Rows::new(input), &weight, &Rows::new(grad), [ConvSource::Plain; 2], options, dtype)
}

/// Computes the weight gradient `[out, in / groups, height, width]` in type `result`, channels-last in memory. `sources`: what the
/// kernels compute from `x` and from `dy` while they load them.
fn grouped_weight_gradient(
    x: &Rows,
    weight: &CubeTensor,
    dy: &Rows,
    sources: [ConvSource<'_>; 2],
    options: &ConvOptions,
    result: DType,
) -> CubeTensor {
    let [outputs, inputs, kernel_height, kernel_width]: [usize; 4] = weight.shape().dims();
    let depthwise = direct::is_depthwise(weight.shape().dims(), options);
    let (workspace, pieces) = weight_gradient_pieces(x, weight, dy, sources, options);
    // A depthwise gradient has its taps first.
    let shape = if depthwise {
        [1, kernel_height, kernel_width, outputs]
    } else {
        [outputs, kernel_height, kernel_width, inputs]
    };
    let sum = empty_device_contiguous_dtype(x.client().clone(), weight.device.clone(), Shape::from(shape), result);
    sum_pieces(&workspace, &sum, pieces);
    let sum = if depthwise { Cube::float_swap_dims(sum, 0, 3) } else { sum };
    permute_nhwc_to_nchw(sum)
}

/// Computes the weight gradient of each piece of the output's pixels, f32, in the order of `depthwise_pieces` or `grouped_pieces`.
/// Returns the gradients and the number of pieces, which depends on the shapes alone.
fn weight_gradient_pieces(
    x: &Rows,
    weight: &CubeTensor,
    dy: &Rows,
    [of_x, of_dy]: [ConvSource<'_>; 2],
    options: &ConvOptions,
) -> (CubeTensor, usize) {
    let [outputs, inputs, kernel_height, kernel_width]: [usize; 4] = weight.shape().dims();
    let ([_, height, width, _], [batch, out_height, out_width, _]) = (x.dims(), dy.dims());
    let depthwise = direct::is_depthwise(weight.shape().dims(), options);
    // Vector of the channels that a thread processes.
    let vector = if depthwise {
        let factors: Vec<_> = [of_x, of_dy].into_iter().filter_map(ConvSource::factors).collect();
        x.vector_size(&[dy, of_dy.norm_input().unwrap_or(dy)], &factors)
    } else {
        x.vector_of(inputs)
    };
    let (columns, vectors) = if depthwise { (outputs / vector, 1) } else { (outputs, inputs / vector) };
    let lanes = columns.next_power_of_two().min(32);
    let (tiles, depth) = (columns.div_ceil(lanes), THREADS_PER_BLOCK / lanes);
    let (pixels, taps) = (batch * out_height * out_width, kernel_height * kernel_width);
    /// Number of blocks that occupies a large GPU.
    const BLOCKS: usize = 1024;
    let piece = pixels.div_ceil((BLOCKS / (tiles * vectors)).clamp(1, 128)).next_multiple_of(depth).max(depth * 4);
    let pieces = pixels.div_ceil(piece);
    let client = x.client();
    let length = outputs * taps * inputs;
    let shape = Shape::from([pieces, 1, 1, length]);
    let workspace = empty_device_contiguous_dtype(client.clone(), weight.device.clone(), shape, DType::F32);
    let count = CubeCount::Static(tiles as u32, pieces as u32, vectors as u32);
    let dim = CubeDim::new_2d(lanes as u32, depth as u32);
    let dtype = dtype_to_storage_type(x.dtype());
    let sizes = SizesLaunch::new(
        pixels,
        out_height,
        out_width,
        height,
        width,
        x.pitch(vector),
        if depthwise { dy.pitch(vector) } else { dy.pitch(1) },
        piece,
    );
    let windows = Taps::of(weight, options);
    // SAFETY: the kernels stay within their size arguments, which are those of the tensors.
    unsafe {
        if depthwise {
            depthwise_pieces::launch_unchecked(
                client,
                count,
                dim,
                vector,
                x.arg(),
                // The kernel reads the factors only if it applies a batch norm (`NormOnLoad`).
                all(of_x.factors().unwrap_or(&workspace)),
                dy.arg(),
                of_dy.norm_input().unwrap_or(dy).arg(),
                all(of_dy.factors().unwrap_or(&workspace)),
                arg(&workspace, pieces * length),
                columns,
                sizes,
                of_x.norm_on_load(),
                of_dy.norm_on_load(),
                windows,
                dtype,
            );
        } else {
            let each = outputs / options.groups;
            grouped_pieces::launch_unchecked(
                client,
                count,
                dim,
                vector,
                x.arg(),
                dy.arg(),
                arg(&workspace, pieces * length),
                outputs,
                each,
                sizes,
                vectors,
                windows,
                dtype,
            );
        }
    }
    (workspace, pieces)
}

/// Sums `[pieces, …]` over the pieces, in order, to `sum`.
fn sum_pieces(pieces: &CubeTensor, sum: &CubeTensor, count: usize) {
    let length = sum.meta.num_elements();
    let vector = if length.is_multiple_of(4) { 4 } else { 1 };
    // As many threads for each column as there are pieces, at most half a block.
    let depth = count.next_power_of_two().min(THREADS_PER_BLOCK / 2);
    let lanes = THREADS_PER_BLOCK / depth;
    let grid = CubeCount::Static((length / vector).div_ceil(lanes) as u32, 1, 1);
    let dim = CubeDim::new_2d(lanes as u32, depth as u32);
    // SAFETY: the kernel stays within its size arguments, which are those of the tensors.
    unsafe {
        add_pieces::launch_unchecked(
            &sum.client,
            grid,
            dim,
            vector,
            all(pieces),
            all(sum),
            length / vector,
            count,
            dtype_to_storage_type(sum.dtype),
        );
    }
}
