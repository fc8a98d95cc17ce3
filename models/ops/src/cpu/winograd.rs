//! 3x3 convolutions of stride 1 by Winograd's minimal filtering, F(2x2, 3x3): Lavin & Gray, "Fast Algorithms for
//! Convolutional Neural Networks", 2015, <https://arxiv.org/abs/1509.09308>.
//!
//! An output tile of 2x2 pixels takes 16 products per pair of channels instead of 36. Input tiles of 4x4 pixels are
//! transformed (by additions only), each of the 16 positions is a matrix product `[tiles, in] · [in, out]` with the
//! transformed weights, and the products are transformed back. The larger F(4x4, 3x3) would save more products but
//! loses a decimal digit; in f32, F(2x2, 3x3) is as accurate as direct sums.
//!
//! With AVX512-BF16, transformed tiles and filters of bf16 are rounded once more than in a direct convolution. Sets that multiply
//! bf16 in f32 keep them in f32 ([`Winograd::Widened`]). Root mean square errors of bf16 against f64, relative to the values, of
//! normal data (after ReLU: a tenth less), for 64 to 512 channels:
//!
//! | | output, data gradient | weight gradient |
//! |---|---|---|
//! | this algorithm, tiles in bf16 | 4.3e-3 to 5.0e-3 | 3.7e-3 to 4.7e-3 |
//! | this algorithm, tiles in f32 | 1.7e-3 | 1e-7 |
//! | direct sums | 2.3e-3 | 1e-7 |
//! | PyTorch | 2.3e-3 | 1.7e-3 |
//! | rounding the exact result to bf16 | 1.6e-3 | 1.7e-3 |
//!
//! The errors of this algorithm are less than one unit in bf16's last place (2⁻⁷ of a value). In a weight gradient, the tiles
//! have independent errors. In f32 the error is 1e-6.
//!
//! Speed for a batch of 128, on two cores (Zen 4 with AVX512-BF16 at 3.7 GHz), in GFLOP/s: the operations of direct sums divided
//! by the time, for forward pass, data gradient and weight gradient. Direct sums can reach 236 in f32 and 472 in bf16.
//!
//! | channels, image | Winograd f32 | direct bf16 | Winograd bf16 |
//! |---|---|---|---|
//! | 64 -> 64, 32x32 | 358, 326, 339 | 412, 416, 363 | 591, 666, 601 |
//! | 64 -> 128, 16x16 | 372, 357, 355 | 428, 422, 381 | 668, 660, 613 |
//! | 128 -> 128, 16x16 | 420, 417, 386 | 440, 435, 404 | 773, 798, 707 |
//! | 128 -> 256, 8x8 | 420, 417, 402 | 426, 401, 391 | 752, 754, 751 |
//! | 256 -> 256, 8x8 | 428, 430, 367 | 424, 402, 418 | 805, 797, 815 |
//! | 256 -> 512, 4x4 | 409, 402, 297 | 378, 314, 303 | 787, 791, 685 |
//! | 512 -> 512, 4x4 | 409, 415, 284 | 378, 314, 280 | 818, 801, 648 |
//! | 512 -> 512, 2x2 | 316, 338, 170 | 252, 171, 202 | 613, 620, 522 |
//!
//! A task computes all three steps for a block of tiles, so that the transformed tiles stay in cache. The products of
//! one panel of columns at a time are transformed back, before they leave the cache. The data gradient is the same
//! computation with the filters rotated by 180 degrees and their channels exchanged.
//!
//! Layouts: transformed tiles `[16][tile][channel]`, filters `[panel][16][depth / STEP][column][STEP]`. A block has at most 48 or
//! 96 tiles. Checked by `conv_tests`.

use super::allocator::Buffer;
use super::kernel::{MicroKernels, Operand, TileArgs};
use super::parallel::{SharedSlice, chunk, for_each, threads};
use super::winograd_tile::{Filters, Transforms, Winograd};
use crate::shape::ConvShape;

