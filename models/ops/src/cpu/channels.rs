//! Means, sums and factors of channels, on channels-last images.
//!
//! Checked by `models/ops/tests/ops.rs` and by `elementwise_operations_and_channels` in `bf16.rs`.

use super::allocator::Buffer;
use super::element::Element;
use super::multiversion::multiversion;
use super::parallel::{PIECE, SharedSlice, VECTOR, elementwise, for_each};

/// Computes the mean of each channel, `[batch, pixels, channels]` → `[batch, channels]`.
pub(crate) fn mean<E: Element>(x: &[E], batch: usize, pixels: usize, channels: usize) -> Buffer {
    let mut y = Buffer::new(batch * channels);
    let target = SharedSlice::new(&mut y);
    for_each(batch, |n| {
        // SAFETY: each task has its own image.
        let y = unsafe { target.slice(n * channels..(n + 1) * channels) };
        mean_image(&x[n * pixels * channels..(n + 1) * pixels * channels], y);
    });
    y
}

multiversion!(fn mean_image<E: Element>(x: &[E], y: &mut [f32]) = mean_image_body);

#[inline(always)]
fn mean_image_body<E: Element>(x: &[E], y: &mut [f32]) {
    let channels = y.len();
    let scale = 1.0 / (x.len() / channels) as f32;
    y.fill(0.0);
    for x in x.chunks_exact(channels) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y += x.to_f32());
    }
    y.iter_mut().for_each(|y| *y *= scale);
}

/// Computes the gradient of [`mean`].
pub(crate) fn mean_grad<E: Element>(dy: &[f32], batch: usize, pixels: usize, channels: usize) -> Buffer<E> {
    let mut dx = Buffer::new(batch * pixels * channels);
    let target = SharedSlice::new(&mut dx);
    let scale = 1.0 / pixels as f32;
    for_each(batch, |n| {
        let dy = &dy[n * channels..(n + 1) * channels];
        // SAFETY: each task has its own image.
        let dx = unsafe { target.slice(n * pixels * channels..(n + 1) * pixels * channels) };
        let (first, rest) = dx.split_at_mut(channels);
        first.iter_mut().zip(dy).for_each(|(dx, dy)| *dx = E::from_f32(dy * scale));
        rest.chunks_exact_mut(channels).for_each(|dx| dx.copy_from_slice(first));
    });
    dx
}

/// Multiplies each channel of each image by a factor, `[batch, channels]`.
pub(crate) fn scale<E: Element>(x: &[E], factors: &[E], [batch, channels, height, width]: [usize; 4]) -> Buffer<E> {
    let mut y = Buffer::new(x.len());
    let target = SharedSlice::new(&mut y);
    let image = height * width * channels;
    for_each(batch, |n| {
        // SAFETY: each task has its own image.
        let y = unsafe { target.slice(n * image..(n + 1) * image) };
        scale_image(&x[n * image..(n + 1) * image], &factors[n * channels..(n + 1) * channels], y);
    });
    y
}

multiversion!(fn scale_image<E: Element>(x: &[E], factors: &[E], y: &mut [E]) = scale_image_body);

#[inline(always)]
fn scale_image_body<E: Element>(x: &[E], factors: &[E], y: &mut [E]) {
    let channels = factors.len();
    for (y, x) in y.chunks_exact_mut(channels).zip(x.chunks_exact(channels)) {
        for ((y, x), factor) in y.iter_mut().zip(x).zip(factors) {
            *y = E::from_f32(x.to_f32() * factor.to_f32());
        }
    }
}

