//! Weight gradient of the convolutions of [`super::winograd`], by the transpose of its algorithm. Tiles of the input
//! are transformed as in the forward pass, and tiles of the output's gradient by the transpose of the output transform.
//! Each of the 16 positions sums products over all tiles, and `Gᵀ · G` transforms the sums back to 3x3.
//!
//! With few channels, the tiles are divided into as many parts as there are threads. Each part has its own sums, which
//! are added in order. The parts, and therefore the last bits of the result, depend on the number of threads. With many
//! channels, the sums of a part would not stay in L2, and all threads would read and write them for every block of tiles.
//! All threads then transform a larger block together, and a task adds the block's products to some of the sums, which
//! exist once.
//!
//! Checked by `conv_tests`.

use std::ops::Range;

use super::allocator::Buffer;
use super::kernel::{MicroKernels, Operand, OuterArgs};
use super::parallel::{SharedSlice, chunk, for_each, threads};
use super::weight_grad::MAX_SUMS;
use super::winograd::{Grid, Kernels, block_len};
use super::winograd_tile::{StepLayout, Winograd};
use crate::shape::ConvShape;

/// Limit in floats of the sums of a part: 1 MiB, the size of an L2 cache.
const PART_SUMS: usize = 256 << 10;
/// Number of steps of tiles whose products are added to the sums at once.
const STEPS: usize = 128;
/// Bytes of transformed tiles per thread in a shared block.
const SHARED: usize = 2 << 20;

/// Computes `[out, in, 3, 3]` from channels-last `x` and `dy`.
pub(crate) fn weight_grad<E: Operand>(isa: &'static MicroKernels<E>, shape: &ConvShape, x: &[E], dy: &[E]) -> Buffer {
    match &isa.winograd {
        Winograd::Same(transforms) => sum(Kernels { isa, transforms }, shape, x, dy),
        Winograd::Widened(transforms, isa) => sum(Kernels { isa, transforms }, shape, x, dy),
    }
}

fn sum<E: Operand, T: Operand>(kernels: Kernels<E, T>, shape: &ConvShape, x: &[E], dy: &[E]) -> Buffer {
    let isa = kernels.isa;
    let channels = shape.channels;
    let panels = channels.map(|c| c.div_ceil(isa.cols));
    let grid = Grid { batch: shape.batch, source: shape.input, target: shape.output, padding: shape.padding };
    let zeros = Buffer::zeroed(channels[0].max(channels[1]));
    let grad = WinogradWeightGrad { kernels, grid, channels, panels, x, dy, zeros: &zeros };
    if grad.grid.len() == 0 {
        return Buffer::zeroed(shape.weight_len());
    }
    let sums_len = 16 * panels[0] * panels[1] * isa.cols * isa.cols;
    if T::STEP == 1 || sums_len <= PART_SUMS {
        let tiles = grad.grid.len();
        let block = block_len::<T>(channels);
        let parts = threads().min(tiles.div_ceil(block)).min(MAX_SUMS / sums_len).max(1);
        let mut sums = Buffer::new(parts * sums_len);
        let shared = SharedSlice::new(&mut sums);
        for_each(parts, |index| {
            // SAFETY: each task has its own part.
            let sums = unsafe { shared.slice(index * sums_len..(index + 1) * sums_len) };
            grad.sum_part(chunk(tiles, block, parts, index), block, sums);
        });
        transform_back(kernels, channels, panels, &sums, parts)
    } else {
        let mut sums = Buffer::new(sums_len);
        grad.sum_shared(&mut sums);
        transform_back(kernels, channels, panels, &sums, 1)
    }
}

/// A weight gradient: for each of the 16 positions of a transformed tile, a matrix product whose summed index is the tile.
struct WinogradWeightGrad<'a, E: 'static, T: 'static> {
    kernels: Kernels<E, T>,
    grid: Grid,
    /// Channels of `x` and `dy`, and their packing panels of `MicroKernels::cols` channels.
    channels: [usize; 2],
    panels: [usize; 2],
    x: &'a [E],
    dy: &'a [E],
    zeros: &'a [E],
}

