//! Convolution as one matrix product without im2col.
//!
//! A pixel of the result is a row, a channel of the result is a column, and the summed index runs over (tap, channel of
//! the source). Since pixels are stored channels-last, the part of a row that belongs to one tap is contiguous in the
//! source: the kernel takes a table of pointers, one for each (tap, row), and padding is a pointer to zeros. This one
//! loop serves the forward pass and, with other tables, the gradient of the data (see [`super::conv`]).
//!
//! Rows go in blocks that different tasks take. Within a block, panels of the packed weights are the outer loop and the
//! register tiles the inner one: a panel comes from memory once a block, the block's pixels stay in L2. With few source
//! channels the kernel would turn to the next tap after a handful of products; there neighbouring taps become one
//! ([`super::widen`]), or else a block's rows are gathered (im2col of some hundred rows, in L1) and multiplied as one tap.

use std::cell::RefCell;

use super::kernel::{Isa, Tile};
use super::memory::Buffer;
use super::parallel::{Shared, for_each, threads};
use super::widen::widen;

/// Source channels from which gathering no longer pays.
const GATHER_BELOW: usize = 8;
/// Register tiles in a block.
const TILES: usize = 8;

/// A grid of pixels in a channels-last tensor `[batch, height, width, channels]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Image {
    pub(crate) size: [usize; 2],
    pub(crate) channels: usize,
    /// First channel in use.
    pub(crate) first: usize,
}

pub(crate) struct Igemm<'a> {
    pub(crate) isa: &'static Isa,
    pub(crate) batch: usize,
    /// Pixels of the result, `[rows, columns]` for each image.
    pub(crate) grid: [usize; 2],
    pub(crate) source: &'a [f32],
    pub(crate) source_image: Image,
    /// Grid pixel `g` reads the source at `g · source_step + tap`.
    pub(crate) source_step: [usize; 2],
    /// Sorted.
    pub(crate) taps: &'a [[isize; 2]],
    /// Channels of the source that are summed.
    pub(crate) depth: usize,
    /// From [`pack`].
    pub(crate) packed: &'a [f32],
    /// Grid pixel `g` is written at `g · target_step + target_first`.
    pub(crate) target_image: Image,
    pub(crate) target_step: [usize; 2],
    pub(crate) target_first: [usize; 2],
    /// Channels of the result.
    pub(crate) columns: usize,
    /// Padded to whole panels.
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) relu: bool,
}

