//! Gradient of a convolution's weights: `dw[tap][ci][co] = Σ_pixel x[pixel + tap][ci] · dy[pixel][co]`.
//!
//! Output pixels go to as many parts as there are threads, in chunks: a chunk of `dy` is packed into panels once and
//! serves all taps and channels of `x`, which are read in place through one pointer a pixel (widened or
//! gathered first where there are few channels, as in [`super::igemm`]). Every part has sums of its own; at the end they are added in the
//! order of the parts. The parts, and so the last bits of the result, depend on the number of threads.

use super::igemm::Image;
use super::kernel::{Isa, Outer};
use super::memory::Buffer;
use super::parallel::{Shared, for_each, part, threads};
use super::shape::ConvShape;
use super::widen::widen;

/// Pixels in a chunk: 32 KiB of a packed panel.
const CHUNK: usize = 256;
/// Most floats that all parts' sums may take together, so that many threads do not take much memory.
pub(super) const MOST_SUMS: usize = 64 << 20;
/// Channels of a group from which gathering no longer pays.
const GATHER_BELOW: usize = 8;

/// `[out, in / groups, kh, kw]` from channels-last `x` and `dy`.
pub(crate) fn weight_grad(isa: &'static Isa, shape: &ConvShape, x: &[f32], dy: &[f32]) -> Buffer {
    let [depth, columns] = shape.group_channels();
    let padded = columns.next_multiple_of(isa.cols);
    let sums_len = shape.groups * shape.taps() * depth * padded;
    let pixels = shape.batch * shape.output[0] * shape.output[1];
    let parts = threads().min(pixels.div_ceil(CHUNK)).min(MOST_SUMS / sums_len).max(1);

    let mut sums = Buffer::new(parts * sums_len);
    let shared = Shared::new(&mut sums);
    let offsets = shape.offsets();
    let image = Image { size: shape.input, channels: shape.channels[0], first: 0 };
    let wide = widen(x, shape.batch, image, &offsets, depth, shape.output, shape.stride);
    let (x, image, taps, depth) = match &wide {
        Some(wide) => (wide.padded.as_deref().unwrap_or(x), wide.image, &wide.taps, wide.depth),
        None => (x, image, &offsets, depth),
    };
    let zeros = Buffer::zeroed(depth + isa.outer_rows);
    for_each(parts, |index| {
        // SAFETY: each task has its own part.
        let sums = unsafe { shared.slice(index * sums_len..(index + 1) * sums_len) };
        sums.fill(0.0);
        let range = part(pixels, CHUNK, parts, index);
        Part { isa, shape, x, image, taps, depth, dy, zeros: &zeros, padded }.add(sums, range);
    });
    add_up(shape, &sums, parts, padded)
}

struct Part<'a> {
    isa: &'static Isa,
    shape: &'a ConvShape,
    x: &'a [f32],
    image: Image,
    taps: &'a [[isize; 2]],
    /// Floats of one tap.
    depth: usize,
    dy: &'a [f32],
    zeros: &'a [f32],
    padded: usize,
}

