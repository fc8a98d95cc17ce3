//! The weight gradient of convolutions that `implicit_gemm` does not compute, and of all depthwise convolutions: the launches of
//! `weight_kernels.rs`, or burn's kernels for wide groups and large windows.
//!
//! burn has no kernel for the weight gradient of a grouped convolution. It runs group by group, with about six launches each:
//! thousands of launches in a training step of RegNet. For depthwise convolutions, burn uses few threads, each of which adds up
//! all pixels of the batch.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::{FloatTensorOps, ModuleOps};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::{numeric::empty_device_contiguous_dtype, permute_nhwc_to_nchw};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::conv::{MAX_TAPS, NARROW, burn_options, cast};
use super::direct;
use super::direct::ConvSource;
use super::rows::{Rows, THREADS_PER_BLOCK, all, arg};
use super::weight_kernels::{SizesLaunch, Taps, add_pieces, depthwise_pieces, grouped_pieces};
use crate::extension::ConvOptions;

/// Computes the weight gradient in type `dtype`, with burn's kernels for wide groups and large windows.
pub(super) fn weight_gradient(
    input: CubeTensor,
    weight: CubeTensor,
    grad: CubeTensor,
    options: &ConvOptions,
    dtype: DType,
) -> CubeTensor {
    let [_, each, height, width]: [usize; 4] = weight.shape().dims();
    if options.groups == 1 || each > NARROW || height * width > MAX_TAPS {
        return cast(Cube::conv2d_weight_backward(input, weight, grad, burn_options(options)), dtype);
    }
    grouped_weight_gradient(&Rows::new(input), &weight, &Rows::new(grad), [ConvSource::Plain; 2], options, dtype)
}

/// Computes the weight gradient `[out, in / groups, height, width]` in type `result`, channels-last in memory. `sources`: what the
/// kernels compute from `x` and from `dy` while they load them.
pub(super) fn grouped_weight_gradient(
    x: &Rows,
    weight: &CubeTensor,
    dy: &Rows,
    sources: [ConvSource<'_>; 2],
    options: &ConvOptions,
    result: DType,
) -> CubeTensor {
    let [outputs, inputs, kernel_height, kernel_width]: [usize; 4] = weight.shape().dims();
    let depthwise = direct::is_depthwise(weight.shape().dims(), options);
    let (workspace, pieces) = weight_gradient_pieces(x, weight, dy, sources, options);
    // A depthwise gradient has its taps first.
    let shape = if depthwise {
        [1, kernel_height, kernel_width, outputs]
    } else {
        [outputs, kernel_height, kernel_width, inputs]
    };
    let sum = empty_device_contiguous_dtype(x.client().clone(), weight.device.clone(), Shape::from(shape), result);
    sum_pieces(&workspace, &sum, pieces);
    let sum = if depthwise { Cube::float_swap_dims(sum, 0, 3) } else { sum };
    permute_nhwc_to_nchw(sum)
}

/// Computes the weight gradient of each piece of the output's pixels, f32, in the order of `depthwise_pieces` or `grouped_pieces`.
/// Returns the gradients and the number of pieces, which depends on the shapes alone.
fn weight_gradient_pieces(
    x: &Rows,
    weight: &CubeTensor,
    dy: &Rows,
    [of_x, of_dy]: [ConvSource<'_>; 2],
    options: &ConvOptions,
) -> (CubeTensor, usize) {
    let [outputs, inputs, kernel_height, kernel_width]: [usize; 4] = weight.shape().dims();
    let ([_, height, width, _], [batch, out_height, out_width, _]) = (x.dims(), dy.dims());
    let depthwise = direct::is_depthwise(weight.shape().dims(), options);
    // Vector of the channels that a thread processes.
    let vector = if depthwise {
        let factors: Vec<_> = [of_x, of_dy].into_iter().filter_map(ConvSource::factors).collect();
        x.vector_size(&[dy, of_dy.norm_input().unwrap_or(dy)], &factors)
    } else {
        x.vector_of(inputs)
    };
    let (columns, vectors) = if depthwise { (outputs / vector, 1) } else { (outputs, inputs / vector) };
    let lanes = columns.next_power_of_two().min(32);
    let (tiles, depth) = (columns.div_ceil(lanes), THREADS_PER_BLOCK / lanes);
    let (pixels, taps) = (batch * out_height * out_width, kernel_height * kernel_width);
    /// Number of blocks that occupies a large GPU.
    const BLOCKS: usize = 1024;
    let piece = pixels.div_ceil((BLOCKS / (tiles * vectors)).clamp(1, 128)).next_multiple_of(depth).max(depth * 4);
    let pieces = pixels.div_ceil(piece);
    let client = x.client();
    let length = outputs * taps * inputs;
    let shape = Shape::from([pieces, 1, 1, length]);
    let workspace = empty_device_contiguous_dtype(client.clone(), weight.device.clone(), shape, DType::F32);
    let count = CubeCount::Static(tiles as u32, pieces as u32, vectors as u32);
    let dim = CubeDim::new_2d(lanes as u32, depth as u32);
    let dtype = dtype_to_storage_type(x.dtype());
    let sizes = SizesLaunch::new(
        pixels,
        out_height,
        out_width,
        height,
        width,
        x.pitch(vector),
        if depthwise { dy.pitch(vector) } else { dy.pitch(1) },
        piece,
    );
    let windows = Taps::of(weight, options);
    // SAFETY: the kernels stay within their size arguments, which are those of the tensors.
    unsafe {
        if depthwise {
            depthwise_pieces::launch_unchecked(
                client,
                count,
                dim,
                vector,
                x.arg(),
                // The kernel reads the factors only if it applies a batch norm (`NormOnLoad`).
                all(of_x.factors().unwrap_or(&workspace)),
                dy.arg(),
                of_dy.norm_input().unwrap_or(dy).arg(),
                all(of_dy.factors().unwrap_or(&workspace)),
                arg(&workspace, pieces * length),
                columns,
                sizes,
                of_x.norm_on_load(),
                of_dy.norm_on_load(),
                windows,
                dtype,
            );
        } else {
            let each = outputs / options.groups;
            grouped_pieces::launch_unchecked(
                client,
                count,
                dim,
                vector,
                x.arg(),
                dy.arg(),
                arg(&workspace, pieces * length),
                outputs,
                each,
                sizes,
                vectors,
                windows,
                dtype,
            );
        }
    }
    (workspace, pieces)
}

/// Sums `[pieces, …]` over the pieces, in order, to `sum`.
fn sum_pieces(pieces: &CubeTensor, sum: &CubeTensor, count: usize) {
    let length = sum.meta.num_elements();
    let vector = if length.is_multiple_of(4) { 4 } else { 1 };
    // As many threads for each column as there are pieces, at most half a block.
    let depth = count.next_power_of_two().min(THREADS_PER_BLOCK / 2);
    let lanes = THREADS_PER_BLOCK / depth;
    let grid = CubeCount::Static((length / vector).div_ceil(lanes) as u32, 1, 1);
    let dim = CubeDim::new_2d(lanes as u32, depth as u32);
    // SAFETY: the kernel stays within its size arguments, which are those of the tensors.
    unsafe {
        add_pieces::launch_unchecked(
            &sum.client,
            grid,
            dim,
            vector,
            all(pieces),
            all(sum),
            length / vector,
            count,
            dtype_to_storage_type(sum.dtype),
        );
    }
}
