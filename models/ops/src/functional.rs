//! The operations without state, as `torch.nn.functional`: convolutions, linear layers, pooling, activations and channels.
//!
//! Operations on channels have kernels because burn's operations process channels-last images pixel by pixel on one thread,
//! and return them in another memory order.

use std::ops::Range;

use burn::backend::Dispatch;
use burn::tensor::ops::{AvgPoolOptions, MaxPoolOptions};
use burn::tensor::{Tensor, activation, module};

use crate::channels::{ChannelOps, Join};
use crate::dispatch::{
    all_have_cpu_kernels, check_gpu_convolution, has_cpu_kernels, has_gpu_kernels, has_image_kernels, parameter_for,
    upcast,
};
use crate::extension::{Activation, ConvOps, ConvOptions, HeadOps, LayerOps, NormOps, PoolOptions};
use crate::features::{Features, conv2d};
use crate::shape::PoolShape;
use crate::trace::{Operand, Operation, Started, is_recording, start, start_fused};

/// Starts the recording of a convolution or linear layer.
pub(crate) fn start_affine(
    operation: Operation,
    operands: [&dyn Operand; 2],
    bias: Option<&Tensor<1>>,
    relu: bool,
) -> Started {
    let activation = if relu { Activation::Relu } else { Activation::Identity };
    match bias {
        Some(bias) => start_fused(operation, &[operands[0], operands[1], bias], None, activation),
        None => start_fused(operation, &operands, None, activation),
    }
}

/// Computes [`conv2d`] without recording the call.
pub(crate) fn conv2d_unrecorded(
    input: Tensor<4>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    options: ConvOptions,
    relu: bool,
) -> Tensor<4> {
    check_bias(bias.as_ref(), weight.dims()[0]);
    // The GPU's kernels take f32 parameters for all inputs, and return their gradients in f32.
    let (weight, bias) = match has_gpu_kernels(&input) {
        true => {
            check_gpu_convolution(input.dims(), weight.dims(), &options);
            (weight, bias)
        }
        false => (parameter_for(weight, &input), bias.map(|bias| parameter_for(bias, &input))),
    };
    if has_image_kernels(&input) {
        let (input, weight) = (input.into_dispatch(), weight.into_dispatch());
        return Tensor::from_dispatch(match bias {
            Some(bias) => Dispatch::conv_bias(input, weight, bias.into_dispatch(), options, relu),
            None => Dispatch::conv(input, weight, options, relu),
        });
    }
    let ConvOptions { stride, padding, dilation, groups, .. } = options;
    let output =
        module::conv2d(input, weight, bias, burn::tensor::ops::ConvOptions::new(stride, padding, dilation, groups));
    if relu { self::relu(output) } else { output }
}

/// Checks the bias of a convolution or linear layer with `outputs` channels, since the kernels read as many values unchecked.
fn check_bias(bias: Option<&Tensor<1>>, outputs: usize) {
    let values = bias.map(|bias| bias.dims()[0]);
    assert!(values.is_none_or(|values| values == outputs), "a bias of {values:?} values for {outputs} output channels");
}

/// Computes `input · weightᵀ + bias`, `torch.nn.functional.linear`, followed by ReLU if `relu` is true. Element types are
/// those of [`conv2d`].
///
/// # Shapes
///
/// - input `[B, in]`, weight `[out, in]`, bias `[out]`
/// - output `[B, out]`
///
/// # Panics
///
/// When the shapes do not match.
pub fn linear(input: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>, relu: bool) -> Tensor<2> {
    let call = start_affine(Operation::Linear, [&input, &weight], bias.as_ref(), relu);
    call.end(linear_unrecorded(input, weight, bias, relu))
}

