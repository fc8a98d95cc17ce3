//! Convolution as one matrix product without im2col.
//!
//! A pixel of the result is a row, a channel of the result is a column, and the summed index runs over (tap, channel of
//! the source). Since pixels are stored channels-last, the part of a row that belongs to one tap is contiguous in the
//! source: the kernel takes a table of pointers, one for each (tap, row), and padding is a pointer to zeros. This one
//! loop serves the forward pass and, with other tables, the gradient of the data (see [`super::conv`]).
//!
//! Rows go in blocks that different tasks take. Within a block, panels of the packed weights are the outer loop and the
//! register tiles the inner one: a panel comes from memory once a block, the block's pixels stay in L2.
//! Groups of channels take turns within a block, so that its pixels are read once for all of them. With few source
//! channels the kernel would turn to the next tap after a handful of products; there neighbouring taps become one
//! ([`super::widen`]), or else a block's rows are gathered (im2col of some hundred rows, in L1) and multiplied as one tap.

use std::cell::RefCell;
use std::ops::Range;

use super::kernel::{Isa, Tile, prefetch};
use super::memory::Buffer;
use super::panels::{Panel, padded, panels};
use super::parallel::{Shared, for_each, threads};
use super::widen::widen;

/// Source channels from which gathering no longer pays.
const GATHER_BELOW: usize = 4;
/// Register tiles in a block, at least.
const TILES: usize = 8;
/// Products for each number of the result from which a block has that few.
const FULL_WIDTH: usize = 256;

/// A grid of pixels in a channels-last tensor `[batch, height, width, channels]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Image {
    pub(crate) size: [usize; 2],
    pub(crate) channels: usize,
}

pub(crate) struct Igemm<'a> {
    pub(crate) isa: &'static Isa,
    pub(crate) batch: usize,
    /// Groups of channels, side by side in source and target.
    pub(crate) groups: usize,
    /// Pixels of the result, `[rows, columns]` for each image.
    pub(crate) grid: [usize; 2],
    pub(crate) source: &'a [f32],
    pub(crate) source_image: Image,
    /// Grid pixel `g` reads the source at `g · source_step + tap`.
    pub(crate) source_step: [usize; 2],
    /// Sorted.
    pub(crate) taps: &'a [[isize; 2]],
    /// Channels of a group of the source that are summed.
    pub(crate) depth: usize,
    /// From [`pack`].
    pub(crate) packed: &'a [f32],
    /// Grid pixel `g` is written at `g · target_step + target_first`.
    pub(crate) target_image: Image,
    pub(crate) target_step: [usize; 2],
    pub(crate) target_first: [usize; 2],
    /// Channels of a group of the result.
    pub(crate) columns: usize,
    /// From [`pad_bias`].
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) relu: bool,
}

#[derive(Default)]
struct Tables {
    /// `[tile][tap][row]`, to the first channel of a pixel of the source.
    a: Vec<*const f32>,
    /// `[tap]`
    reach: Vec<Reach>,
    /// `[row]`, to a gathered row.
    gathered: Vec<*const f32>,
    /// `[row]`, to the first channel of a pixel of the target.
    out: Vec<*mut f32>,
}

/// What a tap sees of the source.
struct Reach {
    /// Floats from the pixel at `g · step` to that below the tap.
    distance: isize,
    /// Rows and columns of the grid whose pixel is inside the image.
    inside: [Range<usize>; 2],
}

impl Reach {
    fn new(tap: &[isize; 2], image: &Image, grid: [usize; 2], step: [usize; 2]) -> Self {
        let inside = [0, 1].map(|i| {
            // The first one at or behind a line of the image.
            let behind = |line: isize| (line - tap[i]).max(0).unsigned_abs().div_ceil(step[i]).min(grid[i]);
            behind(0)..behind(image.size[i] as isize)
        });
        Self { distance: (tap[0] * image.size[1] as isize + tap[1]) * image.channels as isize, inside }
    }
}

