//! The moments of batch norm's rows: of all rows, and of the rows of all ranks.
//!
//! Variances are sums of squares around a thread's first row, merged by Chan's formula
//! (<https://doi.org/10.2307/2683386>), so they stay accurate if the mean is far from zero. The order of merging depends on
//! the shape alone.
//!
//! A block processes a piece of the rows for a tile of columns, and a thread one column of vectors. The last block of each tile
//! merges the pieces. Checked as `norm_kernels.rs`.

use cubecl::prelude::*;

use super::block_sums::thread_position;
use super::counters::is_last_block;
use super::rows::THREADS_PER_BLOCK;

/// Merges two sets by Chan's formula. Returns the mean, the sum of squares around the mean, and the count.
#[cube]
fn merge<N: Size>(
    mean: Vector<f32, N>,
    squares: Vector<f32, N>,
    count: f32,
    other_mean: Vector<f32, N>,
    other_squares: Vector<f32, N>,
    other_count: f32,
) -> (Vector<f32, N>, Vector<f32, N>, f32) {
    let all = count + other_count;
    // Both sets may be empty.
    let part = other_count / max(all, 1.0);
    let difference = other_mean - mean;
    let mean = mean + difference * Vector::new(part);
    (mean, squares + other_squares + difference * difference * Vector::new(count * part), all)
}

/// Merges the sets of all threads of a column. The column's first thread gets the result.
#[cube]
fn merge_over_block<N: Size>(
    mean: Vector<f32, N>,
    squares: Vector<f32, N>,
    count: f32,
) -> (Vector<f32, N>, Vector<f32, N>, f32) {
    let mut means = Shared::<[Vector<f32, N>]>::new_slice(THREADS_PER_BLOCK);
    let mut all_squares = Shared::<[Vector<f32, N>]>::new_slice(THREADS_PER_BLOCK);
    let mut counts = Shared::<[f32]>::new_slice(THREADS_PER_BLOCK);
    let (_, y, unit, depth) = thread_position();
    means[unit] = mean;
    all_squares[unit] = squares;
    counts[unit] = count;
    sync_cube();
    let mut half = depth / 2;
    while half > 0 {
        if y < half {
            let other = unit + half * CUBE_DIM_X as usize;
            let (mean, squares, count) = merge::<N>(
                means[unit],
                all_squares[unit],
                counts[unit],
                means[other],
                all_squares[other],
                counts[other],
            );
            means[unit] = mean;
            all_squares[unit] = squares;
            counts[unit] = count;
        }
        sync_cube();
        half /= 2;
    }
    (means[unit], all_squares[unit], counts[unit])
}

/// Computes the mean and the sum of squares around the mean of all rows of a column. Each block writes those of its piece to
/// `pieces[piece][2][columns]`; the last block merges the pieces. Also returns true in the one thread that has the result.
#[cube]
fn moments_of_column<F: Float, N: Size>(
    x: &[Vector<F, N>],
    pieces: &mut [Vector<f32, N>],
    counters: &mut [Atomic<u32>],
    rows: usize,
    columns: usize,
    pitch: usize,
    piece: usize,
    count_of_pieces: usize,
) -> (Vector<f32, N>, Vector<f32, N>, bool) {
    let (column, y, _, depth) = thread_position();
    let start = CUBE_POS_Y as usize * piece;
    let end = min(start + piece, rows);
    let mut mean = Vector::<f32, N>::new(0.0);
    let mut squares = Vector::<f32, N>::new(0.0);
    let mut count = 0.0f32;
    if column < columns && start + y < end {
        let pivot = Vector::<f32, N>::cast_from(x[(start + y) * pitch + column]);
        let mut sum = Vector::<f32, N>::new(0.0);
        let mut row = start + y;
        while row < end {
            let difference = Vector::<f32, N>::cast_from(x[row * pitch + column]) - pivot;
            sum += difference;
            squares += difference * difference;
            count += 1.0;
            row += depth;
        }
        let shift = sum / Vector::new(count);
        mean = pivot + shift;
        squares = max(squares - shift * sum, Vector::new(0.0));
    }
    merge_blocks::<N>(mean, squares, count, pieces, counters, rows, columns, piece, count_of_pieces)
}

