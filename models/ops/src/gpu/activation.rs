//! Elementwise activations: one launch for each pass, computed in f32.
//!
//! Images are rows of channels in vectors of `N`; a thread processes one column of vectors and several rows ([`Blocks`]). Checked
//! by `gpu_check --ops` (`benches/gpu_check/ops.rs`).

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rows::{Blocks, Rows};
use crate::extension::Activation;

/// Computes `1 / (1 + e^-z)`.
#[cube]
fn logistic<N: Size>(z: Vector<f32, N>) -> Vector<f32, N> {
    Vector::new(1.0) / (Vector::new(1.0) + (-z).exp())
}

/// Computes the normal distribution's Φ.
#[cube]
fn normal<N: Size>(z: Vector<f32, N>) -> Vector<f32, N> {
    Vector::new(0.5) * (Vector::new(1.0) + (z * Vector::new(std::f32::consts::FRAC_1_SQRT_2)).erf())
}

/// Applies an activation.
#[cube]
pub(super) fn activation_value<N: Size>(z: Vector<f32, N>, #[comptime] activation: Activation) -> Vector<f32, N> {
    match comptime!(activation) {
        Activation::Identity => z,
        // `max` would drop NaN.
        Activation::Relu => select_many(z.less_than(&Vector::new(0.0)), Vector::new(0.0), z),
        Activation::Relu6 => {
            let positive = select_many(z.less_than(&Vector::new(0.0)), Vector::new(0.0), z);
            select_many(positive.greater_than(&Vector::new(6.0)), Vector::new(6.0), positive)
        }
        Activation::Sigmoid => logistic::<N>(z),
        Activation::Silu => z * logistic::<N>(z),
        Activation::Gelu => z * normal::<N>(z),
    }
}

/// Computes `dy` times the derivative at `z`. For ReLU, `z` may be the output.
#[cube]
pub(super) fn activation_grad<N: Size>(
    z: Vector<f32, N>,
    dy: Vector<f32, N>,
    #[comptime] activation: Activation,
) -> Vector<f32, N> {
    match comptime!(activation) {
        Activation::Identity => dy,
        Activation::Relu => select_many(z.greater_than(&Vector::new(0.0)), dy, Vector::new(0.0)),
        Activation::Relu6 => {
            let below = select_many(z.less_than(&Vector::new(6.0)), dy, Vector::new(0.0));
            select_many(z.greater_than(&Vector::new(0.0)), below, Vector::new(0.0))
        }
        Activation::Sigmoid => {
            let s = logistic::<N>(z);
            dy * s * (Vector::new(1.0) - s)
        }
        Activation::Silu => {
            let s = logistic::<N>(z);
            dy * s * (Vector::new(1.0) + z * (Vector::new(1.0) - s))
        }
        Activation::Gelu => {
            // 1 / √(2π)
            let density = Vector::new(0.398_942_3) * (Vector::new(-0.5) * z * z).exp();
            dy * (normal::<N>(z) + z * density)
        }
    }
}

/// Applies an activation to `x`. With `backward`, computes `dy` times the derivative at `x` instead.
#[cube(launch_unchecked)]
fn activate<F: Float, N: Size>(
    x: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    rows: usize,
    columns: usize,
    pitch: usize,
    dy_pitch: usize,
    out_pitch: usize,
    #[comptime] backward: bool,
    #[comptime] activation: Activation,
    #[define(F)] _dtype: ElemType,
) {
    let column = CUBE_POS_X as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    if column >= columns {
        terminate!();
    }
    let mut row = CUBE_POS_Y as usize * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    while row < rows {
        let z = Vector::<f32, N>::cast_from(x[row * pitch + column]);
        let value = if comptime!(backward) {
            activation_grad::<N>(z, Vector::<f32, N>::cast_from(dy[row * dy_pitch + column]), activation)
        } else {
            activation_value::<N>(z, activation)
        };
        out[row * out_pitch + column] = Vector::cast_from(value);
        row += CUBE_DIM_Y as usize * CUBE_COUNT_Y as usize;
    }
}

fn launch(x: Rows, dy: Option<Rows>, activation: Activation) -> CubeTensor {
    let out = x.empty_like();
    let vector = x.vector_size(&[dy.as_ref().unwrap_or(&x), &out], &[]);
    let blocks = Blocks::over(&x, vector);
    if x.rows() > 0 {
        let second = dy.as_ref().unwrap_or(&x);
        // SAFETY: all three matrices have the rows and columns that the kernel gets.
        unsafe {
            activate::launch_unchecked(
                x.client(),
                blocks.elementwise(),
                blocks.dim(),
                vector,
                x.arg(),
                second.arg(),
                out.arg(),
                x.rows(),
                blocks.columns,
                x.pitch(vector),
                second.pitch(vector),
                out.pitch(vector),
                dy.is_some(),
                activation,
                dtype_to_storage_type(x.dtype()),
            );
        }
    }
    out.into_tensor()
}

pub(super) fn forward(x: CubeTensor, activation: Activation) -> CubeTensor {
    launch(Rows::new(x), None, activation)
}

pub(super) fn backward(x: CubeTensor, dy: CubeTensor, activation: Activation) -> CubeTensor {
    launch(Rows::new(x), Some(Rows::new(dy)), activation)
}
