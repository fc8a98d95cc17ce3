//! The gradients of one step, flat, in parameter order: what is clipped, reduced and handed to the optimizer.

use burn::{
    optim::GradientsParams,
    tensor::{Device, Gradients, Tensor},
};
use models::{Network, state::ParameterInfo};

/// One flat gradient a learnable parameter in registration order; `None` for a parameter that the loss did not use.
#[derive(Debug)]
pub struct FlatGradients {
    tensors: Vec<Option<Tensor<1>>>,
    /// `[1]`: what all of them are still to be multiplied by.
    scale: Option<Tensor<1>>,
}

impl FlatGradients {
    /// Takes the gradients of `network`'s parameters out of what `backward` returned.
    pub fn from_backward(gradients: Gradients, network: &Network, parameters: &[ParameterInfo]) -> Self {
        let mut gradients = GradientsParams::from_grads(gradients, network);
        Self::from_tensors(parameters.iter().map(|info| models::state::take_gradient(&mut gradients, info)).collect())
    }

    /// Builds them from tensors in parameter order.
    pub fn from_tensors(tensors: Vec<Option<Tensor<1>>>) -> Self {
        Self { tensors, scale: None }
    }

    /// Moves all of them to a device (one without autodiff).
    pub fn to_device(self, device: &Device) -> Self {
        Self::from_tensors(self.into_inner().into_iter().map(|g| g.map(|g| g.to_device(device))).collect())
    }

    /// Adds another batch's gradients, parameter by parameter.
    pub fn accumulate(&mut self, other: Self) {
        self.settle();
        for (mine, theirs) in self.tensors.iter_mut().zip(other.into_inner()) {
            *mine = match (mine.take(), theirs) {
                (Some(mine), Some(theirs)) => Some(mine + theirs),
                (mine, theirs) => mine.or(theirs),
            };
        }
    }

    /// Sum of the squares of all gradients, `[1]`; `None` when there is no gradient at all.
    pub fn square_sum(&self) -> Option<Tensor<1>> {
        let sum = ops::square_sum(&self.tensors.iter().flatten().collect::<Vec<_>>())?;
        Some(match &self.scale {
            Some(scale) => sum * scale.clone() * scale.clone(),
            None => sum,
        })
    }

    /// Multiplies every gradient by the scalar tensor `factor`, `[1]`: when they are read next.
    pub fn scale(&mut self, factor: Tensor<1>) {
        self.scale = Some(match self.scale.take() {
            Some(scale) => scale * factor,
            None => factor,
        });
    }

    /// Does the multiplication that is due.
    fn settle(&mut self) {
        let Some(scale) = self.scale.take() else { return };
        for gradient in self.tensors.iter_mut() {
            *gradient = gradient.take().map(|g| g * scale.clone());
        }
    }

    /// The tensors in parameter order.
    pub fn into_inner(mut self) -> Vec<Option<Tensor<1>>> {
        self.settle();
        self.tensors
    }

    /// The tensors in parameter order, and what they are still to be multiplied by, `[1]`.
    pub(super) fn into_parts(self) -> (Vec<Option<Tensor<1>>>, Option<Tensor<1>>) {
        (self.tensors, self.scale)
    }
}