/// Computes the gradients of both arguments of [`scale`].
pub(crate) fn scale_grad<E: Element>(
    x: &[E],
    factors: &[E],
    dy: &[E],
    [batch, channels, height, width]: [usize; 4],
) -> [Buffer<E>; 2] {
    let (mut dx, mut dfactors) = (Buffer::new(x.len()), Buffer::new(batch * channels));
    let targets = [SharedSlice::new(&mut dx), SharedSlice::new(&mut dfactors)];
    let image = height * width * channels;
    for_each(batch, |n| {
        let (pixels, each) = (n * image..(n + 1) * image, n * channels..(n + 1) * channels);
        let mut sums = Buffer::zeroed(channels);
        // SAFETY: each task has its own image and its channels' gradients.
        let (dx, dfactors) = unsafe { (targets[0].slice(pixels.clone()), targets[1].slice(each.clone())) };
        scale_grad_image(&x[pixels.clone()], &factors[each], &dy[pixels], dx, &mut sums);
        dfactors.iter_mut().zip(&*sums).for_each(|(to, sum)| *to = E::from_f32(*sum));
    });
    [dx, dfactors]
}

multiversion!(fn scale_grad_image<E: Element>(
    x: &[E], factors: &[E], dy: &[E], dx: &mut [E], sums: &mut [f32]
) = scale_grad_image_body);

#[inline(always)]
fn scale_grad_image_body<E: Element>(x: &[E], factors: &[E], dy: &[E], dx: &mut [E], sums: &mut [f32]) {
    let channels = factors.len();
    let sums = &mut sums[..channels];
    let rows = x.chunks_exact(channels).zip(dy.chunks_exact(channels));
    for (dx, (x, dy)) in dx.chunks_exact_mut(channels).zip(rows) {
        for c in 0..channels {
            let dy = dy[c].to_f32();
            dx[c] = E::from_f32(dy * factors[c].to_f32());
            sums[c] += dy * x[c].to_f32();
        }
    }
}

/// Computes `a + b`.
pub(crate) fn add<E: Element>(a: &[E], b: &[E]) -> Buffer<E> {
    elementwise(a.len(), VECTOR, |range, y| add_piece(&a[range.clone()], &b[range], y))
}

multiversion!(fn add_piece<E: Element>(a: &[E], b: &[E], y: &mut [E]) = add_piece_body);

#[inline(always)]
fn add_piece_body<E: Element>(a: &[E], b: &[E], y: &mut [E]) {
    y.iter_mut().zip(a.iter().zip(b)).for_each(|(y, (a, b))| *y = E::from_f32(a.to_f32() + b.to_f32()));
}

/// Sums each channel over all pixels, in pieces of fixed size whose sums are added in order.
pub(crate) fn channel_sums<E: Element>(x: &[E], channels: usize) -> Buffer {
    let rows_each = (PIECE / channels).max(1);
    let count = (x.len() / channels).div_ceil(rows_each);
    let mut sums = Buffer::new(count * channels);
    let target = SharedSlice::new(&mut sums);
    for_each(count, |index| {
        let end = ((index + 1) * rows_each * channels).min(x.len());
        // SAFETY: each task has its own sums.
        let to = unsafe { target.slice(index * channels..(index + 1) * channels) };
        sum_rows(&x[index * rows_each * channels..end], to);
    });
    let mut total = Buffer::zeroed(channels);
    sum_rows::<f32>(&sums, &mut total);
    total
}

multiversion!(fn sum_rows<E: Element>(x: &[E], sums: &mut [f32]) = sum_rows_body);

#[inline(always)]
fn sum_rows_body<E: Element>(x: &[E], sums: &mut [f32]) {
    const MANY: usize = 32;
    let channels = sums.len();
    sums.fill(0.0);
    let mut rows = x;
    // With few channels, add as many rows at once as make whole vectors.
    if channels < MANY {
        let rows_at_once = VECTOR >> channels.trailing_zeros().min(VECTOR.trailing_zeros());
        let mut wide = [0.0; MANY * VECTOR];
        let wide = &mut wide[..rows_at_once * channels];
        let whole = x.chunks_exact(wide.len());
        rows = whole.remainder();
        whole.for_each(|x| wide.iter_mut().zip(x).for_each(|(sum, x)| *sum += x.to_f32()));
        wide.chunks_exact(channels).for_each(|wide| sums.iter_mut().zip(wide).for_each(|(sum, x)| *sum += x));
    }
    for x in rows.chunks_exact(channels) {
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x.to_f32());
    }
}
