//! Weight gradient of a convolution: `dw[tap][ci][co] = Σ_pixel x[pixel + tap][ci] · dy[pixel][co]`.
//!
//! The output pixels are divided into as many parts as there are threads (split-K), and each part into chunks. A chunk of `dy` is
//! packed into panels once and serves all taps and channels of `x`. f32 values of `x` are read in place through one pointer
//! per pixel. For bf16, where a step is a pair of pixels, the pixels of each tap are packed too; where products of bf16 are
//! computed in f32, `x` and `dy` are converted instead, chunk by chunk; `x` of few channels is converted as a whole. With few
//! channels, taps are folded or gathered first, as in [`super::igemm`]. Every part has its own sums, which are added in the order
//! of the parts. The parts, and therefore the last bits of the result, depend on the number of threads.
//!
//! Checked by `conv_tests`.

use std::ops::Range;

use super::allocator::Buffer;
use super::convert::{WideRows, WidenTo, widen_all};
use super::element::Element;
use super::fold_taps::fold_taps;
use super::igemm::ImageSize;
use super::kernel::{AmxKernels, MicroKernels, Operand, OuterArgs};
use super::packing::RowPanels;
use super::panels::{Panel, padded, panels};
use super::parallel::{SharedSlice, chunk, for_each, threads};
use super::weight_grad_amx::SumLayout;
use crate::shape::ConvShape;

/// Pixels per chunk: 32 KiB of a packed panel.
const CHUNK: usize = 256;
/// Unit of a part's size in pixels. It is small because a linear layer has only as many pixels as samples.
const UNIT: usize = 64;
/// Limit in floats of all parts' sums, so that many threads do not need much memory.
pub(super) const MAX_SUMS: usize = 64 << 20;
/// Number of channels per group from which gathering is slower.
const GATHER_BELOW: usize = 4;

/// Computes `[out, in / groups, kh, kw]` from channels-last `x` and `dy`.
pub(crate) fn weight_grad<E: Operand>(isa: &'static MicroKernels<E>, shape: &ConvShape, x: &[E], dy: &[E]) -> Buffer {
    if let Some(wide) = isa.widened_source(shape.channels[0], shape.taps()) {
        return split_k(isa, shape, &widen_all(x), dy, |gemm, _, sums, range| gemm.add::<f32>(wide, sums, range));
    }
    split_k(isa, shape, x, dy, |gemm, amx, sums, range| match (amx, isa.widened_for(gemm.depth)) {
        (Some((kernels, layout)), _) => gemm.add_amx(kernels, layout, sums, range),
        (None, Some(wide)) => gemm.add::<f32>(wide, sums, range),
        (None, None) => gemm.add::<E>(isa, sums, range),
    })
}

/// The kernels for AMX tile registers, and the layout of their sums.
type Amx<E> = (AmxKernels<E>, SumLayout);

/// Divides the output pixels into parts, calls `add` for each of them, and adds up the parts' sums.
fn split_k<S: Element, E: Operand>(
    isa: &'static MicroKernels<E>,
    shape: &ConvShape,
    x: &[S],
    dy: &[E],
    add: impl Fn(&WeightGradGemm<S, E>, Option<&Amx<E>>, &mut [f32], Range<usize>) + Send + Sync,
) -> Buffer {
    let [depth, columns] = shape.group_channels();
    let padded = padded(&panels(isa, columns));
    let offsets = shape.offsets();
    let image = ImageSize { size: shape.input, channels: shape.channels[0] };
    let folded = fold_taps(x, shape.batch, image, &offsets, depth, shape.output, shape.stride);
    let (x, image, taps, depth, readable) = match &folded {
        Some(folded) => {
            (folded.padded.as_deref().unwrap_or(x), folded.image, &folded.taps, folded.depth, folded.readable)
        }
        None => (x, image, &offsets, depth, shape.channels[0]),
    };
    let gathers = depth < GATHER_BELOW && taps.len() > 1;
    let [tap_count, tap_depth] = if gathers { [1, taps.len() * depth] } else { [taps.len(), depth] };
    let amx = isa.amx.map(|kernels| (kernels, SumLayout::new(isa, shape, tap_count, tap_depth)));
    let sums_len = amx.as_ref().map_or(shape.groups * tap_count * tap_depth * padded, |(_, layout)| layout.len());
    let pixels = shape.batch * shape.output[0] * shape.output[1];
    let parts = threads().min(pixels.div_ceil(UNIT)).min(MAX_SUMS / sums_len).max(1);

    let mut sums = Buffer::new(parts * sums_len);
    let shared = SharedSlice::new(&mut sums);
    let (x_zeros, dy_zeros) = (Buffer::zeroed(readable), Buffer::zeroed(shape.channels[1]));
    for_each(parts, |index| {
        // SAFETY: each task has its own part.
        let sums = unsafe { shared.slice(index * sums_len..(index + 1) * sums_len) };
        sums.fill(0.0);
        let range = chunk(pixels, UNIT, parts, index);
        let gemm =
            WeightGradGemm { isa, shape, x, image, taps, depth, readable, dy, x_zeros: &x_zeros, dy_zeros: &dy_zeros };
        add(&gemm, amx.as_ref(), sums, range);
    });
    match &amx {
        Some((_, layout)) => layout.reduce(shape, &sums, parts, tap_depth),
        None => reduce_parts(shape, &sums, parts, padded),
    }
}

