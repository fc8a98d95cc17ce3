//! Max pooling on channels-last images.
//!
//! Loops run over vectors of channels. The last vector of a pixel with few channels extends into the next pixel, whose
//! own values are written later: LeNet's 6 channels then take one vector instead of six scalars.
//!
//! Source: `torch.nn.functional.max_pool2d`. Checked by `pooling_and_relu` in `models/ops/tests/ops.rs` and `poolings` in
//! `bf16.rs`.

use std::ops::Range;

use bytemuck::Pod;

use super::allocator::Buffer;
use super::element::Element;
use super::multiversion::multiversion;
use super::parallel::{PIECE, SharedSlice, chunk, chunk_count, for_each};
use crate::shape::PoolShape;

/// Number of channels up to which half-width vectors are used.
const HALF_VECTOR: usize = 8;

/// Computes the largest value of each window, and its position in the window as a byte. As in PyTorch, the first of
/// several equal values is taken, and NaN is larger than all numbers.
pub(crate) fn forward<E: Element>(shape: &PoolShape, x: &[E]) -> (Buffer<E>, Buffer<u8>) {
    let row_len = shape.output[1] * shape.channels;
    let rows = shape.batch * shape.output[0];
    let mut y = Buffer::new(rows * row_len);
    let mut argmax = Buffer::new(rows * row_len);
    let (values, positions) = (SharedSlice::new(&mut y), SharedSlice::new(&mut argmax));
    let parts = chunk_count(rows * row_len, PIECE);
    for_each(parts, |index| {
        for row in chunk(rows, 1, parts, index) {
            // SAFETY: each task has its own rows.
            let (y, argmax) = unsafe {
                (values.slice(row * row_len..(row + 1) * row_len), positions.slice(row * row_len..(row + 1) * row_len))
            };
            forward_row(shape, x, row, y, argmax);
        }
    });
    (y, argmax)
}

multiversion!(fn forward_row<E: Element>(
    shape: &PoolShape, x: &[E], row: usize, y: &mut [E], argmax: &mut [u8]
) = forward_row_body);

#[inline(always)]
fn forward_row_body<E: Element>(shape: &PoolShape, x: &[E], row: usize, y: &mut [E], argmax: &mut [u8]) {
    if shape.channels <= HALF_VECTOR {
        forward_lanes::<E, 8>(shape, x, row, y, argmax);
    } else {
        forward_lanes::<E, 16>(shape, x, row, y, argmax);
    }
}

#[inline(always)]
fn forward_lanes<E: Element, const LANES: usize>(
    shape: &PoolShape,
    x: &[E],
    row: usize,
    y: &mut [E],
    argmax: &mut [u8],
) {
    let channels = shape.channels;
    let (n, oy) = (row / shape.output[0], row % shape.output[0]);
    let rows_inside = shape.inside(0, oy);
    for ox in 0..shape.output[1] {
        let columns_inside = shape.inside(1, ox);
        for first in (0..channels).step_by(LANES) {
            let at = ox * channels + first;
            let mut best = [f32::NEG_INFINITY; LANES];
            let mut best_tap = [(rows_inside.start * shape.kernel[1] + columns_inside.start) as u32; LANES];
            // Use all lanes if they exceed neither the row nor the image, else only those of this pixel.
            let last = shape.pixel(n, oy, ox, [rows_inside.end - 1, columns_inside.end - 1]) * channels + first;
            let all = at + LANES <= y.len() && last + LANES <= x.len();
            let lanes = if all { LANES } else { LANES.min(channels - first) };
            for ky in rows_inside.clone() {
                for kx in columns_inside.clone() {
                    let from = shape.pixel(n, oy, ox, [ky, kx]) * channels + first;
                    let values = load::<E, LANES>(&x[from..from + lanes]);
                    let tap = (ky * shape.kernel[1] + kx) as u32;
                    for lane in 0..LANES {
                        let value = values[lane].to_f32();
                        let larger = (value > best[lane]) | value.is_nan();
                        best[lane] = if larger { value } else { best[lane] };
                        best_tap[lane] = if larger { tap } else { best_tap[lane] };
                    }
                }
            }
            // Loops instead of `array::map`, whose closures the compiler does not inline into a copy for an instruction set.
            let (mut values, mut taps) = ([E::zeroed(); LANES], [0; LANES]);
            for lane in 0..LANES {
                values[lane] = E::from_exact(best[lane]);
                taps[lane] = best_tap[lane] as u8;
            }
            store(&values, &mut y[at..at + lanes]);
            store(&taps, &mut argmax[at..at + lanes]);
        }
    }
}

/// Computes the gradient of the input: each output's gradient goes to the pixel of the largest value.
pub(crate) fn backward<E: Element>(shape: &PoolShape, argmax: &[u8], dy: &[E]) -> Buffer<E> {
    let input_len = shape.input[0] * shape.input[1] * shape.channels;
    let mut dx = Buffer::new(shape.batch * input_len);
    let target = SharedSlice::new(&mut dx);
    for_each(shape.batch, |n| {
        // SAFETY: each task has its own image.
        let dx = unsafe { target.slice(n * input_len..(n + 1) * input_len) };
        backward_image(shape, argmax, dy, n, dx);
    });
    dx
}

multiversion!(fn backward_image<E: Element>(
    shape: &PoolShape, argmax: &[u8], dy: &[E], n: usize, dx: &mut [E]
) = backward_image_body);

