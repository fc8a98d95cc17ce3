//! Operations composed of others, in the kernels' memory order.
//!
//! burn's elementwise operations and concatenation are fastest on tensors that are contiguous to them: where images lie
//! channels-last, they are handed over as `[B, H, W, C]`, which is a view, and the result is viewed back.

use std::ops::Range;

use burn::backend::Dispatch;
use burn::tensor::ops::AvgPoolOptions;
use burn::tensor::{Tensor, module};

use super::extension::TrainingOps;
use super::{ConvOptions, conv2d, has_kernels, widened};

/// `[B, C, H, W]` as `[B, H, W, C]`.
fn to_last(input: Tensor<4>) -> Tensor<4> {
    input.permute([0, 2, 3, 1])
}

/// `[B, H, W, C]` as `[B, C, H, W]`.
fn from_last(input: Tensor<4>) -> Tensor<4> {
    input.permute([0, 3, 1, 2])
}

/// Elementwise sum of two tensors of one shape.
pub fn add(left: Tensor<4>, right: Tensor<4>) -> Tensor<4> {
    if has_kernels(&left) && has_kernels(&right) {
        Tensor::from_dispatch(Dispatch::add(left.into_dispatch(), right.into_dispatch()))
    } else {
        left + right
    }
}

/// Images side by side along the channels, `torch.cat(parts, 1)`.
pub fn concat(parts: Vec<Tensor<4>>) -> Tensor<4> {
    if parts.iter().all(has_kernels) {
        from_last(Tensor::cat(parts.into_iter().map(to_last).collect(), 3))
    } else {
        Tensor::cat(parts, 1)
    }
}

/// Some of the channels, `input[:, range]`.
pub fn channels(input: Tensor<4>, range: Range<usize>) -> Tensor<4> {
    let [batch, _, height, width] = input.dims();
    input.slice([0..batch, range, 0..height, 0..width])
}

/// Multiplies each channel of each image, `[B, C, H, W]` by `[B, C]`.
pub fn scale_channels(input: Tensor<4>, factors: Tensor<2>) -> Tensor<4> {
    let [batch, channels] = factors.dims();
    let factors = factors.cast(input.dtype());
    if has_kernels(&input) {
        Tensor::from_dispatch(Dispatch::scale(input.into_dispatch(), factors.into_dispatch()))
    } else {
        input * factors.reshape([batch, channels, 1, 1])
    }
}

/// Mean of each `kernel` x `kernel` window without overlap, `torch.nn.functional.avg_pool2d(input, kernel)`; a last row
/// or column that does not fill a window is dropped.
pub fn avg_pool2d(input: Tensor<4>, kernel: usize) -> Tensor<4> {
    if !has_kernels(&input) {
        let (dtype, options) = (input.dtype(), AvgPoolOptions::new([kernel; 2]).with_stride([kernel; 2]));
        return module::avg_pool2d(widened(input), options).cast(dtype);
    }
    // A depthwise convolution with equal weights.
    let [_, channels, _, _] = input.dims();
    let device = input.device().inner();
    let weight = Tensor::full([channels, 1, kernel, kernel], 1.0 / (kernel * kernel) as f64, &device);
    let options = ConvOptions { stride: [kernel; 2], padding: [0, 0], dilation: [1, 1], groups: channels };
    conv2d(input, weight, None, options, false)
}

/// Channel shuffle of ShuffleNet: with channels in `groups` rows, reads them column by column.
pub fn shuffle_channels(input: Tensor<4>, groups: usize) -> Tensor<4> {
    let [batch, channels, height, width] = input.dims();
    if has_kernels(&input) {
        let x = to_last(input).reshape([batch, height, width, groups, channels / groups]);
        from_last(x.swap_dims(3, 4).reshape([batch, height, width, channels]))
    } else {
        let x = input.reshape([batch, groups, channels / groups, height, width]);
        x.swap_dims(1, 2).reshape([batch, channels, height, width])
    }
}
