//! 3x3 convolutions of stride 1 by Winograd's minimal filtering, F(2x2, 3x3): Lavin & Gray, "Fast Algorithms for
//! Convolutional Neural Networks", 2015, <https://arxiv.org/abs/1509.09308>.
//!
//! An output tile of 2x2 pixels takes 16 products per pair of channels instead of 36. Input tiles of 4x4 pixels are
//! transformed (by additions only), each of the 16 positions is a matrix product `[tiles, in] · [in, out]` with the
//! transformed weights, and the products are transformed back. The larger F(4x4, 3x3) would save more products but
//! loses a decimal digit; F(2x2, 3x3) is as accurate as direct summation.
//!
//! A task computes all three steps for a block of tiles, so that the transformed tiles stay in cache. The data gradient
//! is the same computation with the filters rotated by 180 degrees and their channels exchanged.

use super::allocator::Buffer;
use super::kernel::{Isa, Tile};
use super::parallel::{SharedSlice, for_each, threads};
use super::shape::ConvShape;

/// Returns true if [`forward`] and the gradients support the convolution.
pub(crate) fn fits(shape: &ConvShape) -> bool {
    shape.kernel == [3, 3]
        && shape.stride == [1, 1]
        && shape.dilation == [1, 1]
        && shape.groups == 1
        && shape.padding.iter().all(|&p| p <= 2)
        && shape.output.iter().all(|&side| side >= 2)
        && shape.channels.iter().all(|c| c.is_multiple_of(16))
}

/// Computes `y` `[batch, oh, ow, out]`.
pub(crate) fn forward(isa: &'static Isa, shape: &ConvShape, x: &[f32], weight: &[f32], y: &mut [f32]) {
    let weights = transform_weights(isa, weight, shape.channels, false);
    let grid = Grid { batch: shape.batch, source: shape.input, target: shape.output, padding: shape.padding };
    Pass { isa, grid, channels: shape.channels, source: x, weights: &weights }.run(y);
}

/// Computes `dx` `[batch, h, w, in]`.
pub(crate) fn data_grad(isa: &'static Isa, shape: &ConvShape, weight: &[f32], dy: &[f32], dx: &mut [f32]) {
    let weights = transform_weights(isa, weight, shape.channels, true);
    let padding = shape.padding.map(|p| 2 - p);
    let grid = Grid { batch: shape.batch, source: shape.output, target: shape.input, padding };
    let [input, output] = shape.channels;
    Pass { isa, grid, channels: [output, input], source: dy, weights: &weights }.run(dx);
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

    /// Returns the image and the coordinates of a tile.
    fn coordinates(&self, tile: usize) -> (usize, [usize; 2]) {
        let [rows, columns] = self.tiles();
        (tile / (rows * columns), [tile / columns % rows, tile % columns])
    }

    /// Returns the source pixels of a tile, row by row; `None` outside the image.
    pub(super) fn source(&self, tile: usize) -> [Option<usize>; 16] {
        let (n, at) = self.coordinates(tile);
        std::array::from_fn(|i| {
            let y = (2 * at[0] + i / 4).wrapping_sub(self.padding[0]);
            let x = (2 * at[1] + i % 4).wrapping_sub(self.padding[1]);
            (y < self.source[0] && x < self.source[1]).then(|| (n * self.source[0] + y) * self.source[1] + x)
        })
    }

    /// Returns the target pixels of a tile, row by row; `None` outside the image.
    pub(super) fn target(&self, tile: usize) -> [Option<usize>; 4] {
        let (n, at) = self.coordinates(tile);
        std::array::from_fn(|i| {
            let (y, x) = (2 * at[0] + i / 2, 2 * at[1] + i % 2);
            (y < self.target[0] && x < self.target[1]).then(|| (n * self.target[0] + y) * self.target[1] + x)
        })
    }
}

/// Returns the number of tiles per block: with few channels, as many as stay in L2; with many channels, enough to
/// amortise reading the weights.
pub(super) fn block_len(channels: [usize; 2]) -> usize {
    if channels[0] + channels[1] <= 128 { 48 } else { 96 }
}

/// One forward pass or data gradient.
struct Pass<'a> {
    isa: &'static Isa,
    grid: Grid,
    /// Channels of source and target.
    channels: [usize; 2],
    source: &'a [f32],
    /// `[16][panel][source channel][Isa::cols]`.
    weights: &'a [f32],
}

