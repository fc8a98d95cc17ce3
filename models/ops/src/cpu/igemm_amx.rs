//! The indirect GEMM of [`super::igemm`] with AMX tile registers, whose rows must have constant distances in memory.
//!
//! A task copies the source pixels of a block of results, padding included, into an input tile: the rows of one image, or several
//! small images side by side. Neighbours share the columns of zeros between them. With a stride, pixels are divided into planes by
//! their coordinates modulo the stride, so that adjacent results read adjacent pixels of a plane. A register tile is 32 adjacent
//! positions of the input tile, and every tap is a constant distance from them. Positions between images have no result and are not
//! stored. The input tile stays in L2, and the copy is small beside the products. A 1x1 convolution reads the source in place.
//!
//! A register tile is 32 results by 32 channels, a block about 256 results. Checked by `conv_tests`, where the processor has AMX.

use super::allocator::Buffer;
use super::igemm::Igemm;
use super::kernel::{AmxKernels, AmxTileArgs, Operand};
use super::packing::Packed;
use super::panels::{Panel, padded, panels};
use super::parallel::{SharedSlice, for_each, threads};

/// Results per block, about.
const BLOCK: usize = 256;
/// Limit in bytes of an input tile, which shares L2 with the weights.
const MAX_INPUT_TILE: usize = 512 << 10;

/// Layout of a block's input tile: copies of the source pixels that the block reads, padding included, as
/// `[phase row][phase column][plane_rows][plane_columns][group][group_len]`. A plane has the pixels whose coordinates are equal
/// modulo the stride.
#[derive(Default)]
struct InputTile {
    /// The smallest offset of a tap, `[row, column]`. The tile begins there.
    min_tap: [isize; 2],
    /// Images of a block.
    images_per_block: usize,
    /// Rows of the grid in a block.
    grid_rows: usize,
    /// Columns of a plane from the start of one image to the start of the next.
    image_pitch: usize,
    plane_columns: usize,
    plane_rows: usize,
    /// Channels of a group, rounded up to [`MicroKernels::depth`](super::kernel::MicroKernels::depth).
    group_len: usize,
    /// Elements of a pixel: those of all groups.
    pixel_len: usize,
    /// Distance in elements from a position to the pixel of each tap.
    tap_offsets: Vec<usize>,
    /// Pixels after the last plane that a register tile may read.
    slack: usize,
}

impl InputTile {
    fn new<E: Operand>(conv: &Igemm<E>) -> Self {
        let (grid, stride, size) = (conv.grid, conv.source_stride, conv.source_image.size);
        let min_tap = [0, 1].map(|i| conv.taps.iter().map(|tap| tap[i]).min().unwrap_or(0));
        let reach = [0, 1].map(|i| {
            let most = conv.taps.iter().map(|tap| tap[i]).max().unwrap_or(0);
            (most - min_tap[i]) as usize / stride[i]
        });
        // Columns of an image in every plane, and how many of the first and of the last are zero in every plane.
        let columns = grid[1] + reach[1];
        let inside = |column: usize| {
            (0..stride[1]).any(|phase| {
                let x = (column * stride[1] + phase) as isize + min_tap[1];
                x >= 0 && (x as usize) < size[1]
            })
        };
        let leading = (0..columns).take_while(|column| !inside(*column)).count();
        let trailing = (0..columns).rev().take_while(|column| !inside(*column)).count();
        // Only columns after the last result may be shared, so that every image keeps its own results.
        let shared = leading.min(trailing).min(reach[1]);
        let image_pitch = columns - shared;
        let group_len = conv.weights.depth.next_multiple_of(conv.isa.depth);
        let pixel_len = conv.weights.groups * group_len;
        let len = |images: usize, rows: usize| {
            stride[0] * stride[1] * (images * image_pitch + shared) * (rows + reach[0]) * pixel_len * size_of::<E>()
        };
        let area = grid[0] * grid[1];
        let most = conv.batch.div_ceil(threads()).max(1);
        let mut images = (BLOCK / area.max(1)).clamp(1, most);
        while images > 1 && len(images, grid[0]) > MAX_INPUT_TILE {
            images -= 1;
        }
        let mut band = if images > 1 { grid[0] } else { (BLOCK / grid[1]).clamp(1, grid[0]) };
        while band > 1 && len(images, band) > MAX_INPUT_TILE {
            band -= 1;
        }
        let (plane_columns, plane_rows) = (images * image_pitch + shared, band + reach[0]);
        let offset = |tap: &[isize; 2]| {
            let [y, x] = [0, 1].map(|i| (tap[i] - min_tap[i]) as usize);
            let plane = y % stride[0] * stride[1] + x % stride[1];
            ((plane * plane_rows + y / stride[0]) * plane_columns + x / stride[1]) * pixel_len
        };
        Self {
            min_tap,
            images_per_block: images,
            grid_rows: band,
            image_pitch,
            plane_columns,
            plane_rows,
            group_len,
            pixel_len,
            tap_offsets: conv.taps.iter().map(offset).collect(),
            slack: conv.isa.rows + reach[1],
        }
    }
}

