//! Batch norm's kernels. Matrices have one row per pixel and one column per channel, in vectors of `N`; statistics are
//! f32.
//!
//! In a reduction over all rows, each block reduces a piece of the rows, then the last block of each tile of columns reduces the
//! pieces, in an order that depends on the shape alone. `norm_moments.rs` has those of means and variances.
//!
//! Checked by `gpu_check --ops` (`benches/gpu_check/ops.rs`), synchronised batch norm by `gpu_check --ranks` (`norm.rs`).

use cubecl::prelude::*;

use super::activation::{activation_grad, activation_value};
use super::block_sums::{sum_of_pieces, sum_pair_over_block, thread_position};
use super::counters::is_last_block;
use super::norm_moments::{inv_std_of, write_statistics};
use crate::extension::Activation;

/// Computes the means over the rows of all ranks of `g` and of `g · x̂`, from all ranks' sums, `ranks[rank][2][columns]`, in
/// rank order: `out[2][columns]`. `inv_rows` is the reciprocal of the number of rows.
#[cube(launch_unchecked)]
pub(super) fn merge_rank_sums<N: Size>(
    ranks: &[Vector<f32, N>],
    inv_rows: &[Vector<f32, N>],
    out: &mut [Vector<f32, N>],
    columns: usize,
    world_size: usize,
) {
    let column = CUBE_POS_X as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    if column >= columns {
        terminate!();
    }
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut product = Vector::<f32, N>::new(0.0);
    let mut rank = 0usize;
    while rank < world_size {
        let at = rank * 2 * columns + column;
        sum += ranks[at];
        product += ranks[at + columns];
        rank += 1;
    }
    out[column] = sum * inv_rows[column];
    out[columns + column] = product * inv_rows[column];
}

/// Computes `y = activation((x - mean) · inv_std · weight + bias + residual)`. `inv_std_or_variance` is the variance with `given`
/// statistics, else `inv_std`.
#[cube(launch_unchecked)]
pub(super) fn normalise<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    mean: &[Vector<f32, N>],
    inv_std_or_variance: &[Vector<f32, N>],
    weight: &[Vector<f32, N>],
    bias: &[Vector<f32, N>],
    out: &mut [Vector<F, N>],
    rows: usize,
    columns: usize,
    pitch: usize,
    residual_pitch: usize,
    out_pitch: usize,
    epsilon: f32,
    #[comptime] given: bool,
    #[comptime] has_residual: bool,
    #[comptime] activation: Activation,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    if column >= columns {
        terminate!();
    }
    let inv_std = if comptime!(given) {
        Vector::new(1.0) / (inv_std_or_variance[column] + Vector::new(epsilon)).sqrt()
    } else {
        inv_std_or_variance[column]
    };
    let scale = inv_std * weight[column];
    let (first, step) = (CUBE_POS_Y as usize * depth + y, depth * CUBE_COUNT_Y as usize);
    let (mean, bias) = (mean[column], bias[column]);
    normalise_rows::<F, N>(
        x,
        residual,
        mean,
        scale,
        bias,
        out,
        first,
        step,
        rows,
        column,
        pitch,
        residual_pitch,
        out_pitch,
        has_residual,
        activation,
    );
}

/// The rows of [`normalise`] and [`normalise_batch`] that a thread computes.
#[cube]
fn normalise_rows<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    mean: Vector<f32, N>,
    scale: Vector<f32, N>,
    bias: Vector<f32, N>,
    out: &mut [Vector<F, N>],
    first: usize,
    step: usize,
    rows: usize,
    column: usize,
    pitch: usize,
    residual_pitch: usize,
    out_pitch: usize,
    #[comptime] has_residual: bool,
    #[comptime] activation: Activation,
) {
    let mut row = first;
    while row < rows {
        let mut z = (Vector::<f32, N>::cast_from(x[row * pitch + column]) - mean) * scale + bias;
        if comptime!(has_residual) {
            z += Vector::<f32, N>::cast_from(residual[row * residual_pitch + column]);
        }
        out[row * out_pitch + column] = Vector::cast_from(activation_value::<N>(z, activation));
        row += step;
    }
}

/// Normalises as [`normalise`], with the statistics of the batch from the moments of all rows, `moments[2][columns]`. Also writes
/// these statistics and updates the running statistics, as [`write_statistics`].
#[cube(launch_unchecked)]
pub(super) fn normalise_batch<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    moments: &[Vector<f32, N>],
    weight: &[Vector<f32, N>],
    bias: &[Vector<f32, N>],
    mean_out: &mut [Vector<f32, N>],
    inv_std_out: &mut [Vector<f32, N>],
    running_mean: &mut [Vector<f32, N>],
    running_variance: &mut [Vector<f32, N>],
    out: &mut [Vector<F, N>],
    rows: usize,
    columns: usize,
    pitch: usize,
    residual_pitch: usize,
    out_pitch: usize,
    count: f32,
    epsilon: f32,
    momentum: f32,
    #[comptime] updates: bool,
    #[comptime] has_residual: bool,
    #[comptime] activation: Activation,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    if column >= columns {
        terminate!();
    }
    let (mean, squares) = (moments[column], moments[columns + column]);
    if CUBE_POS_Y == 0 && y == 0 {
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
    let scale = inv_std_of::<N>(squares, count, epsilon) * weight[column];
    let (first, step) = (CUBE_POS_Y as usize * depth + y, depth * CUBE_COUNT_Y as usize);
    normalise_rows::<F, N>(
        x,
        residual,
        mean,
        scale,
        bias[column],
        out,
        first,
        step,
        rows,
        column,
        pitch,
        residual_pitch,
        out_pitch,
        has_residual,
        activation,
    );
}

