//! Convolution as one matrix product without im2col: an indirect GEMM, as in XNNPACK.
//!
//! Rows are pixels of the result, columns are its channels, and the summed index is (tap, source channel). Pixels are
//! stored channels-last, so the part of a row that belongs to one tap is contiguous in the source. The micro-kernel
//! takes an indirection buffer: one pointer per (tap, row), where padding points to zeros. The same loop computes the
//! forward pass and, with other pointers, the data gradient (see [`super::conv`]).
//!
//! Tasks take blocks of rows. Within a block, panels of the packed weights are the outer loop and register tiles the
//! inner loop: a panel is read from memory once per block, and the block's pixels stay in L2. Groups of channels
//! alternate within a block, so its pixels are read once for all groups. With few source channels, the micro-kernel
//! would change taps after a few products. Neighbouring taps are then folded into one ([`mod@super::fold_taps`]), or
//! the rows of a block are gathered (im2col of a few hundred rows, in L1) and multiplied as one tap.

use std::cell::RefCell;
use std::ops::Range;

use super::allocator::Buffer;
use super::fold_taps::fold_taps;
use super::kernel::{Isa, Tile, prefetch};
use super::panels::{Panel, padded, panels};
use super::parallel::{SharedSlice, for_each, threads};

/// Number of source channels from which gathering is slower.
const GATHER_BELOW: usize = 4;
/// Minimum number of register tiles per block.
const TILES: usize = 8;
/// Number of products per result element from which blocks have the minimum size.
const FULL_WIDTH: usize = 256;

/// Pixels of a channels-last tensor `[batch, height, width, channels]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Image {
    pub(crate) size: [usize; 2],
    pub(crate) channels: usize,
}

/// A convolution as an indirect GEMM.
pub(crate) struct Igemm<'a> {
    pub(crate) isa: &'static Isa,
    pub(crate) batch: usize,
    /// Number of groups of channels, adjacent in source and target.
    pub(crate) groups: usize,
    /// Pixels of the result, `[rows, columns]` per image.
    pub(crate) grid: [usize; 2],
    pub(crate) source: &'a [f32],
    pub(crate) source_image: Image,
    /// Grid pixel `g` reads the source at `g · source_step + tap`.
    pub(crate) source_step: [usize; 2],
    /// Sorted.
    pub(crate) taps: &'a [[isize; 2]],
    /// Source channels per group, which are summed.
    pub(crate) depth: usize,
    /// Weights from [`pack`].
    pub(crate) packed: &'a [f32],
    /// Grid pixel `g` is written at `g · target_step + target_first`.
    pub(crate) target_image: Image,
    pub(crate) target_step: [usize; 2],
    pub(crate) target_first: [usize; 2],
    /// Result channels per group.
    pub(crate) columns: usize,
    /// Bias from [`pad_bias`].
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) relu: bool,
}

/// Pointers of a block.
#[derive(Default)]
struct Indirection {
    /// `[tile][tap][row]`, each to the first channel of a source pixel.
    a: Vec<*const f32>,
    /// `[tap]`.
    taps: Vec<TapRange>,
    /// `[row]`, each to a gathered row.
    gathered: Vec<*const f32>,
    /// `[row]`, each to the first channel of a target pixel.
    out: Vec<*mut f32>,
}

/// Source pixels of a tap.
struct TapRange {
    /// Offset in floats from the source pixel at `g · step` to the tap's pixel.
    distance: isize,
    /// Rows and columns of the grid whose source pixel is inside the image.
    inside: [Range<usize>; 2],
}

impl TapRange {
    fn new(tap: &[isize; 2], image: &Image, grid: [usize; 2], step: [usize; 2]) -> Self {
        let inside = [0, 1].map(|i| {
            // The first grid index whose source pixel is at or after `line`.
            let first_after = |line: isize| (line - tap[i]).max(0).unsigned_abs().div_ceil(step[i]).min(grid[i]);
            first_after(0)..first_after(image.size[i] as isize)
        });
        Self { distance: (tap[0] * image.size[1] as isize + tap[1]) * image.channels as isize, inside }
    }
}

thread_local! {
    static INDIRECTION: RefCell<Indirection> = RefCell::default();
}