/// The matrix product of a weight gradient, as an implicit GEMM: M is (tap, channel of `x`), N the output channel, and K, the
/// summed index, the output pixel. Threads take parts of K (split-K).
pub(super) struct WeightGradGemm<'a, S, E: 'static> {
    pub(super) isa: &'static MicroKernels<E>,
    pub(super) shape: &'a ConvShape,
    /// `[batch, height, width, channels]` of `image`.
    pub(super) x: &'a [S],
    pub(super) image: ImageSize,
    pub(super) taps: &'a [[isize; 2]],
    /// Elements per tap.
    pub(super) depth: usize,
    /// Elements after a pixel's first that can be read.
    pub(super) readable: usize,
    /// `[batch, height, width, channels]` of the output.
    pub(super) dy: &'a [E],
    /// Zeros in place of a pixel, for padding.
    pub(super) x_zeros: &'a [S],
    pub(super) dy_zeros: &'a [E],
}

impl<S: Element, E: Operand> WeightGradGemm<'_, S, E> {
    /// Adds the products of `pixels` to `sums`. `isa` multiplies elements of `T`, to which those of `x` and `dy` are converted.
    fn add<T: Operand>(&self, isa: &'static MicroKernels<T>, sums: &mut [f32], pixels: Range<usize>)
    where
        S: WidenTo<T>,
        E: WidenTo<T>,
    {
        let groups = self.shape.groups;
        let panels = panels(isa, self.shape.group_channels()[1]);
        let (padded, width) = (padded(&panels), self.taps.len() * self.depth);
        let gather = self.depth < GATHER_BELOW && self.taps.len() > 1;
        let (taps, depth) = if gather { (1, width) } else { (self.taps.len(), self.depth) };
        // All groups' channels of `x` are packed together if no register tile has rows of two groups.
        let joint = !gather && groups > 1 && depth.is_multiple_of(isa.outer_rows);
        let mut packed = Buffer::new(groups * CHUNK * padded);
        let mut gathered = Buffer::new(if gather { CHUNK * width } else { 0 });
        let mut row_panels = RowPanels::new(isa, CHUNK, if joint { groups * depth } else { depth });
        // `[tap][pixel]`, each to a pixel's first channel.
        let mut pointers: Vec<*const S> = Vec::with_capacity(CHUNK * self.taps.len());
        let mut rows: Vec<*const E> = Vec::with_capacity(CHUNK);
        let mut gathered_rows: Vec<*const T> = Vec::new();
        let (mut wide_x, mut wide_dy) = (WideRows::new(), WideRows::new());

        for first in pixels.clone().step_by(CHUNK) {
            let count = CHUNK.min(pixels.end - first);
            // Pixels after the last are zero.
            let padded_count = count.next_multiple_of(T::STEP);
            pointers.clear();
            for (tap, offset) in self.taps.iter().enumerate() {
                self.fill_pointers(&mut pointers, *offset, first, count);
                pointers.resize((tap + 1) * padded_count, self.x_zeros.as_ptr());
            }
            rows.clear();
            rows.extend(self.dy.chunks_exact(self.shape.channels[1]).skip(first).take(count).map(<[E]>::as_ptr));
            rows.resize(padded_count, self.dy_zeros.as_ptr());
            self.pack_dy(&panels, &rows, &mut wide_dy, &mut packed);
            for tap in 0..taps {
                let pixels = &pointers[tap * padded_count..][..padded_count];
                let len = if gather { 0 } else { groups * depth };
                // SAFETY: each pointer points to `depth` elements per group.
                let (pixels, start) = unsafe { S::rows(pixels, 0, len, &mut wide_x) };
                if joint && T::STEP > 1 {
                    // SAFETY: as above.
                    unsafe { row_panels.pack(pixels, start, groups * depth) };
                }
                for (group, packed) in packed.chunks_exact(CHUNK * padded).enumerate() {
                    // A register tile may also read the next groups' channels, which it does not store.
                    let (x, offset, available) = if gather {
                        self.gather(&pointers, padded_count, group * self.depth, &mut gathered);
                        gathered_rows.clear();
                        gathered_rows.extend(gathered.chunks_exact(width).take(padded_count).map(<[T]>::as_ptr));
                        (&*gathered_rows, 0, width)
                    } else {
                        (pixels, start + group * depth, self.readable - group * depth)
                    };
                    let sums = &mut sums[(group * taps + tap) * depth * padded..][..depth * padded];
                    let steps = padded_count / T::STEP;
                    // SAFETY: each pointer points to `depth` elements per group, or to a gathered row.
                    unsafe {
                        if T::STEP == 1 {
                            add_products(&panels, |row| (x.as_ptr(), offset + row), steps, depth, packed, sums);
                        } else if joint {
                            add_products(&panels, |row| row_panels.at(offset + row), steps, depth, packed, sums);
                        } else {
                            row_panels.pack(x, offset, available);
                            add_products(&panels, |row| row_panels.at(row), steps, depth, packed, sums);
                        }
                    }
                }
            }
        }
    }

    /// Packs a chunk of `dy` for all groups: `[group][panel][step][column][STEP]`, with room for [`CHUNK`] pixels per group. `pixels`
    /// point to the first channel of each pixel.
    fn pack_dy<T: Operand>(&self, panels: &[Panel<T>], pixels: &[*const E], room: &mut WideRows<T>, packed: &mut [T])
    where
        E: WidenTo<T>,
    {
        let (channels, [_, columns]) = (self.shape.channels[1], self.shape.group_channels());
        // SAFETY: each pixel has the channels of all groups.
        let (dy, first_column) = unsafe { E::rows(pixels, 0, channels, room) };
        for (group, to) in packed.chunks_exact_mut(CHUNK * padded(panels)).enumerate() {
            for panel in panels {
                let to = &mut to[panel.column * pixels.len()..];
                let column = group * columns + panel.column;
                // SAFETY: as above.
                unsafe { panel.isa.pack(dy, first_column + column, channels - column, panel.isa.cols, to) };
            }
        }
    }

    /// Gathers the taps of each pixel of a chunk.
    pub(super) fn gather<T>(&self, pointers: &[*const S], count: usize, offset: usize, gathered: &mut [T])
    where
        S: WidenTo<T>,
    {
        let width = self.taps.len() * self.depth;
        for (tap, pointers) in pointers.chunks_exact(count).enumerate() {
            for (k, &from) in pointers.iter().enumerate() {
                let to = &mut gathered[k * width + tap * self.depth..][..self.depth];
                // SAFETY: each pointer points to `depth` elements per group.
                S::widen(unsafe { std::slice::from_raw_parts(from.add(offset), self.depth) }, to);
            }
        }
    }

    /// Appends one pointer per pixel of a chunk to `to`: to the pixel of `x` that the tap reads, or to zeros outside the image.
    /// Makes the pointers of one output row at a time.
    pub(super) fn fill_pointers(&self, to: &mut Vec<*const S>, offset: [isize; 2], first: usize, count: usize) {
        let image = &self.image;
        let [height, width] = self.shape.output;
        let [stride_y, stride_x] = self.shape.stride;
        let end = first + count;
        let mut at = first;
        while at < end {
            let (n, y, x) = (at / (height * width), at / width % height, at % width);
            let run = (width - x).min(end - at);
            at += run;
            let sy = (y * stride_y) as isize + offset[0];
            // A negative row wraps around to a large number.
            if sy as usize >= image.size[0] {
                to.resize(to.len() + run, self.x_zeros.as_ptr());
                continue;
            }
            // The range of columns `x` whose source column `x · stride + offset` is inside the image.
            let first_after = |limit: isize| (limit - offset[1]).max(0).unsigned_abs().div_ceil(stride_x);
            let (left, right) =
                (first_after(0).clamp(x, x + run), first_after(image.size[1] as isize).clamp(x, x + run));
            let pixel = (n * image.size[0] + sy as usize) * image.size[1];
            let start = (pixel as isize + offset[1]) * image.channels as isize;
            let stride = stride_x * image.channels;
            to.resize(to.len() + left - x, self.x_zeros.as_ptr());
            let row = self.x.as_ptr().wrapping_offset(start);
            to.extend((left..right).map(|x| row.wrapping_add(x * stride)));
            to.resize(to.len() + x + run - right.max(left), self.x_zeros.as_ptr());
        }
    }
}

