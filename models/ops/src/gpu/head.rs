//! Kernels of a classifier's head: the mean over all pixels, and a bias's gradient. One launch each.
//!
//! Images are rows of channels in vectors of `N`. For a mean, a block processes one image; for a bias, a piece of all rows, and the
//! last block adds up the pieces. Checked by `gpu_check --ops` (`benches/gpu_check/ops.rs`, `convolutions.rs`).

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::block_sums::{sum_over_block, thread_position};
use super::counters::{counters, is_last_block};
use super::rows::{Blocks, Rows, THREADS_PER_BLOCK, all};

/// Computes the mean over the pixels of an image: `out[images][columns]`. The grid's second axis is the image.
#[cube(launch_unchecked)]
fn mean_of_pixels<F: Float, N: Size>(
    x: &[Vector<F, N>],
    out: &mut [Vector<f32, N>],
    pixels: usize,
    columns: usize,
    pitch: usize,
    out_pitch: usize,
    inv_pixels: f32,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    let image = CUBE_POS_Y as usize;
    let mut sum = Vector::<f32, N>::new(0.0);
    if column < columns {
        let mut pixel = y;
        while pixel < pixels {
            sum += Vector::<f32, N>::cast_from(x[(image * pixels + pixel) * pitch + column]);
            pixel += depth;
        }
    }
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(THREADS_PER_BLOCK);
    let sum = sum_over_block::<N>(sum, &mut shared);
    if y == 0 && column < columns {
        out[image * out_pitch + column] = sum * Vector::new(inv_pixels);
    }
}

/// Writes to each pixel of an image its share of the mean's gradient, plus the `addend` if there is one.
#[cube(launch_unchecked)]
fn mean_gradient<F: Float, N: Size>(
    grad: &[Vector<f32, N>],
    addend: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    rows: usize,
    pixels: usize,
    columns: usize,
    grad_pitch: usize,
    addend_pitch: usize,
    pitch: usize,
    inv_pixels: f32,
    #[comptime] add: bool,
    #[define(F)] _dtype: ElemType,
) {
    let (column, y, _, depth) = thread_position();
    if column >= columns {
        terminate!();
    }
    let mut row = CUBE_POS_Y as usize * depth + y;
    while row < rows {
        let mut value = grad[row / pixels * grad_pitch + column] * Vector::new(inv_pixels);
        if comptime!(add) {
            value += Vector::<f32, N>::cast_from(addend[row * addend_pitch + column]);
        }
        dx[row * pitch + column] = Vector::cast_from(value);
        row += depth * CUBE_COUNT_Y as usize;
    }
}

/// Adds up the rows of each column: `total[columns]`. Each block writes `pieces[piece][columns]`; the last block adds these up.
#[cube(launch_unchecked)]
fn sum_of_rows<F: Float, N: Size>(
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
    let (column, y, _, depth) = thread_position();
    let start = CUBE_POS_Y as usize * piece;
    let end = min(start + piece, rows);
    let mut sum = Vector::<f32, N>::new(0.0);
    if column < columns {
        let mut row = start + y;
        while row < end {
            sum += Vector::<f32, N>::cast_from(x[row * pitch + column]);
            row += depth;
        }
    }
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(THREADS_PER_BLOCK);
    let sum = sum_over_block::<N>(sum, &mut shared);
    if y == 0 && column < columns {
        pieces[CUBE_POS_Y as usize * columns + column] = sum;
    }
    if is_last_block(counters, CUBE_POS_X as usize, count_of_pieces) {
        let mut sum = Vector::<f32, N>::new(0.0);
        if column < columns {
            let mut index = y;
            while index < count_of_pieces {
                sum += pieces[index * columns + column];
                index += depth;
            }
        }
        let sum = sum_over_block::<N>(sum, &mut shared);
        if y == 0 && column < columns {
            total[column] = sum;
        }
    }
}

/// See [`global_avg_pool`](crate::global_avg_pool).
pub(super) fn global_avg_pool(x: CubeTensor) -> CubeTensor {
    let x = Rows::new(x);
    let [batch, height, width, channels] = x.dims();
    let out = x.empty_features(batch, channels, DType::F32);
    let vector = x.vector_size(&[&out], &[]);
    let blocks = Blocks::over(&x, vector);
    // SAFETY: `x` has the pixels of `batch` images, and `out` a row for each image.
    unsafe {
        mean_of_pixels::launch_unchecked(
            x.client(),
            blocks.per_image(batch),
            blocks.dim(),
            vector,
            x.arg(),
            out.arg(),
            height * width,
            blocks.columns,
            x.pitch(vector),
            out.pitch(vector),
            1.0 / (height * width) as f32,
            dtype_to_storage_type(x.dtype()),
        );
    }
    out.into_tensor()
}

/// Computes the gradient of images of `[height, width]` pixels and this element type, plus the `addend`.
pub(super) fn global_avg_pool_gradient(
    [height, width]: [usize; 2],
    dtype: DType,
    grad: CubeTensor,
    addend: Option<CubeTensor>,
) -> CubeTensor {
    let (grad, addend) = (Rows::new(grad), addend.map(Rows::new));
    let dx = grad.empty_images_of(grad.rows(), height, width, grad.columns(), dtype);
    let second = addend.as_ref().unwrap_or(&dx);
    let vector = dx.vector_size(&[&grad, second], &[]);
    let blocks = Blocks::over(&dx, vector);
    // SAFETY: `dx` and the addend have the pixels of as many images as `grad` has rows. Without an addend, the kernel does not read
    // it.
    unsafe {
        mean_gradient::launch_unchecked(
            dx.client(),
            blocks.elementwise(),
            blocks.dim(),
            vector,
            grad.arg(),
            second.arg(),
            dx.arg(),
            dx.rows(),
            height * width,
            blocks.columns,
            grad.pitch(vector),
            second.pitch(vector),
            dx.pitch(vector),
            1.0 / (height * width) as f32,
            addend.is_some(),
            dtype_to_storage_type(dtype),
        );
    }
    dx.into_tensor()
}

/// Adds up the rows of a gradient, f32: the gradient of a bias.
pub(super) fn bias_gradient(grad: CubeTensor) -> CubeTensor {
    let grad = Rows::new(grad);
    let total = grad.empty_columns(1);
    let vector = grad.vector_size(&[], &[]);
    let blocks = Blocks::over(&grad, vector);
    let [piece, pieces] = blocks.pieces();
    let [zeros, _] = counters(&total);
    // SAFETY: there is a row for each piece, an element for each column, and a counter for each tile of columns.
    unsafe {
        sum_of_rows::launch_unchecked(
            grad.client(),
            blocks.reduction(),
            blocks.dim(),
            vector,
            grad.arg(),
            all(&grad.empty_columns(pieces)),
            all(&total),
            all(&zeros),
            grad.rows(),
            blocks.columns,
            grad.pitch(vector),
            piece,
            pieces,
            dtype_to_storage_type(grad.dtype()),
        );
    }
    total
}
