//! The output of deferred batch norms: [`apply`] reads each matrix once. Matrices and threads are those of `norm_kernels.rs`.
//! Checked by `gpu_check --ops --cases deferred` (`benches/gpu_check/deferred.rs`).

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use cubecl::prelude::*;

use super::activation::activation_value;
use super::block_sums::{sum_over_block, thread_position};
use super::deferred::Deferred;
use super::rows::{Blocks, Rows, THREADS_PER_BLOCK, all};
use crate::extension::Activation;

/// Computes `activation(x · scale + shift + residual)`. With `norm_of_residual`, normalises the residual too. Statistics are
/// `[4][columns]`, see [`DeferredNorm`](crate::deferred::DeferredNorm). If `pooled`, also computes the means over the `pixels` of
/// each image, `means[images][columns]`; the grid's second axis is then the image. `inv_pixels` is `1 / pixels`.
#[cube(launch_unchecked)]
fn apply<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &[Vector<F, N>],
    statistics: &[Vector<f32, N>],
    residual_statistics: &[Vector<f32, N>],
    out: &mut [Vector<F, N>],
    means: &mut [Vector<f32, N>],
    rows: usize,
    columns: usize,
    pitch: usize,
    residual_pitch: usize,
    out_pitch: usize,
    means_pitch: usize,
    pixels: usize,
    inv_pixels: f32,
    #[comptime] has_residual: bool,
    #[comptime] norm_of_residual: bool,
    #[comptime] pooled: bool,
    #[comptime] writes: bool,
    #[comptime] activation: Activation,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    let block = CUBE_POS_Y as usize;
    let mut row = if comptime!(pooled) { block * pixels + y } else { block * depth + y };
    let end = if comptime!(pooled) { (block + 1) * pixels } else { rows };
    let step = if comptime!(pooled) { depth } else { depth * CUBE_COUNT_Y as usize };
    let mut sum = Vector::<f32, N>::new(0.0);
    if column < columns {
        let (scale, shift) = (statistics[2 * columns + column], statistics[3 * columns + column]);
        let mut residual_scale = Vector::<f32, N>::new(1.0);
        let mut residual_shift = Vector::<f32, N>::new(0.0);
        if comptime!(norm_of_residual) {
            residual_scale = residual_statistics[2 * columns + column];
            residual_shift = residual_statistics[3 * columns + column];
        }
        while row < end {
            let mut z = Vector::<f32, N>::cast_from(x[row * pitch + column]) * scale + shift;
            if comptime!(has_residual) {
                let other = Vector::<f32, N>::cast_from(residual[row * residual_pitch + column]);
                if comptime!(norm_of_residual) {
                    z += other * residual_scale + residual_shift;
                } else {
                    z += other;
                }
            }
            let value = Vector::<F, N>::cast_from(activation_value::<N>(z, activation));
            if comptime!(writes) {
                out[row * out_pitch + column] = value;
            }
            if comptime!(pooled) {
                sum += Vector::<f32, N>::cast_from(value);
            }
            row += step;
        }
    }
    if comptime!(pooled) {
        let mut shared = Shared::<[Vector<f32, N>]>::new_slice(THREADS_PER_BLOCK);
        let sum = sum_over_block::<N>(sum, &mut shared);
        if y == 0 && column < columns {
            means[block * means_pitch + column] = sum * Vector::new(inv_pixels);
        }
    }
}

/// Results of a pass that computes the output of a batch norm.
pub(super) struct Applied {
    /// The output; `None` if only the means are required.
    pub(super) out: Option<Rows>,
    /// The means over the pixels of each image, f32.
    pub(super) means: Option<Rows>,
}

/// Computes the output of a batch norm and, if `pooled`, its mean over all pixels. Then it writes the output only if the backward
/// pass reads it (`keeps`).
pub(super) fn launch_apply(
    x: &Rows,
    residual: Option<&Rows>,
    norm: &Deferred,
    of_residual: Option<&Deferred>,
    [pooled, keeps]: [bool; 2],
) -> Applied {
    let [batch, height, width, channels] = x.dims();
    let out = (!pooled || keeps).then(|| x.empty_like());
    let means = pooled.then(|| x.empty_features(batch, channels, DType::F32));
    // The kernel needs an argument for each tensor. It does not use the argument of an absent tensor, so pass `x`.
    let (second, third, fourth) = (residual.unwrap_or(x), out.as_ref().unwrap_or(x), means.as_ref().unwrap_or(x));
    let statistics = norm.statistics();
    let residual_statistics = of_residual.map_or(statistics, Deferred::statistics);
    let vector = x.vector_size(&[second, third, fourth], &[statistics, residual_statistics]);
    let blocks = Blocks::over(x, vector);
    // SAFETY: matrices have the rows and columns that the kernel gets, statistics four vectors over the columns, and `x` the pixels
    // of as many images as there are means.
    unsafe {
        apply::launch_unchecked(
            x.client(),
            if pooled { blocks.per_image(batch) } else { blocks.elementwise() },
            blocks.dim(),
            vector,
            x.arg(),
            second.arg(),
            all(statistics),
            all(residual_statistics),
            third.arg(),
            fourth.arg(),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            second.pitch(vector),
            third.pitch(vector),
            fourth.pitch(vector),
            height * width,
            1.0 / (height * width) as f32,
            residual.is_some(),
            of_residual.is_some(),
            pooled,
            out.is_some(),
            norm.activation,
            dtype_to_storage_type(x.dtype()),
        );
    }
    Applied { out, means }
}
