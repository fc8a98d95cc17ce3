//! The passes of deferred batch norms. The terms are those of `norm_kernels.rs`.

use burn::backend::cubecl::dtype_to_storage_type;
use cubecl::prelude::*;

use super::activation::{activation_grad, activation_value};
use super::counters::{counters, is_last_block};
use super::deferred::Deferred;
use super::norm_kernels::{sum_over_block, thread_position};
use super::rows::{Blocks, Rows, all};
use super::side_results::NormGradient;
use crate::extension::Activation;

/// Computes `activation(x · scale + shift + residual)`. With `norm_of_residual`, normalises the residual too. Statistics are
/// `[4][columns]`, see [`DeferredNorm`](crate::deferred::DeferredNorm).
#[cube(launch_unchecked)]
fn apply<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    statistics: &[Vector<f32, N>],
    residual_statistics: &[Vector<f32, N>],
    out: &mut [Vector<F, N>],
    rows: usize,
    columns: usize,
    pitch: usize,
    residual_pitch: usize,
    out_pitch: usize,
    #[comptime] has_residual: bool,
    #[comptime] norm_of_residual: bool,
    #[comptime] activation: Activation,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    if column >= columns {
        terminate!();
    }
    let (scale, shift) = (statistics[2 * columns + column], statistics[3 * columns + column]);
    let mut residual_scale = Vector::<f32, N>::new(1.0);
    let mut residual_shift = Vector::<f32, N>::new(0.0);
    if comptime!(norm_of_residual) {
        residual_scale = residual_statistics[2 * columns + column];
        residual_shift = residual_statistics[3 * columns + column];
    }
    let mut row = CUBE_POS_Y as usize * depth + y;
    while row < rows {
        let mut z = Vector::<f32, N>::cast_from(x[row * pitch + column]) * scale + shift;
        if comptime!(has_residual) {
            let other = Vector::<f32, N>::cast_from(residual[row * residual_pitch + column]);
            if comptime!(norm_of_residual) {
                z += other * residual_scale + residual_shift;
            } else {
                z += other;
            }
        }
        out[row * out_pitch + column] = Vector::cast_from(activation_value::<N>(z, activation));
        row += depth * CUBE_COUNT_Y as usize;
    }
}

pub(super) fn launch_apply(x: &Rows, residual: Option<&Rows>, norm: &Deferred, of_residual: Option<&Deferred>) -> Rows {
    let (out, second) = (x.output(), residual.unwrap_or(x));
    let statistics = norm.statistics();
    let residual_statistics = of_residual.map_or(statistics, Deferred::statistics);
    let vector = x.vector(&[second, &out], &[statistics, residual_statistics]);
    let blocks = Blocks::over(x, vector);
    // SAFETY: matrices have the rows and columns that the kernel gets, and statistics four vectors over the columns.
    unsafe {
        apply::launch_unchecked(
            x.client(),
            blocks.elementwise(),
            blocks.dim(),
            vector,
            x.arg(),
            second.arg(),
            all(statistics),
            all(residual_statistics),
            out.arg(),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            second.pitch(vector),
            out.pitch(vector),
            residual.is_some(),
            of_residual.is_some(),
            norm.activation,
            dtype_to_storage_type(x.dtype()),
        );
    }
    out
}