/// Adds products: `sums[row][..padded] += Σ_step a[step][offset] · packed[panel][step][..]` for all rows and panels, where
/// `row(row)` is `a` and the offset. The rows of a register tile are adjacent.
///
/// # Safety
///
/// `row` returns a pointer for each step, to the step's elements of the rows.
unsafe fn add_products<E: Operand>(
    panels: &[Panel<E>],
    row: impl Fn(usize) -> (*const *const E, usize),
    steps: usize,
    rows: usize,
    packed: &[E],
    sums: &mut [f32],
) {
    let padded = padded(panels);
    assert!(packed.len() >= steps * padded * E::STEP && sums.len() >= rows * padded);
    for panel in panels {
        let outer_rows = panel.isa.outer_rows;
        for first in (0..rows).step_by(outer_rows) {
            let (a, offset) = row(first);
            let call = OuterArgs {
                a,
                offset,
                depth: steps,
                b: packed[panel.column * steps * E::STEP..].as_ptr(),
                out: sums[first * padded + panel.column..].as_mut_ptr(),
                stride: padded,
                rows: outer_rows.min(rows - first),
            };
            // SAFETY: the caller guarantees `a`; the other ranges are inside the slices, see the assertion.
            unsafe { panel.isa.outer(&call) };
        }
    }
}

