//! Channels side by side, and some of them, on channels-last images.

use std::ops::Range;

use super::memory::Buffer;
use super::parallel::{Shared, for_each, part, pieces};

/// Elements of one task of a pass.
const PIECE: usize = 1 << 16;

/// Runs `task` on ranges of pixels of `channels` floats.
fn for_pixels(pixels: usize, channels: usize, task: impl Fn(Range<usize>) + Send + Sync) {
    let parts = pieces(pixels * channels, PIECE);
    for_each(parts, |index| task(part(pixels, 1, parts, index)));
}

/// Each pixel's channels of all parts, `(values, channels)`, one part after the other or, where `in_turn`, one channel of
/// each in turn, of which all then have as many.
pub(crate) fn join(parts: &[(&[f32], usize)], pixels: usize, in_turn: bool) -> Buffer {
    let channels: usize = parts.iter().map(|part| part.1).sum();
    let mut y = Buffer::new(pixels * channels);
    let target = Shared::new(&mut y);
    for_pixels(pixels, channels, |range| {
        for pixel in range {
            // SAFETY: each task has its own pixels.
            let y = unsafe { target.slice(pixel * channels..(pixel + 1) * channels) };
            let from = |part: &(&[f32], usize)| pixel * part.1..(pixel + 1) * part.1;
            match parts {
                [left, right] if in_turn => {
                    let pairs = left.0[from(left)].iter().zip(&right.0[from(right)]);
                    y.chunks_exact_mut(2).zip(pairs).for_each(|(y, (left, right))| (y[0], y[1]) = (*left, *right));
                }
                _ => {
                    let mut rest = y;
                    for (i, part) in parts.iter().enumerate() {
                        let values = &part.0[from(part)];
                        if in_turn {
                            rest[i..].iter_mut().step_by(parts.len()).zip(values).for_each(|(y, x)| *y = *x);
                        } else {
                            let (to, behind) = rest.split_at_mut(values.len());
                            to.copy_from_slice(values);
                            rest = behind;
                        }
                    }
                }
            }
        }
    });
    y
}

/// The gradients of the parts of [`join`], which have so many channels.
pub(crate) fn split(dy: &[f32], parts: &[usize], pixels: usize, in_turn: bool) -> Vec<Buffer> {
    let channels: usize = parts.iter().sum();
    let mut grads: Vec<Buffer> = parts.iter().map(|channels| Buffer::new(pixels * channels)).collect();
    let targets: Vec<Shared<f32>> = grads.iter_mut().map(|grad| Shared::new(grad)).collect();
    for_pixels(pixels, channels, |range| {
        for pixel in range {
            let dy = &dy[pixel * channels..(pixel + 1) * channels];
            let mut first = 0;
            for (i, (target, &channels)) in targets.iter().zip(parts).enumerate() {
                // SAFETY: each task has its own pixels.
                let to = unsafe { target.slice(pixel * channels..(pixel + 1) * channels) };
                if in_turn {
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

/// Some of `all` channels.
pub(crate) fn some(x: &[f32], all: usize, chosen: Range<usize>) -> Buffer {
    let (pixels, few) = (x.len() / all, chosen.len());
    let mut y = Buffer::new(pixels * few);
    let target = Shared::new(&mut y);
    for_pixels(pixels, few, |range| {
        for pixel in range {
            // SAFETY: each task has its own pixels.
            let y = unsafe { target.slice(pixel * few..(pixel + 1) * few) };
            y.copy_from_slice(&x[pixel * all..][chosen.clone()]);
        }
    });
    y
}

/// The gradient of [`some`].
pub(crate) fn some_grad(dy: &[f32], all: usize, chosen: Range<usize>) -> Buffer {
    let few = chosen.len();
    let pixels = dy.len() / few;
    let mut dx = Buffer::new(pixels * all);
    let target = Shared::new(&mut dx);
    for_pixels(pixels, all, |range| {
        for pixel in range {
            // SAFETY: each task has its own pixels.
            let dx = unsafe { target.slice(pixel * all..(pixel + 1) * all) };
            dx[..chosen.start].fill(0.0);
            dx[chosen.clone()].copy_from_slice(&dy[pixel * few..(pixel + 1) * few]);
            dx[chosen.end..].fill(0.0);
        }
    });
    dx
}