impl Igemm<'_> {
    /// Computes the result's pixels of the grid; `target` is the whole tensor.
    pub(crate) fn run(&self, target: &mut [f32]) {
        let (source, image, step) = (self.source, self.source_image, self.source_step);
        match fold_taps(source, self.batch, image, self.taps, self.depth, self.grid, step) {
            Some(folded) => Igemm {
                source: folded.padded.as_deref().unwrap_or(source),
                source_image: folded.image,
                taps: &folded.taps,
                depth: folded.depth,
                ..*self
            }
            .run_blocks(target),
            None => self.run_blocks(target),
        }
    }

    fn run_blocks(&self, target: &mut [f32]) {
        let rows = self.batch * self.grid[0] * self.grid[1];
        // Rows with few products take little time, so a task has more of them.
        let tiles = (TILES * FULL_WIDTH / (self.depth * self.taps.len()).max(1)).clamp(TILES, 4 * TILES);
        let block = (self.isa.rows * tiles).min(rows.div_ceil(threads()).next_multiple_of(self.isa.rows).max(1));
        let zeros = Buffer::zeroed(self.source_image.channels.max(self.depth).max(1));
        let panels = panels(self.isa, self.columns);
        let target = SharedSlice::new(target);
        for_each(rows.div_ceil(block.max(1)), |index| {
            let first = index * block;
            INDIRECTION.with_borrow_mut(|pointers| {
                self.block(pointers, &panels, first, block.min(rows - first), &zeros, target);
            });
        });
    }

    fn block(
        &self,
        pointers: &mut Indirection,
        panels: &[Panel],
        first: usize,
        count: usize,
        zeros: &[f32],
        target: SharedSlice<f32>,
    ) {
        let gather = self.depth < GATHER_BELOW && self.taps.len() > 1;
        self.fill_pointers(pointers, first, count, zeros, target);
        self.prefetch_next(pointers, count);
        let (rows, width, padded) = (self.isa.rows, self.depth * self.taps.len(), padded(panels));
        let (taps, depth) = if gather { (1, width) } else { (self.taps.len(), self.depth) };
        let mut gathered = Buffer::new(if gather { count.next_multiple_of(rows) * width } else { 0 });

        for group in 0..self.groups {
            if gather {
                self.gather(pointers, &mut gathered, width, group * self.depth);
            }
            let (a, offset) = if gather { (&pointers.gathered, 0) } else { (&pointers.a, group * self.depth) };
            for panel in panels {
                let packed = &self.packed[(group * padded + panel.column) * width..];
                let bias = self.bias.map(|bias| &bias[group * padded + panel.column..]);
                for tile in 0..count.div_ceil(rows) {
                    let call = Tile {
                        // The pointers of a tile are adjacent for all taps.
                        a: a[tile * rows * taps..].as_ptr(),
                        offset,
                        taps,
                        depth,
                        b: packed.as_ptr(),
                        out: pointers.out[tile * rows..].as_ptr(),
                        column: group * self.columns + panel.column,
                        rows: rows.min(count - tile * rows),
                        cols: panel.cols,
                        bias: bias.map_or(std::ptr::null(), <[f32]>::as_ptr),
                        relu: self.relu,
                    };
                    // SAFETY: `fill_pointers` made pointers for whole tiles. Each points to `depth` floats per group in
                    // the source, to as many zeros or (gathered) to a row of `width` floats. Output rows have `columns`
                    // floats per group, and only this block writes them.
                    unsafe { panel.isa.tile(&call) };
                }
            }
        }
    }

    /// Prefetches the source pixels of the next block's last tap, which no earlier block reads. With steps of one, the
    /// pixels follow this block's pixels; with larger steps, some are missed.
    fn prefetch_next(&self, pointers: &Indirection, count: usize) {
        const LINE: usize = 64 / size_of::<f32>();
        let (rows, taps) = (self.isa.rows, self.taps.len());
        let (channels, [sy, sx]) = (self.source_image.channels, self.source_step);
        for row in 0..count {
            let last = pointers.a[(row / rows * taps + taps - 1) * rows + row % rows];
            let next = last.wrapping_add(count * sy * sx * channels);
            for line in (0..channels).step_by(LINE) {
                prefetch(next.wrapping_add(line));
            }
        }
    }

    /// Fills the pointers of a block to source and target, one run of adjacent pixels of a grid row at a time. Rows
    /// after the last repeat the last row.
    fn fill_pointers(
        &self,
        pointers: &mut Indirection,
        first: usize,
        count: usize,
        zeros: &[f32],
        target: SharedSlice<f32>,
    ) {
        let (rows, taps) = (self.isa.rows, self.taps.len());
        let (image, target_image) = (&self.source_image, &self.target_image);
        let Indirection { a, taps: tap_ranges, out, .. } = pointers;
        tap_ranges.clear();
        tap_ranges.extend(self.taps.iter().map(|tap| TapRange::new(tap, image, self.grid, self.source_step)));
        a.clear();
        a.resize(count.next_multiple_of(rows) * taps, zeros.as_ptr());
        out.clear();
        let [height, width] = self.grid;
        let (mut n, mut y, mut x) = (first / (height * width), first / width % height, first % width);
        let step = self.source_step[1] * image.channels;
        for (tile, a) in a.chunks_exact_mut((rows * taps).max(1)).enumerate() {
            let rows_here = rows.min(count - tile * rows);
            let mut row = 0;
            while row < rows_here {
                let run = (width - x).min(rows_here - row);
                let start = (n * image.size[0] + y * self.source_step[0]) * image.size[1];
                let start = self.source.as_ptr().wrapping_add(start * image.channels);
                for (range, a) in tap_ranges.iter().zip(a.chunks_exact_mut(rows)) {
                    if range.inside[0].contains(&y) {
                        let start = start.wrapping_offset(range.distance);
                        let inside = range.inside[1].start.max(x)..range.inside[1].end.min(x + run);
                        for x_inside in inside {
                            a[row + x_inside - x] = start.wrapping_add(x_inside * step);
                        }
                    }
                }
                let ty = y * self.target_step[0] + self.target_first[0];
                let pixel = (n * target_image.size[0] + ty) * target_image.size[1]
                    + x * self.target_step[1]
                    + self.target_first[1];
                let pixels = (0..run).map(|i| pixel + i * self.target_step[1]);
                // SAFETY: all are pixels of the target tensor.
                out.extend(pixels.map(|pixel| unsafe { target.ptr().add(pixel * target_image.channels) }));
                row += run;
                x += run;
                if x == width {
                    (x, y) = (0, y + 1);
                }
                if y == height {
                    (y, n) = (0, n + 1);
                }
            }
            if rows_here < rows {
                for a in a.chunks_exact_mut(rows) {
                    let last = a[rows_here - 1];
                    a[rows_here..].fill(last);
                }
                out.resize(out.len() + rows - rows_here, out[out.len() - 1]);
            }
        }
    }

    /// Gathers the rows of one group of a block, as one tap.
    fn gather(&self, pointers: &mut Indirection, gathered: &mut [f32], width: usize, offset: usize) {
        let (rows, taps) = (self.isa.rows, self.taps.len());
        for (row, to) in gathered.chunks_exact_mut(width).enumerate() {
            for (tap, to) in to.chunks_exact_mut(self.depth).enumerate() {
                let from = pointers.a[(row / rows * taps + tap) * rows + row % rows];
                for (d, to) in to.iter_mut().enumerate() {
                    // SAFETY: each pointer points to `depth` floats per group.
                    *to = unsafe { *from.add(offset + d) };
                }
            }
        }
        pointers.gathered.clear();
        pointers.gathered.extend(gathered.chunks_exact(width).map(<[f32]>::as_ptr));
    }
}

