//! Weight gradient of a convolution: `dw[tap][ci][co] = Σ_pixel x[pixel + tap][ci] · dy[pixel][co]`.
//!
//! The output pixels are divided into as many parts as there are threads, and each part into chunks. A chunk of `dy` is
//! packed into panels once and serves all taps and channels of `x`. `x` is read in place through one pointer per pixel;
//! with few channels, taps are folded or gathered first, as in [`super::igemm`]. Every part has its own sums, which are
//! added in the order of the parts. The parts, and therefore the last bits of the result, depend on the number of
//! threads.

use super::allocator::Buffer;
use super::fold_taps::fold_taps;
use super::igemm::Image;
use super::kernel::{Isa, Outer};
use super::panels::{Panel, padded, panels};
use super::parallel::{SharedSlice, chunk, for_each, threads};
use super::shape::ConvShape;

/// Pixels per chunk: 32 KiB of a packed panel.
const CHUNK: usize = 256;
/// Unit of a part's size in pixels. It is small because a linear layer has only as many pixels as samples.
const UNIT: usize = 64;
/// Limit in floats of all parts' sums, so that many threads do not need much memory.
pub(super) const MAX_SUMS: usize = 64 << 20;
/// Number of channels per group from which gathering is slower.
const GATHER_BELOW: usize = 4;

/// Computes `[out, in / groups, kh, kw]` from channels-last `x` and `dy`.
pub(crate) fn weight_grad(isa: &'static Isa, shape: &ConvShape, x: &[f32], dy: &[f32]) -> Buffer {
    let [depth, columns] = shape.group_channels();
    let panels = panels(isa, columns);
    let padded = padded(&panels);
    let sums_len = shape.groups * shape.taps() * depth * padded;
    let pixels = shape.batch * shape.output[0] * shape.output[1];
    let parts = threads().min(pixels.div_ceil(UNIT)).min(MAX_SUMS / sums_len).max(1);

    let mut sums = Buffer::new(parts * sums_len);
    let shared = SharedSlice::new(&mut sums);
    let offsets = shape.offsets();
    let image = Image { size: shape.input, channels: shape.channels[0] };
    let folded = fold_taps(x, shape.batch, image, &offsets, depth, shape.output, shape.stride);
    let (x, image, taps, depth) = match &folded {
        Some(folded) => (folded.padded.as_deref().unwrap_or(x), folded.image, &folded.taps, folded.depth),
        None => (x, image, &offsets, depth),
    };
    let zeros = Buffer::zeroed(shape.channels[0].max(depth));
    for_each(parts, |index| {
        // SAFETY: each task has its own part.
        let sums = unsafe { shared.slice(index * sums_len..(index + 1) * sums_len) };
        sums.fill(0.0);
        let range = chunk(pixels, UNIT, parts, index);
        Part { shape, x, image, taps, depth, dy, zeros: &zeros, panels: &panels }.add(sums, range);
    });
    reduce_parts(shape, &sums, parts, padded)
}

/// Inputs of one part's sums.
struct Part<'a> {
    shape: &'a ConvShape,
    x: &'a [f32],
    image: Image,
    taps: &'a [[isize; 2]],
    /// Floats per tap.
    depth: usize,
    dy: &'a [f32],
    /// Zeros for padding, one per channel of a pixel.
    zeros: &'a [f32],
    panels: &'a [Panel],
}

impl Part<'_> {
    /// Adds the products of `pixels` to `sums`.
    fn add(&self, sums: &mut [f32], pixels: std::ops::Range<usize>) {
        let [_, columns] = self.shape.group_channels();
        let (depth, taps, padded) = (self.depth, self.taps.len(), padded(self.panels));
        let gather = depth < GATHER_BELOW && taps > 1;
        let width = taps * depth;
        let mut packed = Buffer::new(CHUNK * padded);
        let mut gathered = Buffer::new(if gather { CHUNK * width } else { 0 });
        // `[tap][pixel]`, each to a pixel's first channel.
        let mut pointers: Vec<*const f32> = Vec::with_capacity(CHUNK * taps);
        let mut rows: Vec<*const f32> = Vec::with_capacity(if gather { CHUNK } else { 0 });

        for first in pixels.clone().step_by(CHUNK) {
            let count = CHUNK.min(pixels.end - first);
            pointers.clear();
            for offset in self.taps {
                self.fill_pointers(&mut pointers, *offset, first, count);
            }
            for group in 0..self.shape.groups {
                let dy = &self.dy[first * self.shape.channels[1] + group * columns..];
                pack_rows(self.panels, dy, &mut packed, count, self.shape.channels[1]);
                let sums = &mut sums[group * width * padded..(group + 1) * width * padded];
                let offset = group * depth;
                if gather {
                    for (tap, pointers) in pointers.chunks_exact(count).enumerate() {
                        for (k, &from) in pointers.iter().enumerate() {
                            let to = &mut gathered[k * width + tap * depth..][..depth];
                            for (d, to) in to.iter_mut().enumerate() {
                                // SAFETY: each pointer points to `depth` floats per group.
                                *to = unsafe { *from.add(offset + d) };
                            }
                        }
                    }
                    rows.clear();
                    rows.extend(gathered.chunks_exact(width).take(count).map(<[f32]>::as_ptr));
                    // SAFETY: each pointer points to `width` floats.
                    unsafe { add_products(self.panels, &rows, 0, width, &packed, sums) };
                } else {
                    for (pointers, sums) in pointers.chunks_exact(count).zip(sums.chunks_exact_mut(depth * padded)) {
                        // SAFETY: each pointer points to `depth` floats per group.
                        unsafe { add_products(self.panels, pointers, offset, depth, &packed, sums) };
                    }
                }
            }
        }
    }

    /// Appends the pointers of one tap to `x`, for each pixel of a chunk, one output row at a time.
    fn fill_pointers(&self, to: &mut Vec<*const f32>, offset: [isize; 2], first: usize, count: usize) {
        let image = &self.image;
        let [height, width] = self.shape.output;
        let [step_y, step_x] = self.shape.stride;
        let end = first + count;
        let mut at = first;
        while at < end {
            let (n, y, x) = (at / (height * width), at / width % height, at % width);
            let run = (width - x).min(end - at);
            at += run;
            let sy = (y * step_y) as isize + offset[0];
            // A negative row wraps around to a large number.
            if sy as usize >= image.size[0] {
                to.resize(to.len() + run, self.zeros.as_ptr());
                continue;
            }
            // The range of columns `x` whose source column `x · step + offset` is inside the image.
            let first_after = |limit: isize| (limit - offset[1]).max(0).unsigned_abs().div_ceil(step_x);
            let (left, right) =
                (first_after(0).clamp(x, x + run), first_after(image.size[1] as isize).clamp(x, x + run));
            let pixel = (n * image.size[0] + sy as usize) * image.size[1];
            let start = (pixel as isize + offset[1]) * image.channels as isize;
            let step = step_x * image.channels;
            to.resize(to.len() + left - x, self.zeros.as_ptr());
            let row = self.x.as_ptr().wrapping_offset(start);
            to.extend((left..right).map(|x| row.wrapping_add(x * step)));
            to.resize(to.len() + x + run - right.max(left), self.zeros.as_ptr());
        }
    }
}