#[inline(always)]
fn backward_image_body<E: Element>(shape: &PoolShape, argmax: &[u8], dy: &[E], n: usize, dx: &mut [E]) {
    // Without overlap, each pixel is in at most one window, and pixels are written in ascending order.
    let disjoint = shape.stride == shape.kernel;
    let covered = shape.padding == [0, 0] && (0..2).all(|i| shape.output[i] * shape.kernel[i] == shape.input[i]);
    if !(disjoint && covered) {
        dx.fill(E::zeroed());
    }
    match (disjoint, shape.channels <= HALF_VECTOR) {
        (true, true) => backward_lanes::<E, E, 8, true>(shape, argmax, dy, n, dx),
        (true, false) => backward_lanes::<E, E, 16, true>(shape, argmax, dy, n, dx),
        (false, true) => backward_overlapping::<E, 8>(shape, argmax, dy, n, dx),
        (false, false) => backward_overlapping::<E, 16>(shape, argmax, dy, n, dx),
    }
}

/// Adds up the gradients of overlapping windows in f32.
#[inline(always)]
fn backward_overlapping<E: Element, const LANES: usize>(
    shape: &PoolShape,
    argmax: &[u8],
    dy: &[E],
    n: usize,
    dx: &mut [E],
) {
    if E::DTYPE == f32::DTYPE {
        return backward_lanes::<E, E, LANES, false>(shape, argmax, dy, n, dx);
    }
    let mut sums = Buffer::<f32>::zeroed(dx.len());
    backward_lanes::<E, f32, LANES, false>(shape, argmax, dy, n, &mut sums);
    dx.iter_mut().zip(&*sums).for_each(|(dx, sum)| *dx = E::from_f32(*sum));
}

#[inline(always)]
fn backward_lanes<E: Element, S: Element, const LANES: usize, const DISJOINT: bool>(
    shape: &PoolShape,
    argmax: &[u8],
    dy: &[E],
    n: usize,
    dx: &mut [S],
) {
    let channels = shape.channels;
    let start = n * shape.input[0] * shape.input[1];
    for oy in 0..shape.output[0] {
        for ky in shape.inside(0, oy) {
            // A vector may spill into the next pixels of a row of windows, which are written later, but not beyond the last pixel.
            let last_window = shape.output[1] - 1;
            let last_column = shape.inside(1, last_window).end - 1;
            let end = (shape.pixel(n, oy, last_window, [ky, last_column]) - start + 1) * channels;
            for ox in 0..shape.output[1] {
                for kx in shape.inside(1, ox) {
                    let (output, pixel) =
                        (((n * shape.output[0] + oy) * shape.output[1] + ox), shape.pixel(n, oy, ox, [ky, kx]) - start);
                    let tap = (ky * shape.kernel[1] + kx) as u8;
                    for first in (0..channels).step_by(LANES) {
                        let (from, to) = (output * channels + first, pixel * channels + first);
                        let all = DISJOINT && from + LANES <= dy.len() && to + LANES <= end;
                        let lanes = if all { LANES } else { LANES.min(channels - first) };
                        let (dy, dx) = (&dy[from..from + lanes], &mut dx[to..to + lanes]);
                        let chosen: [u8; LANES] = load(&argmax[from..from + lanes]);
                        let grads = load::<E, LANES>(dy);
                        let mut sums = if DISJOINT { [S::zeroed(); LANES] } else { load::<S, LANES>(dx) };
                        for lane in 0..LANES {
                            let grad = if chosen[lane] == tap { grads[lane].to_f32() } else { 0.0 };
                            // A gradient or an f32 sum: neither needs rounding.
                            sums[lane] = S::from_exact(if DISJOINT { grad } else { sums[lane].to_f32() + grad });
                        }
                        store(&sums, dx);
                    }
                }
            }
        }
    }
}

/// Loads a vector, or its first lanes.
#[inline(always)]
fn load<T: Pod, const LANES: usize>(from: &[T]) -> [T; LANES] {
    let mut lanes = [T::zeroed(); LANES];
    if from.len() == LANES {
        lanes.copy_from_slice(from);
    } else {
        lanes.iter_mut().zip(from).for_each(|(lane, value)| *lane = *value);
    }
    lanes
}

/// Stores a vector, or its first lanes.
#[inline(always)]
fn store<T: Copy, const LANES: usize>(lanes: &[T; LANES], to: &mut [T]) {
    if to.len() == LANES {
        to.copy_from_slice(lanes);
    } else {
        to.iter_mut().zip(lanes).for_each(|(to, lane)| *to = *lane);
    }
}

impl PoolShape {
    /// Returns the positions of a window along one axis that are inside the image; never empty.
    #[inline(always)]
    fn inside(&self, axis: usize, window: usize) -> Range<usize> {
        let start = window * self.stride[axis];
        let end = (self.input[axis] + self.padding[axis] - start).min(self.kernel[axis]);
        self.padding[axis].saturating_sub(start)..end
    }

    /// Returns the pixel at a position of a window, which must be inside the image.
    #[inline(always)]
    fn pixel(&self, n: usize, oy: usize, ox: usize, tap: [usize; 2]) -> usize {
        let along = |axis: usize, window: usize| window * self.stride[axis] + tap[axis] - self.padding[axis];
        (n * self.input[0] + along(0, oy)) * self.input[1] + along(1, ox)
    }
}
