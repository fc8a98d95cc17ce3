//! Muon: SGD with momentum whose updates of weight matrices are orthogonalized.
//!
//! Source: `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` (<https://kellerjordan.github.io/posts/muon/>,
//! <https://arxiv.org/abs/2502.16982>). This adjustment makes an update as large as AdamW's, so one learning rate and one weight
//! decay serve both: AdamW updates the weights that Muon is not meant for.

use burn::tensor::{Device, Tensor};
use models::{
    Network, StateKind,
    state::{self, ParameterInfo},
};
use ops::{ParameterUpdate, UpdateRule, UpdatedParameter};
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};

/// The root mean square of AdamW's updates, as measured by Moonshot AI.
const ADAMW_RMS: f64 = 0.2;
/// AdamW updates a convolution whose groups have at most this many input channels: the convolution of the images, and depthwise
/// convolutions, whose channels do not interact.
const FEW_CHANNELS: usize = 3;

/// The hyperparameters of Muon's step.
#[derive(Debug, Clone, Copy)]
pub(super) struct MuonOptions {
    pub(super) lr: f64,
    pub(super) momentum: f64,
    pub(super) nesterov: bool,
}

/// The step of one weight.
pub(super) struct MuonStep {
    /// The index of the weight among all parameters.
    pub(super) index: usize,
    pub(super) options: MuonOptions,
    pub(super) info: ParameterInfo,
    pub(super) update: ParameterUpdate,
}

/// Takes the steps of several weights and returns the results with the weights' indices. A product of small matrices cannot use all
/// threads, so on a CPU several weights are updated at the same time.
pub(super) fn step_all(steps: Vec<MuonStep>, scale: Option<&Tensor<1>>) -> Vec<(usize, UpdatedParameter)> {
    let run = |MuonStep { index, options, info, update }| (index, options.step(&info, update, scale));
    if steps.iter().any(|step| step.update.value.device() != Device::flex()) {
        return steps.into_iter().map(run).collect();
    }
    steps.into_par_iter().with_max_len(1).map(run).collect()
}

impl MuonOptions {
    /// Takes the step of the weight `info`. Convolutions count as matrices `[out, in * height * width]`.
    fn step(self, info: &ParameterInfo, update: ParameterUpdate, scale: Option<&Tensor<1>>) -> UpdatedParameter {
        let ParameterUpdate { value, gradient, weight_decay, state: [buffer, unused] } = update;
        let gradient = match scale {
            Some(scale) => gradient * scale.clone(),
            None => gradient,
        };
        let buffer = buffer.unwrap_or_else(|| gradient.zeros_like());
        // `buffer.lerp_(gradient, 1 - momentum)`, and with Nesterov momentum `gradient.lerp(buffer, momentum)`.
        let buffer = self.average(buffer, gradient.clone());
        let direction = if self.nesterov { self.average(buffer.clone(), gradient) } else { buffer.clone() };
        let [rows, columns] = matrix_of(info);
        let direction = ops::orthogonalize(direction.reshape([rows, columns])).reshape([rows * columns]);
        let factor = ADAMW_RMS * (rows.max(columns) as f64).sqrt();
        // SGD without momentum: `value -= lr factor (direction + decay value)`. The weight decay has no factor.
        let rule = UpdateRule::Sgd { lr: self.lr * factor, momentum: 0.0, nesterov: false };
        let update =
            ParameterUpdate { value, gradient: direction, weight_decay: weight_decay / factor, state: [None, None] };
        let updated = ops::update(&rule, None, None, vec![update]).remove(0);
        UpdatedParameter { value: updated.value, state: [Some(buffer), unused] }
    }

    /// Returns `momentum · average + (1 − momentum) · value`.
    fn average(self, average: Tensor<1>, value: Tensor<1>) -> Tensor<1> {
        ops::ema_update(self.momentum, vec![(average, value)]).remove(0)
    }
}

/// Returns whether Muon updates the parameter: weights of linear layers and convolutions, but not the first convolution, depthwise
/// convolutions and the weight of the last layer, whose name is `last`.
pub(super) fn is_updated_by_muon(info: &ParameterInfo, last: &str) -> bool {
    let is_wide = info.shape.len() == 2 || (info.shape.len() > 2 && info.shape[1] > FEW_CHANNELS);
    is_wide && info.name != last
}

/// Returns the name of the last layer's weight, also if it is frozen.
pub(super) fn last_weight(network: &Network) -> String {
    let mut last = String::new();
    state::visit(network, |info, kind, _| {
        if kind != StateKind::Buffer && info.shape.len() >= 2 {
            last = info.name;
        }
    });
    last
}

/// Returns the shape of the weight's matrix.
fn matrix_of(info: &ParameterInfo) -> [usize; 2] {
    [info.shape[0], info.shape[1..].iter().product()]
}
