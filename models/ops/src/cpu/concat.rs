//! Concatenation, slicing and joining of channels, on channels-last images.
//!
//! Checked by `composed_operations` in `models/ops/tests/ops.rs` and `elementwise_operations_and_channels` in `bf16.rs`; joining by
//! the DPNs of `models/tests/golden.rs`.

use std::ops::Range;

use super::allocator::Buffer;
use super::element::Element;
use super::multiversion::multiversion;
use super::parallel::{PIECE, SharedSlice, chunk, chunk_count, for_each};
use crate::channels::Join;

/// Runs `task` in parallel over ranges of pixels with `channels` elements each.
fn for_pixels(pixels: usize, channels: usize, task: impl Fn(Range<usize>) + Send + Sync) {
    let parts = chunk_count(pixels * channels, PIECE);
    for_each(parts, |index| task(chunk(pixels, 1, parts, index)));
}

/// Concatenates the channels of `parts`, `(values, channels)`. If `interleaved`, the result alternates between the
/// parts' channels, and all parts have the same number of channels.
pub(crate) fn concat<E: Element>(parts: &[(&[E], usize)], pixels: usize, interleaved: bool) -> Buffer<E> {
    let channels: usize = parts.iter().map(|part| part.1).sum();
    let mut y = Buffer::new(pixels * channels);
    let target = SharedSlice::new(&mut y);
    for_pixels(pixels, channels, |range| {
        for pixel in range {
            // SAFETY: each task has its own pixels.
            let y = unsafe { target.slice(pixel * channels..(pixel + 1) * channels) };
            let from = |part: &(&[E], usize)| pixel * part.1..(pixel + 1) * part.1;
            match parts {
                [left, right] if interleaved => {
                    let pairs = left.0[from(left)].iter().zip(&right.0[from(right)]);
                    y.chunks_exact_mut(2).zip(pairs).for_each(|(y, (left, right))| (y[0], y[1]) = (*left, *right));
                }
                _ => {
                    let mut rest = y;
                    for (i, part) in parts.iter().enumerate() {
                        let values = &part.0[from(part)];
                        if interleaved {
                            rest[i..].iter_mut().step_by(parts.len()).zip(values).for_each(|(y, x)| *y = *x);
                        } else {
                            let (to, tail) = rest.split_at_mut(values.len());
                            to.copy_from_slice(values);
                            rest = tail;
                        }
                    }
                }
            }
        }
    });
    y
}

/// Returns the gradients of the parts of [`concat`], which have `parts` channels.
pub(crate) fn concat_grad<E: Element>(dy: &[E], parts: &[usize], pixels: usize, interleaved: bool) -> Vec<Buffer<E>> {
    let channels: usize = parts.iter().sum();
    let mut grads: Vec<Buffer<E>> = parts.iter().map(|channels| Buffer::new(pixels * channels)).collect();
    let targets: Vec<SharedSlice<E>> = grads.iter_mut().map(|grad| SharedSlice::new(grad)).collect();
    for_pixels(pixels, channels, |range| {
        for pixel in range {
            let dy = &dy[pixel * channels..(pixel + 1) * channels];
            let mut first = 0;
            for (i, (target, &channels)) in targets.iter().zip(parts).enumerate() {
                // SAFETY: each task has its own pixels.
                let to = unsafe { target.slice(pixel * channels..(pixel + 1) * channels) };
                if interleaved {
                    to.iter_mut().zip(dy.chunks_exact(parts.len())).for_each(|(to, dy)| *to = dy[i]);
                } else {
                    to.copy_from_slice(&dy[first..first + channels]);
                    first += channels;
                }
            }
        }
    });
    grads
}

/// Copies the `chosen` range of `all` channels.
pub(crate) fn slice<E: Element>(x: &[E], all: usize, chosen: Range<usize>) -> Buffer<E> {
    let (pixels, few) = (x.len() / all, chosen.len());
    let mut y = Buffer::new(pixels * few);
    let target = SharedSlice::new(&mut y);
    for_pixels(pixels, few, |range| {
        for pixel in range {
            // SAFETY: each task has its own pixels.
            let y = unsafe { target.slice(pixel * few..(pixel + 1) * few) };
            y.copy_from_slice(&x[pixel * all..][chosen.clone()]);
        }
    });
    y
}

