//! Weight gradients of groups that are at most a vector wide, from the planes of [`super::group_conv`].
//!
//! There is one sum for each of 16 parts of the batch. The sums are added in order, so the gradient does not depend on the number
//! of threads.
//!
//! Checked by `conv_tests`.

use super::allocator::Buffer;
use super::group_conv::{self, PLANE};
use super::group_kernel::{GroupKernels, GroupOuterArgs};
use super::kernel::{MicroKernels, Operand};
use super::parallel::{SharedSlice, chunk, for_each};
use crate::shape::ConvShape;

/// Computes the weight gradient in PyTorch's layout, for groups that fit into a vector of `isa`; `None` for a dilation along
/// rows, with which the taps of a row are not adjacent.
pub(crate) fn weight_grad<E: Operand>(
    isa: &'static MicroKernels<E>,
    shape: &ConvShape,
    x: &[E],
    dy: &[E],
) -> Option<Buffer> {
    /// Parts of the batch that are summed separately. The number is constant, so the result does not depend on the number of
    /// threads.
    const PARTS: usize = 16;
    if shape.dilation[1] > 1 {
        return None;
    }
    let [depth, columns] = shape.group_channels();
    let kernels = group_conv::kernels(isa, depth, columns, shape.groups);
    let vectors = shape.groups.div_ceil(kernels.groups);
    let len = vectors * shape.taps() * kernels.lanes / kernels.groups * kernels.lanes;
    let parts = PARTS.min(shape.batch).max(1);
    let mut sums = Buffer::new(parts * len);
    let shared = SharedSlice::new(&mut sums);
    let zeros = Buffer::zeroed(shape.channels[0].max(shape.channels[1]));
    for_each(parts, |index| {
        // SAFETY: each task has its own sums.
        let sums = unsafe { shared.slice(index * len..(index + 1) * len) };
        sums.fill(0.0);
        let mut part = PlanesOfPart::new(kernels, shape, x, dy, &zeros);
        for n in chunk(shape.batch, 1, parts, index) {
            part.add_image(n, sums);
        }
    });
    Some(add_parts(kernels, shape, &sums, parts))
}

/// The inputs of a part of the batch, and planes with copies of one band of an image at a time:
/// `[row / STEP][column][lanes][STEP]`.
struct PlanesOfPart<'a, E: 'static> {
    kernels: &'static GroupKernels<E>,
    shape: &'a ConvShape,
    x: &'a [E],
    dy: &'a [E],
    zeros: &'a [E],
    /// Output rows that share planes, a multiple of [`Operand::STEP`].
    band: usize,
    /// Rows and columns of `x`'s plane.
    plane: [usize; 2],
    /// `[row][column][STEP]`: each step has the pixels that adjacent output rows read.
    x_pixels: Vec<*const E>,
    dy_pixels: Vec<*const E>,
    x_plane: Buffer<E>,
    dy_plane: Buffer<E>,
}

impl<'a, E: Operand> PlanesOfPart<'a, E> {
    fn new(kernels: &'static GroupKernels<E>, shape: &'a ConvShape, x: &'a [E], dy: &'a [E], zeros: &'a [E]) -> Self {
        let GroupKernels { lanes, groups, .. } = *kernels;
        let columns = (shape.output[1] - 1) * shape.stride[1] + shape.kernel[1];
        let span = shape.dilation[0] * (shape.kernel[0] - 1) + 1;
        let row = columns * lanes * E::STEP * size_of::<E>();
        let most = (groups * PLANE / row).saturating_sub(span) / shape.stride[0] + E::STEP;
        let band = (most / E::STEP * E::STEP).min(shape.output[0].next_multiple_of(E::STEP));
        let plane = [(band - E::STEP) * shape.stride[0] + span, columns];
        let step = lanes * E::STEP;
        Self {
            kernels,
            shape,
            x,
            dy,
            zeros,
            band,
            plane,
            x_pixels: Vec::with_capacity(plane[0] * plane[1] * E::STEP),
            dy_pixels: Vec::with_capacity(band * shape.output[1]),
            x_plane: Buffer::new(plane[0] * plane[1] * step),
            dy_plane: Buffer::new(band / E::STEP * shape.output[1] * step),
        }
    }