impl Pass<'_> {
    fn run(&self, target: &mut [f32]) {
        let tiles = self.grid.len();
        let fair = tiles.div_ceil(threads()).next_multiple_of(self.isa.rows);
        let block = block_len(self.channels).min(fair);
        let zeros = Buffer::zeroed(self.channels[0]);
        let target = SharedSlice::new(target);
        for_each(tiles.div_ceil(block), |index| {
            let first = index * block;
            self.block(first, block.min(tiles - first), &zeros, target);
        });
    }

    fn block(&self, first: usize, count: usize, zeros: &[f32], target: SharedSlice<f32>) {
        let (isa, [depth, columns]) = (self.isa, self.channels);
        let mut input = Buffer::new(16 * count * depth);
        let mut products = Buffer::new(16 * count * columns);
        for tile in 0..count {
            let pixels = self.grid.source(first + tile).map(|pixel| match pixel {
                Some(pixel) => self.source[pixel * depth..(pixel + 1) * depth].as_ptr(),
                None => zeros.as_ptr(),
            });
            let to = input[tile * depth..].as_mut_ptr();
            // SAFETY: each pixel has `depth` floats, and position ξ of the tile is at offset ξ · count · depth.
            unsafe { (isa.winograd.input)(&pixels, depth, to, count * depth) };
        }

        let padded = count.next_multiple_of(isa.rows);
        let (mut a, mut out) = (Vec::with_capacity(padded), Vec::with_capacity(padded));
        for (xi, weights) in self.weights.chunks_exact(self.weights.len() / 16).enumerate() {
            a.clear();
            out.clear();
            for row in 0..padded {
                // Rows after the last repeat the last row and are not stored.
                let row = xi * count + row.min(count - 1);
                a.push(input[row * depth..].as_ptr());
                out.push(products[row * columns..].as_mut_ptr());
            }
            for (panel, weights) in weights.chunks_exact(depth * isa.cols).enumerate() {
                let column = panel * isa.cols;
                for row in (0..count).step_by(isa.rows) {
                    let call = Tile {
                        a: a[row..].as_ptr(),
                        offset: 0,
                        taps: 1,
                        depth,
                        b: weights.as_ptr(),
                        out: out[row..].as_ptr(),
                        column,
                        rows: isa.rows.min(count - row),
                        cols: isa.cols.min(columns - column),
                        bias: std::ptr::null(),
                        relu: false,
                    };
                    // SAFETY: rows have `depth` and `columns` floats, and the pointers cover whole register tiles.
                    unsafe { isa.tile(&call) };
                }
            }
        }

        for tile in 0..count {
            let pixels = self.grid.target(first + tile).map(|pixel| match pixel {
                // SAFETY: a pixel of the target, which no other tile writes.
                Some(pixel) => unsafe { target.ptr().add(pixel * columns) },
                None => std::ptr::null_mut(),
            });
            let from = products[tile * columns..].as_ptr();
            // SAFETY: position ξ of the tile is at offset ξ · count · columns; pixels have `columns` floats.
            unsafe { (isa.winograd.output)(from, count * columns, columns, &pixels) };
        }
    }
}

/// Transforms each filter to `G g Gᵀ`, packed as `[16][panel][depth][Isa::cols]`; rotated filters for the data
/// gradient.
#[expect(clippy::needless_range_loop, reason = "a lane is an index of all 16 positions")]
fn transform_weights(isa: &Isa, weight: &[f32], [input, output]: [usize; 2], rotated: bool) -> Buffer {
    let (depth, columns) = if rotated { (output, input) } else { (input, output) };
    let panels = columns.div_ceil(isa.cols);
    let panel_len = depth * isa.cols;
    let mut packed = Buffer::new(16 * panels * panel_len);
    let target = SharedSlice::new(&mut packed);
    // Eight columns per task.
    for_each(panels * isa.cols / 8, |block| {
        let from = block * 8;
        for d in 0..depth {
            let mut tile = [[0.0_f32; 8]; 16];
            for lane in 0..8.min(columns.saturating_sub(from)) {
                let (co, ci) = if rotated { (d, from + lane) } else { (from + lane, d) };
                let g: &[f32] = &weight[(co * input + ci) * 9..][..9];
                let g: [f32; 9] = std::array::from_fn(|i| if rotated { g[8 - i] } else { g[i] });
                let mut half = [[0.0_f32; 3]; 4];
                for j in 0..3 {
                    let (sum, middle) = (0.5 * (g[j] + g[6 + j]), 0.5 * g[3 + j]);
                    (half[0][j], half[1][j], half[2][j], half[3][j]) = (g[j], sum + middle, sum - middle, g[6 + j]);
                }
                for (i, h) in half.iter().enumerate() {
                    let (sum, middle) = (0.5 * (h[0] + h[2]), 0.5 * h[1]);
                    tile[4 * i][lane] = h[0];
                    tile[4 * i + 1][lane] = sum + middle;
                    tile[4 * i + 2][lane] = sum - middle;
                    tile[4 * i + 3][lane] = h[2];
                }
            }
            for (xi, values) in tile.iter().enumerate() {
                let at = (xi * panels + from / isa.cols) * panel_len + d * isa.cols + from % isa.cols;
                // SAFETY: each task has its own columns.
                unsafe { target.slice(at..at + 8) }.copy_from_slice(values);
            }
        }
    });
    packed
}
