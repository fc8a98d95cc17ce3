//! Convolution on channels-last bf16 images: the choice of the algorithm for each pass.

use half::bf16;

use crate::cpu::allocator::Buffer;
use crate::cpu::kernel::Isa;
use crate::cpu::shape::ConvShape;
use crate::cpu::{col2im, conv, depthwise, grouped, weight_grad as direct};

/// Computes the output `[batch, oh, ow, out]` from `x` `[batch, h, w, in]` and weights in PyTorch's layout. Bias and
/// ReLU are optional.
pub(crate) fn forward(
    isa: &'static Isa<bf16>,
    shape: &ConvShape,
    x: &[bf16],
    weight: &[f32],
    bias: Option<&[f32]>,
    relu: bool,
) -> Buffer<bf16> {
    if let Some(merged) = grouped::merge(shape, isa) {
        return forward(isa, &merged.shape, x, &merged.block_diagonal(weight), bias, relu);
    }
    let mut y = Buffer::new(shape.output_len());
    if depthwise::fits(shape) {
        depthwise::forward(shape, x, weight, bias, relu, &mut y);
        return y;
    }
    conv::direct_forward(isa, shape, x, weight, bias, relu, &mut y);
    y
}

/// Computes the data gradient `[batch, h, w, in]` from `dy` `[batch, oh, ow, out]`.
pub(crate) fn data_grad(isa: &'static Isa<bf16>, shape: &ConvShape, weight: &[f32], dy: &[bf16]) -> Buffer<bf16> {
    if let Some(merged) = grouped::merge(shape, isa) {
        return data_grad(isa, &merged.shape, &merged.block_diagonal(weight), dy);
    }
    let mut dx = Buffer::new(shape.input_len());
    if depthwise::fits(shape) {
        depthwise::data_grad(shape, weight, dy, &mut dx);
        return dx;
    }
    if col2im::fits(shape) {
        col2im::data_grad(isa, shape, weight, dy, &mut dx);
        return dx;
    }
    conv::direct_data_grad(isa, shape, weight, dy, &mut dx);
    dx
}

/// Computes the weight gradient in PyTorch's layout.
pub(crate) fn weight_grad(isa: &'static Isa<bf16>, shape: &ConvShape, x: &[bf16], dy: &[bf16]) -> Buffer {
    if let Some(merged) = grouped::merge(shape, isa) {
        return merged.diagonal_blocks(&weight_grad(isa, &merged.shape, x, dy));
    }
    if depthwise::fits(shape) {
        return depthwise::weight_grad(shape, x, dy);
    }
    direct::weight_grad(isa, shape, x, dy)
}
