//! Activations of single values, one launch each way; computed in f32.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::extension::Activation;
use super::rows::{Blocks, Rows};

#[cube]
fn logistic<N: Size>(z: Vector<f32, N>) -> Vector<f32, N> {
    Vector::new(1.0) / (Vector::new(1.0) + (-z).exp())
}

#[cube]
pub(super) fn activated<N: Size>(z: Vector<f32, N>, #[comptime] activation: Activation) -> Vector<f32, N> {
    match comptime!(activation) {
        Activation::Identity => z,
        // not the larger one, which would swallow NaN
        Activation::Relu => select_many(z.less_than(&Vector::new(0.0)), Vector::new(0.0), z),
        Activation::Sigmoid => logistic::<N>(z),
        Activation::Swish => z * logistic::<N>(z),
    }
}

/// `dy` times the slope at `z`; a ReLU's result tells its slope as well.
#[cube]
pub(super) fn sloped<N: Size>(
    z: Vector<f32, N>,
    dy: Vector<f32, N>,
    #[comptime] activation: Activation,
) -> Vector<f32, N> {
    match comptime!(activation) {
        Activation::Identity => dy,
        Activation::Relu => select_many(z.greater_than(&Vector::new(0.0)), dy, Vector::new(0.0)),
        Activation::Sigmoid => {
            let s = logistic::<N>(z);
            dy * s * (Vector::new(1.0) - s)
        }
        Activation::Swish => {
            let s = logistic::<N>(z);
            dy * s * (Vector::new(1.0) + z * (Vector::new(1.0) - s))
        }
    }
}

/// The activation of `x`, or with `slopes` the slope at `x` times `dy`.
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
    #[comptime] slopes: bool,
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
        let value = if comptime!(slopes) {
            sloped::<N>(z, Vector::<f32, N>::cast_from(dy[row * dy_pitch + column]), activation)
        } else {
            activated::<N>(z, activation)
        };
        out[row * out_pitch + column] = Vector::cast_from(value);
        row += CUBE_DIM_Y as usize * CUBE_COUNT_Y as usize;
    }
}

fn launch(x: Rows, dy: Option<Rows>, activation: Activation) -> CubeTensor {
    let out = x.output();
    let vector = x.vector(&[dy.as_ref().unwrap_or(&x), &out], &[]);
    let blocks = Blocks::over(&x, vector);
    if x.rows() > 0 {
        let second = dy.as_ref().unwrap_or(&x);
        // SAFETY: all three have the rows and columns that the kernel is told.
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
    launch(Rows::of(x), None, activation)
}

pub(super) fn backward(x: CubeTensor, dy: CubeTensor, activation: Activation) -> CubeTensor {
    launch(Rows::of(x), Some(Rows::of(dy)), activation)
}