/// Returns true if [`forward`] and the gradients support the convolution.
pub(crate) fn fits<E: Operand>(isa: &MicroKernels<E>, shape: &ConvShape) -> bool {
    let step = if isa.widened().is_some() { f32::STEP } else { E::STEP };
    shape.kernel == [3, 3]
        && shape.stride == [1, 1]
        && shape.dilation == [1, 1]
        && shape.groups == 1
        && shape.padding.iter().all(|&p| p <= 2)
        && shape.output.iter().all(|&side| side >= 2)
        && shape.channels.iter().all(|c| c.is_multiple_of(16 * step))
}

/// Computes `y` `[batch, oh, ow, out]`. Bias and ReLU are optional.
pub(crate) fn forward<E: Operand>(
    isa: &'static MicroKernels<E>,
    shape: &ConvShape,
    x: &[E],
    weight: &[f32],
    bias: Option<&[f32]>,
    relu: bool,
    y: &mut [E],
) {
    match &isa.winograd {
        Winograd::Same(transforms) => Kernels { isa, transforms }.forward(shape, x, weight, bias, relu, y),
        Winograd::Widened(transforms, isa) => Kernels { isa, transforms }.forward(shape, x, weight, bias, relu, y),
    }
}

/// Computes `dx` `[batch, h, w, in]`.
pub(crate) fn data_grad<E: Operand>(
    isa: &'static MicroKernels<E>,
    shape: &ConvShape,
    weight: &[f32],
    dy: &[E],
    dx: &mut [E],
) {
    match &isa.winograd {
        Winograd::Same(transforms) => Kernels { isa, transforms }.data_grad(shape, weight, dy, dx),
        Winograd::Widened(transforms, isa) => Kernels { isa, transforms }.data_grad(shape, weight, dy, dx),
    }
}

/// The kernels for images of `E` and transformed tiles of `T`.
#[derive(Clone, Copy)]
pub(super) struct Kernels<E: 'static, T: 'static> {
    /// Multiplies transformed tiles.
    pub(super) isa: &'static MicroKernels<T>,
    pub(super) transforms: &'static Transforms<E, T>,
}

impl<E: Operand, T: Operand> Kernels<E, T> {
    fn forward(self, shape: &ConvShape, x: &[E], weight: &[f32], bias: Option<&[f32]>, relu: bool, y: &mut [E]) {
        let weights = self.transform_weights(weight, shape.channels, false);
        let grid = Grid { batch: shape.batch, source: shape.input, target: shape.output, padding: shape.padding };
        WinogradConv { kernels: self, grid, channels: shape.channels, source: x, weights: &weights, bias, relu }.run(y);
    }

    fn data_grad(self, shape: &ConvShape, weight: &[f32], dy: &[E], dx: &mut [E]) {
        let weights = self.transform_weights(weight, shape.channels, true);
        let padding = shape.padding.map(|p| 2 - p);
        let grid = Grid { batch: shape.batch, source: shape.output, target: shape.input, padding };
        let [input, output] = shape.channels;
        WinogradConv {
            kernels: self,
            grid,
            channels: [output, input],
            source: dy,
            weights: &weights,
            bias: None,
            relu: false,
        }
        .run(dx);
    }

    /// Transforms each filter to `G g Gᵀ`, packed as `[panel][16][depth / STEP][MicroKernels::cols][STEP]`; rotated filters for the
    /// data gradient.
    fn transform_weights(self, weight: &[f32], [input, output]: [usize; 2], rotated: bool) -> Buffer<T> {
        let Self { isa, transforms } = self;
        let (depth, columns, stride) =
            if rotated { (output, input, [9, 9 * input]) } else { (input, output, [9 * input, 9]) };
        let (filters, lanes) = (Filters { stride, rotated }, transforms.lanes);
        let panel_len = depth * isa.cols;
        let mut packed = Buffer::<T>::new(16 * columns.div_ceil(isa.cols) * panel_len);
        let target = SharedSlice::new(&mut packed);
        for_each(columns.div_ceil(lanes), |block| {
            let column = block * lanes;
            for d in (0..depth).step_by(T::STEP) {
                let from = weight[column * stride[0] + d * stride[1]..].as_ptr();
                let at = column / isa.cols * 16 * panel_len + d * isa.cols + column % isa.cols * T::STEP;
                // SAFETY: `lanes` divides the columns and the panel's width, and each task has its own columns.
                unsafe { (transforms.filters)(from, &filters, target.ptr().add(at), panel_len) };
            }
        });
        packed
    }
}