/// Adds the parts' sums in order and converts them to PyTorch's layout.
fn reduce_parts(shape: &ConvShape, sums: &[f32], parts: usize, padded: usize) -> Buffer {
    let [depth, columns] = shape.group_channels();
    let taps = shape.taps();
    let part_len = sums.len() / parts;
    let mut grad = Buffer::new(shape.weight_len());
    let row_len = depth * taps;
    let target = SharedSlice::new(&mut grad);
    // Adjacent filters share cache lines of the sums.
    const FILTERS: usize = 16;
    /// Channels whose transposed sums stay in L1.
    const CHANNELS: usize = 16;
    for_each(shape.groups * columns.div_ceil(FILTERS), |task| {
        let (group, block) = (task / columns.div_ceil(FILTERS), task % columns.div_ceil(FILTERS));
        let filters = block * FILTERS..columns.min((block + 1) * FILTERS);
        let start = (group * columns + filters.start) * row_len;
        // SAFETY: each task has its own filters.
        let to = unsafe { target.slice(start..start + filters.len() * row_len) };
        let mut rows = Buffer::new(FILTERS * CHANNELS * taps);
        for first in (0..depth).step_by(CHANNELS) {
            let channels = CHANNELS.min(depth - first);
            for tap in 0..taps {
                for ci in 0..channels {
                    let at = ((group * taps + tap) * depth + first + ci) * padded + filters.start;
                    let mut sum = [0.0_f32; FILTERS];
                    for part in 0..parts {
                        let from = &sums[part * part_len + at..][..filters.len()];
                        for (sum, value) in sum.iter_mut().zip(from) {
                            *sum += value;
                        }
                    }
                    for (filter, sum) in sum.iter().enumerate() {
                        rows[(filter * CHANNELS + ci) * taps + tap] = *sum;
                    }
                }
            }
            for (to, row) in to.chunks_exact_mut(row_len).zip(rows.chunks_exact(CHANNELS * taps)) {
                to[first * taps..][..channels * taps].copy_from_slice(&row[..channels * taps]);
            }
        }
    });
    grad
}