impl Part<'_> {
    fn add(&self, sums: &mut [f32], pixels: std::ops::Range<usize>) {
        let [_, columns] = self.shape.group_channels();
        let (depth, isa) = (self.depth, self.isa);
        let gather = depth < GATHER_BELOW && self.taps.len() > 1;
        let width = self.taps.len() * depth;
        let mut packed = Buffer::new(CHUNK * self.padded);
        let mut gathered = Buffer::new(if gather { CHUNK * width } else { 0 });
        let mut pointers: Vec<*const f32> = Vec::with_capacity(CHUNK);

        for first in pixels.clone().step_by(CHUNK) {
            let count = CHUNK.min(pixels.end - first);
            for group in 0..self.shape.groups {
                pack_rows(
                    isa,
                    self.dy,
                    &mut packed,
                    first..first + count,
                    self.shape.channels[1],
                    group * columns,
                    columns,
                );
                let image = Image { first: group * depth, ..self.image };
                let sums = &mut sums[group * width * self.padded..(group + 1) * width * self.padded];
                for (tap, offset) in self.taps.iter().enumerate() {
                    self.point(&mut pointers, &image, *offset, first, count);
                    if gather {
                        for (k, &from) in pointers.iter().enumerate() {
                            let to = &mut gathered[k * width + tap * depth..][..depth];
                            for (d, to) in to.iter_mut().enumerate() {
                                // SAFETY: each pointer has `depth` floats.
                                *to = unsafe { *from.add(d) };
                            }
                        }
                    } else {
                        let sums = &mut sums[tap * depth * self.padded..(tap + 1) * depth * self.padded];
                        // SAFETY: each pointer has `depth` floats.
                        unsafe { add_products(isa, &pointers, depth, &packed, self.padded, sums) };
                    }
                }
                if gather {
                    pointers.clear();
                    pointers.extend(gathered.chunks_exact(width).take(count).map(<[f32]>::as_ptr));
                    // SAFETY: each pointer has `width` floats.
                    unsafe { add_products(isa, &pointers, width, &packed, self.padded, sums) };
                }
            }
        }
    }

    /// Where one tap of each pixel of a chunk lies in `x`.
    fn point(&self, to: &mut Vec<*const f32>, image: &Image, offset: [isize; 2], first: usize, count: usize) {
        let [height, width] = self.shape.output;
        let (mut n, mut y, mut x) = (first / (height * width), first / width % height, first % width);
        to.clear();
        for _ in 0..count {
            let sy = (y * self.shape.stride[0]) as isize + offset[0];
            let sx = (x * self.shape.stride[1]) as isize + offset[1];
            // A pixel to the left of or above the image wraps around to a huge number.
            let inside = (sy as usize) < image.size[0] && (sx as usize) < image.size[1];
            to.push(if inside {
                let pixel = (n * image.size[0] + sy as usize) * image.size[1] + sx as usize;
                self.x[pixel * image.channels + image.first..].as_ptr()
            } else {
                self.zeros.as_ptr()
            });
            x += 1;
            if x == width {
                (x, y) = (0, y + 1);
            }
            if y == height {
                (y, n) = (0, n + 1);
            }
        }
    }
}

/// `sums[row][..padded] += Σ_k a[k][row] · packed[panel][k][..]` for all rows and panels.
///
/// # Safety
///
/// Each pointer has `rows` floats.
pub(crate) unsafe fn add_products(
    isa: &Isa,
    a: &[*const f32],
    rows: usize,
    packed: &[f32],
    padded: usize,
    sums: &mut [f32],
) {
    let depth = a.len();
    assert!(packed.len() >= padded * depth && sums.len() >= rows * padded);
    for panel in 0..padded / isa.cols {
        for first in (0..rows).step_by(isa.outer_rows) {
            let call = Outer {
                a: a.as_ptr(),
                offset: first,
                depth,
                b: packed[panel * depth * isa.cols..].as_ptr(),
                out: sums[first * padded + panel * isa.cols..].as_mut_ptr(),
                stride: padded,
                rows: isa.outer_rows.min(rows - first),
            };
            // SAFETY: `a` is the caller's promise; the other sides are inside the slices, see the assertion.
            unsafe { isa.outer(&call) };
        }
    }
}

/// Packs some channels of some pixels: `[panel][pixel][Isa::cols]`, padded with zeros.
fn pack_rows(
    isa: &Isa,
    from: &[f32],
    to: &mut [f32],
    pixels: std::ops::Range<usize>,
    channels: usize,
    first: usize,
    columns: usize,
) {
    let (cols, count) = (isa.cols, pixels.len());
    for (k, pixel) in pixels.enumerate() {
        let row = &from[pixel * channels + first..][..columns];
        for (panel, row) in row.chunks(cols).enumerate() {
            let to = &mut to[(panel * count + k) * cols..][..cols];
            to[..row.len()].copy_from_slice(row);
            to[row.len()..].fill(0.0);
        }
    }
}

/// Adds the parts in order and brings the sums into PyTorch's layout.
fn add_up(shape: &ConvShape, sums: &[f32], parts: usize, padded: usize) -> Buffer {
    let [depth, columns] = shape.group_channels();
    let taps = shape.taps();
    let part_len = sums.len() / parts;
    let mut grad = Buffer::new(shape.weight_len());
    let row_len = depth * taps;
    let target = Shared::new(&mut grad);
    // Neighbouring filters share cache lines of the sums.
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
