//! Depthwise convolution: one filter per channel. Each multiply-add processes a vector of channels, and there is no
//! matrix product. Weights and sums are f32. Tasks are rows of pixels. The weight gradient has one sum for each of 16 parts of
//! the batch and adds the sums in order, so it does not depend on the number of threads.
//!
//! Images are channels-last, and weights `[tap][channel]` while they are used. Checked by `conv_tests`.

use super::allocator::Buffer;
use super::channels::sum_rows;
use super::element::Element;
use super::multiversion::multiversion;
use super::parallel::{SharedSlice, chunk, for_each};
use crate::shape::ConvShape;

/// Returns true if each group has one input and one output channel. One group is accepted too: average pooling relies on
/// weights that are not rounded to bf16.
pub(crate) fn fits(shape: &ConvShape) -> bool {
    shape.group_channels() == [1, 1]
}

/// Transposes `[channel][tap]` to `[tap][channel]`.
fn by_tap(weight: &[f32], taps: usize) -> Buffer {
    let channels = weight.len() / taps;
    let mut to = Buffer::new(weight.len());
    for tap in 0..taps {
        for c in 0..channels {
            to[tap * channels + c] = weight[c * taps + tap];
        }
    }
    to
}

/// Computes `y` `[batch, oh, ow, channels]`.
pub(crate) fn forward<E: Element>(
    shape: &ConvShape,
    x: &[E],
    weight: &[f32],
    bias: Option<&[f32]>,
    relu: bool,
    y: &mut [E],
) {
    let weight = by_tap(weight, shape.taps());
    let row_len = shape.output[1] * shape.channels[0];
    let target = SharedSlice::new(y);
    for_each(shape.batch * shape.output[0], |row| {
        // SAFETY: each task has its own row.
        let y = unsafe { target.slice(row * row_len..(row + 1) * row_len) };
        forward_row(shape, x, &weight, bias, relu, row, y);
    });
}

multiversion!(fn forward_row<E: Element>(
    shape: &ConvShape, x: &[E], weight: &[f32], bias: Option<&[f32]>, relu: bool, row: usize, y: &mut [E]
) = forward_row_body);

#[inline(always)]
fn forward_row_body<E: Element>(
    shape: &ConvShape,
    x: &[E],
    weight: &[f32],
    bias: Option<&[f32]>,
    relu: bool,
    row: usize,
    y: &mut [E],
) {
    let channels = shape.channels[0];
    let (n, oy) = (row / shape.output[0], row % shape.output[0]);
    let mut scratch = sums_of_a_pixel::<E>(channels);
    for (ox, y) in y.chunks_exact_mut(channels).enumerate() {
        let sums = sums_or(&mut scratch, y);
        match bias {
            Some(bias) => sums.copy_from_slice(bias),
            None => sums.fill(0.0),
        }
        for tap in 0..shape.taps() {
            let Some(pixel) = source(shape, n, oy, ox, tap) else { continue };
            let x = &x[pixel * channels..][..channels];
            let weight = &weight[tap * channels..][..channels];
            for ((sum, x), w) in sums.iter_mut().zip(x).zip(weight) {
                *sum += x.to_f32() * w;
            }
        }
        if relu {
            sums.iter_mut().for_each(|sum| *sum = if *sum < 0.0 { 0.0 } else { *sum });
        }
        round(&scratch, y);
    }
}

/// Returns memory for the f32 sums of a pixel; none where the result is f32 itself.
#[inline(always)]
fn sums_of_a_pixel<E: Element>(channels: usize) -> Vec<f32> {
    vec![0.0; if E::DTYPE == f32::DTYPE { 0 } else { channels }]
}

/// Returns the sums: `scratch`, or the result itself if it is f32.
#[inline(always)]
fn sums_or<'a, E: Element>(scratch: &'a mut [f32], result: &'a mut [E]) -> &'a mut [f32] {
    if E::DTYPE == f32::DTYPE { bytemuck::cast_slice_mut(result) } else { scratch }
}

/// Rounds the sums to the result. An f32 result holds them already.
#[inline(always)]
fn round<E: Element>(scratch: &[f32], result: &mut [E]) {
    result.iter_mut().zip(scratch).for_each(|(to, sum)| *to = E::from_f32(*sum));
}

/// Returns the input pixel of a tap of an output pixel; `None` for padding.
#[inline(always)]
fn source(shape: &ConvShape, n: usize, oy: usize, ox: usize, tap: usize) -> Option<usize> {
    let along = |i: usize, o: usize, k: usize| {
        let at = (o * shape.stride[i] + k * shape.dilation[i]).checked_sub(shape.padding[i])?;
        (at < shape.input[i]).then_some(at)
    };
    let (iy, ix) = (along(0, oy, tap / shape.kernel[1])?, along(1, ox, tap % shape.kernel[1])?);
    Some((n * shape.input[0] + iy) * shape.input[1] + ix)
}