thread_local! {
    static TABLES: RefCell<Tables> = RefCell::default();
}

impl Igemm<'_> {
    /// Fills the result's pixels of the grid; `target` is the whole tensor.
    pub(crate) fn run(&self, target: &mut [f32]) {
        let (source, image, step) = (self.source, self.source_image, self.source_step);
        match widen(source, self.batch, image, self.taps, self.depth, self.grid, step) {
            Some(wide) => Igemm {
                source: wide.padded.as_deref().unwrap_or(source),
                source_image: wide.image,
                taps: &wide.taps,
                depth: wide.depth,
                ..*self
            }
            .run_blocks(target),
            None => self.run_blocks(target),
        }
    }

    fn run_blocks(&self, target: &mut [f32]) {
        let rows = self.batch * self.grid[0] * self.grid[1];
        // Rows of few products are soon done: more of them a task.
        let tiles = (TILES * FULL_WIDTH / (self.depth * self.taps.len()).max(1)).clamp(TILES, 4 * TILES);
        let block = (self.isa.rows * tiles).min(rows.div_ceil(threads()).next_multiple_of(self.isa.rows).max(1));
        let zeros = Buffer::zeroed(self.source_image.channels.max(self.depth).max(1));
        let panels = panels(self.isa, self.columns);
        let target = Shared::new(target);
        for_each(rows.div_ceil(block.max(1)), |index| {
            let first = index * block;
            TABLES.with_borrow_mut(|tables| {
                self.block(tables, &panels, first, block.min(rows - first), &zeros, target);
            });
        });
    }

    fn block(
        &self,
        tables: &mut Tables,
        panels: &[Panel],
        first: usize,
        count: usize,
        zeros: &[f32],
        target: Shared<f32>,
    ) {
        let gather = self.depth < GATHER_BELOW && self.taps.len() > 1;
        self.point(tables, first, count, zeros, target);
        self.fetch_next(tables, count);
        let (rows, width, padded) = (self.isa.rows, self.depth * self.taps.len(), padded(panels));
        let (taps, depth) = if gather { (1, width) } else { (self.taps.len(), self.depth) };
        let mut gathered = Buffer::new(if gather { count.next_multiple_of(rows) * width } else { 0 });

        for group in 0..self.groups {
            if gather {
                self.gather(tables, &mut gathered, width, group * self.depth);
            }
            let (a, offset) = if gather { (&tables.gathered, 0) } else { (&tables.a, group * self.depth) };
            for panel in panels {
                let packed = &self.packed[(group * padded + panel.column) * width..];
                let bias = self.bias.map(|bias| &bias[group * padded + panel.column..]);
                for tile in 0..count.div_ceil(rows) {
                    let call = Tile {
                        // A tile's pointers for all taps lie together.
                        a: a[tile * rows * taps..].as_ptr(),
                        offset,
                        taps,
                        depth,
                        b: packed.as_ptr(),
                        out: tables.out[tile * rows..].as_ptr(),
                        column: group * self.columns + panel.column,
                        rows: rows.min(count - tile * rows),
                        cols: panel.cols,
                        bias: bias.map_or(std::ptr::null(), <[f32]>::as_ptr),
                        relu: self.relu,
                    };
                    // SAFETY: `point` made tables for whole tiles, each pointer into the source with all groups' `depth`
                    // floats left, to as many zeros or (gathered) to a row of `width` floats; output rows have all
                    // groups' `columns` floats, and this block alone writes them.
                    unsafe { panel.isa.tile(&call) };
                }
            }
        }
    }

    /// Asks for the pixels below the last tap of the next block, which no block before it reads. Where steps are one they
    /// follow this block's; elsewhere some are missed.
    fn fetch_next(&self, tables: &Tables, count: usize) {
        const LINE: usize = 64 / size_of::<f32>();
        let (rows, taps) = (self.isa.rows, self.taps.len());
        let (channels, [sy, sx]) = (self.source_image.channels, self.source_step);
        for row in 0..count {
            let last = tables.a[(row / rows * taps + taps - 1) * rows + row % rows];
            let next = last.wrapping_add(count * sy * sx * channels);
            for line in (0..channels).step_by(LINE) {
                prefetch(next.wrapping_add(line));
            }
        }
    }

    /// Pointers of a block to the source and to the target, a run of pixels that are neighbours in a row of the grid at a
    /// time. Rows behind the last repeat it.
    fn point(&self, tables: &mut Tables, first: usize, count: usize, zeros: &[f32], target: Shared<f32>) {
        let (rows, taps) = (self.isa.rows, self.taps.len());
        let (image, goal) = (&self.source_image, &self.target_image);
        let Tables { a, reach, out, .. } = tables;
        reach.clear();
        reach.extend(self.taps.iter().map(|tap| Reach::new(tap, image, self.grid, self.source_step)));
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
                for (reach, a) in reach.iter().zip(a.chunks_exact_mut(rows)) {
                    if reach.inside[0].contains(&y) {
                        let start = start.wrapping_offset(reach.distance);
                        let inside = reach.inside[1].start.max(x)..reach.inside[1].end.min(x + run);
                        for x_inside in inside {
                            a[row + x_inside - x] = start.wrapping_add(x_inside * step);
                        }
                    }
                }
                let ty = y * self.target_step[0] + self.target_first[0];
                let pixel = (n * goal.size[0] + ty) * goal.size[1] + x * self.target_step[1] + self.target_first[1];
                let pixels = (0..run).map(|i| pixel + i * self.target_step[1]);
                // SAFETY: pixels of the target tensor.
                out.extend(pixels.map(|pixel| unsafe { target.ptr().add(pixel * goal.channels) }));
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

    /// Copies the rows of a block's group together, as one tap.
    fn gather(&self, tables: &mut Tables, gathered: &mut [f32], width: usize, offset: usize) {
        let (rows, taps) = (self.isa.rows, self.taps.len());
        for (row, to) in gathered.chunks_exact_mut(width).enumerate() {
            for (tap, to) in to.chunks_exact_mut(self.depth).enumerate() {
                let from = tables.a[(row / rows * taps + tap) * rows + row % rows];
                for (d, to) in to.iter_mut().enumerate() {
                    // SAFETY: each pointer has all groups' `depth` floats.
                    *to = unsafe { *from.add(offset + d) };
                }
            }
        }
        tables.gathered.clear();
        tables.gathered.extend(gathered.chunks_exact(width).map(<[f32]>::as_ptr));
    }
}

