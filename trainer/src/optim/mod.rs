//! Optimizers, schedules, gradient clipping and the weight average, over PyTorch-named flat parameters.
//!
//! burn's own optimizers clip per tensor and have no parameter groups by name (`GradientClipping::Norm` is not global),
//! so the two that image classification uses are written here, each checked against PyTorch's values.

mod adamw;
mod clip;
mod ema;
mod gradients;
mod schedule;
mod sgd;

pub use clip::clip_global_norm;
pub use ema::Ema;
pub use gradients::FlatGradients;
pub use schedule::Schedule;

use burn::tensor::Tensor;
use models::{Network, state::ParameterInfo};

use crate::config::{Optimizer as OptimizerConfig, OptimizerKind};
use crate::state_file::NamedTensor;

/// One state tensor of one parameter, flat, on the parameter's device without autodiff; absent before its first step.
type Slot = Option<Tensor<1>>;

/// SGD or AdamW with its state.
#[derive(Debug, Clone)]
pub struct Optimizer {
    config: OptimizerConfig,
    /// Two slots a parameter in registration order: SGD's momentum buffer, or AdamW's first and second moment.
    slots: Vec<[Slot; 2]>,
    /// Steps taken, for AdamW's bias correction.
    steps: u64,
}

impl Optimizer {
    /// An optimizer without state.
    pub fn new(config: &OptimizerConfig) -> Self {
        Self { config: config.clone(), slots: Vec::new(), steps: 0 }
    }

    /// One step with learning rate `lr`; a parameter without a gradient keeps its value and its state, as in PyTorch.
    pub fn step(&mut self, network: Network, gradients: FlatGradients, lr: f64) -> Network {
        self.steps += 1;
        let mut gradients = gradients.into_inner().into_iter();
        let mut index = 0;
        models::state::map_parameters(network, |info, value| {
            let gradient = gradients.next().flatten();
            let value = match gradient {
                Some(gradient) => self.update(index, info, value, gradient, lr),
                None => value,
            };
            index += 1;
            value
        })
    }

    fn update(
        &mut self,
        index: usize,
        info: &ParameterInfo,
        value: Tensor<1>,
        gradient: Tensor<1>,
        lr: f64,
    ) -> Tensor<1> {
        if self.slots.len() <= index {
            self.slots.resize(index + 1, [None, None]);
        }
        let weight_decay = match self.config.decay_norm_and_bias || !is_norm_or_bias(info) {
            true => self.config.weight_decay,
            false => 0.0,
        };
        let slots = &mut self.slots[index];
        match self.config.kind {
            OptimizerKind::Sgd { momentum, nesterov } => {
                sgd::Sgd { lr, weight_decay, momentum, nesterov }.update(&mut slots[0], value, gradient)
            }
            OptimizerKind::AdamW { betas, eps } => {
                adamw::AdamW { lr, weight_decay, betas, eps }.update(slots, self.steps, value, gradient)
            }
        }
    }

    /// The state for a checkpoint: `<slot>.<parameter>` and its values; the second item is the count of steps taken.
    pub fn state(&self, parameters: &[ParameterInfo]) -> (Vec<NamedTensor>, u64) {
        let mut tensors = Vec::new();
        for (info, slots) in parameters.iter().zip(&self.slots) {
            for (slot, name) in slots.iter().zip(self.slot_names()) {
                if let Some(tensor) = slot {
                    tensors.push(NamedTensor::from_tensor(format!("{name}.{}", info.name), &info.shape, tensor));
                }
            }
        }
        (tensors, self.steps)
    }

    /// Takes back what [`Optimizer::state`] gave.
    ///
    /// # Errors
    /// Names a tensor that no parameter has a place for, or whose length is wrong.
    pub fn load_state(
        &mut self,
        tensors: Vec<NamedTensor>,
        steps: u64,
        parameters: &[ParameterInfo],
        device: &burn::tensor::Device,
    ) -> Result<(), String> {
        let mut by_name: std::collections::HashMap<_, _> =
            tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        let names = self.slot_names();
        self.slots.clear();
        for info in parameters {
            let mut slots = [None, None];
            for (slot, name) in slots.iter_mut().zip(names) {
                let Some(tensor) = by_name.remove(&format!("{name}.{}", info.name)) else { continue };
                if tensor.shape != info.shape {
                    return Err(format!(
                        "optimizer tensor `{}` has shape {:?}, its parameter has {:?}",
                        tensor.name, tensor.shape, info.shape
                    ));
                }
                *slot = Some(tensor.into_tensor(device));
            }
            self.slots.push(slots);
        }
        if let Some(name) = by_name.keys().min() {
            return Err(format!("optimizer tensor `{name}` belongs to no parameter of this model and optimizer"));
        }
        self.steps = steps;
        Ok(())
    }

    fn slot_names(&self) -> [&'static str; 2] {
        match self.config.kind {
            OptimizerKind::Sgd { .. } => ["momentum", "unused"],
            OptimizerKind::AdamW { .. } => ["exp_avg", "exp_avg_sq"],
        }
    }
}

/// Batch-norm scales and every bias have one dimension; weights of convolutions and linear layers have more.
fn is_norm_or_bias(info: &ParameterInfo) -> bool {
    info.shape.len() == 1
}

#[cfg(test)]
mod tests;
