//! The sums over the gradient of deferred batch norms, and what follows from them: [`norm_gradient`] reads each matrix once.
//!
//! Matrices have one row per pixel and one column per channel, in vectors of `N`, as in `norm_kernels.rs`. A thread processes one
//! column of vectors and every `depth`-th row of its block's rows ([`Blocks`]). Checked by `gpu_check --ops --cases deferred`
//! (`benches/gpu_check/deferred.rs`).

use burn::backend::cubecl::dtype_to_storage_type;
use cubecl::prelude::*;

use super::activation::activation_grad;
use super::block_sums::{sum_of_pieces, sum_over_block, sum_pair_over_block, thread_position};
use super::counters::{counters, is_last_block};
use super::deferred::Deferred;
use super::rows::{Blocks, Rows, THREADS_PER_BLOCK, all};
use super::side_results::NormGradientResult;
use crate::extension::Activation;

/// Writes the gradients of bias and weight, and the factors of the input's gradient, `factors[3][columns]` (`NormGradient` in
/// `implicit_gemm/prologue.cu`), from the sums over all rows. `inv_rows` is the reciprocal of the number of rows.
#[cube]
pub(super) fn write_gradient<N: Size>(
    sum: Vector<f32, N>,
    product: Vector<f32, N>,
    statistics: &[Vector<f32, N>],
    weight: &mut [Vector<f32, N>],
    bias: &mut [Vector<f32, N>],
    factors: &mut [Vector<f32, N>],
    column: usize,
    columns: usize,
    inv_rows: f32,
) {
    bias[column] = sum;
    weight[column] = product;
    let inv_rows = Vector::<f32, N>::new(inv_rows);
    // The forward scale is also the factor of the gradient.
    let scale = statistics[2 * columns + column];
    let of_input = -(scale * statistics[columns + column] * (product * inv_rows));
    factors[column] = scale;
    factors[columns + column] = of_input;
    factors[2 * columns + column] = -(scale * (sum * inv_rows)) - of_input * statistics[column];
}

/// Size arguments of [`norm_gradient`]. Pitches are distances of rows, in vectors.
#[derive(CubeType, CubeLaunch)]
struct GradientSizes {
    rows: usize,
    /// Vectors per row.
    columns: usize,
    pitch: usize,
    residual_pitch: usize,
    dy_pitch: usize,
    out_pitch: usize,
    g_pitch: usize,
    /// Pixels of an image, and the reciprocal of their number; used if the gradient is pooled.
    pixels: usize,
    inv_pixels: f32,
    /// Rows per piece, and the number of pieces.
    piece: usize,
    count_of_pieces: usize,
    /// Reciprocal of the number of rows.
    inv_rows: f32,
}

/// What [`norm_gradient`] reads and computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct GradientOptions {
    /// Whether the activation's derivative is computed from the output, not from the recomputed input of the activation.
    from_output: bool,
    /// Whether `g` is written.
    writes: bool,
    /// Whether the gradients of the residual's batch norm are computed too. Its gradient is also `g`.
    of_residual: bool,
    /// Whether the given gradient is that of the means over the pixels of each image.
    pooled: bool,
    activation: Activation,
}

