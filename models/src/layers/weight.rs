//! Weights of layers: trained, or frozen.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::Buffer;

/// A weight of a layer. [`Init`](crate::Init) decides whether it is trained.
#[derive(Module, Debug)]
pub enum Weight<const D: usize> {
    /// Has a gradient, and an optimizer updates it.
    Trained(Param<Tensor<D>>),
    /// A parameter with `requires_grad = False`: no gradient, no update. It keeps its name in the state dict.
    Frozen(Buffer<D>),
}

impl<const D: usize> Weight<D> {
    /// Makes a weight with this initial value.
    pub(crate) fn new(value: Tensor<D>, frozen: bool) -> Self {
        if frozen { Self::Frozen(Buffer::frozen(value)) } else { Self::Trained(Param::from_tensor(value)) }
    }

    /// Returns the current value. That of a frozen weight is without autodiff.
    pub fn value(&self) -> Tensor<D> {
        match self {
            Self::Trained(parameter) => parameter.val(),
            Self::Frozen(buffer) => buffer.value(),
        }
    }

    /// Returns the shape.
    pub fn dims(&self) -> [usize; D] {
        match self {
            Self::Trained(parameter) => parameter.dims(),
            Self::Frozen(buffer) => buffer.value().dims(),
        }
    }

    /// Returns whether the weight is never trained.
    pub fn is_frozen(&self) -> bool {
        matches!(self, Self::Frozen(_))
    }
}