/// Computes the sums over all rows of `g` and of `g · x̂`, the gradients of bias and weight, where `g` is the gradient of the
/// activation's input, and the factors of the input's gradient, `factors[3][columns]` (`NormGradient` in
/// `implicit_gemm/prologue.cu`). With `writes`, also writes `g`.
#[cube(launch_unchecked)]
fn norm_gradient<F: Float, N: Size>(
    x: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    out: &[Vector<F, N>],
    statistics: &[Vector<f32, N>],
    g_out: &mut [Vector<F, N>],
    pieces: &mut [Vector<f32, N>],
    weight_out: &mut [Vector<f32, N>],
    bias_out: &mut [Vector<f32, N>],
    factors: &mut [Vector<f32, N>],
    counters: &mut [Atomic<u32>],
    rows: usize,
    columns: usize,
    pitch: usize,
    dy_pitch: usize,
    out_pitch: usize,
    g_pitch: usize,
    piece: usize,
    count_of_pieces: usize,
    part: f32,
    #[comptime] from_output: bool,
    #[comptime] writes: bool,
    #[comptime] activation: Activation,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    let start = CUBE_POS_Y as usize * piece;
    let end = min(start + piece, rows);
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut product = Vector::<f32, N>::new(0.0);
    if column < columns {
        let (mean, inverse) = (statistics[column], statistics[columns + column]);
        let (scale, shift) = (statistics[2 * columns + column], statistics[3 * columns + column]);
        let mut row = start + y;
        while row < end {
            let x = Vector::<f32, N>::cast_from(x[row * pitch + column]);
            let at = if comptime!(from_output) {
                Vector::<f32, N>::cast_from(out[row * out_pitch + column])
            } else {
                x * scale + shift
            };
            let dy = Vector::<f32, N>::cast_from(dy[row * dy_pitch + column]);
            // The sums are those of the rounded gradient.
            let rounded = Vector::<F, N>::cast_from(activation_grad::<N>(at, dy, activation));
            let g = Vector::<f32, N>::cast_from(rounded);
            if comptime!(writes) {
                g_out[row * g_pitch + column] = rounded;
            }
            sum += g;
            product += g * ((x - mean) * inverse);
            row += depth;
        }
    }
    let (sum, product) = sum_over_block::<N>(sum, product);
    if y == 0 && column < columns {
        let at = CUBE_POS_Y as usize * 2 * columns + column;
        pieces[at] = sum;
        pieces[at + columns] = product;
    }
    if is_last_block(counters, CUBE_POS_X as usize, count_of_pieces) {
        let mut sum = Vector::<f32, N>::new(0.0);
        let mut product = Vector::<f32, N>::new(0.0);
        if column < columns {
            let mut index = y;
            while index < count_of_pieces {
                let at = index * 2 * columns + column;
                sum += pieces[at];
                product += pieces[at + columns];
                index += depth;
            }
        }
        let (sum, product) = sum_over_block::<N>(sum, product);
        if y == 0 && column < columns {
            bias_out[column] = sum;
            weight_out[column] = product;
            let part = Vector::<f32, N>::new(part);
            // The factor that normalises is that of the gradient too.
            let scale = statistics[2 * columns + column];
            let of_input = -(scale * statistics[columns + column] * (product * part));
            factors[column] = scale;
            factors[columns + column] = of_input;
            factors[2 * columns + column] = -(scale * (sum * part)) - of_input * statistics[column];
        }
    }
}

/// Launches [`norm_gradient`]. `out`: the output, if the activation's derivative is computed from it. `masked` gets the gradient of
/// the activation's input.
pub(super) fn launch_norm_gradient(
    x: &Rows,
    dy: &Rows,
    out: Option<&Rows>,
    norm: &Deferred,
    masked: Option<&Rows>,
) -> NormGradient {
    let statistics = norm.statistics();
    let [weight, bias] = [0; 2].map(|_| x.of_columns(1));
    let factors = x.of_columns(3);
    // Nothing is written to `x` without `masked`.
    let (second, third) = (out.unwrap_or(x), masked.unwrap_or(x));
    let vector = x.vector(&[dy, second, third], &[statistics, &weight, &bias, &factors]);
    let blocks = Blocks::over(x, vector);
    let [piece, pieces] = blocks.pieces();
    let workspace = x.of_columns(2 * pieces);
    let [zeros, _] = counters(&workspace);
    // SAFETY: matrices have the rows and columns that the kernel gets; statistics have four vectors over the columns, factors three,
    // the workspace two per piece, and a tile of columns has a counter.
    unsafe {
        norm_gradient::launch_unchecked(
            x.client(),
            blocks.reduction(),
            blocks.dim(),
            vector,
            x.arg(),
            dy.arg(),
            second.arg(),
            all(statistics),
            third.arg(),
            all(&workspace),
            all(&weight),
            all(&bias),
            all(&factors),
            all(&zeros),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            dy.pitch(vector),
            second.pitch(vector),
            third.pitch(vector),
            piece,
            pieces,
            1.0 / x.rows() as f32,
            out.is_some(),
            masked.is_some(),
            norm.activation,
            dtype_to_storage_type(x.dtype()),
        );
    }
    NormGradient { affine: [weight, bias], factors }
}