/// Computes `g`, the gradient of the activation's input, for the rows of a thread. Returns its sums of `g`, of `g · x̂`, and of
/// `g · x̂` with the residual's x̂ (zero unless `of_residual`). Arguments are those of [`norm_gradient`].
#[cube]
fn sums_of_rows<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dy_means: &[Vector<f32, N>],
    out: &[Vector<F, N>],
    statistics: &[Vector<f32, N>],
    residual_statistics: &[Vector<f32, N>],
    g_out: &mut [Vector<F, N>],
    sizes: &GradientSizes,
    #[comptime] options: GradientOptions,
) -> (Vector<f32, N>, Vector<f32, N>, Vector<f32, N>) {
    let (column, y, _, depth) = thread_position();
    let columns = sizes.columns;
    let start = CUBE_POS_Y as usize * sizes.piece;
    let end = min(start + sizes.piece, sizes.rows);
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut product = Vector::<f32, N>::new(0.0);
    let mut residual_product = Vector::<f32, N>::new(0.0);
    if column < columns {
        let (mean, inv_std) = (statistics[column], statistics[columns + column]);
        let (scale, shift) = (statistics[2 * columns + column], statistics[3 * columns + column]);
        let mut residual_mean = Vector::<f32, N>::new(0.0);
        let mut residual_inv_std = Vector::<f32, N>::new(0.0);
        if comptime!(options.of_residual) {
            residual_mean = residual_statistics[column];
            residual_inv_std = residual_statistics[columns + column];
        }
        let mut row = start + y;
        while row < end {
            let x = Vector::<f32, N>::cast_from(x[row * sizes.pitch + column]);
            let at = if comptime!(options.from_output) {
                Vector::<f32, N>::cast_from(out[row * sizes.out_pitch + column])
            } else {
                x * scale + shift
            };
            let dy = if comptime!(options.pooled) {
                dy_means[row / sizes.pixels * sizes.dy_pitch + column] * Vector::new(sizes.inv_pixels)
            } else {
                Vector::<f32, N>::cast_from(dy[row * sizes.dy_pitch + column])
            };
            // Sum the rounded values, which later kernels read.
            let rounded = Vector::<F, N>::cast_from(activation_grad::<N>(at, dy, comptime!(options.activation)));
            let g = Vector::<f32, N>::cast_from(rounded);
            if comptime!(options.writes) {
                g_out[row * sizes.g_pitch + column] = rounded;
            }
            sum += g;
            product += g * ((x - mean) * inv_std);
            if comptime!(options.of_residual) {
                let other = Vector::<f32, N>::cast_from(residual[row * sizes.residual_pitch + column]);
                residual_product += g * ((other - residual_mean) * residual_inv_std);
            }
            row += depth;
        }
    }
    (sum, product, residual_product)
}

/// Computes the sums over all rows of `g` and of `g · x̂`, where `g` is the gradient of the activation's input, and everything that
/// [`write_gradient`] writes; with `of_residual` also for the batch norm of the residual. With `writes`, also writes `g` to
/// `g_out`. If `pooled`, the gradient is `dy_means[images][columns]`, otherwise `dy[rows][columns]`.
///
/// Each block writes its sums to `pieces[piece][2 or 3][columns]`: `g`, `g · x̂` and, with `of_residual`, `g · x̂` of the residual.
/// The last block of each tile of columns adds up the pieces.
#[cube(launch_unchecked)]
fn norm_gradient<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dy_means: &[Vector<f32, N>],
    out: &[Vector<F, N>],
    statistics: &[Vector<f32, N>],
    residual_statistics: &[Vector<f32, N>],
    g_out: &mut [Vector<F, N>],
    pieces: &mut [Vector<f32, N>],
    weight_out: &mut [Vector<f32, N>],
    bias_out: &mut [Vector<f32, N>],
    factors: &mut [Vector<f32, N>],
    residual_weight_out: &mut [Vector<f32, N>],
    residual_bias_out: &mut [Vector<f32, N>],
    residual_factors: &mut [Vector<f32, N>],
    counters: &mut [Atomic<u32>],
    sizes: &GradientSizes,
    #[comptime] options: GradientOptions,
    #[define(F)] _dtype: ElemType,
) {
    let (sum, product, residual_product) =
        sums_of_rows::<F, N>(x, residual, dy, dy_means, out, statistics, residual_statistics, g_out, sizes, options);
    let (column, y, _, _) = thread_position();
    let (columns, count_of_pieces, inv_rows) = (sizes.columns, sizes.count_of_pieces, sizes.inv_rows);
    // Vectors of a piece.
    let step = if comptime!(options.of_residual) { 3 * columns } else { 2 * columns };
    let at = CUBE_POS_Y as usize * step + column;
    let (sum, product) = sum_pair_over_block::<N>(sum, product);
    if y == 0 && column < columns {
        pieces[at] = sum;
        pieces[at + columns] = product;
    }
    if comptime!(options.of_residual) {
        let mut shared = Shared::<[Vector<f32, N>]>::new_slice(THREADS_PER_BLOCK);
        let residual_product = sum_over_block::<N>(residual_product, &mut shared);
        if y == 0 && column < columns {
            pieces[at + 2 * columns] = residual_product;
        }
    }
    if is_last_block(counters, CUBE_POS_X as usize, count_of_pieces) {
        let (sum, product) = sum_of_pieces::<N>(pieces, 0usize, step, count_of_pieces, columns);
        if y == 0 && column < columns {
            write_gradient::<N>(sum, product, statistics, weight_out, bias_out, factors, column, columns, inv_rows);
        }
        if comptime!(options.of_residual) {
            let (_, residual_product) = sum_of_pieces::<N>(pieces, columns, step, count_of_pieces, columns);
            if y == 0 && column < columns {
                write_gradient::<N>(
                    sum,
                    residual_product,
                    residual_statistics,
                    residual_weight_out,
                    residual_bias_out,
                    residual_factors,
                    column,
                    columns,
                    inv_rows,
                );
            }
        }
    }
}