/// Returns the gradient of [`slice`].
pub(crate) fn slice_grad<E: Element>(dy: &[E], all: usize, chosen: Range<usize>) -> Buffer<E> {
    let few = chosen.len();
    let pixels = dy.len() / few;
    let mut dx = Buffer::new(pixels * all);
    let target = SharedSlice::new(&mut dx);
    for_pixels(pixels, all, |range| {
        for pixel in range {
            // SAFETY: each task has its own pixels.
            let dx = unsafe { target.slice(pixel * all..(pixel + 1) * all) };
            dx[..chosen.start].fill(E::zeroed());
            dx[chosen.clone()].copy_from_slice(&dy[pixel * few..(pixel + 1) * few]);
            dx[chosen.end..].fill(E::zeroed());
        }
    });
    dx
}

/// See [`ChannelKernels::join_forward`](crate::channels::ChannelKernels::join_forward); the images have `old` and `new` channels.
pub(crate) fn joined<E: Element>(left: &[E], right: &[E], [old, new]: [usize; 2], join: Join) -> Buffer<E> {
    let (pixels, all) = (left.len() / old, old + new - join.shared);
    let mut y = Buffer::new(pixels * all);
    let target = SharedSlice::new(&mut y);
    for_pixels(pixels, all, |range| {
        // SAFETY: each task has its own pixels.
        let y = unsafe { target.slice(range.start * all..range.end * all) };
        let (left, right) = (&left[range.start * old..range.end * old], &right[range.start * new..range.end * new]);
        join_pixels(left, right, y, old, new, join.shared, join.relu);
    });
    y
}

multiversion!(fn join_pixels<E: Element>(
    left: &[E], right: &[E], y: &mut [E], old: usize, new: usize, shared: usize, relu: bool
) = join_pixels_body);

#[inline(always)]
fn join_pixels_body<E: Element>(
    left: &[E],
    right: &[E],
    y: &mut [E],
    old: usize,
    new: usize,
    shared: usize,
    relu: bool,
) {
    let pixels = left.chunks_exact(old).zip(right.chunks_exact(new));
    for (y, (left, right)) in y.chunks_exact_mut(old + new - shared).zip(pixels) {
        let (sums, rest) = y.split_at_mut(shared);
        let both = left[..shared].iter().zip(&right[..shared]);
        sums.iter_mut().zip(both).for_each(|(y, (left, right))| *y = E::from_f32(left.to_f32() + right.to_f32()));
        let (first, second) = rest.split_at_mut(old - shared);
        first.copy_from_slice(&left[shared..]);
        second.copy_from_slice(&right[shared..]);
        if relu {
            // Not `max`, which would drop NaN.
            y.iter_mut().for_each(|y| *y = if y.to_f32() < 0.0 { E::zeroed() } else { *y });
        }
    }
}

/// See [`ChannelKernels::join_backward`](crate::channels::ChannelKernels::join_backward); without ReLU, `output` is empty.
pub(crate) fn joined_grad<E: Element>(dy: &[E], output: &[E], [old, new]: [usize; 2], shared: usize) -> [Buffer<E>; 2] {
    let all = old + new - shared;
    let pixels = dy.len() / all;
    let (mut left, mut right) = (Buffer::new(pixels * old), Buffer::new(pixels * new));
    let targets = [SharedSlice::new(&mut left), SharedSlice::new(&mut right)];
    for_pixels(pixels, all, |range| {
        let of = |channels: usize| range.start * channels..range.end * channels;
        // SAFETY: each task has its own pixels.
        let (left, right) = unsafe { (targets[0].slice(of(old)), targets[1].slice(of(new))) };
        let output = if output.is_empty() { output } else { &output[of(all)] };
        split_pixels(&dy[of(all)], output, left, right, old, new, shared);
    });
    [left, right]
}

multiversion!(fn split_pixels<E: Element>(
    dy: &[E], output: &[E], left: &mut [E], right: &mut [E], old: usize, new: usize, shared: usize
) = split_pixels_body);

#[inline(always)]
fn split_pixels_body<E: Element>(
    dy: &[E],
    output: &[E],
    left: &mut [E],
    right: &mut [E],
    old: usize,
    new: usize,
    shared: usize,
) {
    let all = old + new - shared;
    let pixels = left.chunks_exact_mut(old).zip(right.chunks_exact_mut(new)).enumerate();
    for (pixel, (left, right)) in pixels {
        let dy = &dy[pixel * all..(pixel + 1) * all];
        left.copy_from_slice(&dy[..old]);
        right[shared..].copy_from_slice(&dy[old..]);
        if !output.is_empty() {
            let output = &output[pixel * all..(pixel + 1) * all];
            let masked = |(dx, y): (&mut E, &E)| *dx = if y.to_f32() > 0.0 { *dx } else { E::zeroed() };
            left.iter_mut().zip(&output[..old]).for_each(masked);
            right[shared..].iter_mut().zip(&output[old..]).for_each(masked);
        }
        right[..shared].copy_from_slice(&left[..shared]);
    }
}
