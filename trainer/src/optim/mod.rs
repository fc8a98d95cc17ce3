//! Optimizers, schedules, gradient clipping and the weight average, over PyTorch-named flat parameters.
//!
//! burn's optimizers clip per tensor (`GradientClipping::Norm` is not global) and have no parameter groups by name. So this
//! module implements the optimizers that image classification uses, and checks them against PyTorch's values. The kernels
//! of their formulas are in the crate `ops`: [`ops::UpdateRule`].

mod clip;
mod device_rates;
mod ema;
mod gradients;
mod layer_decay;
mod muon;
mod schedule;

pub use clip::clip_grad_norm;
pub(crate) use clip::clip_on_device;
pub(crate) use device_rates::DeviceScalars;
pub use ema::Ema;
pub use gradients::FlatGradients;
pub use schedule::{Schedule, lr_scale_factor};

use std::collections::HashMap;

use burn::tensor::Tensor;
use models::{
    Network,
    state::{self, ParameterInfo},
};
use ops::{self, ParameterUpdate, UpdateRule, UpdatedParameter};

use crate::config::{OptimizerConfig, OptimizerKind};
use crate::state_file::NamedTensor;
use device_rates::ParameterGroup;
use muon::{MuonOptions, MuonStep};

/// One state tensor of one parameter: flat, on the parameter's device, without autodiff; `None` before its first step.
type Slot = Option<Tensor<1>>;

/// The name of the only slot of SGD and Muon.
const MOMENTUM: &str = "momentum";
/// The names of AdamW's slots, as in PyTorch's state.
const ADAMW_SLOTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// SGD, AdamW or Muon with its state: `torch.optim.SGD`, `torch.optim.AdamW`, `torch.optim.Muon`.
#[derive(Debug, Clone)]
pub struct Optimizer {
    config: OptimizerConfig,
    /// Two slots per parameter in registration order: the momentum buffer of SGD and Muon, or AdamW's first and second moment.
    slots: Vec<[Slot; 2]>,
    /// Steps taken.
    steps: u64,
    /// For each parameter, the steps in which it had no gradient. AdamW's bias correction counts the other steps.
    skipped_steps: Vec<u64>,
    /// The factor of each weight's learning rate from `layer_decay`. Empty without `layer_decay`.
    layer_decay_factors: HashMap<String, f64>,
    /// The name of the last layer's weight, which Muon does not update. Empty without [`Self::for_layers_of`].
    last_weight: String,
}

/// The updates of a step, sorted by the kernel calls that do them.
#[derive(Default)]
struct SortedUpdates {
    /// Per parameter: the value if the parameter has no gradient; `None` until the parameter is updated.
    values: Vec<Option<Tensor<1>>>,
    /// The parameters that Muon updates.
    muon_steps: Vec<MuonStep>,
    /// The other parameters, as groups with one learning rate and number of steps: their indices and updates.
    groups: Vec<(ParameterGroup, Vec<usize>, Vec<ParameterUpdate>)>,
}

impl Optimizer {
    /// Makes an optimizer without state.
    pub fn new(config: &OptimizerConfig) -> Self {
        Self {
            config: config.clone(),
            slots: Vec::new(),
            steps: 0,
            skipped_steps: Vec::new(),
            layer_decay_factors: HashMap::new(),
            last_weight: String::new(),
        }
    }

    /// Finds the layers to which `layer_decay` and Muon's exceptions apply, in the network that the steps will update.
    pub fn for_layers_of(mut self, network: &Network) -> Self {
        if let Some(decay) = self.config.layer_decay {
            self.layer_decay_factors = layer_decay::factors(network, decay);
        }
        self.last_weight = muon::last_weight(network);
        self
    }

    /// Takes one step with learning rate `lr` and returns the updated network. A parameter without a gradient keeps its value
    /// and its state, as in PyTorch. Parameters and state change in place unless a clone of the network shares them.
    pub fn step(&mut self, network: Network, gradients: FlatGradients, lr: f64) -> Network {
        self.step_with(network, gradients, lr, None)
    }

    /// Takes one step, as [`Optimizer::step`]. With `rates`, the kernels of SGD and AdamW read the learning rates from device
    /// memory.
    pub(crate) fn step_with(
        &mut self,
        network: Network,
        gradients: FlatGradients,
        lr: f64,
        rates: Option<&mut DeviceScalars>,
    ) -> Network {
        let (gradients, scale) = gradients.into_parts();
        models::state::update_parameters(network, |parameters| {
            let with_gradients =
                parameters.into_iter().zip(gradients.into_iter().chain(std::iter::repeat_with(|| None)));
            self.update(with_gradients.collect(), scale, lr, rates)
        })
    }

    /// Returns the values of all tensors of `rates` for the next step, with learning rate `lr`.
    pub(crate) fn rates(&self, rates: &DeviceScalars, lr: f64) -> Vec<f32> {
        rates.values(|group| self.rule(self.steps + 1 - group.skipped_steps, lr * group.factor))
    }

