//! Convolution as one matrix product without im2col: an implicit GEMM with an indirection buffer, as in XNNPACK ("indirect GEMM").
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
//! the rows of a block are gathered (im2col of a few hundred rows, in L1) and multiplied as one tap. Rows of bf16 whose
//! products are computed in f32 are converted once per block instead of in every register tile. A source of few channels is
//! converted as a whole: its pixels are in the windows of many results.
//!
//! A register tile has [`MicroKernels::rows`] rows and as many columns as its panel: 12 x 32 with AVX-512. Checked by
//! `conv_tests`.

use std::ops::Range;

use super::allocator::Buffer;
use super::convert::{WideRows, WidenTo, widen_all};
use super::element::Element;
use super::fold_taps::fold_taps;
use super::group_conv;
use super::kernel::{MicroKernels, Operand, TileArgs, prefetch};
use super::packing::{Packed, Weights};
use super::panels::{Panel, padded, panels};
use super::parallel::{SharedSlice, for_each, threads};

/// Number of source channels from which gathering is slower.
const GATHER_BELOW: usize = 4;
/// Number of source channels from which a tap fills enough of an AMX tile register.
const AMX_DEPTH: usize = 16;
/// Minimum number of register tiles per block.
const TILES: usize = 8;
/// Number of products per result element from which blocks have the minimum size.
const LONG_SUM: usize = 256;

/// Size of a channels-last image `[height, width, channels]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageSize {
    pub(crate) size: [usize; 2],
    pub(crate) channels: usize,
}

/// A convolution as an implicit GEMM: M is the pixel of the result's grid, N its channel, and K (tap, source channel).
pub(crate) struct Igemm<'a, E: 'static> {
    pub(crate) isa: &'static MicroKernels<E>,
    pub(crate) batch: usize,
    /// Pixels of the result, `[rows, columns]` per image.
    pub(crate) grid: [usize; 2],
    /// `[batch, height, width, channels]` of `source_image`.
    pub(crate) source: &'a [E],
    pub(crate) source_image: ImageSize,
    /// Grid pixel `g` reads the source at `g · source_stride + tap`.
    pub(crate) source_stride: [usize; 2],
    /// Offset `[row, column]` of each tap in pixels, sorted.
    pub(crate) taps: &'a [[isize; 2]],
    /// Weights of all `taps`.
    pub(crate) weights: &'a Weights<'a>,
    /// Grid pixel `g` is written at `g · target_stride + target_first`.
    pub(crate) target_image: ImageSize,
    pub(crate) target_stride: [usize; 2],
    pub(crate) target_first: [usize; 2],
    /// Bias from [`super::packing::pad_bias`].
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) relu: bool,
}

/// Indirection buffer of a block: pointers to the pixels that its register tiles read and write.
struct Indirection<S, E> {
    /// `[tile][tap][row]`, each to the first channel of a source pixel.
    a: Vec<*const S>,
    /// `[row]`, each to the first channel of a target pixel.
    out: Vec<*mut E>,
}

/// The source pixels that one tap reads, as seen from the grid.
struct TapRange {
    /// Offset in elements from the source pixel at `g · stride` to the tap's pixel.
    distance: isize,
    /// Rows and columns of the grid whose source pixel is inside the image.
    inside: [Range<usize>; 2],
}

impl TapRange {
    fn new(tap: &[isize; 2], image: &ImageSize, grid: [usize; 2], stride: [usize; 2]) -> Self {
        let inside = [0, 1].map(|i| {
            // The first grid index whose source pixel is at or after `line`.
            let first_after = |line: isize| (line - tap[i]).max(0).unsigned_abs().div_ceil(stride[i]).min(grid[i]);
            first_after(0)..first_after(image.size[i] as isize)
        });
        Self { distance: (tap[0] * image.size[1] as isize + tap[1]) * image.channels as isize, inside }
    }
}