/// Tiles of 2x2 target pixels, with the 4x4 source pixels of each.
pub(super) struct Grid {
    pub(super) batch: usize,
    pub(super) source: [usize; 2],
    pub(super) target: [usize; 2],
    pub(super) padding: [usize; 2],
}

impl Grid {
    fn tiles(&self) -> [usize; 2] {
        self.target.map(|side| side.div_ceil(2))
    }

    pub(super) fn len(&self) -> usize {
        self.batch * self.tiles()[0] * self.tiles()[1]
    }

    /// Returns pointers to the source pixels of a tile, row by row; to `zeros` outside the image.
    pub(super) fn source<E>(&self, tile: usize, image: &[E], channels: usize, zeros: &[E]) -> [*const E; 16] {
        pointers(self.pixels::<4>(tile, self.source, self.padding).as_flattened(), image, channels, zeros)
    }

    /// Returns pointers to the target pixels of a tile in the target's gradient, row by row; to `zeros` outside the image.
    pub(super) fn gradient<E>(&self, tile: usize, image: &[E], channels: usize, zeros: &[E]) -> [*const E; 4] {
        pointers(&self.target(tile), image, channels, zeros)
    }

    /// Returns the target pixels of a tile, row by row; [`OUTSIDE`] outside the image.
    fn target(&self, tile: usize) -> [usize; 4] {
        let [top, bottom] = self.pixels::<2>(tile, self.target, [0, 0]);
        [top[0], top[1], bottom[0], bottom[1]]
    }

    fn pixels<const N: usize>(&self, tile: usize, size: [usize; 2], padding: [usize; 2]) -> [[usize; N]; N] {
        let [rows, columns] = self.tiles();
        let (n, row, column) = (tile / (rows * columns), tile / columns % rows, tile % columns);
        let first = [(2 * row).wrapping_sub(padding[0]), (2 * column).wrapping_sub(padding[1])];
        let mut pixels = [[OUTSIDE; N]; N];
        for (i, pixels) in pixels.iter_mut().enumerate() {
            let y = first[0].wrapping_add(i);
            if y < size[0] {
                let start = (n * size[0] + y) * size[1];
                for (j, pixel) in pixels.iter_mut().enumerate() {
                    let x = first[1].wrapping_add(j);
                    if x < size[1] {
                        *pixel = start + x;
                    }
                }
            }
        }
        pixels
    }
}

/// Returns pointers to an image's pixels; to `zeros` outside the image.
fn pointers<E, const N: usize>(pixels: &[usize], image: &[E], channels: usize, zeros: &[E]) -> [*const E; N] {
    let mut pointers = [zeros.as_ptr(); N];
    for (pointer, &pixel) in pointers.iter_mut().zip(pixels) {
        if pixel != OUTSIDE {
            *pointer = image[pixel * channels..(pixel + 1) * channels].as_ptr();
        }
    }
    pointers
}

/// Index of a pixel outside the image.
const OUTSIDE: usize = usize::MAX;

/// Returns the number of tiles per block. The transformed tiles of a block stay in L2, and with many channels a block is
/// large enough to amortise reading the weights.
pub(super) fn block_len<T: Operand>(channels: [usize; 2]) -> usize {
    if channels[0] + channels[1] <= 128 || T::STEP > 1 { 48 } else { 96 }
}

/// A forward pass, or a data gradient, which is a convolution too.
struct WinogradConv<'a, E: 'static, T: 'static> {
    kernels: Kernels<E, T>,
    grid: Grid,
    /// Channels of source and target.
    channels: [usize; 2],
    source: &'a [E],
    /// `[panel][16][source channel / STEP][MicroKernels::cols][STEP]`.
    weights: &'a [T],
    bias: Option<&'a [f32]>,
    relu: bool,
}