/// A pass over a gradient that computes [`NormGradientResult`].
pub(super) struct GradientPass<'a> {
    /// The batch norm's input.
    pub(super) x: &'a Rows,
    pub(super) norm: &'a Deferred,
    /// The input of the residual's batch norm.
    pub(super) residual: Option<(&'a Rows, &'a Deferred)>,
    /// The gradient of the output or, if `pooled`, of its means over all pixels.
    pub(super) dy: &'a Rows,
    pub(super) pooled: bool,
    /// The output, if the activation's derivative is computed from it.
    pub(super) out: Option<&'a Rows>,
    /// Gets the gradient of the activation's input.
    pub(super) masked: Option<&'a Rows>,
}

impl GradientPass<'_> {
    /// Launches [`norm_gradient`]. Returns the values of the batch norm and of the residual's batch norm.
    pub(super) fn launch(self) -> (NormGradientResult, Option<NormGradientResult>) {
        let Self { x, norm, residual, dy, pooled, out, masked } = self;
        let (gradient, of_residual) = (NormGradientResult::empty(x), residual.map(|_| NormGradientResult::empty(x)));
        // The kernel needs an argument for each tensor. It does not use the argument of an absent tensor, so pass `x` or
        // `gradient`.
        let (second, third) = (out.unwrap_or(x), masked.unwrap_or(x));
        let (residual, residual_norm) = residual.unwrap_or((x, norm));
        let (statistics, residual_statistics) = (norm.statistics(), residual_norm.statistics());
        let NormGradientResult { affine: [weight, bias], factors } = &gradient;
        let NormGradientResult { affine: [second_weight, second_bias], factors: second_factors } =
            of_residual.as_ref().unwrap_or(&gradient);
        let vector =
            x.vector_size(&[dy, residual, second, third], &[statistics, residual_statistics, weight, bias, factors]);
        let blocks = Blocks::over(x, vector);
        let [piece, pieces] = blocks.pieces();
        let workspace = x.empty_columns(if of_residual.is_some() { 3 } else { 2 } * pieces);
        let [zeros, _] = counters(&workspace);
        let pixels = if pooled { x.rows() / dy.rows() } else { 1 };
        let sizes = GradientSizesLaunch::new(
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            residual.pitch(vector),
            dy.pitch(vector),
            second.pitch(vector),
            third.pitch(vector),
            pixels,
            1.0 / pixels as f32,
            piece,
            pieces,
            1.0 / x.rows() as f32,
        );
        let options = GradientOptions {
            from_output: out.is_some(),
            writes: masked.is_some(),
            of_residual: of_residual.is_some(),
            pooled,
            activation: norm.activation,
        };
        // SAFETY: matrices have the rows and columns that the kernel gets, the means a row for each image; statistics have four
        // vectors over the columns, factors three, the workspace one per piece and sum, and a tile of columns has a counter.
        unsafe {
            norm_gradient::launch_unchecked(
                x.client(),
                blocks.reduction(),
                blocks.dim(),
                vector,
                x.arg(),
                residual.arg(),
                dy.arg(),
                dy.arg(),
                second.arg(),
                all(statistics),
                all(residual_statistics),
                third.arg(),
                all(&workspace),
                all(weight),
                all(bias),
                all(factors),
                all(second_weight),
                all(second_bias),
                all(second_factors),
                all(&zeros),
                sizes,
                options,
                dtype_to_storage_type(x.dtype()),
            );
        }
        (gradient, of_residual)
    }
}