    /// Counts a step that a CUDA graph runs on the device. A parameter without state had no gradient when the graph was captured.
    pub(crate) fn count_step(&mut self) {
        self.steps += 1;
        for (slots, skipped) in self.slots.iter().zip(&mut self.skipped_steps) {
            *skipped += u64::from(slots[0].is_none());
        }
    }

    /// Returns the existing state tensors.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor<1>> {
        self.slots.iter().flatten().flatten()
    }

    /// Updates the parameters that have a gradient, and returns the values of all parameters.
    fn update(
        &mut self,
        parameters: Vec<((ParameterInfo, Tensor<1>), Option<Tensor<1>>)>,
        scale: Option<Tensor<1>>,
        lr: f64,
        mut rates: Option<&mut DeviceScalars>,
    ) -> Vec<Tensor<1>> {
        self.steps += 1;
        let count = parameters.len().max(self.slots.len());
        self.slots.resize(count, [None, None]);
        self.skipped_steps.resize(count, 0);
        let SortedUpdates { mut values, muon_steps, groups } = self.sort_updates(parameters, lr);
        for (index, updated) in muon::step_all(muon_steps, scale.as_ref()) {
            (values[index], self.slots[index]) = (Some(updated.value), updated.state);
        }
        for (group, indices, updates) in groups {
            let rule = self.rule(self.steps - group.skipped_steps, lr * group.factor);
            let scalars = rates.as_mut().map(|rates| rates.scalars(group, &rule));
            let updated = ops::update(&rule, scalars.as_ref(), scale.as_ref(), updates);
            for (index, UpdatedParameter { value, state: slots }) in indices.into_iter().zip(updated) {
                (values[index], self.slots[index]) = (Some(value), slots);
            }
        }
        values.into_iter().map(|value| value.expect("an update returns one result per parameter")).collect()
    }

    /// Sorts the parameters with a gradient by the kernel calls that update them, and takes out their state. Counts a skipped step
    /// of the other parameters.
    fn sort_updates(
        &mut self,
        parameters: Vec<((ParameterInfo, Tensor<1>), Option<Tensor<1>>)>,
        lr: f64,
    ) -> SortedUpdates {
        let updated_by_muon = self.updated_by_muon(parameters.iter().map(|((info, _), _)| info));
        let mut sorted = SortedUpdates::default();
        for (index, ((info, value), gradient)) in parameters.into_iter().enumerate() {
            let Some(gradient) = gradient else {
                sorted.values.push(Some(value));
                self.skipped_steps[index] += 1;
                continue;
            };
            sorted.values.push(None);
            let factor = self.total_lr_factor(&info, updated_by_muon[index]);
            let slots = std::mem::take(&mut self.slots[index]);
            // The rules multiply the decay by the learning rate. Divide, so that norm_bias_lr_factor does not change the decay.
            let weight_decay = self.weight_decay(&info) / self.norm_bias_factor(&info);
            let update = ParameterUpdate { value, gradient, weight_decay, state: slots };
            if updated_by_muon[index] {
                let OptimizerConfig { momentum, nesterov, .. } = self.config;
                let options = MuonOptions { lr: lr * factor, momentum, nesterov };
                sorted.muon_steps.push(MuonStep { index, options, info, update });
                continue;
            }
            let group = ParameterGroup { factor, skipped_steps: self.skipped_steps[index] };
            match sorted.groups.iter_mut().find(|(other, ..)| *other == group) {
                Some((_, indices, updates)) => {
                    indices.push(index);
                    updates.push(update);
                }
                None => sorted.groups.push((group, vec![index], vec![update])),
            }
        }
        sorted
    }

    /// Returns the product of all factors of the parameter's learning rate.
    fn total_lr_factor(&self, info: &ParameterInfo, by_muon: bool) -> f64 {
        let layer_decay_factor = self.layer_decay_factors.get(&info.name).copied().unwrap_or(1.0);
        let adamw_factor = if by_muon { 1.0 } else { self.adamw_factor() };
        self.norm_bias_factor(info) * layer_decay_factor * adamw_factor * self.lr_factor(&info.name)
    }

    /// Returns the factor `norm_bias_lr_factor` for the biases of batch norms, and 1 for other parameters.
    fn norm_bias_factor(&self, info: &ParameterInfo) -> f64 {
        let applies = info.of_norm && info.name.ends_with("bias");
        if applies { self.config.norm_bias_lr_factor } else { 1.0 }
    }

    /// Returns the factor of `lr` for the parameters that AdamW updates beside Muon.
    fn adamw_factor(&self) -> f64 {
        self.config.adamw_lr.map_or(1.0, |adamw| adamw / self.config.lr)
    }

    /// Returns the factor of `lr_factors` for the parameter `name`. If several layers match, the innermost layer's factor
    /// applies.
    fn lr_factor(&self, name: &str) -> f64 {
        let layers = self.config.lr_factors.iter().filter(|(layer, _)| state::is_within(name, layer));
        layers.max_by_key(|(layer, _)| layer.len()).map_or(1.0, |(_, factor)| *factor)
    }

    fn rule(&self, step: u64, lr: f64) -> UpdateRule {
        let OptimizerConfig { kind, momentum, nesterov, betas, eps, .. } = self.config;
        match kind {
            OptimizerKind::Sgd => UpdateRule::Sgd { lr, momentum, nesterov },
            // Muon's own rule is in `muon`.
            OptimizerKind::AdamW | OptimizerKind::Muon => UpdateRule::AdamW { lr, betas, eps, step },
        }
    }

    /// Returns for each parameter whether Muon updates it.
    fn updated_by_muon<'a>(&self, parameters: impl Iterator<Item = &'a ParameterInfo>) -> Vec<bool> {
        let is_muon = self.config.kind == OptimizerKind::Muon;
        parameters.map(|info| is_muon && muon::is_updated_by_muon(info, &self.last_weight)).collect()
    }

    fn weight_decay(&self, info: &ParameterInfo) -> f64 {
        if self.config.decay_norm_and_bias || !is_norm_or_bias(info) { self.config.weight_decay } else { 0.0 }
    }

    /// Copies the state for a checkpoint to the host: tensors named `<slot>.<parameter>`, and the number of steps taken. The steps of
    /// a parameter that AdamW did not update in all of them are in the tensor `step.<parameter>`, as in PyTorch's state.
    pub fn state(&self, parameters: &[ParameterInfo]) -> (Vec<NamedTensor>, u64) {
        let mut tensors = Vec::new();
        let states = self.slots.iter().zip(&self.skipped_steps);
        for ((info, (slots, &skipped)), names) in parameters.iter().zip(states).zip(self.slot_names(parameters)) {
            if names == ADAMW_SLOTS && slots[0].is_some() && skipped > 0 {
                let values = vec![(self.steps - skipped) as f32];
                tensors.push(NamedTensor { name: step_name(info), shape: Vec::new(), values });
            }
            for (slot, name) in slots.iter().zip(names) {
                if let Some(tensor) = slot {
                    tensors.push(NamedTensor::from_tensor(
                        format!("{name}.{}", info.name),
                        &info.shape,
                        tensor.clone(),
                    ));
                }
            }
        }
        (tensors, self.steps)
    }

    /// Loads the state that [`Optimizer::state`] returned.
    ///
    /// # Errors
    /// Names a tensor that belongs to no parameter, or that has another shape than its parameter.
    pub fn load_state(
        &mut self,
        tensors: Vec<NamedTensor>,
        steps: u64,
        parameters: &[ParameterInfo],
        device: &burn::tensor::Device,
    ) -> Result<(), String> {
        let mut by_name: HashMap<_, _> = tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        self.slots.clear();
        self.skipped_steps.clear();
        for (info, names) in parameters.iter().zip(self.slot_names(parameters)) {
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
            // Without state, the parameter was not trained in these steps: it was frozen, or the optimizer was another one.
            let steps_of_parameter = match by_name.remove(&step_name(info)) {
                Some(tensor) => tensor.values.first().map_or(0, |&step| step as u64),
                None if slots[0].is_some() => steps,
                None => 0,
            };
            self.skipped_steps.push(steps.saturating_sub(steps_of_parameter));
            self.slots.push(slots);
        }
        if let Some(name) = by_name.keys().min() {
            return Err(format!("optimizer tensor `{name}` belongs to no parameter of this model and optimizer"));
        }
        self.steps = steps;
        Ok(())
    }

    /// Returns the names of each parameter's slots.
    fn slot_names(&self, parameters: &[ParameterInfo]) -> Vec<[&'static str; 2]> {
        let names = |by_muon| match (self.config.kind, by_muon) {
            (OptimizerKind::Sgd, _) | (OptimizerKind::Muon, true) => [MOMENTUM, "unused"],
            (OptimizerKind::AdamW, _) | (OptimizerKind::Muon, false) => ADAMW_SLOTS,
        };
        self.updated_by_muon(parameters.iter()).into_iter().map(names).collect()
    }
}

