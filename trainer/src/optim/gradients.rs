//! The gradients of one step: flat, in parameter order. They are reduced, clipped and passed to the optimizer.

use burn::tensor::{Gradients, Tensor};
use models::Network;

/// One flat gradient per learnable parameter, in registration order. `None` for a parameter that the loss did not use. The
/// default value has no gradients, as after `zero_grad(set_to_none=True)`.
#[derive(Debug, Default)]
pub struct FlatGradients {
    tensors: Vec<Option<Tensor<1>>>,
    /// `[1]`: a factor for all gradients that is not applied yet.
    scale: Option<Tensor<1>>,
}

impl FlatGradients {
    /// Takes the gradients of `network`'s parameters out of the result of `backward`.
    pub fn from_backward(mut gradients: Gradients, network: &Network) -> Self {
        Self::from_tensors(models::take_gradients(&mut gradients, network))
    }

    /// Takes flat tensors in parameter order.
    pub fn from_tensors(tensors: Vec<Option<Tensor<1>>>) -> Self {
        Self { tensors, scale: None }
    }

    /// Replaces all existing gradients by the result of one call of `map`, for example by copies on another device.
    ///
    /// # Panics
    /// `map` returns another number of gradients.
    pub fn map_all(self, map: impl FnOnce(Vec<Tensor<1>>) -> Vec<Tensor<1>>) -> Self {
        let gradients = self.into_inner();
        let there: Vec<bool> = gradients.iter().map(Option::is_some).collect();
        let mut mapped = map(gradients.into_iter().flatten().collect()).into_iter();
        let next = |there: bool| there.then(|| mapped.next().expect("as many gradients as before"));
        let gradients = there.into_iter().map(next).collect();
        assert!(mapped.next().is_none(), "as many gradients as before");
        Self::from_tensors(gradients)
    }

    /// Adds another batch's gradients, parameter by parameter.
    pub fn accumulate(&mut self, other: Self) {
        if self.tensors.is_empty() {
            *self = other;
            return;
        }
        self.apply_scale();
        for (mine, theirs) in self.tensors.iter_mut().zip(other.into_inner()) {
            *mine = match (mine.take(), theirs) {
                (Some(mine), Some(theirs)) => Some(mine + theirs),
                (mine, theirs) => mine.or(theirs),
            };
        }
    }

    /// Removes the gradients of `parameters` (indices in registration order), so the optimizer does not change these parameters.
    pub fn set_none(&mut self, parameters: &[usize]) {
        parameters.iter().for_each(|&index| self.tensors[index] = None);
    }

    /// Returns the sum of the squares of all gradients, `[1]`, or `None` if there are no gradients.
    pub fn square_sum(&self) -> Option<Tensor<1>> {
        let sum = ops::square_sum(&self.tensors.iter().flatten().collect::<Vec<_>>())?;
        Some(match &self.scale {
            Some(scale) => sum * scale.clone() * scale.clone(),
            None => sum,
        })
    }

    /// Multiplies every gradient by `factor`, `[1]`. The multiplication happens when the gradients are read next.
    pub fn scale(&mut self, factor: Tensor<1>) {
        self.scale = Some(match self.scale.take() {
            Some(scale) => scale * factor,
            None => factor,
        });
    }

    fn apply_scale(&mut self) {
        let Some(scale) = self.scale.take() else { return };
        for gradient in self.tensors.iter_mut() {
            *gradient = gradient.take().map(|g| g * scale.clone());
        }
    }

    /// Returns the tensors in parameter order.
    pub fn into_inner(mut self) -> Vec<Option<Tensor<1>>> {
        self.apply_scale();
        self.tensors
    }

    /// Returns the tensors in parameter order, and the factor `[1]` that is not applied yet.
    pub(super) fn into_parts(self) -> (Vec<Option<Tensor<1>>>, Option<Tensor<1>>) {
        (self.tensors, self.scale)
    }
}
