//! What layers do with whole channels; of burn's operations where there are no kernels.
//!
//! burn's own operations take channels-last images apart pixel by pixel, on one thread, and leave them in another order.

use std::ops::Range;

use burn::backend::Dispatch;
use burn::tensor::ops::AvgPoolOptions;
use burn::tensor::{Tensor, module};

use super::extension::TrainingOps;
use super::{ConvOptions, conv2d, has_kernels, widened};

fn channels_last(image: Tensor<4>) -> Tensor<4> {
    image.permute([0, 2, 3, 1])
}

fn channels_first(rows: Tensor<4>) -> Tensor<4> {
    rows.permute([0, 3, 1, 2])
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
    if !parts.iter().all(has_kernels) {
        // along the last axis, so that a GPU's images stay channels-last in memory
        let parts = parts.into_iter().map(channels_last).collect();
        return channels_first(Tensor::cat(parts, 3));
    }
    let mut parts = parts.into_iter().map(Tensor::into_dispatch);
    let mut all = parts.next().expect("something to concatenate");
    while let Some(part) = parts.next() {
        all = match parts.next() {
            Some(next) => Dispatch::join_three(all, part, next),
            None => Dispatch::join_two(all, part, false),
        };
    }
    Tensor::from_dispatch(all)
}

/// Channels of two tensors in turn: ShuffleNet's shuffle of `concat([left, right])`, with its channels in two rows read
/// column by column.
pub fn interleave(left: Tensor<4>, right: Tensor<4>) -> Tensor<4> {
    if has_kernels(&left) && has_kernels(&right) {
        return Tensor::from_dispatch(Dispatch::join_two(left.into_dispatch(), right.into_dispatch(), true));
    }
    let [batch, channels, height, width] = left.dims();
    let x: Tensor<5> = Tensor::stack(vec![channels_last(left), channels_last(right)], 4);
    channels_first(x.reshape([batch, height, width, 2 * channels]))
}

/// Some of the channels, `input[:, range]`.
pub fn channels(input: Tensor<4>, range: Range<usize>) -> Tensor<4> {
    if has_kernels(&input) {
        return Tensor::from_dispatch(Dispatch::some(input.into_dispatch(), range.start, range.len()));
    }
    let [batch, _, height, width] = input.dims();
    channels_first(channels_last(input).slice([0..batch, 0..height, 0..width, range]))
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
