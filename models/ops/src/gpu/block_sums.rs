//! Sums over the threads of a block, and over the results of blocks. The order depends on the shape alone.

use cubecl::prelude::*;

use super::rows::THREADS_PER_BLOCK;

/// Returns the thread's column, its row within the block, its index within the block, and the rows that a block
/// processes at a time.
#[cube]
pub(super) fn thread_position() -> (usize, usize, usize, usize) {
    let column = CUBE_POS_X as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    (column, UNIT_POS_Y as usize, UNIT_POS as usize, CUBE_DIM_Y as usize)
}

/// Sums the values of all threads of a column. The column's first thread gets the result. `shared` holds a value per thread.
#[cube]
pub(super) fn sum_over_block<N: Size>(value: Vector<f32, N>, shared: &mut Shared<[Vector<f32, N>]>) -> Vector<f32, N> {
    let (_, y, unit, depth) = thread_position();
    shared[unit] = value;
    sync_cube();
    let mut half = depth / 2;
    while half > 0 {
        if y < half {
            let sum = shared[unit] + shared[unit + half * CUBE_DIM_X as usize];
            shared[unit] = sum;
        }
        sync_cube();
        half /= 2;
    }
    shared[unit]
}

/// Computes two sums as [`sum_over_block`] does, in the same number of steps as one sum.
#[cube]
pub(super) fn sum_pair_over_block<N: Size>(
    first: Vector<f32, N>,
    second: Vector<f32, N>,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let mut firsts = Shared::<[Vector<f32, N>]>::new_slice(THREADS_PER_BLOCK);
    let mut seconds = Shared::<[Vector<f32, N>]>::new_slice(THREADS_PER_BLOCK);
    let (_, y, unit, depth) = thread_position();
    firsts[unit] = first;
    seconds[unit] = second;
    sync_cube();
    let mut half = depth / 2;
    while half > 0 {
        if y < half {
            let other = unit + half * CUBE_DIM_X as usize;
            let (first, second) = (firsts[unit] + firsts[other], seconds[unit] + seconds[other]);
            firsts[unit] = first;
            seconds[unit] = second;
        }
        sync_cube();
        half /= 2;
    }
    (firsts[unit], seconds[unit])
}

/// Adds up the pieces of two sums, which `pieces` has at `first + index · step` and `columns` after it. All threads of a block must
/// call the function. The column's first thread gets the result.
#[cube]
pub(super) fn sum_of_pieces<N: Size>(
    pieces: &mut [Vector<f32, N>],
    first: usize,
    step: usize,
    count: usize,
    columns: usize,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let (column, y, _, depth) = thread_position();
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut product = Vector::<f32, N>::new(0.0);
    if column < columns {
        let mut index = y;
        while index < count {
            let at = first + index * step + column;
            sum += pieces[at];
            product += pieces[at + columns];
            index += depth;
        }
    }
    sum_pair_over_block::<N>(sum, product)
}