/// Computes [`linear`] without recording the call.
fn linear_unrecorded(input: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>, relu: bool) -> Tensor<2> {
    let ([batch, inputs], [outputs, columns]) = (input.dims(), weight.dims());
    assert!(inputs == columns, "a linear layer of {outputs}x{columns} weights for {inputs} features");
    check_bias(bias.as_ref(), outputs);
    if has_gpu_kernels(&input) {
        // A convolution of images of one pixel, with the same kernels.
        let (images, weight) = (input.reshape([batch, inputs, 1, 1]), weight.reshape([outputs, inputs, 1, 1]));
        let options = ConvOptions::stride_one(1);
        return conv2d_unrecorded(images, weight, bias, options, relu).reshape([batch, outputs]);
    }
    // The kernels add a bias in any case. A few zeros cost nothing.
    let bias = bias.unwrap_or_else(|| Tensor::zeros([outputs], &input.device().inner()));
    let (weight, bias) = (parameter_for(weight, &input), parameter_for(bias, &input));
    if has_cpu_kernels(&input) {
        let (input, weight, bias) = (input.into_dispatch(), weight.into_dispatch(), bias.into_dispatch());
        return Tensor::from_dispatch(Dispatch::linear_bias(input, weight, bias, relu));
    }
    let output = module::linear(input, weight.transpose(), Some(bias));
    if relu { self::relu(output) } else { output }
}

/// Max pooling of `[B, C, H, W]`, `torch.nn.functional.max_pool2d` without dilation.
///
/// # Panics
///
/// When a window has more than 256 pixels, the padding exceeds half a window, or the image is smaller than a window.
pub fn max_pool2d(input: Tensor<4>, options: PoolOptions) -> Tensor<4> {
    PoolShape::new(input.dims(), &options);
    let call = start(Operation::MaxPool(options), &[&input]);
    call.end(if has_cpu_kernels(&input) {
        Tensor::from_dispatch(Dispatch::max_pool(input.into_dispatch(), options))
    } else {
        let PoolOptions { kernel, stride, padding } = options;
        module::max_pool2d(input, MaxPoolOptions::new(kernel).with_stride(stride).with_padding(padding))
    })
}

/// Average pooling over adjacent `kernel` x `kernel` windows, `torch.nn.functional.avg_pool2d(input, kernel)`:
/// `[B, C, H, W]` → `[B, C, H / kernel, W / kernel]`. Incomplete windows at the end of a row or column are dropped.
///
/// # Panics
///
/// When `kernel` is 0, or the image is smaller than a window.
pub fn avg_pool2d(input: Tensor<4>, kernel: usize) -> Tensor<4> {
    let [_, _, height, width] = input.dims();
    assert!(
        (1..=height.min(width)).contains(&kernel),
        "average pooling of {height}x{width} pixels with windows of {kernel}"
    );
    let call = start(Operation::AvgPool { kernel }, &[&input]);
    if !has_cpu_kernels(&input) {
        let (dtype, options) = (input.dtype(), AvgPoolOptions::new([kernel; 2]).with_stride([kernel; 2]));
        return call.end(module::avg_pool2d(upcast(input), options).cast(dtype));
    }
    // A depthwise convolution with equal weights.
    let [_, channels, _, _] = input.dims();
    let device = input.device().inner();
    let weight = Tensor::full([channels, 1, kernel, kernel], 1.0 / (kernel * kernel) as f64, &device);
    let options = ConvOptions { stride: [kernel; 2], ..ConvOptions::stride_one(channels) };
    call.end(conv2d(input, weight, None, options, false))
}

/// Mean over all pixels, computed and returned in f32: `[B, C, H, W]` → `[B, C]`.
pub fn global_avg_pool(input: impl Into<Features>) -> Tensor<2> {
    let input = match input.into().into_means() {
        Ok(means) => return means,
        Err(images) => images,
    };
    let call = start(Operation::GlobalAvgPool, &[&input]);
    if has_image_kernels(&input) {
        return call.end(Tensor::from_dispatch(Dispatch::global_avg_pool(input.into_dispatch())));
    }
    let [batch, channels, height, width] = input.dims();
    call.end(upcast(input).reshape([batch, channels, height * width]).mean_dim(2).reshape([batch, channels]))
}

/// Joins all axes but the first, `torch.flatten(input, 1)`: `[B, C, H, W]` → `[B, C·H·W]`.
pub fn flatten(input: Tensor<4>) -> Tensor<2> {
    let call = start(Operation::Flatten, &[&input]);
    call.end(if has_cpu_kernels(&input) {
        Tensor::from_dispatch(Dispatch::flatten(input.into_dispatch()))
    } else {
        input.flatten(1, 3)
    })
}

