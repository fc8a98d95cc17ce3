//! The learning rates and other numbers of the optimizer's step in device memory. The kernels of a captured step (CUDA graph)
//! read them there, since a graph's arguments cannot change.

use burn::tensor::{Device, Tensor};
use ops::{StepNumbers, UpdateRule};

/// The learning rates of one step on the device, one per parameter group.
#[derive(Debug)]
pub(crate) struct DeviceRates {
    device: Device,
    /// The loss of the step, `[1]`. If it is not finite, the kernels do not change the weights.
    pub(crate) loss: Tensor<1>,
    /// [`UpdateRule::numbers`] for each factor of the learning rate.
    groups: Vec<(f64, Tensor<1>)>,
}

impl DeviceRates {
    /// Makes rates without groups on `device` (without autodiff). The first step makes the groups.
    pub(crate) fn new(device: &Device) -> Self {
        Self { device: device.clone(), loss: Tensor::zeros([1], device), groups: Vec::new() }
    }

    /// Returns the numbers of the group whose learning rate has the factor `factor`. Makes a new group with the numbers of
    /// `rule` if there is none.
    pub(super) fn numbers(&mut self, factor: f64, rule: &UpdateRule) -> StepNumbers {
        let found = self.groups.iter().find(|(of_group, _)| *of_group == factor);
        let numbers = match found {
            Some((_, numbers)) => numbers.clone(),
            None => {
                let numbers = Tensor::from_floats(rule.numbers(), &self.device);
                self.groups.push((factor, numbers.clone()));
                numbers
            }
        };
        StepNumbers { numbers, loss: self.loss.clone() }
    }

    /// Returns the tensors of all groups.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor<1>> {
        self.groups.iter().map(|(_, numbers)| numbers)
    }

    /// Returns the numbers of `rule(factor)` for all groups, in the order of [`DeviceRates::tensors`].
    pub(super) fn values(&self, rule: impl Fn(f64) -> UpdateRule) -> Vec<f32> {
        self.groups.iter().flat_map(|(factor, _)| rule(*factor).numbers()).collect()
    }
}