/// Merges the sets of all threads of a column, each with its mean, the sum of squares around the mean and its count. Returns what
/// [`moments_of_column`] returns.
#[cube]
pub(super) fn merge_blocks<N: Size>(
    mean: Vector<f32, N>,
    squares: Vector<f32, N>,
    count: f32,
    pieces: &mut [Vector<f32, N>],
    counters: &mut [Atomic<u32>],
    rows: usize,
    columns: usize,
    piece: usize,
    count_of_pieces: usize,
) -> (Vector<f32, N>, Vector<f32, N>, bool) {
    let (column, y, _, _) = thread_position();
    let (mean, squares, _) = merge_over_block::<N>(mean, squares, count);
    if y == 0 && column < columns {
        let at = CUBE_POS_Y as usize * 2 * columns + column;
        pieces[at] = mean;
        pieces[at + columns] = squares;
    }
    let is_last = is_last_block(counters, CUBE_POS_X as usize, count_of_pieces);
    let mut of_all = mean;
    let mut squares_of_all = squares;
    if is_last {
        let (mean, squares) = merge_pieces::<N>(pieces, rows, columns, piece, count_of_pieces);
        of_all = mean;
        squares_of_all = squares;
    }
    (of_all, squares_of_all, is_last && y == 0 && column < columns)
}

/// Computes the mean and the sum of squares around the mean of all rows, `total[2][columns]`.
#[cube(launch_unchecked)]
pub(super) fn moments_of_rows<F: Float, N: Size>(
    x: &[Vector<F, N>],
    pieces: &mut [Vector<f32, N>],
    total: &mut [Vector<f32, N>],
    counters: &mut [Atomic<u32>],
    rows: usize,
    columns: usize,
    pitch: usize,
    piece: usize,
    count_of_pieces: usize,
    #[define(F)] _dtype: ElemType,
) {
    let (mean, squares, has_result) =
        moments_of_column::<F, N>(x, pieces, counters, rows, columns, pitch, piece, count_of_pieces);
    if has_result {
        let (column, _, _, _) = thread_position();
        total[column] = mean;
        total[columns + column] = squares;
    }
}

/// Writes the statistics of a deferred batch norm, `of_batch[4][columns]` (see [`DeferredNorm`](crate::deferred::DeferredNorm)),
/// and updates the running statistics, as `write_statistics` of `implicit_gemm/moments.cu` does.
#[cube]
pub(super) fn write_deferred_statistics<N: Size>(
    mean: Vector<f32, N>,
    squares: Vector<f32, N>,
    count: f32,
    column: usize,
    columns: usize,
    of_batch: &mut [Vector<f32, N>],
    weight: &[Vector<f32, N>],
    bias: &[Vector<f32, N>],
    running_mean: &mut [Vector<f32, N>],
    running_variance: &mut [Vector<f32, N>],
    epsilon: f32,
    momentum: f32,
) {
    let inv_std = inv_std_of::<N>(squares, count, epsilon);
    let scale = inv_std * weight[column];
    of_batch[column] = mean;
    of_batch[columns + column] = inv_std;
    of_batch[2 * columns + column] = scale;
    of_batch[3 * columns + column] = bias[column] - mean * scale;
    update_running::<N>(mean, squares, count, column, running_mean, running_variance, momentum);
}

/// Merges the pieces of a column. The column's first thread gets the mean and the sum of squares around it.
#[cube]
fn merge_pieces<N: Size>(
    pieces: &mut [Vector<f32, N>],
    rows: usize,
    columns: usize,
    piece: usize,
    count_of_pieces: usize,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let (column, y, _, depth) = thread_position();
    let mut mean = Vector::<f32, N>::new(0.0);
    let mut squares = Vector::<f32, N>::new(0.0);
    let mut count = 0.0f32;
    if column < columns {
        let mut index = y;
        while index < count_of_pieces {
            let at = index * 2 * columns + column;
            let inside = min(piece, rows - index * piece);
            let (new_mean, new_squares, new_count) =
                merge::<N>(mean, squares, count, pieces[at], pieces[at + columns], inside as f32);
            mean = new_mean;
            squares = new_squares;
            count = new_count;
            index += depth;
        }
    }
    let (mean, squares, _) = merge_over_block::<N>(mean, squares, count);
    (mean, squares)
}