/// Returns whether a tensor of a checkpoint's optimizer state is certainly the state of another optimizer than `kind`.
pub(crate) fn is_of_another_optimizer(kind: OptimizerKind, tensor: &NamedTensor) -> bool {
    let slot = tensor.name.split_once('.').map(|(slot, _)| slot);
    match kind {
        OptimizerKind::Sgd => slot == Some(ADAMW_SLOTS[0]),
        OptimizerKind::AdamW => slot == Some(MOMENTUM),
        // Muon never updates biases and batch norms, whose tensors have one dimension.
        OptimizerKind::Muon => slot == Some(MOMENTUM) && tensor.shape.len() == 1,
    }
}

/// Returns the name of the parameter to which a tensor of a checkpoint's optimizer state belongs.
pub(crate) fn parameter_of(tensor: &NamedTensor) -> &str {
    tensor.name.split_once('.').map_or("", |(_, parameter)| parameter)
}

/// Returns the name of the tensor with a parameter's steps.
fn step_name(info: &ParameterInfo) -> String {
    format!("step.{}", info.name)
}

/// Returns whether the parameter is a batch norm's scale or a bias. These have one dimension; weights of convolutions and linear
/// layers have more.
fn is_norm_or_bias(info: &ParameterInfo) -> bool {
    info.shape.len() == 1
}

#[cfg(test)]
mod tests;
