//! Joins the channels of two images ([`Join`]), and computes both gradients: one launch for each pass.
//!
//! Images are rows of channels in vectors of `N`; a thread processes one column of vectors and several rows ([`Blocks`]). Checked
//! by `gpu_check --ops` (`benches/gpu_check/ops.rs`).

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::block_sums::thread_position;
use super::rows::{Blocks, Rows};
use crate::channels::Join;

/// Writes the joined images. `shared` and `old`, the left image's channels, are counted in vectors, as all columns are.
#[cube(launch_unchecked)]
fn join<F: Float, N: Size>(
    left: &[Vector<F, N>],
    right: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    rows: usize,
    columns: usize,
    shared: usize,
    old: usize,
    left_pitch: usize,
    right_pitch: usize,
    out_pitch: usize,
    #[comptime] relu: bool,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    if column >= columns {
        terminate!();
    }
    let mut row = CUBE_POS_Y as usize * depth + y;
    while row < rows {
        let mut value = Vector::<f32, N>::new(0.0);
        if column < old {
            value += Vector::<f32, N>::cast_from(left[row * left_pitch + column]);
        }
        if column < shared {
            value += Vector::<f32, N>::cast_from(right[row * right_pitch + column]);
        }
        if column >= old {
            value += Vector::<f32, N>::cast_from(right[row * right_pitch + column - old + shared]);
        }
        if comptime!(relu) {
            // `max` would drop NaN.
            value = select_many(value.less_than(&Vector::new(0.0)), Vector::new(0.0), value);
        }
        out[row * out_pitch + column] = Vector::cast_from(value);
        row += depth * CUBE_COUNT_Y as usize;
    }
}

/// Writes the gradients of both images. With `relu`, the gradient is masked by the output.
#[cube(launch_unchecked)]
fn join_gradients<F: Float, N: Size>(
    dy: &[Vector<F, N>],
    output: &[Vector<F, N>],
    left: &mut [Vector<F, N>],
    right: &mut [Vector<F, N>],
    rows: usize,
    columns: usize,
    shared: usize,
    old: usize,
    dy_pitch: usize,
    output_pitch: usize,
    left_pitch: usize,
    right_pitch: usize,
    #[comptime] relu: bool,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    if column >= columns {
        terminate!();
    }
    let mut row = CUBE_POS_Y as usize * depth + y;
    while row < rows {
        let mut gradient = Vector::<f32, N>::cast_from(dy[row * dy_pitch + column]);
        if comptime!(relu) {
            let value = Vector::<f32, N>::cast_from(output[row * output_pitch + column]);
            gradient = select_many(value.greater_than(&Vector::new(0.0)), gradient, Vector::new(0.0));
        }
        if column < old {
            left[row * left_pitch + column] = Vector::cast_from(gradient);
        }
        if column < shared {
            right[row * right_pitch + column] = Vector::cast_from(gradient);
        }
        if column >= old {
            right[row * right_pitch + column - old + shared] = Vector::cast_from(gradient);
        }
        row += depth * CUBE_COUNT_Y as usize;
    }
}

/// Returns the vector size of [`Rows::vector_size`], or 1 if 4 does not divide these numbers of channels.
fn vector_size(rows: &Rows, others: &[&Rows], channels: [usize; 2]) -> usize {
    if channels.iter().all(|channels| channels.is_multiple_of(4)) { rows.vector_size(others, &[]) } else { 1 }
}

/// Joins two images.
pub(super) fn forward(left: CubeTensor, right: CubeTensor, options: Join) -> CubeTensor {
    let (left, right) = (Rows::new(left), Rows::new(right));
    let ([batch, height, width, old], shared) = (left.dims(), options.shared);
    assert_eq!(right.dims()[..3], [batch, height, width], "joined images have the same size");
    let out = left.empty_images(batch, height, width, old + right.columns() - shared);
    let vector = vector_size(&left, &[&right, &out], [right.columns(), shared]);
    let blocks = Blocks::over(&out, vector);
    // SAFETY: all three matrices have the same rows, and `out` the columns of both, less the shared ones.
    unsafe {
        join::launch_unchecked(
            left.client(),
            blocks.elementwise(),
            blocks.dim(),
            vector,
            left.arg(),
            right.arg(),
            out.arg(),
            out.rows(),
            blocks.columns,
            shared / vector,
            old / vector,
            left.pitch(vector),
            right.pitch(vector),
            out.pitch(vector),
            options.relu,
            dtype_to_storage_type(out.dtype()),
        );
    }
    out.into_tensor()
}

/// Computes the gradients of both images, which have `old` and `new` channels.
pub(super) fn backward(
    output: Option<CubeTensor>,
    [old, new]: [usize; 2],
    shared: usize,
    dy: CubeTensor,
) -> [CubeTensor; 2] {
    let (dy, output) = (Rows::new(dy), output.map(Rows::new));
    let [batch, height, width, _] = dy.dims();
    let [left, right] = [old, new].map(|channels| dy.empty_images(batch, height, width, channels));
    let second = output.as_ref().unwrap_or(&dy);
    let vector = vector_size(&dy, &[second, &left, &right], [old, shared]);
    let blocks = Blocks::over(&dy, vector);
    // SAFETY: all matrices have the same rows, and `dy` and the output have the columns of both gradients, less the shared ones.
    unsafe {
        join_gradients::launch_unchecked(
            dy.client(),
            blocks.elementwise(),
            blocks.dim(),
            vector,
            dy.arg(),
            second.arg(),
            left.arg(),
            right.arg(),
            dy.rows(),
            blocks.columns,
            shared / vector,
            old / vector,
            dy.pitch(vector),
            second.pitch(vector),
            left.pitch(vector),
            right.pitch(vector),
            output.is_some(),
            dtype_to_storage_type(dy.dtype()),
        );
    }
    [left, right].map(Rows::into_tensor)
}
