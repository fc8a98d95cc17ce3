//! Max pooling on channels-last images.
//!
//! Loops run over vectors of channels. The last vector of a pixel with few channels reaches into the next pixel, whose
//! own values are written after: LeNet's 6 channels then take one vector, not six numbers.

use std::ops::Range;

use super::memory::Buffer;
use super::parallel::{Shared, for_each, part, pieces};
use super::shape::PoolShape;
use super::simd::multiversion;

/// Elements of one task of a pass.
const PIECE: usize = 1 << 16;
/// Up to that many channels vectors are half as wide.
const FEW: usize = 8;

/// Largest value of each window and its position in the window; the first one where several are equal, NaN where there
/// is one, as in PyTorch.
/// The positions are bytes.
pub(crate) fn forward(shape: &PoolShape, x: &[f32]) -> (Buffer, Buffer) {
    let row_len = shape.output[1] * shape.channels;
    let rows = shape.batch * shape.output[0];
    let mut y = Buffer::new(rows * row_len);
    let mut choice = Buffer::new((rows * row_len).div_ceil(size_of::<f32>()));
    let (values, choices) = (Shared::new(&mut y), Shared::new(choice.bytes_mut()));
    let parts = pieces(rows * row_len, PIECE);
    for_each(parts, |index| {
        for row in part(rows, 1, parts, index) {
            // SAFETY: each task has its own rows.
            let (y, choice) = unsafe {
                (values.slice(row * row_len..(row + 1) * row_len), choices.slice(row * row_len..(row + 1) * row_len))
            };
            forward_row(shape, x, row, y, choice);
        }
    });
    (y, choice)
}

multiversion!(fn forward_row(shape: &PoolShape, x: &[f32], row: usize, y: &mut [f32], choice: &mut [u8]) = forward_row_body);

#[inline(always)]
fn forward_row_body(shape: &PoolShape, x: &[f32], row: usize, y: &mut [f32], choice: &mut [u8]) {
    if shape.channels <= FEW {
        forward_lanes::<8>(shape, x, row, y, choice);
    } else {
        forward_lanes::<16>(shape, x, row, y, choice);
    }
}

#[inline(always)]
fn forward_lanes<const LANES: usize>(shape: &PoolShape, x: &[f32], row: usize, y: &mut [f32], choice: &mut [u8]) {
    let channels = shape.channels;
    let (n, oy) = (row / shape.output[0], row % shape.output[0]);
    let down = shape.inside(0, oy);
    for ox in 0..shape.output[1] {
        let across = shape.inside(1, ox);
        for first in (0..channels).step_by(LANES) {
            let at = ox * channels + first;
            let mut best = [f32::NEG_INFINITY; LANES];
            let mut best_tap = [(down.start * shape.kernel[1] + across.start) as u32; LANES];
            // All lanes where this leaves neither the row nor the image: else those of this pixel alone.
            let last = shape.pixel(n, oy, ox, [down.end - 1, across.end - 1]) * channels + first;
            let all = at + LANES <= y.len() && last + LANES <= x.len();
            let lanes = if all { LANES } else { LANES.min(channels - first) };
            for ky in down.clone() {
                for kx in across.clone() {
                    let from = shape.pixel(n, oy, ox, [ky, kx]) * channels + first;
                    let values: [f32; LANES] = load(&x[from..from + lanes]);
                    let tap = (ky * shape.kernel[1] + kx) as u32;
                    for lane in 0..LANES {
                        let larger = (values[lane] > best[lane]) | values[lane].is_nan();
                        best[lane] = if larger { values[lane] } else { best[lane] };
                        best_tap[lane] = if larger { tap } else { best_tap[lane] };
                    }
                }
            }
            store(&best, &mut y[at..at + lanes]);
            store(&best_tap.map(|tap| tap as u8), &mut choice[at..at + lanes]);
        }
    }
}

/// Each gradient goes to the pixel that was chosen.
pub(crate) fn backward(shape: &PoolShape, choice: &[u8], dy: &[f32]) -> Buffer {
    let input_len = shape.input[0] * shape.input[1] * shape.channels;
    let mut dx = Buffer::new(shape.batch * input_len);
    let target = Shared::new(&mut dx);
    for_each(shape.batch, |n| {
        // SAFETY: each task has its own image.
        let dx = unsafe { target.slice(n * input_len..(n + 1) * input_len) };
        backward_image(shape, choice, dy, n, dx);
    });
    dx
}

