//! The weight gradient with AMX tile registers: `dw[tap][co][ci] = Σ_pixel dy[pixel][co] · x[pixel + tap][ci]`.
//!
//! An AMX tile register multiplies rows that are contiguous along the summed index. A chunk of `dy` is therefore transposed once,
//! square by square, to squares of output channels by pixels, and serves all taps. The pixels of each tap of `x` are packed in
//! pairs, as in [`super::weight_grad`]. The sums stay in f32 in memory, where the products of each chunk are added to them.
//!
//! A register tile is 32 output channels by 32 channels of `x`, a chunk 1024 pixels. Checked by `conv_tests`, where the processor
//! has AMX.

use std::ops::Range;

use super::allocator::Buffer;
use super::kernel::{AmxKernels, AmxProductArgs, Operand};
use super::packing::RowPanels;
use super::panels::{padded, panels};
use super::parallel::{SharedSlice, for_each};
use super::weight_grad::WeightGradGemm;
use crate::shape::ConvShape;

/// Pixels per chunk. With fewer, reading and writing the sums takes longer than the products.
const CHUNK: usize = 1024;

/// Layout of the f32 sums of a part: `[group][tap][output channel][channel of x]`, both channels rounded up to whole register
/// tiles.
pub(super) struct SumLayout {
    /// Output channels of a group, rounded up.
    rows: usize,
    /// Elements of a tap, rounded up.
    columns: usize,
    taps: usize,
    groups: usize,
}

impl SumLayout {
    /// Makes the layout of `taps` taps with `depth` elements per group each.
    pub(super) fn new<E: Operand>(
        isa: &'static super::kernel::MicroKernels<E>,
        shape: &ConvShape,
        taps: usize,
        depth: usize,
    ) -> Self {
        let rows = shape.group_channels()[1].next_multiple_of(isa.rows);
        Self { rows, columns: padded(&panels(isa, depth)), taps, groups: shape.groups }
    }

    pub(super) fn len(&self) -> usize {
        self.groups * self.taps * self.rows * self.columns
    }

    /// Adds the parts' sums in order and converts them to PyTorch's layout. `depth` is the number of elements per tap, of which
    /// each has the channels of one or several of the convolution's taps.
    pub(super) fn reduce(&self, shape: &ConvShape, sums: &[f32], parts: usize, depth: usize) -> Buffer {
        let [channels, columns] = shape.group_channels();
        let (taps, part_len) = (shape.taps(), self.len());
        let mut grad = Buffer::new(shape.weight_len());
        let (row_len, merged) = (channels * taps, depth / channels);
        let target = SharedSlice::new(&mut grad);
        /// Filters per task.
        const FILTERS: usize = 8;
        let tasks = columns.div_ceil(FILTERS);
        for_each(shape.groups * tasks, |task| {
            let (group, first) = (task / tasks, task % tasks * FILTERS);
            let mut row = Buffer::new(depth);
            for filter in first..columns.min(first + FILTERS) {
                let start = (group * columns + filter) * row_len;
                // SAFETY: each task has its own filters.
                let to = unsafe { target.slice(start..start + row_len) };
                for tap in 0..self.taps {
                    let at = ((group * self.taps + tap) * self.rows + filter) * self.columns;
                    row.copy_from_slice(&sums[at..at + depth]);
                    for part in 1..parts {
                        row.iter_mut().zip(&sums[part * part_len + at..]).for_each(|(sum, value)| *sum += value);
                    }
                    for (folded, row) in row.chunks_exact(channels).enumerate() {
                        let to = to[tap * merged + folded..].iter_mut().step_by(taps);
                        to.zip(row).for_each(|(to, sum)| *to = *sum);
                    }
                }
            }
        });
        grad
    }
}

impl<E: Operand> WeightGradGemm<'_, E, E> {
    /// Adds the products of `pixels` to `sums`, which have the order of `layout`.
    pub(super) fn add_amx(&self, kernels: &AmxKernels<E>, layout: &SumLayout, sums: &mut [f32], pixels: Range<usize>) {
        let (groups, [_, columns]) = (self.shape.groups, self.shape.group_channels());
        let gather = layout.taps < self.taps.len();
        let depth = if gather { self.taps.len() * self.depth } else { self.depth };
        let side = self.isa.depth;
        let mut transposed = Buffer::new(layout.rows * CHUNK);
        let mut gathered = Buffer::new(if gather { CHUNK * depth } else { 0 });
        let mut row_panels = RowPanels::new(self.isa, CHUNK, depth);
        // `[tap][pixel]`, each to a pixel's first channel.
        let mut pointers: Vec<*const E> = Vec::with_capacity(CHUNK * self.taps.len());
        let mut rows: Vec<*const E> = Vec::with_capacity(CHUNK);

        for first in pixels.clone().step_by(CHUNK) {
            let count = CHUNK.min(pixels.end - first);
            // Pixels after the last are zero.
            let padded_count = count.next_multiple_of(side);
            pointers.clear();
            for (tap, offset) in self.taps.iter().enumerate() {
                self.fill_pointers(&mut pointers, *offset, first, count);
                pointers.resize((tap + 1) * padded_count, self.x_zeros.as_ptr());
            }
            for group in 0..groups {
                rows.clear();
                rows.extend(self.dy.chunks_exact(self.shape.channels[1]).skip(first).take(count).map(<[E]>::as_ptr));
                rows.resize(padded_count, self.dy_zeros.as_ptr());
                for column in (0..layout.rows).step_by(side) {
                    for (k, rows) in rows.chunks_exact(side).enumerate() {
                        let to = transposed[column * padded_count + k * side * side..].as_mut_ptr();
                        let available = side.min(columns.saturating_sub(column));
                        // SAFETY: each row has the channels of all groups; the target has a square.
                        unsafe { (kernels.transpose)(rows, group * columns + column, available, to, side) };
                    }
                }
                for tap in 0..layout.taps {
                    let (x, offset, available) = if gather {
                        self.gather::<E>(&pointers, padded_count, group * self.depth, &mut gathered);
                        rows.clear();
                        rows.extend(gathered.chunks_exact(depth).take(padded_count).map(<[E]>::as_ptr));
                        (&*rows, 0, depth)
                    } else {
                        let pixels = &pointers[tap * padded_count..][..padded_count];
                        (pixels, group * depth, self.readable - group * depth)
                    };
                    // SAFETY: each pointer points to `depth` elements per group, or to a gathered row.
                    unsafe { row_panels.pack(x, offset, available) };
                    (kernels.begin)();
                    let sums = &mut sums[(group * layout.taps + tap) * layout.rows * layout.columns..];
                    for row in (0..layout.rows).step_by(self.isa.rows) {
                        for panel in row_panels.panels() {
                            let call = AmxProductArgs {
                                rows: transposed[row * padded_count..].as_ptr(),
                                columns: row_panels.values(panel).as_ptr(),
                                depth: padded_count,
                                sums: sums[row * layout.columns + panel.column..].as_mut_ptr(),
                                stride: layout.columns,
                                blocks: panel.isa.cols / 16,
                            };
                            // SAFETY: the layout has whole register tiles, and so have the transposed rows and the panels.
                            unsafe { (kernels.product)(&call) };
                        }
                    }
                    (kernels.end)();
                }
            }
        }
    }
}