/// A weight tensor with its strides, input of [`pack`].
pub(crate) struct Weights<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) groups: usize,
    /// Columns and depth of one group.
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    pub(crate) group_stride: usize,
    pub(crate) column_stride: usize,
    pub(crate) depth_stride: usize,
    /// Offset of each tap.
    pub(crate) taps: &'a [usize],
}

/// Packs weights into `[group][panel][tap][depth][columns of the panel's tile]`, padded with zeros.
pub(crate) fn pack(isa: &'static Isa, weights: &Weights<'_>) -> Buffer {
    let (depth, width) = (weights.depth, weights.taps.len() * weights.depth);
    let panels = panels(isa, weights.columns);
    let padded = padded(&panels);
    let mut packed = Buffer::new(weights.groups * padded * width);
    let target = SharedSlice::new(&mut packed);
    for_each(weights.groups * panels.len(), |task| {
        let (group, panel) = (task / panels.len(), panels[task % panels.len()]);
        let (start, cols) = ((group * padded + panel.column) * width, panel.isa.cols);
        // SAFETY: each task has its own panel.
        let to = unsafe { target.slice(start..start + cols * width) };
        if panel.cols < cols {
            to.fill(0.0);
        }
        for column in 0..panel.cols {
            let from = group * weights.group_stride + (panel.column + column) * weights.column_stride;
            for d in 0..depth {
                let from = &weights.data[from + d * weights.depth_stride..];
                for (tap, &start) in weights.taps.iter().enumerate() {
                    to[(tap * depth + d) * cols + column] = from[start];
                }
            }
        }
    });
    packed
}

/// Pads each group's bias with zeros to the columns of its panels.
pub(crate) fn pad_bias(isa: &'static Isa, bias: &[f32], groups: usize) -> Buffer {
    let columns = bias.len() / groups;
    let padded = padded(&panels(isa, columns));
    let mut to = Buffer::zeroed(groups * padded);
    for (to, bias) in to.chunks_exact_mut(padded).zip(bias.chunks_exact(columns)) {
        to[..columns].copy_from_slice(bias);
    }
    to
}
