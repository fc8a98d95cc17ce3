//! Means, sums and factors of the channels of channels-last images.

use super::memory::Buffer;
use super::parallel::{Shared, for_each, part, pieces};
use super::simd::multiversion;

/// Elements of one task of an elementwise pass.
const PIECE: usize = 1 << 16;

/// Mean of each channel, `[batch, pixels, channels]` to `[batch, channels]`.
pub(crate) fn mean(x: &[f32], batch: usize, pixels: usize, channels: usize) -> Buffer {
    let mut y = Buffer::new(batch * channels);
    let target = Shared::new(&mut y);
    for_each(batch, |n| {
        // SAFETY: each task has its own image.
        let y = unsafe { target.slice(n * channels..(n + 1) * channels) };
        mean_image(&x[n * pixels * channels..(n + 1) * pixels * channels], y);
    });
    y
}

multiversion!(fn mean_image(x: &[f32], y: &mut [f32]) = mean_image_body);

#[inline(always)]
fn mean_image_body(x: &[f32], y: &mut [f32]) {
    let channels = y.len();
    let scale = 1.0 / (x.len() / channels) as f32;
    y.fill(0.0);
    for x in x.chunks_exact(channels) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
    }
    y.iter_mut().for_each(|y| *y *= scale);
}

/// The gradient of [`mean`].
pub(crate) fn mean_grad(dy: &[f32], batch: usize, pixels: usize, channels: usize) -> Buffer {
    let mut dx = Buffer::new(batch * pixels * channels);
    let target = Shared::new(&mut dx);
    let scale = 1.0 / pixels as f32;
    for_each(batch, |n| {
        let dy = &dy[n * channels..(n + 1) * channels];
        // SAFETY: each task has its own image.
        let dx = unsafe { target.slice(n * pixels * channels..(n + 1) * pixels * channels) };
        let (first, rest) = dx.split_at_mut(channels);
        first.iter_mut().zip(dy).for_each(|(dx, dy)| *dx = dy * scale);
        rest.chunks_exact_mut(channels).for_each(|dx| dx.copy_from_slice(first));
    });
    dx
}

/// Each channel of each image times a number, `[batch, channels]`.
pub(crate) fn scale(x: &[f32], factors: &[f32], [batch, channels, height, width]: [usize; 4]) -> Buffer {
    let mut y = Buffer::new(x.len());
    let target = Shared::new(&mut y);
    let image = height * width * channels;
    for_each(batch, |n| {
        // SAFETY: each task has its own image.
        let y = unsafe { target.slice(n * image..(n + 1) * image) };
        scale_image(&x[n * image..(n + 1) * image], &factors[n * channels..(n + 1) * channels], y);
    });
    y
}

multiversion!(fn scale_image(x: &[f32], factors: &[f32], y: &mut [f32]) = scale_image_body);

#[inline(always)]
fn scale_image_body(x: &[f32], factors: &[f32], y: &mut [f32]) {
    let channels = factors.len();
    for (y, x) in y.chunks_exact_mut(channels).zip(x.chunks_exact(channels)) {
        for ((y, x), factor) in y.iter_mut().zip(x).zip(factors) {
            *y = x * factor;
        }
    }
}

/// The gradients of both sides of [`scale`].
pub(crate) fn scale_grad(
    x: &[f32],
    factors: &[f32],
    dy: &[f32],
    [batch, channels, height, width]: [usize; 4],
) -> [Buffer; 2] {
    let (mut dx, mut sums) = (Buffer::new(x.len()), Buffer::new(batch * channels));
    let targets = [Shared::new(&mut dx), Shared::new(&mut sums)];
    let image = height * width * channels;
    for_each(batch, |n| {
        let (pixels, each) = (n * image..(n + 1) * image, n * channels..(n + 1) * channels);
        // SAFETY: each task has its own image and its channels' sums.
        let (dx, sums) = unsafe { (targets[0].slice(pixels.clone()), targets[1].slice(each.clone())) };
        scale_grad_image(&x[pixels.clone()], &factors[each], &dy[pixels], dx, sums);
    });
    [dx, sums]
}

multiversion!(fn scale_grad_image(x: &[f32], factors: &[f32], dy: &[f32], dx: &mut [f32], sums: &mut [f32]) = scale_grad_image_body);

