//! Convolution of both element types: the entry points of their kernels.

use half::bf16;

use super::allocator::Buffer;
use super::element::Element;
use super::kernel::Isa;
use super::shape::ConvShape;
use super::{conv, depthwise};

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

/// Converts the elements.
fn cast<F: Element, E: Element>(from: &[F]) -> Buffer<E> {
    let mut to = Buffer::new(from.len());
    to.iter_mut().zip(from).for_each(|(to, from)| *to = E::from_f32(from.to_f32()));
    to
}

impl Convolve for bf16 {
    fn forward(shape: &ConvShape, x: &[bf16], weight: &[f32], bias: Option<&[f32]>, relu: bool) -> Buffer<bf16> {
        if depthwise::fits(shape) {
            let mut y = Buffer::new(shape.output_len());
            depthwise::forward(shape, x, weight, bias, relu, &mut y);
            return y;
        }
        cast::<f32, _>(&<f32 as Convolve>::forward(shape, &cast(x), weight, bias, relu))
    }

    fn data_grad(shape: &ConvShape, weight: &[f32], dy: &[bf16]) -> Buffer<bf16> {
        if depthwise::fits(shape) {
            let mut dx = Buffer::new(shape.input_len());
            depthwise::data_grad(shape, weight, dy, &mut dx);
            return dx;
        }
        cast::<f32, _>(&<f32 as Convolve>::data_grad(shape, weight, &cast(dy)))
    }

    fn weight_grad(shape: &ConvShape, x: &[bf16], dy: &[bf16]) -> Buffer {
        if depthwise::fits(shape) {
            return depthwise::weight_grad(shape, x, dy);
        }
        <f32 as Convolve>::weight_grad(shape, &cast(x), &cast(dy))
    }
}