/// Returns the reciprocal of the biased standard deviation.
#[cube]
pub(super) fn inv_std_of<N: Size>(squares: Vector<f32, N>, count: f32, epsilon: f32) -> Vector<f32, N> {
    Vector::new(1.0) / (squares / Vector::new(count) + Vector::new(epsilon)).sqrt()
}

/// Returns the unbiased variance; 0 for a single row, which has none.
#[cube]
fn unbiased_variance<N: Size>(squares: Vector<f32, N>, count: f32) -> Vector<f32, N> {
    squares / Vector::new(max(count - 1.0, 1.0))
}

/// Moves the running statistics of a column towards the mean and the unbiased variance.
#[cube]
fn update_running<N: Size>(
    mean: Vector<f32, N>,
    squares: Vector<f32, N>,
    count: f32,
    column: usize,
    running_mean: &mut [Vector<f32, N>],
    running_variance: &mut [Vector<f32, N>],
    momentum: f32,
) {
    let (old, new) = (Vector::new(1.0 - momentum), Vector::new(momentum));
    running_mean[column] = old * running_mean[column] + new * mean;
    running_variance[column] = old * running_variance[column] + new * unbiased_variance::<N>(squares, count);
}

/// Writes the mean and the reciprocal of the biased standard deviation of a column. Also writes the mean and the unbiased
/// variance or, with `updates`, updates the running statistics that are there.
#[cube]
pub(super) fn write_statistics<N: Size>(
    mean: Vector<f32, N>,
    squares: Vector<f32, N>,
    count: f32,
    column: usize,
    mean_out: &mut [Vector<f32, N>],
    inv_std_out: &mut [Vector<f32, N>],
    running_mean: &mut [Vector<f32, N>],
    running_variance: &mut [Vector<f32, N>],
    epsilon: f32,
    momentum: f32,
    #[comptime] updates: bool,
) {
    mean_out[column] = mean;
    if comptime!(updates) {
        update_running::<N>(mean, squares, count, column, running_mean, running_variance, momentum);
    } else {
        running_mean[column] = mean;
        running_variance[column] = unbiased_variance::<N>(squares, count);
    }
    inv_std_out[column] = inv_std_of::<N>(squares, count, epsilon);
}

/// Computes the statistics of [`write_statistics`] from all ranks' moments, in rank order, and the reciprocal of the number of
/// all rows. `ranks[rank][3][columns]`: mean, sum of squares around the mean, and number of rows.
#[cube(launch_unchecked)]
pub(super) fn merge_rank_moments<N: Size>(
    ranks: &[Vector<f32, N>],
    mean_out: &mut [Vector<f32, N>],
    inv_std_out: &mut [Vector<f32, N>],
    running_mean: &mut [Vector<f32, N>],
    running_variance: &mut [Vector<f32, N>],
    inv_rows_out: &mut [Vector<f32, N>],
    columns: usize,
    world_size: usize,
    epsilon: f32,
    momentum: f32,
    #[comptime] updates: bool,
) {
    let column = CUBE_POS_X as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    if column >= columns {
        terminate!();
    }
    let mut mean = Vector::<f32, N>::new(0.0);
    let mut squares = Vector::<f32, N>::new(0.0);
    let mut count = 0.0f32;
    let mut rank = 0usize;
    while rank < world_size {
        let at = rank * 3 * columns + column;
        let of_rank = ranks[at + 2 * columns].extract(0usize);
        let (new_mean, new_squares, new_count) =
            merge::<N>(mean, squares, count, ranks[at], ranks[at + columns], of_rank);
        mean = new_mean;
        squares = new_squares;
        count = new_count;
        rank += 1;
    }
    inv_rows_out[column] = Vector::new(1.0 / count);
    write_statistics::<N>(
        mean,
        squares,
        count,
        column,
        mean_out,
        inv_std_out,
        running_mean,
        running_variance,
        epsilon,
        momentum,
        updates,
    );
}