impl<E: Operand> Igemm<'_, E> {
    /// Computes the result's pixels of the grid; `target` is the whole tensor.
    pub(crate) fn run(&self, target: &mut [E]) {
        let depth = self.weights.depth;
        if let Some(isa) = self.narrow_groups() {
            return self.run_groups(isa, target);
        }
        if let Some(kernels) = &self.isa.amx
            && depth >= AMX_DEPTH
        {
            return self.run_amx(kernels, target);
        }
        if let Some(isa) = self.isa.widened_source(self.source_image.channels, self.taps.len()) {
            let source = widen_all(self.source);
            return self.fold(&source, |folded| self.run_blocks::<f32, f32>(isa, folded, target));
        }
        self.fold(self.source, |folded| match self.isa.widened_for(folded.depth) {
            Some(isa) => self.run_blocks::<E, f32>(isa, folded, target),
            None => self.run_blocks::<E, E>(self.isa, folded, target),
        });
    }

    /// Folds the taps where possible, and calls `run` with the result.
    fn fold<S: Element>(&self, source: &[S], run: impl FnOnce(FoldedSource<S>)) {
        let (image, depth) = (self.source_image, self.weights.depth);
        let folded = fold_taps(source, self.batch, image, self.taps, depth, self.grid, self.source_stride);
        run(match &folded {
            Some(folded) => FoldedSource {
                source: folded.padded.as_deref().unwrap_or(source),
                image: folded.image,
                taps: &folded.taps,
                depth: folded.depth,
            },
            None => FoldedSource { source, image, taps: self.taps, depth },
        });
    }

    /// Packs the weights and computes all blocks of rows. `isa` multiplies elements of `T`, to which those of the source are
    /// converted.
    fn run_blocks<S: Element + WidenTo<T>, T: Operand>(
        &self,
        isa: &'static MicroKernels<T>,
        folded: FoldedSource<S>,
        target: &mut [E],
    ) {
        let FoldedSource { image, taps, depth, .. } = folded;
        let gather = depth < GATHER_BELOW && taps.len() > 1;
        let merged = if gather { self.taps.len() } else { self.taps.len() / taps.len().max(1) };
        let packed = self.weights.pack(isa, merged.max(1));
        let zeros = Buffer::zeroed(image.channels.max(depth).max(1));
        let panels = panels(isa, self.weights.columns);
        PackedConv { conv: self, isa, folded, gather, packed, panels: &panels, zeros: &zeros }.run(target);
    }

    /// Returns the instruction set with which [`super::group_conv`] computes the groups; `None` where the tiles of this file are
    /// as fast. A tile of 16 columns hides the loads of its pointers behind its products.
    fn narrow_groups(&self) -> Option<&'static MicroKernels<E>> {
        let rows = self.batch * self.grid[0] * self.grid[1];
        let several = self.weights.groups > 1 && self.taps.len() > 1 && rows > 0;
        let isa =
            several.then(|| group_conv::isa_for_group(self.isa, self.weights.depth, self.weights.columns)).flatten()?;
        (isa.cols <= 8).then_some(isa)
    }
}

/// The source and the taps of a convolution, after [`fold_taps`] or as they were.
#[derive(Clone, Copy)]
struct FoldedSource<'a, S> {
    source: &'a [S],
    image: ImageSize,
    taps: &'a [[isize; 2]],
    /// Elements per tap.
    depth: usize,
}

/// A convolution with packed weights, ready to be computed in blocks of rows.
struct PackedConv<'a, S, T: 'static, E: 'static> {
    conv: &'a Igemm<'a, E>,
    /// Multiplies elements of `T`, to which those of the source are converted.
    isa: &'static MicroKernels<T>,
    folded: FoldedSource<'a, S>,
    /// Whether the rows of a block are gathered (im2col).
    gather: bool,
    packed: Packed<T>,
    panels: &'a [Panel<T>],
    /// Zeros for padding, one per element of a tap.
    zeros: &'a [S],
}

