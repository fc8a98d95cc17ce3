//! The gradients of one step, flat, in parameter order: what is clipped, reduced and handed to the optimizer.

use burn::{
    optim::GradientsParams,
    tensor::{Device, Gradients, Tensor},
};
use models::{Network, state::ParameterInfo};

/// One flat gradient a learnable parameter in registration order; `None` for a parameter that the loss did not use.
#[derive(Debug)]
pub struct FlatGradients(Vec<Option<Tensor<1>>>);

impl FlatGradients {
    /// Takes the gradients of `network`'s parameters out of what `backward` returned.
    pub fn from_backward(gradients: Gradients, network: &Network, parameters: &[ParameterInfo]) -> Self {
        let mut gradients = GradientsParams::from_grads(gradients, network);
        Self(parameters.iter().map(|info| models::state::take_gradient(&mut gradients, info)).collect())
    }

    /// Builds them from tensors in parameter order.
    pub fn from_tensors(tensors: Vec<Option<Tensor<1>>>) -> Self {
        Self(tensors)
    }

    /// Moves all of them to a device (one without autodiff).
    pub fn to_device(self, device: &Device) -> Self {
        Self(self.0.into_iter().map(|gradient| gradient.map(|gradient| gradient.to_device(device))).collect())
    }

    /// Adds another batch's gradients, parameter by parameter.
    pub fn accumulate(&mut self, other: Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine = match (mine.take(), theirs) {
                (Some(mine), Some(theirs)) => Some(mine + theirs),
                (mine, theirs) => mine.or(theirs),
            };
        }
    }

    /// Sum of the squares of all gradients, `[1]`; `None` when there is no gradient at all.
    pub fn square_sum(&self) -> Option<Tensor<1>> {
        let sums: Vec<_> = self.0.iter().flatten().map(|g| (g.clone() * g.clone()).sum()).collect();
        (!sums.is_empty()).then(|| Tensor::cat(sums, 0).sum())
    }

    /// Multiplies every gradient by the scalar tensor `factor`, `[1]`.
    pub fn scale(&mut self, factor: Tensor<1>) {
        for gradient in self.0.iter_mut() {
            *gradient = gradient.take().map(|g| g * factor.clone());
        }
    }

    /// The tensors in parameter order.
    pub fn into_inner(self) -> Vec<Option<Tensor<1>>> {
        self.0
    }
}