#[derive(Default)]
struct Tables {
    a: Vec<*const f32>,
    out: Vec<*mut f32>,
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
        let block = (self.isa.rows * TILES).min(rows.div_ceil(threads()).next_multiple_of(self.isa.rows).max(1));
        let zeros = Buffer::zeroed(self.depth.max(1));
        let target = Shared::new(target);
        for_each(rows.div_ceil(block.max(1)), |index| {
            let first = index * block;
            TABLES.with_borrow_mut(|tables| self.block(tables, first, block.min(rows - first), &zeros, target));
        });
    }

    fn block(&self, tables: &mut Tables, first: usize, count: usize, zeros: &[f32], target: Shared<f32>) {
        let gather = self.depth < GATHER_BELOW && self.taps.len() > 1;
        self.point(tables, first, count, zeros, target);
        let (isa, width) = (self.isa, self.depth * self.taps.len());
        let gathered = gather.then(|| self.gather(tables, count, width));
        let (taps, depth) = if gather { (1, width) } else { (self.taps.len(), self.depth) };

        for (panel, packed) in self.packed.chunks_exact((width * isa.cols).max(1)).enumerate() {
            let column = panel * isa.cols;
            for tile in 0..count.div_ceil(isa.rows) {
                let call = Tile {
                    // A tile's pointers for all taps lie together.
                    a: tables.a[tile * isa.rows * taps..].as_ptr(),
                    taps,
                    depth,
                    b: packed.as_ptr(),
                    out: tables.out[tile * isa.rows..].as_ptr(),
                    column,
                    rows: isa.rows.min(count - tile * isa.rows),
                    cols: isa.cols.min(self.columns - column),
                    bias: self.bias.map_or(std::ptr::null(), |bias| bias[column..].as_ptr()),
                    relu: self.relu,
                };
                // SAFETY: `point` made tables for whole tiles, each pointer into the source with `depth` floats left,
                // to the zeros or (gathered) to a row of `width` floats; output rows have `columns` floats, and this
                // block alone writes them.
                unsafe { isa.tile(&call) };
            }
        }
        drop(gathered);
    }

    /// Pointers of a block: `[tile][tap][row]` to the source, `[row]` to the target. Rows behind the last repeat it.
    fn point(&self, tables: &mut Tables, first: usize, count: usize, zeros: &[f32], target: Shared<f32>) {
        let rows = self.isa.rows;
        let (source, image, goal) = (self.source, &self.source_image, &self.target_image);
        tables.a.clear();
        tables.out.clear();
        tables.a.resize(count.next_multiple_of(rows) * self.taps.len(), zeros.as_ptr());
        let [height, width] = self.grid;
        let (mut n, mut y, mut x) = (first / (height * width), first / width % height, first % width);
        for row in 0..count.next_multiple_of(rows) {
            let tile = &mut tables.a[row / rows * rows * self.taps.len()..];
            for (tap, offset) in self.taps.iter().enumerate() {
                let sy = (y * self.source_step[0]) as isize + offset[0];
                let sx = (x * self.source_step[1]) as isize + offset[1];
                // A pixel to the left of or above the image wraps around to a huge number.
                let inside = (sy as usize) < image.size[0] && (sx as usize) < image.size[1];
                if inside {
                    let pixel = (n * image.size[0] + sy as usize) * image.size[1] + sx as usize;
                    let start = pixel * image.channels + image.first;
                    tile[tap * rows + row % rows] = source[start..start + self.depth].as_ptr();
                }
            }
            let ty = y * self.target_step[0] + self.target_first[0];
            let tx = x * self.target_step[1] + self.target_first[1];
            let pixel = (n * goal.size[0] + ty) * goal.size[1] + tx;
            // SAFETY: a pixel of the target tensor.
            tables.out.push(unsafe { target.ptr().add(pixel * goal.channels + goal.first) });
            if row + 1 < count {
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

    /// Copies a block's rows together and points the tables to them, as one tap.
    fn gather(&self, tables: &mut Tables, count: usize, width: usize) -> Buffer {
        let (rows, taps) = (self.isa.rows, self.taps.len());
        let mut gathered = Buffer::new(count.next_multiple_of(rows) * width);
        for (row, to) in gathered.chunks_exact_mut(width).enumerate() {
            for (tap, to) in to.chunks_exact_mut(self.depth).enumerate() {
                let from = tables.a[(row / rows * taps + tap) * rows + row % rows];
                for (d, to) in to.iter_mut().enumerate() {
                    // SAFETY: each pointer has `depth` floats.
                    *to = unsafe { *from.add(d) };
                }
            }
        }
        tables.a.clear();
        tables.a.extend(gathered.chunks_exact(width).map(<[f32]>::as_ptr));
        gathered
    }
}

/// Strides of a weight tensor as `pack` reads it.
pub(crate) struct Weights<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    pub(crate) column_stride: usize,
    pub(crate) depth_stride: usize,
    /// Where each tap starts.
    pub(crate) taps: &'a [usize],
}

/// Panels `[panel][tap][depth][Isa::cols]`, padded with zeros.
pub(crate) fn pack(isa: &Isa, weights: &Weights<'_>) -> Buffer {
    let (cols, depth, taps) = (isa.cols, weights.depth, weights.taps.len());
    let len = taps * depth * cols;
    let panels = weights.columns.div_ceil(cols);
    let mut packed = Buffer::new(panels * len);
    let target = Shared::new(&mut packed);
    for_each(panels, |panel| {
        // SAFETY: each task has its own panel.
        let to = unsafe { target.slice(panel * len..(panel + 1) * len) };
        if (panel + 1) * cols > weights.columns {
            to.fill(0.0);
        }
        for column in 0..cols.min(weights.columns - panel * cols) {
            let from = (panel * cols + column) * weights.column_stride;
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