/// Makes images of one pixel, `input[:, :, None, None]`: `[B, C]` → `[B, C, 1, 1]`.
pub fn unflatten(input: Tensor<2>) -> Tensor<4> {
    let [batch, channels] = input.dims();
    start(Operation::Unflatten, &[&input]).end(input.reshape([batch, channels, 1, 1]))
}

/// Divides every element by `divisor`.
pub fn divide<const D: usize>(input: Tensor<D>, divisor: f32) -> Tensor<D> {
    start(Operation::Divide(divisor), &[&input]).end(input.div_scalar(divisor))
}

/// Replaces negative values by zero, `torch.nn.functional.relu`. NaN stays NaN.
pub fn relu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    activate(input, Activation::Relu)
}

/// Computes `1 / (1 + e^-x)`, `torch.sigmoid`.
pub fn sigmoid<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    activate(input, Activation::Sigmoid)
}

/// Computes `x · sigmoid(x)`, `torch.nn.functional.silu` (<https://arxiv.org/abs/1710.05941>).
pub fn silu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    activate(input, Activation::Silu)
}

/// Computes `x · Φ(x)`, `torch.nn.functional.gelu` (<https://arxiv.org/abs/1606.08415>).
pub fn gelu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    activate(input, Activation::Gelu)
}

/// Applies `activation` to every element.
pub(crate) fn activate<const D: usize>(input: Tensor<D>, activation: Activation) -> Tensor<D> {
    if activation == Activation::Identity {
        return input;
    }
    let call = start(Operation::Activation(activation), &[&input]);
    if has_image_kernels(&input) {
        return call.end(Tensor::from_dispatch(Dispatch::activate(input.into_dispatch(), activation)));
    }
    call.end(match activation {
        Activation::Identity => input,
        Activation::Relu => activation::relu(input),
        Activation::Relu6 => activation::relu(input).clamp_max(6.0),
        Activation::Sigmoid => activation::sigmoid(input),
        Activation::Silu => activation::silu(input),
        Activation::Gelu => activation::gelu(input),
    })
}

fn to_channels_last(image: Tensor<4>) -> Tensor<4> {
    image.permute([0, 2, 3, 1])
}

fn from_channels_last(rows: Tensor<4>) -> Tensor<4> {
    rows.permute([0, 3, 1, 2])
}

/// Adds two tensors of the same shape. The result has the element type of `left`.
///
/// # Panics
///
/// When the shapes differ.
pub fn add(left: Tensor<4>, right: Tensor<4>) -> Tensor<4> {
    let right = crate::dispatch::cast_like(right, &left);
    let call = start(Operation::Add, &[&left, &right]);
    call.end(if all_have_cpu_kernels([&left, &right].into_iter()) {
        Tensor::from_dispatch(Dispatch::add(left.into_dispatch(), right.into_dispatch()))
    } else {
        left + right
    })
}

/// Concatenates images along the channels, `torch.cat(parts, 1)`.
///
/// # Panics
///
/// When `parts` is empty, or the parts differ in batch, height or width.
pub fn concat(parts: Vec<Tensor<4>>) -> Tensor<4> {
    let sizes = |part: &Tensor<4>| {
        let [batch, _, height, width] = part.dims();
        [batch, height, width]
    };
    let first = sizes(parts.first().expect("something to concatenate"));
    for part in &parts {
        assert_eq!(sizes(part), first, "images to concatenate differ in batch, height or width");
    }
    let call = start(Operation::Concat, &parts.iter().map(|part| part as &dyn Operand).collect::<Vec<_>>());
    if let [left, right] = &parts[..]
        && joins_on_gpu(left, right)
    {
        return call.end(join(left.clone(), right.clone(), Join { shared: 0, relu: false }));
    }
    if !all_have_cpu_kernels(parts.iter()) {
        // Concatenate along the last axis, so that images on a GPU stay channels-last in memory.
        let parts = parts.into_iter().map(to_channels_last).collect();
        return call.end(from_channels_last(Tensor::cat(parts, 3)));
    }
    let mut parts = parts.into_iter().map(Tensor::into_dispatch);
    let mut all = parts.next().expect("the first part");
    while let Some(part) = parts.next() {
        all = match parts.next() {
            Some(next) => Dispatch::concat_three(all, part, next),
            None => Dispatch::concat_two(all, part, false),
        };
    }
    call.end(Tensor::from_dispatch(all))
}

