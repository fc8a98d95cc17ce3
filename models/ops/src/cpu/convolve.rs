//! Convolution of both element types: the entry points of their kernels.

use half::bf16;

use super::allocator::Buffer;
use super::conv;
use super::element::Element;
use super::kernel::Isa;
use super::shape::ConvShape;

/// An element type with kernels of a convolution. Weights, biases and their gradients are f32.
pub(crate) trait Convolve: Element {
    /// Computes the output `[batch, oh, ow, out]` from `x` `[batch, h, w, in]` and weights in PyTorch's layout.
    fn forward(shape: &ConvShape, x: &[Self], weight: &[f32], bias: Option<&[f32]>, relu: bool) -> Buffer<Self>;
    /// Computes the data gradient `[batch, h, w, in]` from `dy` `[batch, oh, ow, out]`.
    fn data_grad(shape: &ConvShape, weight: &[f32], dy: &[Self]) -> Buffer<Self>;
    /// Computes the weight gradient in PyTorch's layout.
    fn weight_grad(shape: &ConvShape, x: &[Self], dy: &[Self]) -> Buffer;
}

impl Convolve for f32 {
    fn forward(shape: &ConvShape, x: &[f32], weight: &[f32], bias: Option<&[f32]>, relu: bool) -> Buffer {
        conv::forward(Isa::best(), shape, x, weight, bias, relu)
    }

    fn data_grad(shape: &ConvShape, weight: &[f32], dy: &[f32]) -> Buffer {
        conv::data_grad(Isa::best(), shape, weight, dy)
    }

    fn weight_grad(shape: &ConvShape, x: &[f32], dy: &[f32]) -> Buffer {
        conv::weight_grad(Isa::best(), shape, x, dy)
    }
}

impl Convolve for bf16 {
    fn forward(shape: &ConvShape, x: &[bf16], weight: &[f32], bias: Option<&[f32]>, relu: bool) -> Buffer<bf16> {
        super::bf16::conv::forward(Isa::best(), shape, x, weight, bias, relu)
    }

    fn data_grad(shape: &ConvShape, weight: &[f32], dy: &[bf16]) -> Buffer<bf16> {
        super::bf16::conv::data_grad(Isa::best(), shape, weight, dy)
    }

    fn weight_grad(shape: &ConvShape, x: &[bf16], dy: &[bf16]) -> Buffer {
        super::bf16::conv::weight_grad(Isa::best(), shape, x, dy)
    }
}