impl<S: Element + WidenTo<T>, T: Operand, E: Operand> PackedConv<'_, S, T, E> {
    fn run(&self, target: &mut [E]) {
        let isa = self.isa;
        let rows = self.conv.batch * self.conv.grid[0] * self.conv.grid[1];
        // Rows with few products take little time, so a task has more of them.
        let tiles = (TILES * LONG_SUM / (self.folded.depth * self.folded.taps.len()).max(1)).clamp(TILES, 4 * TILES);
        let block = (isa.rows * tiles).min(rows.div_ceil(threads()).next_multiple_of(isa.rows).max(1));
        let target = SharedSlice::new(target);
        for_each(rows.div_ceil(block.max(1)), |index| {
            let first = index * block;
            self.block(first, block.min(rows - first), target);
        });
    }

    /// Computes `count` rows from row `first`.
    fn block(&self, first: usize, count: usize, target: SharedSlice<E>) {
        let pointers = self.pointers(first, count, target);
        self.prefetch_next(&pointers, count);
        let (rows, width, padded) = (self.isa.rows, self.folded.depth * self.folded.taps.len(), padded(self.panels));
        let (taps, depth) = if self.gather { (1, width) } else { (self.folded.taps.len(), self.folded.depth) };
        let mut gathered = Buffer::new(if self.gather { count.next_multiple_of(rows) * width } else { 0 });
        let mut gathered_rows = Vec::new();
        let mut converted = WideRows::new();
        let columns = self.conv.weights.columns;

        for group in 0..self.conv.weights.groups {
            if self.gather {
                self.gather(&pointers, &mut gathered, width, group * self.folded.depth);
                gathered_rows.clear();
                gathered_rows.extend(gathered.chunks_exact(width).map(<[T]>::as_ptr));
            }
            let (a, offset) = if self.gather {
                (&*gathered_rows, 0)
            } else {
                // SAFETY: `pointers` made pointers to `depth` elements per group.
                unsafe { S::rows(&pointers.a, group * depth, depth, &mut converted) }
            };
            for panel in self.panels {
                let packed = &self.packed.values[(group * padded + panel.column) * self.packed.width..];
                let bias = self.conv.bias.map(|bias| &bias[group * padded + panel.column..]);
                for tile in 0..count.div_ceil(rows) {
                    let call = TileArgs {
                        // The pointers of a tile are adjacent for all taps.
                        a: a[tile * rows * taps..].as_ptr(),
                        offset,
                        taps,
                        depth,
                        b: packed.as_ptr(),
                        out: pointers.out[tile * rows..].as_ptr(),
                        column: group * columns + panel.column,
                        rows: rows.min(count - tile * rows),
                        cols: panel.cols,
                        bias: bias.map_or(std::ptr::null(), <[f32]>::as_ptr),
                        relu: self.conv.relu,
                    };
                    // SAFETY: `pointers` made pointers for whole tiles. Each points to `depth` elements per group in
                    // the source, to as many zeros or (gathered) to a row of `width` elements. Output rows have `columns`
                    // elements per group, and only this block writes them.
                    unsafe { panel.isa.tile(&call) };
                }
            }
        }
    }

    /// Prefetches the source pixels of the next block's last tap, which no earlier block reads. With strides of one, the
    /// pixels follow this block's pixels; with larger strides, some are missed.
    fn prefetch_next(&self, pointers: &Indirection<S, E>, count: usize) {
        let line = 64 / size_of::<S>();
        let (rows, taps) = (self.isa.rows, self.folded.taps.len());
        let (channels, [sy, sx]) = (self.folded.image.channels, self.conv.source_stride);
        for row in 0..count {
            let last = pointers.a[(row / rows * taps + taps - 1) * rows + row % rows];
            let next = last.wrapping_add(count * sy * sx * channels);
            for line in (0..channels).step_by(line) {
                prefetch(next.wrapping_add(line));
            }
        }
    }

    /// Returns the pointers of a block to source and target, made for one run of adjacent pixels of a grid row at a time.
    /// Rows after the last repeat the last row.
    fn pointers(&self, first: usize, count: usize, target: SharedSlice<E>) -> Indirection<S, E> {
        let (conv, image, target_image) = (self.conv, &self.folded.image, &self.conv.target_image);
        let (rows, taps) = (self.isa.rows, self.folded.taps.len());
        let tap_ranges: Vec<TapRange> =
            self.folded.taps.iter().map(|tap| TapRange::new(tap, image, conv.grid, conv.source_stride)).collect();
        let mut a = vec![self.zeros.as_ptr(); count.next_multiple_of(rows) * taps];
        let mut out = Vec::with_capacity(count.next_multiple_of(rows));
        let [height, width] = conv.grid;
        let (mut n, mut y, mut x) = (first / (height * width), first / width % height, first % width);
        let stride = conv.source_stride[1] * image.channels;
        for (tile, a) in a.chunks_exact_mut((rows * taps).max(1)).enumerate() {
            let rows_here = rows.min(count - tile * rows);
            let mut row = 0;
            while row < rows_here {
                let run = (width - x).min(rows_here - row);
                let start = (n * image.size[0] + y * conv.source_stride[0]) * image.size[1];
                let start = self.folded.source.as_ptr().wrapping_add(start * image.channels);
                for (range, a) in tap_ranges.iter().zip(a.chunks_exact_mut(rows)) {
                    if range.inside[0].contains(&y) {
                        let start = start.wrapping_offset(range.distance);
                        let inside = range.inside[1].start.max(x)..range.inside[1].end.min(x + run);
                        for x_inside in inside {
                            a[row + x_inside - x] = start.wrapping_add(x_inside * stride);
                        }
                    }
                }
                let ty = y * conv.target_stride[0] + conv.target_first[0];
                let pixel = (n * target_image.size[0] + ty) * target_image.size[1]
                    + x * conv.target_stride[1]
                    + conv.target_first[1];
                let pixels = (0..run).map(|i| pixel + i * conv.target_stride[1]);
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
        Indirection { a, out }
    }

    /// Gathers the rows of one group of a block, as one tap.
    fn gather(&self, pointers: &Indirection<S, E>, gathered: &mut [T], width: usize, offset: usize) {
        let (rows, taps) = (self.isa.rows, self.folded.taps.len());
        for (row, to) in gathered.chunks_exact_mut(width).enumerate() {
            for (tap, to) in to.chunks_exact_mut(self.folded.depth).enumerate() {
                let from = pointers.a[(row / rows * taps + tap) * rows + row % rows];
                // SAFETY: each pointer points to `depth` elements per group.
                S::widen(unsafe { std::slice::from_raw_parts(from.add(offset), self.folded.depth) }, to);
            }
        }
    }
}
