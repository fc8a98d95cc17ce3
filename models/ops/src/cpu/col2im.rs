//! Data gradient for inputs with few channels, as in a network's first layers, by col2im.
//!
//! As a convolution of `dy` ([`super::igemm`]), this gradient would have few columns, and near the image's edge many of
//! its products would be with padding. Here every pixel of `dy` is multiplied by all filters (the columns are the
//! weights of all taps), and the products are added to the pixels of `dx` under the kernel. In channels-last order, the
//! sums of one kernel row are adjacent in memory.
//!
//! Checked by `conv_tests`.

use super::allocator::Buffer;
use super::kernel::{MicroKernels, Operand, TileArgs};
use super::multiversion::multiversion;
use super::packing::Weights;
use super::panels::panels;
use super::parallel::{SharedSlice, for_each};
use crate::shape::ConvShape;

/// Number of input channels from which the convolution of `dy` fills a register tile.
const FULL_TILE: usize = 16;
/// Floats per vector.
const LANES: usize = 8;
/// Register tiles per block.
const TILES: usize = 4;

/// Returns true if [`data_grad`] supports the convolution.
pub(crate) fn fits(shape: &ConvShape) -> bool {
    shape.groups == 1 && shape.channels[0] < FULL_TILE && shape.kernel[1] > 1 && shape.dilation[1] == 1
}

/// Returns the columns of one kernel row, rounded up to whole vectors.
fn row_columns(shape: &ConvShape) -> usize {
    (shape.kernel[1] * shape.channels[0]).next_multiple_of(LANES)
}

/// Computes `dx` `[batch, h, w, in]`. Each image is one task, so the result does not depend on the number of threads.
pub(crate) fn data_grad<E: Operand>(
    isa: &'static MicroKernels<E>,
    shape: &ConvShape,
    weight: &[f32],
    dy: &[E],
    dx: &mut [E],
) {
    let [input, output] = shape.channels;
    let (taps, row_columns) = (shape.taps(), row_columns(shape));
    let columns = shape.kernel[0] * row_columns;
    // `[out][kernel row][kernel column · in]`, with zeros between the rows.
    let mut reordered = Buffer::zeroed(output * columns);
    for (to, from) in reordered.chunks_exact_mut(columns).zip(weight.chunks_exact(input * taps)) {
        for (i, value) in from.iter().enumerate() {
            let (channel, row, column) = (i / taps, i % taps / shape.kernel[1], i % shape.kernel[1]);
            to[row * row_columns + column * input + channel] = *value;
        }
    }
    let weights = Weights {
        data: &reordered,
        groups: 1,
        columns,
        depth: output,
        group_stride: 0,
        column_stride: 1,
        depth_stride: columns,
        taps: &[0],
    };
    let packed = weights.pack(isa, 1);
    let panels = panels(isa, columns);
    let (pixels, block) = (shape.output[0] * shape.output[1], TILES * isa.rows);
    let image = shape.input[0] * shape.input[1] * input;
    let target = SharedSlice::new(dx);
    for_each(shape.batch, |n| {
        let mut sums = Buffer::zeroed(image);
        let dy = &dy[n * pixels * output..(n + 1) * pixels * output];
        let mut products = Buffer::new(block * columns);
        let mut a = Vec::with_capacity(block);
        let out: Vec<*mut f32> = products.chunks_exact_mut(columns).map(<[f32]>::as_mut_ptr).collect();
        for first in (0..pixels).step_by(block) {
            let count = block.min(pixels - first);
            a.clear();
            // Rows after the last repeat the last row and are not stored.
            a.extend((0..block).map(|row| dy[(first + row.min(count - 1)) * output..][..output].as_ptr()));
            for panel in &panels {
                for row in (0..count).step_by(isa.rows) {
                    let call = TileArgs {
                        a: a[row..].as_ptr(),
                        offset: 0,
                        taps: 1,
                        depth: output,
                        b: packed.values[panel.column * packed.width..].as_ptr(),
                        out: out[row..].as_ptr(),
                        column: panel.column,
                        rows: isa.rows.min(count - row),
                        cols: panel.cols,
                        bias: std::ptr::null(),
                        relu: false,
                    };
                    // SAFETY: rows of `output` elements and `columns` floats, tables of whole register tiles.
                    unsafe { panel.isa.tile(&call) };
                }
            }
            add(shape, &products, first..first + count, &mut sums);
        }
        // SAFETY: each task has its own image.
        let dx = unsafe { target.slice(n * image..(n + 1) * image) };
        dx.iter_mut().zip(sums.iter()).for_each(|(dx, sum)| *dx = E::from_f32(*sum));
    });
}

multiversion!(
    /// Adds the products of some output pixels of an image to its input pixels.
    fn add(shape: &ConvShape, products: &[f32], pixels: std::ops::Range<usize>, dx: &mut [f32]) = add_body
);

#[inline(always)]
fn add_body(shape: &ConvShape, products: &[f32], pixels: std::ops::Range<usize>, dx: &mut [f32]) {
    let (channels, row_columns) = (shape.channels[0], row_columns(shape));
    let columns = shape.kernel[0] * row_columns;
    for (pixel, products) in pixels.zip(products.chunks_exact(columns)) {
        let (oy, ox) = (pixel / shape.output[1], pixel % shape.output[1]);
        // Range of the kernel's columns that are inside the image.
        let start = ox * shape.stride[1];
        let first = shape.padding[1].saturating_sub(start);
        let end = shape.kernel[1].min((shape.input[1] + shape.padding[1]).saturating_sub(start));
        if first >= end {
            continue;
        }
        let all = first == 0 && end == shape.kernel[1];
        for (ky, products) in products.chunks_exact(row_columns).enumerate() {
            let iy = (oy * shape.stride[0] + ky * shape.dilation[0]).wrapping_sub(shape.padding[0]);
            if iy >= shape.input[0] {
                continue;
            }
            let at = (iy * shape.input[1] + start + first - shape.padding[1]) * channels;
            if all && at + row_columns <= dx.len() {
                // The padding of the row adds zeros.
                let to = dx[at..at + row_columns].chunks_exact_mut(LANES);
                for (to, from) in to.zip(products.chunks_exact(LANES)) {
                    for lane in 0..LANES {
                        to[lane] += from[lane];
                    }
                }
            } else {
                let from = &products[first * channels..end * channels];
                dx[at..].iter_mut().zip(from).for_each(|(to, from)| *to += from);
            }
        }
    }
}
