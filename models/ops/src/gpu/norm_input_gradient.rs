//! The pass that computes the gradient of a batch norm's input, for convolutions that would read it once for each of their taps.
//!
//! Images are rows of channels in vectors of `N`; a thread processes one column of vectors and several rows ([`Blocks`]). Checked
//! by `gpu_check --ops --cases deferred` (`benches/gpu_check/deferred.rs`).

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::block_sums::thread_position;
use super::rows::{Blocks, Rows, all};

/// Computes the gradient of a batch norm's input: `dy · factors[0] + x · factors[1] + factors[2]`, where `dy` is the gradient of
/// the normalised values. `factors[3][columns]` are those of [`NormGradientResult`](super::side_results::NormGradientResult).
#[cube(launch_unchecked)]
fn input_gradient<F: Float, N: Size>(
    x: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    factors: &[Vector<f32, N>],
    dx: &mut [Vector<F, N>],
    rows: usize,
    columns: usize,
    pitch: usize,
    dy_pitch: usize,
    dx_pitch: usize,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    if column >= columns {
        terminate!();
    }
    let (of_dy, of_x) = (factors[column], factors[columns + column]);
    let constant = factors[2 * columns + column];
    let mut row = CUBE_POS_Y as usize * depth + y;
    while row < rows {
        let dy = Vector::<f32, N>::cast_from(dy[row * dy_pitch + column]);
        let x = Vector::<f32, N>::cast_from(x[row * pitch + column]);
        dx[row * dx_pitch + column] = Vector::cast_from(dy * of_dy + (x * of_x + constant));
        row += depth * CUBE_COUNT_Y as usize;
    }
}

/// Launches [`input_gradient`].
pub(super) fn launch_input_gradient(x: &Rows, dy: &Rows, factors: &CubeTensor) -> Rows {
    let dx = x.empty_like();
    let vector = x.vector_size(&[dy, &dx], &[factors]);
    let blocks = Blocks::over(x, vector);
    // SAFETY: matrices have the rows and columns that the kernel gets, and there are three vectors of factors.
    unsafe {
        input_gradient::launch_unchecked(
            x.client(),
            blocks.elementwise(),
            blocks.dim(),
            vector,
            x.arg(),
            dy.arg(),
            all(factors),
            dx.arg(),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            dy.pitch(vector),
            dx.pitch(vector),
            dtype_to_storage_type(x.dtype()),
        );
    }
    dx
}
