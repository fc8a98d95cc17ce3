//! Weight gradient of the convolutions of [`super::winograd`], by the transpose of its algorithm. Tiles of the input
//! are transformed as in the forward pass, and tiles of the output's gradient by the transpose of the output transform.
//! Each of the 16 positions sums products over all tiles, and `Gᵀ · G` transforms the sums back to 3x3.
//!
//! The tiles are divided into as many parts as there are threads. Each part has its own sums, which are added in order.
//! The parts, and therefore the last bits of the result, depend on the number of threads.

use super::allocator::Buffer;
use super::kernel::Isa;
use super::panels::Panel;
use super::parallel::{SharedSlice, chunk, for_each, threads};
use super::shape::ConvShape;
use super::weight_grad::{MAX_SUMS, add_products};
use super::winograd::{Grid, block_len};

/// Computes `[out, in, 3, 3]` from channels-last `x` and `dy`.
pub(crate) fn weight_grad(isa: &'static Isa, shape: &ConvShape, x: &[f32], dy: &[f32]) -> Buffer {
    let [depth, columns] = shape.channels;
    let padded = columns.next_multiple_of(isa.cols);
    // The transform writes panels of equal width.
    let panels: Vec<Panel> =
        (0..padded).step_by(isa.cols).map(|column| Panel { isa, column, cols: isa.cols }).collect();
    let grid = Grid { batch: shape.batch, source: shape.input, target: shape.output, padding: shape.padding };
    let (tiles, block) = (grid.len(), block_len(shape.channels));
    let sums_len = 16 * depth * padded;
    let parts = threads().min(tiles.div_ceil(block)).min(MAX_SUMS / sums_len).max(1);

    let mut sums = Buffer::new(parts * sums_len);
    let shared = SharedSlice::new(&mut sums);
    let zeros = Buffer::zeroed(depth.max(columns));
    for_each(parts, |index| {
        // SAFETY: each task has its own part.
        let sums = unsafe { shared.slice(index * sums_len..(index + 1) * sums_len) };
        sums.fill(0.0);
        let range = chunk(tiles, block, parts, index);
        let mut input = Buffer::new(16 * block * depth);
        let mut grads = Buffer::zeroed(16 * block * padded);
        let mut pointers = Vec::with_capacity(block);
        for first in range.clone().step_by(block) {
            let count = block.min(range.end - first);
            for tile in 0..count {
                let pixels = grid.source(first + tile).map(|pixel| match pixel {
                    Some(pixel) => x[pixel * depth..(pixel + 1) * depth].as_ptr(),
                    None => zeros.as_ptr(),
                });
                let to = input[tile * depth..].as_mut_ptr();
                // SAFETY: each pixel has `depth` floats, and position ξ of the tile is at offset ξ · count · depth.
                unsafe { (isa.winograd.input)(&pixels, depth, to, count * depth) };
                let pixels = grid.target(first + tile).map(|pixel| match pixel {
                    Some(pixel) => dy[pixel * columns..(pixel + 1) * columns].as_ptr(),
                    None => zeros.as_ptr(),
                });
                let to = grads[tile * isa.cols..].as_mut_ptr();
                // SAFETY: each pixel has `columns` floats; the panels of a position have `count · padded` floats.
                unsafe {
                    (isa.winograd.grad)(&pixels, columns, to, count * padded, [isa.cols, count * isa.cols]);
                }
            }
            for (xi, sums) in sums.chunks_exact_mut(depth * padded).enumerate() {
                pointers.clear();
                pointers.extend((0..count).map(|tile| input[(xi * count + tile) * depth..].as_ptr()));
                let grads = &grads[xi * count * padded..(xi + 1) * count * padded];
                // SAFETY: each pointer points to `depth` floats.
                unsafe { add_products(&panels, &pointers, |row| row, depth, grads, sums) };
            }
        }
    });
    transform_back(shape.channels, &sums, parts, padded)
}

/// Adds the parts' sums in order, then computes `Gᵀ s G` of each filter.
fn transform_back([depth, columns]: [usize; 2], sums: &[f32], parts: usize, padded: usize) -> Buffer {
    const FILTERS: usize = 16;
    let part_len = sums.len() / parts;
    let mut grad = Buffer::new(columns * depth * 9);
    let target = SharedSlice::new(&mut grad);
    for_each(columns / FILTERS, |block| {
        let first = block * FILTERS;
        // SAFETY: each task has its own filters.
        let to = unsafe { target.slice(first * depth * 9..(first + FILTERS) * depth * 9) };
        for ci in 0..depth {
            let s: [[f32; FILTERS]; 16] = std::array::from_fn(|xi| {
                let mut sum = [0.0; FILTERS];
                for part in 0..parts {
                    let from = &sums[part * part_len + (xi * depth + ci) * padded + first..][..FILTERS];
                    sum.iter_mut().zip(from).for_each(|(sum, value)| *sum += value);
                }
                sum
            });
            for filter in 0..FILTERS {
                let mut half = [[0.0_f32; 4]; 3];
                for j in 0..4 {
                    let column: [f32; 4] = std::array::from_fn(|i| s[4 * i + j][filter]);
                    let (sum, difference) = (0.5 * (column[1] + column[2]), 0.5 * (column[1] - column[2]));
                    (half[0][j], half[1][j], half[2][j]) = (column[0] + sum, difference, sum + column[3]);
                }
                let to = &mut to[(filter * depth + ci) * 9..][..9];
                for (i, h) in half.iter().enumerate() {
                    let (sum, difference) = (0.5 * (h[1] + h[2]), 0.5 * (h[1] - h[2]));
                    (to[3 * i], to[3 * i + 1], to[3 * i + 2]) = (h[0] + sum, difference, sum + h[3]);
                }
            }
        }
    });
    grad
}