/// Adjacent Winograd tiles that are transformed and multiplied together.
#[derive(Clone, Copy)]
struct TileBlock {
    first: usize,
    count: usize,
    /// True if nothing was added to the sums yet.
    fresh: bool,
}

impl<E: Operand, T: Operand> WinogradWeightGrad<'_, E, T> {
    /// Returns buffers for the transformed tiles of `x` and `dy`, `[16][panel][step][MicroKernels::cols][STEP]`.
    fn buffers(&self, tiles: usize) -> [Buffer<T>; 2] {
        std::array::from_fn(|i| {
            let columns = self.panels[i] * self.kernels.isa.cols;
            let mut buffer = Buffer::new(16 * columns * tiles.next_multiple_of(T::STEP));
            if columns > self.channels[i] {
                // The columns after the last channel are multiplied too, and not used. Zeros, because denormal numbers are slow.
                buffer.fill(T::zeroed());
            }
            buffer
        })
    }

    /// Sets `sums` to the products of `tiles`, one block after the other.
    fn sum_part(&self, tiles: Range<usize>, block_len: usize, sums: &mut [f32]) {
        let mut buffers = self.buffers(block_len);
        let sums = SharedSlice::new(sums);
        for first in tiles.clone().step_by(block_len) {
            let fresh = first == tiles.start;
            let block = TileBlock { first, count: block_len.min(tiles.end - first), fresh };
            self.transform(block, 0..block.count.div_ceil(T::STEP), buffers.each_mut().map(|to| SharedSlice::new(to)));
            for task in 0..16 * self.panels[0] {
                self.multiply(block, &buffers, task / self.panels[0], task % self.panels[0], sums);
            }
        }
    }

    /// Sets `sums` to the products of all tiles. All threads work on the same block.
    fn sum_shared(&self, sums: &mut [f32]) {
        const TASK: usize = 8;
        let tiles = self.grid.len();
        let tile_bytes = 16 * (self.panels[0] + self.panels[1]) * self.kernels.isa.cols * size_of::<T>();
        // A multiple of the number of tiles that are added to the sums at once, so that the length does not change the order of
        // sums.
        let unit = STEPS * T::STEP;
        let block_len = (threads() * SHARED / tile_bytes).max(1).next_multiple_of(unit).min(tiles);
        let mut buffers = self.buffers(block_len);
        let sums = SharedSlice::new(sums);
        for first in (0..tiles).step_by(block_len) {
            let block = TileBlock { first, count: block_len.min(tiles - first), fresh: first == 0 };
            let steps = block.count.div_ceil(T::STEP);
            let to = buffers.each_mut().map(|to| SharedSlice::new(to));
            for_each(steps.div_ceil(TASK), |task| {
                self.transform(block, task * TASK..steps.min((task + 1) * TASK), to);
            });
            for_each(16 * self.panels[0], |task| {
                self.multiply(block, &buffers, task / self.panels[0], task % self.panels[0], sums);
            });
        }
    }

    /// Transforms some steps of a block's tiles.
    fn transform(&self, block: TileBlock, steps: Range<usize>, to: [SharedSlice<T>; 2]) {
        let Kernels { isa, transforms } = self.kernels;
        let cols = isa.cols;
        let [input, grads] = self.panels.map(|panels| {
            let panel = block.count.div_ceil(T::STEP) * cols * T::STEP;
            StepLayout { stride: panels * panel, cols, panel }
        });
        for step in steps {
            // Tiles after the last are zeros.
            let (mut source, mut target) = ([[self.zeros.as_ptr(); 16]; 2], [[self.zeros.as_ptr(); 4]; 2]);
            for (i, tile) in (step * T::STEP..block.count.min((step + 1) * T::STEP)).enumerate() {
                source[i] = self.grid.source(block.first + tile, self.x, self.channels[0], self.zeros);
                target[i] = self.grid.gradient(block.first + tile, self.dy, self.channels[1], self.zeros);
            }
            let at = step * cols * T::STEP;
            // SAFETY: each pixel has as many elements as there are channels. The layouts are inside the buffers, and only
            // this call writes this step.
            unsafe {
                (transforms.input_steps)(&source, self.channels[0], to[0].ptr().add(at), &input);
                (transforms.grad_steps)(&target, self.channels[1], to[1].ptr().add(at), &grads);
            }
        }
    }

    /// Adds a block's products of position `xi` and one panel of input channels to
    /// `sums[input panel][output panel][ξ][MicroKernels::cols][MicroKernels::cols]`.
    fn multiply(
        &self,
        block: TileBlock,
        [input, grads]: &[Buffer<T>; 2],
        xi: usize,
        panel: usize,
        sums: SharedSlice<f32>,
    ) {
        let isa = self.kernels.isa;
        let (cols, steps) = (isa.cols, block.count.div_ceil(T::STEP));
        let panel_len = steps * cols * T::STEP;
        let rows = cols.min(self.channels[0] - panel * cols);
        let input = &input[(xi * self.panels[0] + panel) * panel_len..][..panel_len];
        let grads = &grads[xi * self.panels[1] * panel_len..][..self.panels[1] * panel_len];
        let mut pointers = [std::ptr::null(); STEPS];
        for first in (0..steps).step_by(STEPS) {
            let depth = STEPS.min(steps - first);
            for (pointer, from) in pointers.iter_mut().zip(input.chunks_exact(cols * T::STEP).skip(first)) {
                *pointer = from.as_ptr();
            }
            for (column, grads) in grads.chunks_exact(panel_len).enumerate() {
                let at = ((panel * self.panels[1] + column) * 16 + xi) * cols * cols;
                if block.fresh && first == 0 {
                    // SAFETY: inside the sums; only this call adds to the sums of this position and panel.
                    unsafe { sums.slice(at..at + cols * cols) }.fill(0.0);
                }
                for row in (0..rows).step_by(isa.outer_rows) {
                    let call = OuterArgs {
                        a: pointers.as_ptr(),
                        offset: row,
                        depth,
                        b: grads[first * cols * T::STEP..].as_ptr(),
                        // SAFETY: as above.
                        out: unsafe { sums.ptr().add(at + row * cols) },
                        stride: cols,
                        rows: isa.outer_rows.min(rows - row),
                    };
                    // SAFETY: `depth` pointers to `cols` rows, and as many steps of the panel.
                    unsafe { isa.outer(&call) };
                }
            }
        }
    }
}

/// Adds the parts' sums in order, then computes `Gᵀ s G` of each filter.
fn transform_back<E: Operand, T: Operand>(
    Kernels { isa, transforms }: Kernels<E, T>,
    [depth, columns]: [usize; 2],
    panels: [usize; 2],
    sums: &[f32],
    parts: usize,
) -> Buffer {
    let (cols, lanes) = (isa.cols, transforms.lanes);
    let strides = [parts, sums.len() / parts, cols * cols];
    let mut grad = Buffer::<f32>::new(columns * depth * 9);
    let target = SharedSlice::new(&mut grad);
    for_each(columns / lanes, |block| {
        let column = block * lanes;
        for ci in 0..depth {
            let panel = ci / cols * panels[1] + column / cols;
            let from = sums[panel * 16 * cols * cols + ci % cols * cols + column % cols..].as_ptr();
            // SAFETY: `lanes` divides the columns and the panel's width, and each task has its own columns.
            unsafe {
                let to = target.ptr().add((column * depth + ci) * 9);
                (transforms.filter_grads)(from, strides, to, depth * 9);
            }
        }
    });
    grad
}