/// Returns true if the GPU kernels can join two images. They count elements in 32 bits.
fn joins_on_gpu(left: &Tensor<4>, right: &Tensor<4>) -> bool {
    let elements = left.shape().num_elements() + right.shape().num_elements();
    has_gpu_kernels(left) && left.dtype() == right.dtype() && elements < 1 << 31
}

fn join(left: Tensor<4>, right: Tensor<4>, join: Join) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::join(left.into_dispatch(), right.into_dispatch(), join))
}

/// Joins the two paths of a block of DPN: ReLU of the sum of the first `shared` channels of both, the other channels of `left`, and
/// the other channels of `right`.
///
/// # Panics
///
/// When an image has fewer than `shared` channels, or the sizes differ.
pub fn join_paths(left: Tensor<4>, right: Tensor<4>, shared: usize) -> Tensor<4> {
    let ([batch, old, height, width], new) = (left.dims(), right.dims()[1]);
    assert_eq!(right.dims(), [batch, new, height, width], "joined images have the same size");
    assert!(shared <= old.min(new), "{shared} shared channels of {old} and {new}");
    if (joins_on_gpu(&left, &right) || all_have_cpu_kernels([&left, &right].into_iter())) && !is_recording() {
        return join(left, right, Join { shared, relu: true });
    }
    let sum = add(slice_channels(left.clone(), 0..shared), slice_channels(right.clone(), 0..shared));
    relu(concat(vec![sum, slice_channels(left, shared..old), slice_channels(right, shared..new)]))
}

/// Interleaves the channels of two tensors `[B, C, H, W]`, → `[B, 2·C, H, W]`. Equals ShuffleNet's channel shuffle of
/// `concat([left, right])` with two groups.
///
/// # Panics
///
/// When the shapes differ.
pub fn interleave(left: Tensor<4>, right: Tensor<4>) -> Tensor<4> {
    assert_eq!(left.dims(), right.dims(), "two images to interleave differ in shape");
    let call = start(Operation::Interleave, &[&left, &right]);
    if all_have_cpu_kernels([&left, &right].into_iter()) {
        return call.end(Tensor::from_dispatch(Dispatch::concat_two(
            left.into_dispatch(),
            right.into_dispatch(),
            true,
        )));
    }
    let [batch, channels, height, width] = left.dims();
    let x: Tensor<5> = Tensor::stack(vec![to_channels_last(left), to_channels_last(right)], 4);
    call.end(from_channels_last(x.reshape([batch, height, width, 2 * channels])))
}

/// Returns a range of the channels, `input[:, range]`.
pub fn slice_channels(input: Tensor<4>, range: Range<usize>) -> Tensor<4> {
    let call = start(Operation::SliceChannels(range.clone()), &[&input]);
    if has_cpu_kernels(&input) {
        let slice = Dispatch::slice_channels(input.into_dispatch(), range.start, range.len());
        return call.end(Tensor::from_dispatch(slice));
    }
    let [batch, _, height, width] = input.dims();
    call.end(from_channels_last(to_channels_last(input).slice([0..batch, 0..height, 0..width, range])))
}

/// Multiplies each channel of each image `[B, C, H, W]` by a factor, `[B, C]`.
///
/// # Panics
///
/// When there is not one factor for each channel of each image.
pub fn scale_channels(input: Tensor<4>, factors: Tensor<2>) -> Tensor<4> {
    let [batch, channels, ..] = input.dims();
    assert_eq!(factors.dims(), [batch, channels], "one factor for each channel of each image");
    let call = start(Operation::ScaleChannels, &[&input, &factors]);
    let factors = factors.cast(input.dtype());
    call.end(if has_image_kernels(&input) {
        Tensor::from_dispatch(Dispatch::scale_channels(input.into_dispatch(), factors.into_dispatch()))
    } else {
        input * factors.reshape([batch, channels, 1, 1])
    })
}
