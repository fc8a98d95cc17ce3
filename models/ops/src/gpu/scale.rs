//! Scaling of each channel of each image, with both gradients: one launch for each pass, computed in f32.
//!
//! Images are rows of channels in vectors of `N`, factors `[images][columns]`. Forward, a thread processes several rows of any
//! image; backward, a block processes one image. Checked by `gpu_check --ops` (`benches/gpu_check/ops.rs`).

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::block_sums::{sum_over_block, thread_position};
use super::rows::{Blocks, Rows, THREADS_PER_BLOCK};

/// Multiplies the pixels of an image by the image's factors.
#[cube(launch_unchecked)]
fn scale<F: Float, N: Size>(
    x: &[Vector<F, N>],
    factors: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    rows: usize,
    pixels: usize,
    columns: usize,
    pitch: usize,
    factors_pitch: usize,
    out_pitch: usize,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    if column >= columns {
        terminate!();
    }
    let mut row = CUBE_POS_Y as usize * depth + y;
    while row < rows {
        let factor = Vector::<f32, N>::cast_from(factors[row / pixels * factors_pitch + column]);
        out[row * out_pitch + column] =
            Vector::cast_from(Vector::<f32, N>::cast_from(x[row * pitch + column]) * factor);
        row += depth * CUBE_COUNT_Y as usize;
    }
}

/// Computes `dx`, the gradient `dy` times the factors, and the factors' gradient, the sum of `dy · x` over the pixels of an image.
/// The grid's second axis is the image.
#[cube(launch_unchecked)]
fn scale_gradients<F: Float, N: Size>(
    x: &[Vector<F, N>],
    factors: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    dfactors: &mut [Vector<F, N>],
    pixels: usize,
    columns: usize,
    pitch: usize,
    factors_pitch: usize,
    dy_pitch: usize,
    dx_pitch: usize,
    dfactors_pitch: usize,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    let image = CUBE_POS_Y as usize;
    let mut sum = Vector::<f32, N>::new(0.0);
    if column < columns {
        let factor = Vector::<f32, N>::cast_from(factors[image * factors_pitch + column]);
        let mut row = image * pixels + y;
        let end = (image + 1) * pixels;
        while row < end {
            let gradient = Vector::<f32, N>::cast_from(dy[row * dy_pitch + column]);
            dx[row * dx_pitch + column] = Vector::cast_from(gradient * factor);
            sum += gradient * Vector::<f32, N>::cast_from(x[row * pitch + column]);
            row += depth;
        }
    }
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(THREADS_PER_BLOCK);
    let sum = sum_over_block::<N>(sum, &mut shared);
    if y == 0 && column < columns {
        dfactors[image * dfactors_pitch + column] = Vector::cast_from(sum);
    }
}

/// See [`scale_channels`](crate::scale_channels).
pub(super) fn scale_channels(x: CubeTensor, factors: CubeTensor) -> CubeTensor {
    let (x, factors) = (Rows::new(x), Rows::new(factors));
    let out = x.empty_like();
    let [_, height, width, _] = x.dims();
    let vector = x.vector_size(&[&factors, &out], &[]);
    let blocks = Blocks::over(&x, vector);
    // SAFETY: `x` and `out` have the pixels of as many images as `factors` has rows, and all have the same columns.
    unsafe {
        scale::launch_unchecked(
            x.client(),
            blocks.elementwise(),
            blocks.dim(),
            vector,
            x.arg(),
            factors.arg(),
            out.arg(),
            x.rows(),
            height * width,
            blocks.columns,
            x.pitch(vector),
            factors.pitch(vector),
            out.pitch(vector),
            dtype_to_storage_type(x.dtype()),
        );
    }
    out.into_tensor()
}

/// Computes the gradients of images and factors.
pub(super) fn scale_channels_gradients(x: CubeTensor, factors: CubeTensor, dy: CubeTensor) -> [CubeTensor; 2] {
    let (x, factors, dy) = (Rows::new(x), Rows::new(factors), Rows::new(dy));
    let (dx, dfactors) = (x.empty_like(), factors.empty_features(factors.rows(), factors.columns(), factors.dtype()));
    let [batch, height, width, _] = x.dims();
    let vector = x.vector_size(&[&factors, &dy, &dx, &dfactors], &[]);
    let blocks = Blocks::over(&x, vector);
    // SAFETY: `x`, `dy` and `dx` have the pixels of `batch` images, and `factors` and `dfactors` a row for each image.
    unsafe {
        scale_gradients::launch_unchecked(
            x.client(),
            blocks.per_image(batch),
            blocks.dim(),
            vector,
            x.arg(),
            factors.arg(),
            dy.arg(),
            dx.arg(),
            dfactors.arg(),
            height * width,
            blocks.columns,
            x.pitch(vector),
            factors.pitch(vector),
            dy.pitch(vector),
            dx.pitch(vector),
            dfactors.pitch(vector),
            dtype_to_storage_type(x.dtype()),
        );
    }
    [dx, dfactors].map(Rows::into_tensor)
}
