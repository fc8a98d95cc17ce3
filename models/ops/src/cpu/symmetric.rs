//! Matrix products `left · rightᵀ` whose result is symmetric, for [`orthogonalize`](crate::orthogonalize()). Only the register
//! tiles that reach the lower triangle are computed, which is little more than half of them. The upper triangle is a copy of the
//! lower one, so the result is exactly symmetric.

use burn::backend::Flex;
use burn::tensor::Tensor;

use super::allocator::Buffer;
use super::kernel::{MicroKernels, TileArgs};
use super::packing::Weights;
use super::panels::panels;
use super::parallel::{SharedSlice, for_each};
use super::tensor::row_major;
use super::update::{contiguous, values};

/// Register tiles per task.
const TILES: usize = 4;
/// Side of the squares in which the lower triangle is copied, so that reads and writes stay in L1.
const SQUARE: usize = 16;

/// Returns `left · rightᵀ`, both f32 `[n, depth]` on the CPU, as `[n, n]`. The caller knows that the result is symmetric: its upper
/// triangle is not computed.
pub(crate) fn product(left: Tensor<2>, right: Tensor<2>) -> Tensor<2> {
    let [n, depth] = left.dims();
    assert_eq!(right.dims(), [n, depth], "factors of a symmetric product");
    let [left, right] = [left, right].map(|factor| contiguous(factor.reshape([n * depth])));
    let result = row_major(lower_product(MicroKernels::best(), values(&left), values(&right), n), [n, n]);
    Tensor::<2>::from_primitive::<Flex>(result)
}

/// Computes the lower triangle of `left · rightᵀ`, both `[n, depth]`, and copies it to the upper one.
fn lower_product(isa: &'static MicroKernels, left: &[f32], right: &[f32], n: usize) -> Buffer {
    let mut result = Buffer::new(n * n);
    if n == 0 {
        return result;
    }
    let depth = left.len() / n;
    assert!(left.len() == n * depth && right.len() == n * depth, "factors of {n} rows");
    let weights = Weights {
        data: right,
        groups: 1,
        columns: n,
        depth,
        group_stride: 0,
        column_stride: depth,
        depth_stride: 1,
        taps: &[0],
    };
    let (packed, panels) = (weights.pack(isa, 1), panels(isa, n));
    let target = SharedSlice::new(&mut result);
    let block = TILES * isa.rows;
    let blocks = n.div_ceil(block);
    for_each(blocks, |index| {
        // The last rows have the most columns, so they come first.
        let first = (blocks - 1 - index) * block;
        let count = block.min(n - first);
        // Rows after the last repeat the last row and are not stored.
        let rows = || (0..count.next_multiple_of(isa.rows)).map(|row| first + row.min(count - 1));
        let a: Vec<*const f32> = rows().map(|row| left[row * depth..].as_ptr()).collect();
        let out: Vec<*mut f32> = rows().map(|row| target.ptr().wrapping_add(row * n)).collect();
        for panel in panels.iter().take_while(|panel| panel.column < first + count) {
            for row in (0..count).step_by(isa.rows) {
                let rows = isa.rows.min(count - row);
                if first + row + rows <= panel.column {
                    continue;
                }
                let call = TileArgs {
                    a: a[row..].as_ptr(),
                    offset: 0,
                    taps: 1,
                    depth,
                    b: packed.values[panel.column * packed.width..].as_ptr(),
                    out: out[row..].as_ptr(),
                    column: panel.column,
                    rows,
                    cols: panel.cols,
                    bias: std::ptr::null(),
                    relu: false,
                };
                // SAFETY: the tables have whole register tiles. Each row of `left` has `depth` elements, each row of the result has
                // `n`, and only this task writes these rows.
                unsafe { panel.isa.tile(&call) };
            }
        }
    });
    for_each(n.div_ceil(SQUARE), |index| {
        let rows = index * SQUARE..n.min((index + 1) * SQUARE);
        for first in (rows.start..n).step_by(SQUARE) {
            for row in rows.clone() {
                for column in first.max(row + 1)..n.min(first + SQUARE) {
                    // SAFETY: both are elements of the result. This task alone writes the upper triangle of its rows, and no task
                    // writes the lower triangle, whose elements were computed above.
                    unsafe { *target.ptr().add(row * n + column) = *target.ptr().add(column * n + row) };
                }
            }
        }
    });
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| (((i + seed * 7919) as f32 + 1.0) * 12.9898).sin()).collect()
    }

    /// `left = X`, `right = X`: the result is symmetric.
    #[test]
    fn products_are_those_of_all_elements_on_every_instruction_set() {
        for (n, depth) in [(1, 1), (1, 40), (2, 3), (7, 5), (16, 16), (33, 9), (64, 70), (130, 31), (257, 3)] {
            let x = noise(n * depth, n);
            let row = |row: usize| &x[row * depth..(row + 1) * depth];
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
            for isa in MicroKernels::<f32>::supported() {
                let result = lower_product(isa, &x, &x, n);
                for i in 0..n {
                    for j in 0..n {
                        let (got, expected) = (result[i * n + j], dot(row(i), row(j)));
                        assert!((f64::from(got) - expected).abs() < 1e-4, "{} {n}x{depth} [{i}, {j}]: {got}", isa.name);
                        assert_eq!(got.to_bits(), result[j * n + i].to_bits(), "exactly symmetric");
                    }
                }
            }
        }
        assert!(lower_product(MicroKernels::best(), &[], &[], 0).is_empty());
    }
}
