//! Exponential moving average of the weights and batch-norm statistics, as in timm's `ModelEmaV2`. If the average is on,
//! evaluations use it instead of the weights.

use burn::tensor::{Device, Tensor};
use models::{
    Network, StateKind,
    state::{self, StateTensor},
};

/// The average: one flat tensor per entry of the state dict.
#[derive(Debug, Clone)]
pub struct Ema {
    decay: f64,
    shadow: Vec<Tensor<1>>,
}

impl Ema {
    /// Starts from the network's state. `decay` in `(0, 1)` is the weight of the old average at each step.
    pub fn new(network: &Network, decay: f64) -> Self {
        let mut shadow = Vec::new();
        state::visit(network, |_, _, value| shadow.push(value));
        Self { decay, shadow }
    }

    /// Updates the average after an optimizer step: `shadow = decay * shadow + (1 - decay) * value`.
    pub fn update(&mut self, network: &Network) {
        let (mut places, mut pairs) = (Vec::new(), Vec::new());
        let mut index = 0;
        state::visit(network, |_, kind, value| {
            // Skip frozen weights, so their bits do not change.
            if kind != StateKind::Frozen {
                places.push(index);
                pairs.push((std::mem::replace(&mut self.shadow[index], value.clone()), value));
            }
            index += 1;
        });
        for (index, average) in places.into_iter().zip(ops::ema_update(self.decay, pairs)) {
            self.shadow[index] = average;
        }
    }

    /// Returns `network` with the averaged state.
    pub fn apply(&self, network: Network) -> Network {
        let mut shadow = self.shadow.iter();
        state::map_state(network, |_, _, value| shadow.next().cloned().unwrap_or(value))
    }

    /// Returns the averages.
    pub(crate) fn tensors(&self) -> &[Tensor<1>] {
        &self.shadow
    }

    /// Replaces the average by `tensors`, a state dict in the order of `network`. For a frozen tensor, takes the value in `network`
    /// instead. [`Ema::update`] skips frozen tensors, so a layer that is frozen since this start would keep an old average.
    pub fn load(&mut self, tensors: &[StateTensor], network: &Network, device: &Device) {
        let on_device = |tensor: &StateTensor| {
            ops::parameter::from_row_major(Tensor::from_floats(tensor.values.as_slice(), device), &tensor.shape)
        };
        self.shadow = tensors.iter().map(on_device).collect();
        let mut shadow = self.shadow.iter_mut();
        state::visit(network, |_, kind, value| {
            let average = shadow.next();
            if let (StateKind::Frozen, Some(average)) = (kind, average) {
                *average = value;
            }
        });
    }
}