impl<E: Operand> Igemm<'_, E> {
    /// Computes the result's pixels of the grid; `target` is the whole tensor.
    pub(super) fn run_amx(&self, kernels: &AmxKernels<E>, target: &mut [E]) {
        if self.batch * self.grid[0] * self.grid[1] == 0 {
            return;
        }
        let panels = panels(self.isa, self.weights.columns);
        let packed = self.weights.pack_amx(self.isa, kernels);
        let target = SharedSlice::new(target);
        let conv = |input| AmxConv { conv: self, kernels, packed: &packed, panels: &panels, input, target };
        let in_place = self.taps == [[0, 0]]
            && self.source_stride == [1, 1]
            && self.source_image.size == self.grid
            && self.weights.depth.is_multiple_of(self.isa.depth);
        if in_place {
            // All pixels are one row of one image.
            let pixels = self.batch * self.grid[0] * self.grid[1];
            let (group_len, pixel_len) = (self.weights.depth, self.source_image.channels);
            let conv = conv(InputTile { group_len, pixel_len, tap_offsets: vec![0], ..InputTile::default() });
            for_each(pixels.div_ceil(BLOCK), |index| conv.in_place(index * BLOCK, pixels));
            return;
        }
        let conv = conv(InputTile::new(self));
        let bands = self.grid[0].div_ceil(conv.input.grid_rows);
        for_each(self.batch.div_ceil(conv.input.images_per_block) * bands, |index| {
            let first = index / bands * conv.input.images_per_block;
            conv.run(first, conv.input.images_per_block.min(self.batch - first), index % bands * conv.input.grid_rows);
        });
    }

    /// Returns a pointer to the result of a pixel of the grid.
    fn result(&self, target: SharedSlice<E>, image: usize, y: usize, x: usize) -> *mut E {
        let to = &self.target_image;
        let [y, x] = [(0, y), (1, x)].map(|(i, at)| at * self.target_stride[i] + self.target_first[i]);
        target.ptr().wrapping_add(((image * to.size[0] + y) * to.size[1] + x) * to.channels)
    }
}

/// A convolution with packed weights, ready to be computed in blocks with AMX tile registers.
struct AmxConv<'a, E: 'static> {
    conv: &'a Igemm<'a, E>,
    kernels: &'a AmxKernels<E>,
    packed: &'a Packed<E>,
    panels: &'a [Panel<E>],
    input: InputTile,
    target: SharedSlice<E>,
}

