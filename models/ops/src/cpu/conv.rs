//! Convolution on channels-last images: the choice of the algorithm for each pass.
//!
//! Images and their gradients are f32 or bf16. Weights, biases and their gradients are f32; the kernels round weights to
//! the images' type. Sums are f32.
//!
//! The data gradient is a convolution too. With stride `s`, input pixels form `s · s` classes by their coordinates
//! modulo the stride. All pixels of a class have the same taps, at offsets of whole output pixels. Each class is
//! therefore one [`Igemm`] with its own taps, and no product is wasted on zeros between pixels.

use super::allocator::Buffer;
use super::igemm::{Igemm, ImageSize};
use super::kernel::{MicroKernels, Operand};
use super::packing::{Weights, pad_bias};
use super::{
    col2im, depthwise, group_conv, group_weight_grad, merge_groups, weight_grad as direct, winograd, winograd_grad,
};
use crate::shape::ConvShape;

/// Returns the instruction set for a convolution: vectors instead of AMX tile registers, where a group would fill at most half of
/// an AMX tile register.
fn isa_for<E: Operand>(isa: &'static MicroKernels<E>, shape: &ConvShape) -> &'static MicroKernels<E> {
    let [depth, columns] = shape.group_channels();
    let narrow = shape.groups > 1 && 2 * depth.max(columns) <= isa.cols;
    isa.amx.filter(|_| narrow).map_or(isa, |amx| amx.vectors)
}

/// Returns true if Winograd's algorithm is the fastest.
fn use_winograd<E: Operand>(isa: &'static MicroKernels<E>, shape: &ConvShape) -> bool {
    isa.amx.is_none() && winograd::fits(isa, shape)
}

/// Computes the output `[batch, oh, ow, out]` from `x` `[batch, h, w, in]` and weights in PyTorch's layout. Bias and
/// ReLU are optional.
pub(crate) fn forward<E: Operand>(
    isa: &'static MicroKernels<E>,
    shape: &ConvShape,
    x: &[E],
    weight: &[f32],
    bias: Option<&[f32]>,
    relu: bool,
) -> Buffer<E> {
    if let Some(merged) = merge_groups::merge(shape, isa) {
        return forward(isa, &merged.shape, x, &merged.block_diagonal(weight), bias, relu);
    }
    let isa = isa_for(isa, shape);
    let mut y = Buffer::new(shape.output_len());
    if depthwise::fits(shape) {
        depthwise::forward(shape, x, weight, bias, relu, &mut y);
        return y;
    }
    if use_winograd(isa, shape) {
        winograd::forward(isa, shape, x, weight, bias, relu, &mut y);
        return y;
    }
    igemm_forward(isa, shape, x, weight, bias, relu, &mut y);
    y
}

/// Computes the output as an implicit GEMM ([`Igemm`]).
pub(crate) fn igemm_forward<E: Operand>(
    isa: &'static MicroKernels<E>,
    shape: &ConvShape,
    x: &[E],
    weight: &[f32],
    bias: Option<&[f32]>,
    relu: bool,
    y: &mut [E],
) {
    let [depth, columns] = shape.group_channels();
    let (offsets, taps) = (shape.offsets(), shape.taps());
    let starts: Vec<usize> = (0..taps).collect();
    let weights = Weights {
        data: weight,
        groups: shape.groups,
        columns,
        depth,
        group_stride: columns * depth * taps,
        column_stride: depth * taps,
        depth_stride: taps,
        taps: &starts,
    };
    let bias = bias.map(|bias| pad_bias(isa, bias, shape.groups));
    Igemm {
        isa,
        batch: shape.batch,
        grid: shape.output,
        source: x,
        source_image: ImageSize { size: shape.input, channels: shape.channels[0] },
        source_stride: shape.stride,
        taps: &offsets,
        weights: &weights,
        target_image: ImageSize { size: shape.output, channels: shape.channels[1] },
        target_stride: [1, 1],
        target_first: [0, 0],
        bias: bias.as_deref(),
        relu,
    }
    .run(y);
}

/// Computes the data gradient `[batch, h, w, in]` from `dy` `[batch, oh, ow, out]`.
pub(crate) fn data_grad<E: Operand>(
    isa: &'static MicroKernels<E>,
    shape: &ConvShape,
    weight: &[f32],
    dy: &[E],
) -> Buffer<E> {
    if let Some(merged) = merge_groups::merge(shape, isa) {
        return data_grad(isa, &merged.shape, &merged.block_diagonal(weight), dy);
    }
    let isa = isa_for(isa, shape);
    let mut dx = Buffer::new(shape.input_len());
    if depthwise::fits(shape) {
        depthwise::data_grad(shape, weight, dy, &mut dx);
        return dx;
    }
    if use_winograd(isa, shape) {
        winograd::data_grad(isa, shape, weight, dy, &mut dx);
        return dx;
    }
    if col2im::fits(shape) {
        col2im::data_grad(isa, shape, weight, dy, &mut dx);
        return dx;
    }
    igemm_data_grad(isa, shape, weight, dy, &mut dx);
    dx
}

/// Computes the data gradient as one implicit GEMM ([`Igemm`]) for each class of input pixels.
pub(crate) fn igemm_data_grad<E: Operand>(
    isa: &'static MicroKernels<E>,
    shape: &ConvShape,
    weight: &[f32],
    dy: &[E],
    dx: &mut [E],
) {
    let classes = stride_classes(shape);
    if classes.iter().any(|class| class.taps.is_empty()) {
        dx.fill(E::zeroed());
    }
    let [columns, depth] = shape.group_channels();
    let taps = shape.taps();
    for class in classes.iter().filter(|class| !class.taps.is_empty()) {
        let weights = Weights {
            data: weight,
            groups: shape.groups,
            columns,
            depth,
            group_stride: depth * columns * taps,
            column_stride: taps,
            depth_stride: columns * taps,
            taps: &class.starts,
        };
        Igemm {
            isa,
            batch: shape.batch,
            grid: class.grid,
            source: dy,
            source_image: ImageSize { size: shape.output, channels: shape.channels[1] },
            source_stride: [1, 1],
            taps: &class.taps,
            weights: &weights,
            target_image: ImageSize { size: shape.input, channels: shape.channels[0] },
            target_stride: shape.stride,
            target_first: class.first,
            bias: None,
            relu: false,
        }
        .run(dx);
    }
}

/// Computes the weight gradient in PyTorch's layout.
pub(crate) fn weight_grad<E: Operand>(isa: &'static MicroKernels<E>, shape: &ConvShape, x: &[E], dy: &[E]) -> Buffer {
    if let Some(merged) = merge_groups::merge(shape, isa) {
        return merged.diagonal_blocks(&weight_grad(isa, &merged.shape, x, dy));
    }
    let isa = isa_for(isa, shape);
    if depthwise::fits(shape) {
        return depthwise::weight_grad(shape, x, dy);
    }
    if use_winograd(isa, shape) {
        return winograd_grad::weight_grad(isa, shape, x, dy);
    }
    let [depth, columns] = shape.group_channels();
    let narrow = (shape.groups > 1).then(|| group_conv::isa_for_group(isa, depth, columns)).flatten();
    // With 16 lanes these kernels are faster only for bf16, which they multiply in pairs.
    if let Some(narrow) = narrow.filter(|isa| isa.cols <= 8 || E::STEP > 1)
        && let Some(grad) = group_weight_grad::weight_grad(narrow, shape, x, dy)
    {
        return grad;
    }
    direct::weight_grad(isa, shape, x, dy)
}

/// Input pixels whose coordinates are equal modulo the stride.
struct StrideClass {
    /// The first of these pixels, `[row, column]`.
    first: [usize; 2],
    /// Number of these pixels on each axis.
    grid: [usize; 2],
    /// Offset of each tap to its output pixel.
    taps: Vec<[isize; 2]>,
    /// Index of each tap in a filter.
    starts: Vec<usize>,
}

fn stride_classes(shape: &ConvShape) -> Vec<StrideClass> {
    let mut classes = Vec::new();
    for ry in 0..shape.stride[0].min(shape.input[0]) {
        for rx in 0..shape.stride[1].min(shape.input[1]) {
            let first = [ry, rx];
            let grid = [0, 1].map(|i| (shape.input[i] - first[i]).div_ceil(shape.stride[i]));
            let mut found = Vec::new();
            for (tap, offset) in shape.offsets().into_iter().enumerate() {
                // Input pixel i contributes to output pixel o where i = o · stride + offset.
                let distance = [0, 1].map(|i| first[i] as isize - offset[i]);
                let stride = shape.stride.map(|s| s as isize);
                if distance[0] % stride[0] == 0 && distance[1] % stride[1] == 0 {
                    found.push(([distance[0] / stride[0], distance[1] / stride[1]], tap));
                }
            }
            found.sort_unstable();
            let (taps, starts) = found.into_iter().unzip();
            classes.push(StrideClass { first, grid, taps, starts });
        }
    }
    classes
}