/// Adds products: `sums[row][..padded] += Σ_k a[k][offset + row] · packed[panel][k][..]` for all rows and panels.
///
/// # Safety
///
/// Each pointer points to `offset + rows` floats.
pub(crate) unsafe fn add_products(
    panels: &[Panel],
    a: &[*const f32],
    offset: usize,
    rows: usize,
    packed: &[f32],
    sums: &mut [f32],
) {
    let (depth, padded) = (a.len(), padded(panels));
    assert!(packed.len() >= depth * padded && sums.len() >= rows * padded);
    for panel in panels {
        let outer_rows = panel.isa.outer_rows;
        for first in (0..rows).step_by(outer_rows) {
            let call = Outer {
                a: a.as_ptr(),
                offset: offset + first,
                depth,
                b: packed[panel.column * depth..].as_ptr(),
                out: sums[first * padded + panel.column..].as_mut_ptr(),
                stride: padded,
                rows: outer_rows.min(rows - first),
            };
            // SAFETY: the caller guarantees `a`; the other ranges are inside the slices, see the assertion.
            unsafe { panel.isa.outer(&call) };
        }
    }
}

/// Packs the columns of `count` pixels with `channels` floats each: `[panel][pixel][columns of the panel's tile]`,
/// padded with zeros.
fn pack_rows(panels: &[Panel], from: &[f32], to: &mut [f32], count: usize, channels: usize) {
    for panel in panels {
        let to = &mut to[panel.column * count..][..panel.isa.cols * count];
        let from = &from[panel.column..];
        match (panel.isa.cols, panel.cols) {
            (32, 32) => pack_full::<32>(from, to, channels),
            (16, 16) => pack_full::<16>(from, to, channels),
            (8, 8) => pack_full::<8>(from, to, channels),
            (cols, stored) => {
                for (k, to) in to.chunks_exact_mut(cols).enumerate() {
                    let row = &from[k * channels..][..stored];
                    to[..stored].iter_mut().zip(row).for_each(|(to, from)| *to = *from);
                    to[stored..].fill(0.0);
                }
            }
        }
    }
}

/// Packs rows of a length that is known at compile time.
fn pack_full<const COLS: usize>(from: &[f32], to: &mut [f32], channels: usize) {
    for (k, to) in to.chunks_exact_mut(COLS).enumerate() {
        to.copy_from_slice(&from[k * channels..][..COLS]);
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
    for_each(shape.groups * columns.div_ceil(FILTERS), |task| {
        let (group, block) = (task / columns.div_ceil(FILTERS), task % columns.div_ceil(FILTERS));
        let filters = block * FILTERS..columns.min((block + 1) * FILTERS);
        let start = (group * columns + filters.start) * row_len;
        // SAFETY: each task has its own filters.
        let to = unsafe { target.slice(start..start + filters.len() * row_len) };
        for ci in 0..depth {
            for tap in 0..taps {
                let at = ((group * taps + tap) * depth + ci) * padded + filters.start;
                let mut sum = [0.0_f32; FILTERS];
                for part in 0..parts {
                    let from = &sums[part * part_len + at..][..filters.len()];
                    for (sum, value) in sum.iter_mut().zip(from) {
                        *sum += value;
                    }
                }
                for (filter, sum) in sum.iter().enumerate().take(filters.len()) {
                    to[filter * row_len + ci * taps + tap] = *sum;
                }
            }
        }
    });
    grad
}