impl<E: Operand> AmxConv<'_, E> {
    /// Computes the block of a 1x1 convolution from pixel `first`.
    fn in_place(&self, first: usize, pixels: usize) {
        let [height, width] = self.conv.grid;
        let out: Vec<*mut E> = (first..pixels.min(first + BLOCK))
            .map(|at| self.conv.result(self.target, at / (height * width), at / width % height, at % width))
            .collect();
        let rows = self.conv.isa.rows;
        let whole = out.len() / rows * rows;
        self.multiply(&self.conv.source[first * self.input.pixel_len..], &out[..whole]);
        if whole < out.len() {
            // A register tile reads 32 rows, which the last one does not have.
            let from = &self.conv.source[(first + whole) * self.input.pixel_len..];
            let mut last = Buffer::zeroed(rows * self.input.pixel_len);
            last[..from.len()].copy_from_slice(from);
            self.multiply(&last, &out[whole..]);
        }
    }

    /// Computes rows from `y` of `images` images from `first`.
    fn run(&self, first: usize, images: usize, y: usize) {
        let (conv, input) = (self.conv, &self.input);
        let [stride_y, stride_x] = conv.source_stride;
        let band = input.grid_rows.min(conv.grid[0] - y);
        let len = (stride_y * stride_x * input.plane_rows * input.plane_columns + input.slack) * input.pixel_len;
        let mut pixels = Buffer::new(len);
        for image in 0..images {
            self.copy(first + image, y, image * input.image_pitch, &mut pixels);
        }
        // Columns after the last image, and positions after the last row.
        let (lines, slack) = pixels.split_at_mut(len - input.slack * input.pixel_len);
        for line in lines.chunks_exact_mut(input.plane_columns * input.pixel_len) {
            line[images * input.image_pitch * input.pixel_len..].fill(E::zeroed());
        }
        slack.fill(E::zeroed());
        let mut out = vec![std::ptr::null_mut(); band * input.plane_columns];
        for (row, out) in out.chunks_exact_mut(input.plane_columns).enumerate() {
            for image in 0..images {
                for (x, out) in out[image * input.image_pitch..].iter_mut().take(conv.grid[1]).enumerate() {
                    *out = conv.result(self.target, first + image, y + row, x);
                }
            }
        }
        self.multiply(&pixels, &out);
    }

    /// Copies the source pixels of rows from `y` of an image to the input tile's columns from `column`, with zeros around them.
    fn copy(&self, image: usize, y: usize, column: usize, pixels: &mut [E]) {
        let (conv, input) = (self.conv, &self.input);
        let (size, channels, [stride_y, stride_x]) =
            (conv.source_image.size, conv.source_image.channels, conv.source_stride);
        let (depth, groups) = (conv.weights.depth, conv.weights.groups);
        for row in 0..input.plane_rows * stride_y {
            let source_y = (y * stride_y + row) as isize + input.min_tap[0];
            let inside = source_y >= 0 && (source_y as usize) < size[0];
            for phase in 0..stride_x {
                let plane = row % stride_y * stride_x + phase;
                let to = ((plane * input.plane_rows + row / stride_y) * input.plane_columns + column) * input.pixel_len;
                let to = &mut pixels[to..][..input.image_pitch * input.pixel_len];
                // The source column of the plane's column 0.
                let start = phase as isize + input.min_tap[1];
                let first_after =
                    |x: isize| (x - start).max(0).unsigned_abs().div_ceil(stride_x).min(input.image_pitch);
                let (first, last) = (first_after(0), first_after(size[1] as isize));
                if !inside || first >= last {
                    to.fill(E::zeroed());
                    continue;
                }
                let (before, to) = to.split_at_mut(first * input.pixel_len);
                let (to, after) = to.split_at_mut((last - first) * input.pixel_len);
                before.fill(E::zeroed());
                after.fill(E::zeroed());
                let line = (image * size[0] + source_y as usize) * size[1];
                let from = (line + ((first * stride_x) as isize + start) as usize) * channels;
                if stride_x == 1 && input.pixel_len == channels {
                    to.copy_from_slice(&conv.source[from..from + to.len()]);
                    continue;
                }
                for (at, to) in to.chunks_exact_mut(input.pixel_len).enumerate() {
                    let from = &conv.source[from + at * stride_x * channels..][..channels];
                    for group in 0..groups {
                        let (values, zeros) = to[group * input.group_len..][..input.group_len].split_at_mut(depth);
                        values.copy_from_slice(&from[group * depth..][..depth]);
                        zeros.fill(E::zeroed());
                    }
                }
            }
        }
    }

    /// Computes the results of adjacent positions; `out` is null where a position has none.
    fn multiply(&self, pixels: &[E], out: &[*mut E]) {
        let (conv, input, padded) = (self.conv, &self.input, padded(self.panels));
        let columns = conv.weights.columns;
        (self.kernels.begin)();
        for group in 0..conv.weights.groups {
            for panel in self.panels {
                let packed = &self.packed.values[(group * padded + panel.column) * self.packed.width..];
                let bias = conv.bias.map(|bias| &bias[group * padded + panel.column..]);
                let call = AmxTileArgs {
                    rows: pixels[group * input.group_len..].as_ptr(),
                    row_len: input.pixel_len,
                    taps: &input.tap_offsets,
                    depth: input.group_len,
                    columns: packed.as_ptr(),
                    blocks: panel.isa.cols / 16,
                    out,
                    column: group * columns + panel.column,
                    cols: panel.cols,
                    bias: bias.map_or(std::ptr::null(), <[f32]>::as_ptr),
                    relu: conv.relu,
                };
                // SAFETY: the input tile, or the source, has the channels of whole register tiles at every tap. The packed panel
                // has `depth` elements per tap. Pointers of results point to the group's columns, and only this block writes them.
                unsafe { (self.kernels.tiles)(&call) };
            }
        }
        (self.kernels.end)();
    }
}