multiversion!(fn backward_image(shape: &PoolShape, choice: &[u8], dy: &[f32], n: usize, dx: &mut [f32]) = backward_image_body);

#[inline(always)]
fn backward_image_body(shape: &PoolShape, choice: &[u8], dy: &[f32], n: usize, dx: &mut [f32]) {
    // Windows side by side: each pixel belongs to one window at most, and follows the one that is written before it.
    let side_by_side = shape.stride == shape.kernel;
    let covered = shape.padding == [0, 0] && (0..2).all(|i| shape.output[i] * shape.kernel[i] == shape.input[i]);
    if !(side_by_side && covered) {
        dx.fill(0.0);
    }
    match (side_by_side, shape.channels <= FEW) {
        (true, true) => backward_lanes::<8, true>(shape, choice, dy, n, dx),
        (true, false) => backward_lanes::<16, true>(shape, choice, dy, n, dx),
        (false, true) => backward_lanes::<8, false>(shape, choice, dy, n, dx),
        (false, false) => backward_lanes::<16, false>(shape, choice, dy, n, dx),
    }
}

#[inline(always)]
fn backward_lanes<const LANES: usize, const ALONE: bool>(
    shape: &PoolShape,
    choice: &[u8],
    dy: &[f32],
    n: usize,
    dx: &mut [f32],
) {
    let channels = shape.channels;
    let start = n * shape.input[0] * shape.input[1];
    for oy in 0..shape.output[0] {
        for ky in shape.inside(0, oy) {
            for ox in 0..shape.output[1] {
                let across = shape.inside(1, ox);
                for kx in across.clone() {
                    // The last pixel of a row of windows has none behind it that would be written later.
                    let spills = ALONE && !(ox + 1 == shape.output[1] && kx + 1 == across.end);
                    let (output, pixel) =
                        (((n * shape.output[0] + oy) * shape.output[1] + ox), shape.pixel(n, oy, ox, [ky, kx]) - start);
                    let tap = (ky * shape.kernel[1] + kx) as u8;
                    for first in (0..channels).step_by(LANES) {
                        let (from, to) = (output * channels + first, pixel * channels + first);
                        let all = spills && from + LANES <= dy.len() && to + LANES <= dx.len();
                        let lanes = if all { LANES } else { LANES.min(channels - first) };
                        let (dy, dx) = (&dy[from..from + lanes], &mut dx[to..to + lanes]);
                        let chosen: [u8; LANES] = load(&choice[from..from + lanes]);
                        let grads: [f32; LANES] = load(dy);
                        let mut sums: [f32; LANES] = if ALONE { [0.0; LANES] } else { load(dx) };
                        for lane in 0..LANES {
                            sums[lane] += if chosen[lane] == tap { grads[lane] } else { 0.0 };
                        }
                        store(&sums, dx);
                    }
                }
            }
        }
    }
}

/// A vector, or the first lanes of one.
#[inline(always)]
fn load<T: Copy + Default, const LANES: usize>(from: &[T]) -> [T; LANES] {
    let mut lanes = [T::default(); LANES];
    if from.len() == LANES {
        lanes.copy_from_slice(from);
    } else {
        lanes.iter_mut().zip(from).for_each(|(lane, value)| *lane = *value);
    }
    lanes
}

#[inline(always)]
fn store<T: Copy, const LANES: usize>(lanes: &[T; LANES], to: &mut [T]) {
    if to.len() == LANES {
        to.copy_from_slice(lanes);
    } else {
        to.iter_mut().zip(lanes).for_each(|(to, lane)| *to = *lane);
    }
}

impl PoolShape {
    /// The positions along one axis of a window that lie inside the image; never none.
    #[inline(always)]
    fn inside(&self, axis: usize, window: usize) -> Range<usize> {
        let start = window * self.stride[axis];
        let end = (self.input[axis] + self.padding[axis] - start).min(self.kernel[axis]);
        self.padding[axis].saturating_sub(start)..end
    }

    /// The pixel below a position of a window that is inside the image.
    #[inline(always)]
    fn pixel(&self, n: usize, oy: usize, ox: usize, tap: [usize; 2]) -> usize {
        let along = |axis: usize, window: usize| window * self.stride[axis] + tap[axis] - self.padding[axis];
        (n * self.input[0] + along(0, oy)) * self.input[1] + along(1, ox)
    }
}