    /// Adds the products of an image's pixels to `sums` `[vector][tap][channel][LANES]`.
    fn add_image(&mut self, n: usize, sums: &mut [f32]) {
        let (shape, GroupKernels { lanes, groups, .. }) = (self.shape, *self.kernels);
        let [depth, columns] = shape.group_channels().map(|channels| channels * groups);
        let rows = lanes / groups;
        let step = lanes * E::STEP;
        for first in (0..shape.output[0]).step_by(self.band) {
            let lines = (shape.output[0] - first).min(self.band).div_ceil(E::STEP);
            self.find_pixels(n, first, lines);
            for (vector, sums) in sums.chunks_exact_mut(shape.taps() * rows * lanes).enumerate() {
                let (x, dy) = (vector * depth, vector * columns);
                // SAFETY: each pixel has the channels of all groups.
                unsafe {
                    self.kernels.pack(&self.x_pixels, x, shape.channels[0] - x, &mut self.x_plane);
                    self.kernels.pack(&self.dy_pixels, dy, shape.channels[1] - dy, &mut self.dy_plane);
                }
                let taps = sums.chunks_exact_mut(shape.kernel[1] * rows * lanes);
                for (ky, sums) in taps.enumerate() {
                    let call = GroupOuterArgs {
                        x: self.x_plane[ky * shape.dilation[0] * self.plane[1] * step..].as_ptr(),
                        x_stride: [E::STEP * shape.stride[0] * self.plane[1], shape.stride[1]]
                            .map(|pixels| pixels * step),
                        dy: self.dy_plane.as_ptr(),
                        lines,
                        steps: shape.output[1],
                        sums: sums.as_mut_ptr(),
                        rows: shape.kernel[1] * rows,
                    };
                    // SAFETY: the planes have the pixels of a band, of which these are the first lines, and the sums have
                    // a row per tap and lane of a group.
                    unsafe { self.kernels.outer(&call) };
                }
            }
        }
    }

    /// Finds the pixels of the band from output row `first`; zeros for padding and for rows after the last.
    fn find_pixels(&mut self, n: usize, first: usize, lines: usize) {
        let (shape, zeros) = (self.shape, self.zeros.as_ptr());
        let pixel = |values: &'a [E], size: [usize; 2], channels: usize, y: isize, x: isize| {
            // A negative coordinate wraps around to a large number.
            match (y as usize) < size[0] && (x as usize) < size[1] {
                true => values[((n * size[0] + y as usize) * size[1] + x as usize) * channels..].as_ptr(),
                false => zeros,
            }
        };
        self.x_pixels.clear();
        let rows = (lines - 1) * E::STEP * shape.stride[0] + shape.dilation[0] * (shape.kernel[0] - 1) + 1;
        for row in 0..rows {
            for column in 0..self.plane[1] {
                for step in 0..E::STEP {
                    let y = (first + step) * shape.stride[0] + row;
                    let [y, x] = [y as isize - shape.padding[0] as isize, column as isize - shape.padding[1] as isize];
                    self.x_pixels.push(pixel(self.x, shape.input, shape.channels[0], y, x));
                }
            }
        }
        self.dy_pixels.clear();
        for line in 0..lines {
            for column in 0..shape.output[1] {
                for step in 0..E::STEP {
                    let [y, x] = [first + line * E::STEP + step, column].map(|at| at as isize);
                    self.dy_pixels.push(pixel(self.dy, shape.output, shape.channels[1], y, x));
                }
            }
        }
    }
}

/// Adds the parts' sums `[vector][tap][channel][lanes]` in order and converts them to PyTorch's layout.
fn add_parts<E>(kernels: &GroupKernels<E>, shape: &ConvShape, sums: &[f32], parts: usize) -> Buffer {
    let GroupKernels { lanes, groups, .. } = *kernels;
    let ([depth, columns], taps) = (shape.group_channels(), shape.taps());
    let part = sums.len() / parts;
    let mut grad = Buffer::new(shape.weight_len());
    let target = SharedSlice::new(&mut grad);
    for_each(shape.groups, |group| {
        let len = columns * depth * taps;
        // SAFETY: each task has its own group.
        let grad = unsafe { target.slice(group * len..(group + 1) * len) };
        let (vector, group) = (group / groups, group % groups);
        for tap in 0..taps {
            for d in 0..depth {
                let at = ((vector * taps + tap) * (lanes / groups) + d) * lanes + group;
                let mut sum = [0.0_f32; 16];
                for part in sums.chunks_exact(part) {
                    let lanes_of_group = part[at..].iter().step_by(groups).take(columns);
                    sum.iter_mut().zip(lanes_of_group).for_each(|(sum, value)| *sum += value);
                }
                for (column, sum) in sum[..columns].iter().enumerate() {
                    grad[(column * depth + d) * taps + tap] = *sum;
                }
            }
        }
    });
    grad
}