#[inline(always)]
fn scale_grad_image_body(x: &[f32], factors: &[f32], dy: &[f32], dx: &mut [f32], sums: &mut [f32]) {
    let channels = factors.len();
    let sums = &mut sums[..channels];
    sums.fill(0.0);
    let rows = x.chunks_exact(channels).zip(dy.chunks_exact(channels));
    for (dx, (x, dy)) in dx.chunks_exact_mut(channels).zip(rows) {
        for c in 0..channels {
            dx[c] = dy[c] * factors[c];
            sums[c] += dy[c] * x[c];
        }
    }
}

/// `a + b`.
pub(crate) fn sum(a: &[f32], b: &[f32]) -> Buffer {
    let mut y = Buffer::new(a.len());
    let target = Shared::new(&mut y);
    let parts = pieces(a.len(), PIECE);
    for_each(parts, |index| {
        let range = part(a.len(), 16, parts, index);
        // SAFETY: each task has its own range.
        sum_piece(&a[range.clone()], &b[range.clone()], unsafe { target.slice(range) });
    });
    y
}

multiversion!(fn sum_piece(a: &[f32], b: &[f32], y: &mut [f32]) = sum_piece_body);

#[inline(always)]
fn sum_piece_body(a: &[f32], b: &[f32], y: &mut [f32]) {
    y.iter_mut().zip(a.iter().zip(b)).for_each(|(y, (a, b))| *y = a + b);
}

/// Adds a number to each channel, then makes negative values zero if told so.
pub(crate) fn add_bias(y: &mut [f32], channels: usize, bias: Option<&[f32]>, relu: bool) {
    let (len, parts) = (y.len(), pieces(y.len(), PIECE));
    let target = Shared::new(y);
    for_each(parts, |index| {
        // SAFETY: each task has its own range.
        add_bias_piece(unsafe { target.slice(part(len, channels, parts, index)) }, channels, bias, relu);
    });
}

multiversion!(fn add_bias_piece(y: &mut [f32], channels: usize, bias: Option<&[f32]>, relu: bool) = add_bias_piece_body);

#[inline(always)]
fn add_bias_piece_body(y: &mut [f32], channels: usize, bias: Option<&[f32]>, relu: bool) {
    if let Some(bias) = bias {
        for y in y.chunks_exact_mut(channels) {
            y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
    }
    if relu {
        y.iter_mut().for_each(|y| *y = if *y < 0.0 { 0.0 } else { *y });
    }
}

/// Sum of each channel over all pixels, in pieces of fixed size whose sums are added in order.
pub(crate) fn channel_sums(x: &[f32], channels: usize) -> Buffer {
    let rows_each = (PIECE / channels).max(1);
    let count = (x.len() / channels).div_ceil(rows_each);
    let mut sums = Buffer::new(count * channels);
    let target = Shared::new(&mut sums);
    for_each(count, |index| {
        let end = ((index + 1) * rows_each * channels).min(x.len());
        // SAFETY: each task has its own sums.
        let to = unsafe { target.slice(index * channels..(index + 1) * channels) };
        sum_rows(&x[index * rows_each * channels..end], to);
    });
    let mut total = Buffer::zeroed(channels);
    sum_rows(&sums, &mut total);
    total
}

multiversion!(fn sum_rows(x: &[f32], sums: &mut [f32]) = sum_rows_body);

#[inline(always)]
fn sum_rows_body(x: &[f32], sums: &mut [f32]) {
    const VECTOR: usize = 16;
    const FEW: usize = 32;
    let channels = sums.len();
    sums.fill(0.0);
    let mut rows = x;
    // Few channels: as many rows at once as make whole vectors.
    if channels < FEW {
        let together = VECTOR >> channels.trailing_zeros().min(VECTOR.trailing_zeros());
        let mut wide = [0.0; FEW * VECTOR];
        let wide = &mut wide[..together * channels];
        let whole = x.chunks_exact(wide.len());
        rows = whole.remainder();
        whole.for_each(|x| wide.iter_mut().zip(x).for_each(|(sum, x)| *sum += x));
        wide.chunks_exact(channels).for_each(|wide| sums.iter_mut().zip(wide).for_each(|(sum, x)| *sum += x));
    }
    for x in rows.chunks_exact(channels) {
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
    }
}
