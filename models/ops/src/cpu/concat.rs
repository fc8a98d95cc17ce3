//! Concatenation and slicing of channels, on channels-last images.

use std::ops::Range;

use super::allocator::Buffer;
use super::element::Element;
use super::parallel::{PIECE, SharedSlice, chunk, chunk_count, for_each};

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