impl<E: Operand, T: Operand> WinogradConv<'_, E, T> {
    fn run(&self, target: &mut [E]) {
        let tiles = self.grid.len();
        // Threads have equal numbers of blocks of nearly equal lengths.
        let blocks = tiles.div_ceil(block_len::<T>(self.channels)).next_multiple_of(threads());
        let zeros = Buffer::zeroed(self.channels[0]);
        let target = SharedSlice::new(target);
        for_each(blocks, |index| {
            let range = chunk(tiles, self.kernels.isa.rows, blocks, index);
            if !range.is_empty() {
                self.block(range.start, range.len(), &zeros, target);
            }
        });
    }

    fn block(&self, first: usize, count: usize, zeros: &[E], target: SharedSlice<E>) {
        let (Kernels { isa, transforms }, [depth, columns]) = (self.kernels, self.channels);
        let mut input = Buffer::<T>::new(16 * count * depth);
        for tile in 0..count {
            let pixels = self.grid.source(first + tile, self.source, depth, zeros);
            let to = input[tile * depth..].as_mut_ptr();
            // SAFETY: each pixel has `depth` elements, and position ξ of the tile is at offset ξ · count · depth.
            unsafe { (transforms.input)(&pixels, depth, to, count * depth) };
        }

        let mut products = Buffer::<f32>::new(16 * count * isa.cols);
        // Rows after the last repeat the last row and are not stored.
        let padded = count.next_multiple_of(isa.rows);
        let (mut a, mut out) = (Vec::with_capacity(16 * padded), Vec::with_capacity(16 * padded));
        for xi in 0..16 {
            let (from, to) = (input[xi * count * depth..].as_ptr(), products[xi * count * isa.cols..].as_mut_ptr());
            a.extend((0..count).map(|row| from.wrapping_add(row * depth)));
            a.resize((xi + 1) * padded, from.wrapping_add((count - 1) * depth));
            out.extend((0..count).map(|row| to.wrapping_add(row * isa.cols)));
            out.resize((xi + 1) * padded, to.wrapping_add((count - 1) * isa.cols));
        }
        let pixels: Vec<_> = (0..count).map(|tile| self.grid.target(first + tile)).collect();

        for (panel, weights) in self.weights.chunks_exact(16 * depth * isa.cols).enumerate() {
            let column = panel * isa.cols;
            let cols = isa.cols.min(columns - column);
            for (xi, weights) in weights.chunks_exact(depth * isa.cols).enumerate() {
                for row in (0..count).step_by(isa.rows) {
                    let call = TileArgs {
                        a: a[xi * padded + row..].as_ptr(),
                        offset: 0,
                        taps: 1,
                        depth,
                        b: weights.as_ptr(),
                        out: out[xi * padded + row..].as_ptr(),
                        column: 0,
                        rows: isa.rows.min(count - row),
                        cols: isa.cols,
                        bias: std::ptr::null(),
                        relu: false,
                    };
                    // SAFETY: rows have `depth` and `MicroKernels::cols` elements, and the pointers cover whole register tiles.
                    unsafe { isa.tile(&call) };
                }
            }
            let bias = self.bias.map_or(std::ptr::null(), |bias| bias[column..].as_ptr());
            for (tile, pixels) in pixels.iter().enumerate() {
                let pixels = pixels.map(|pixel| match pixel {
                    OUTSIDE => std::ptr::null_mut(),
                    // SAFETY: a pixel of the target, which no other tile writes.
                    pixel => unsafe { target.ptr().add(pixel * columns + column) },
                });
                let from = products[tile * isa.cols..].as_ptr();
                // SAFETY: position ξ of the tile is at offset ξ · count · MicroKernels::cols; pixels have `cols` elements left.
                unsafe { (transforms.output)(from, count * isa.cols, cols, &pixels, bias, self.relu) };
            }
        }
    }
}