/// Strides of a weight tensor as `pack` reads it.
pub(crate) struct Weights<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) groups: usize,
    /// Columns and depth of one group.
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    pub(crate) group_stride: usize,
    pub(crate) column_stride: usize,
    pub(crate) depth_stride: usize,
    /// Where each tap starts.
    pub(crate) taps: &'a [usize],
}

/// `[group][panel][tap][depth][columns of the panel's tile]`, padded with zeros.
pub(crate) fn pack(isa: &'static Isa, weights: &Weights<'_>) -> Buffer {
    let (depth, width) = (weights.depth, weights.taps.len() * weights.depth);
    let panels = panels(isa, weights.columns);
    let padded = padded(&panels);
    let mut packed = Buffer::new(weights.groups * padded * width);
    let target = Shared::new(&mut packed);
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

/// Each group's bias with zeros for the padding of its panels.
pub(crate) fn pad_bias(isa: &'static Isa, bias: &[f32], groups: usize) -> Buffer {
    let columns = bias.len() / groups;
    let padded = padded(&panels(isa, columns));
    let mut to = Buffer::zeroed(groups * padded);
    for (to, bias) in to.chunks_exact_mut(padded).zip(bias.chunks_exact(columns)) {
        to[..columns].copy_from_slice(bias);
    }
    to
}
