//! The learning rates and other scalars of the optimizer's step in device memory. The kernels of a captured step (CUDA graph)
//! read them there, since a graph's arguments cannot change.

use burn::tensor::{Device, Tensor};
use ops::{StepScalars, UpdateRule};

/// The parameters that an update rule updates with the same scalars, as PyTorch's parameter groups.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ParameterGroup {
    /// The factor of the learning rate.
    pub(super) factor: f64,
    /// The steps without a gradient, which AdamW's bias correction does not count.
    pub(super) skipped_steps: u64,
}

/// The scalars of the optimizer's step on the device: those of each parameter group, and the loss.
#[derive(Debug)]
pub(crate) struct DeviceScalars {
    device: Device,
    /// The loss of the step, `[1]`. If it is not finite, the kernels do not change the weights.
    pub(crate) loss: Tensor<1>,
    /// [`UpdateRule::scalars`] for each group.
    groups: Vec<(ParameterGroup, Tensor<1>)>,
}

impl DeviceScalars {
    /// Makes scalars without groups on `device` (without autodiff). The first step makes the groups.
    pub(crate) fn new(device: &Device) -> Self {
        Self { device: device.clone(), loss: Tensor::zeros([1], device), groups: Vec::new() }
    }

    /// Returns the scalars of `group`. Adds the group with the scalars of `rule` if it is new.
    pub(super) fn scalars(&mut self, group: ParameterGroup, rule: &UpdateRule) -> StepScalars {
        let found = self.groups.iter().find(|(other, _)| *other == group);
        let scalars = match found {
            Some((_, scalars)) => scalars.clone(),
            None => {
                let scalars = Tensor::from_floats(rule.scalars(), &self.device);
                self.groups.push((group, scalars.clone()));
                scalars
            }
        };
        StepScalars { scalars, loss: self.loss.clone() }
    }

    /// Returns the tensors of all groups.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor<1>> {
        self.groups.iter().map(|(_, scalars)| scalars)
    }

    /// Returns the scalars of `rule(group)` for all groups, in the order of [`DeviceScalars::tensors`].
    pub(super) fn values(&self, rule: impl Fn(ParameterGroup) -> UpdateRule) -> Vec<f32> {
        self.groups.iter().flat_map(|(group, _)| rule(*group).scalars()).collect()
    }
}