/// Computes the gradient of the activation's input, from the output of a ReLU or from the activation's input.
#[cube]
fn activation_input_grad<F: Float, N: Size>(
    dy: Vector<F, N>,
    out: Vector<F, N>,
    normalised: Vector<f32, N>,
    weight: Vector<f32, N>,
    bias: Vector<f32, N>,
    #[comptime] from_output: bool,
    #[comptime] activation: Activation,
) -> Vector<f32, N> {
    let dy = Vector::<f32, N>::cast_from(dy);
    let at = if comptime!(from_output) { Vector::<f32, N>::cast_from(out) } else { normalised * weight + bias };
    activation_grad::<N>(at, dy, activation)
}

/// Computes the sums over all rows of `g` and of `g · x̂`: `total[2][columns]`. `g` is the gradient of the activation's input.
/// Each block writes its sums to `pieces[piece][2][columns]`; the last block adds these up.
#[cube(launch_unchecked)]
pub(super) fn gradient_sums<F: Float, N: Size>(
    x: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    out: &[Vector<F, N>],
    mean: &[Vector<f32, N>],
    inv_std: &[Vector<f32, N>],
    weight: &[Vector<f32, N>],
    bias: &[Vector<f32, N>],
    pieces: &mut [Vector<f32, N>],
    total: &mut [Vector<f32, N>],
    counters: &mut [Atomic<u32>],
    rows: usize,
    columns: usize,
    pitch: usize,
    dy_pitch: usize,
    out_pitch: usize,
    piece: usize,
    count_of_pieces: usize,
    #[comptime] from_output: bool,
    #[comptime] activation: Activation,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    let start = CUBE_POS_Y as usize * piece;
    let end = min(start + piece, rows);
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut product = Vector::<f32, N>::new(0.0);
    if column < columns {
        let (mean, inv_std) = (mean[column], inv_std[column]);
        let (weight, bias) = (weight[column], bias[column]);
        let mut row = start + y;
        while row < end {
            let normalised = (Vector::<f32, N>::cast_from(x[row * pitch + column]) - mean) * inv_std;
            let g = activation_input_grad::<F, N>(
                dy[row * dy_pitch + column],
                out[row * out_pitch + column],
                normalised,
                weight,
                bias,
                from_output,
                activation,
            );
            sum += g;
            product += g * normalised;
            row += depth;
        }
    }
    let (sum, product) = sum_pair_over_block::<N>(sum, product);
    if y == 0 && column < columns {
        let at = CUBE_POS_Y as usize * 2 * columns + column;
        pieces[at] = sum;
        pieces[at + columns] = product;
    }
    if is_last_block(counters, CUBE_POS_X as usize, count_of_pieces) {
        let (sum, product) = sum_of_pieces::<N>(pieces, 0usize, 2 * columns, count_of_pieces, columns);
        if y == 0 && column < columns {
            total[column] = sum;
            total[columns + column] = product;
        }
    }
}

/// Computes the input's gradient, `scale · (g - inv_rows · sum - inv_rows · x̂ · product)` with `sums[2][columns]`. With
/// `separate_residual`, also writes the residual's gradient, `g`. The gradients of bias and weight are this rank's sums,
/// `own[2][columns]`.
#[cube(launch_unchecked)]
pub(super) fn input_gradient<F: Float, N: Size>(
    x: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    out: &[Vector<F, N>],
    mean: &[Vector<f32, N>],
    inv_std: &[Vector<f32, N>],
    weight: &[Vector<f32, N>],
    bias: &[Vector<f32, N>],
    sums: &[Vector<f32, N>],
    own: &[Vector<f32, N>],
    bias_out: &mut [Vector<f32, N>],
    weight_out: &mut [Vector<f32, N>],
    dx: &mut [Vector<F, N>],
    residual: &mut [Vector<F, N>],
    rows: usize,
    columns: usize,
    pitch: usize,
    dy_pitch: usize,
    out_pitch: usize,
    dx_pitch: usize,
    inv_rows: f32,
    #[comptime] from_output: bool,
    #[comptime] separate_residual: bool,
    #[comptime] activation: Activation,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    if column >= columns {
        terminate!();
    }
    let (mean, inv_std) = (mean[column], inv_std[column]);
    let (weight, bias) = (weight[column], bias[column]);
    let inv_rows = Vector::new(inv_rows);
    let (sum, product) = (sums[column] * inv_rows, sums[columns + column] * inv_rows);
    if CUBE_POS_Y == 0 && y == 0 {
        bias_out[column] = own[column];
        weight_out[column] = own[columns + column];
    }
    let scale = inv_std * weight;
    let mut row = CUBE_POS_Y as usize * depth + y;
    while row < rows {
        let normalised = (Vector::<f32, N>::cast_from(x[row * pitch + column]) - mean) * inv_std;
        let g = activation_input_grad::<F, N>(
            dy[row * dy_pitch + column],
            out[row * out_pitch + column],
            normalised,
            weight,
            bias,
            from_output,
            activation,
        );
        dx[row * dx_pitch + column] = Vector::cast_from(scale * (g - sum - normalised * product));
        if comptime!(separate_residual) {
            residual[row * dx_pitch + column] = Vector::cast_from(g);
        }
        row += depth * CUBE_COUNT_Y as usize;
    }
}