/// Computes `dx` `[batch, h, w, channels]`.
pub(crate) fn data_grad<E: Element>(shape: &ConvShape, weight: &[f32], dy: &[E], dx: &mut [E]) {
    let weight = by_tap(weight, shape.taps());
    let row_len = shape.input[1] * shape.channels[0];
    let target = SharedSlice::new(dx);
    for_each(shape.batch * shape.input[0], |row| {
        // SAFETY: each task has its own row.
        let dx = unsafe { target.slice(row * row_len..(row + 1) * row_len) };
        data_grad_row(shape, dy, &weight, row, dx);
    });
}

multiversion!(fn data_grad_row<E: Element>(
    shape: &ConvShape, dy: &[E], weight: &[f32], row: usize, dx: &mut [E]
) = data_grad_row_body);

#[inline(always)]
fn data_grad_row_body<E: Element>(shape: &ConvShape, dy: &[E], weight: &[f32], row: usize, dx: &mut [E]) {
    let channels = shape.channels[0];
    let (n, iy) = (row / shape.input[0], row % shape.input[0]);
    // The output pixel to which input pixel `i` contributes by tap `k`.
    let along = |axis: usize, i: usize, k: usize| {
        let at = (i + shape.padding[axis]).checked_sub(k * shape.dilation[axis])?;
        let o = at / shape.stride[axis];
        (at.is_multiple_of(shape.stride[axis]) && o < shape.output[axis]).then_some(o)
    };
    let mut scratch = sums_of_a_pixel::<E>(channels);
    for (ix, dx) in dx.chunks_exact_mut(channels).enumerate() {
        let sums = sums_or(&mut scratch, dx);
        sums.fill(0.0);
        for tap in 0..shape.taps() {
            let Some(oy) = along(0, iy, tap / shape.kernel[1]) else { continue };
            let Some(ox) = along(1, ix, tap % shape.kernel[1]) else { continue };
            let dy = &dy[((n * shape.output[0] + oy) * shape.output[1] + ox) * channels..][..channels];
            let weight = &weight[tap * channels..][..channels];
            for ((sum, dy), w) in sums.iter_mut().zip(dy).zip(weight) {
                *sum += dy.to_f32() * w;
            }
        }
        round(&scratch, dx);
    }
}

/// Computes the weight gradient in PyTorch's layout.
pub(crate) fn weight_grad<E: Element>(shape: &ConvShape, x: &[E], dy: &[E]) -> Buffer {
    /// Parts of the batch that are summed separately. The number is constant, so the result does not depend on the number of
    /// threads.
    const PARTS: usize = 16;
    let (channels, taps) = (shape.channels[0], shape.taps());
    let len = channels * taps;
    let parts = PARTS.min(shape.batch).max(1);
    let mut sums = Buffer::new(parts * len);
    let target = SharedSlice::new(&mut sums);
    for_each(parts, |index| {
        // SAFETY: each task has its own sums.
        let sums = unsafe { target.slice(index * len..(index + 1) * len) };
        sums.fill(0.0);
        for n in chunk(shape.batch, 1, parts, index) {
            weight_grad_image(shape, x, dy, n, sums);
        }
    });
    let mut total = Buffer::new(len);
    sum_rows::<f32>(&sums, &mut total);
    let mut grad = Buffer::new(len);
    for (c, grad) in grad.chunks_exact_mut(taps).enumerate() {
        for (tap, grad) in grad.iter_mut().enumerate() {
            *grad = total[tap * channels + c];
        }
    }
    grad
}

multiversion!(fn weight_grad_image<E: Element>(
    shape: &ConvShape, x: &[E], dy: &[E], n: usize, sums: &mut [f32]
) = weight_grad_image_body);

#[inline(always)]
fn weight_grad_image_body<E: Element>(shape: &ConvShape, x: &[E], dy: &[E], n: usize, sums: &mut [f32]) {
    let channels = shape.channels[0];
    for oy in 0..shape.output[0] {
        for ox in 0..shape.output[1] {
            let dy = &dy[((n * shape.output[0] + oy) * shape.output[1] + ox) * channels..][..channels];
            for tap in 0..shape.taps() {
                let Some(pixel) = source(shape, n, oy, ox, tap) else { continue };
                let x = &x[pixel * channels..][..channels];
                let sums = &mut sums[tap * channels..][..channels];
                for ((sum, x), dy) in sums.iter_mut().zip(x).zip(dy) {
                    *sum += x.to_f32() * dy.to_f32();
                }
            }
        }
    }
}
