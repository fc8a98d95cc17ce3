//! The optimizer's step and the weight average: elementwise passes over lists of flat tensors.
//!
//! On burn's CPU backend, for `f32`, every value is read once and written once, in place where nobody else holds the
//! tensor; a list is one parallel section, so that hundreds of small parameters cost no more than one large one. On a
//! GPU, for `f32`, one launch serves many parameters once their state is there. On any other device or element type the same
//! formulas are chains of burn's operations. The results of the kernels depend
//! neither on the number of threads nor on the instruction set: no product is fused with a sum, and sums have one order.

use burn::tensor::Tensor;

use super::cpu::update as cpu;
use super::has_kernels;

/// How parameters follow their gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UpdateRule {
    /// `torch.optim.SGD`: `d = g + wd p; b = mu b + d; p -= lr (nesterov ? d + mu b : b)`.
    ///
    /// The first `b` is `d`. Without momentum there is no `b`, and `p -= lr d`.
    Sgd {
        /// Learning rate.
        lr: f64,
        /// `mu`.
        momentum: f64,
        /// Whether the step looks ahead by the momentum.
        nesterov: bool,
    },
    /// `torch.optim.AdamW`, arXiv:1711.05101: `p *= 1 - lr wd; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g²;
    /// p -= lr/(1-b1^t) m / (sqrt(v)/sqrt(1-b2^t) + eps)`.
    AdamW {
        /// Learning rate.
        lr: f64,
        /// `b1` and `b2`.
        betas: [f64; 2],
        /// Keeps the denominator away from zero.
        eps: f64,
        /// `t`, from 1.
        step: u64,
    },
}

/// One parameter in a step. All its tensors are flat, of one length, on one device, without autodiff.
#[derive(Debug)]
pub struct ParameterUpdate {
    /// `p`, which the step replaces.
    pub value: Tensor<1>,
    /// `g`; it may be a view of a longer tensor.
    pub gradient: Tensor<1>,
    /// `wd`.
    pub weight_decay: f64,
    /// SGD's momentum buffer, or AdamW's first and second moment; `None` before the first step, which makes them.
    pub slots: [Option<Tensor<1>>; 2],
}

impl ParameterUpdate {
    fn has_kernels(&self) -> bool {
        let tensors = [&self.value, &self.gradient].into_iter().chain(self.slots.iter().flatten());
        tensors.into_iter().all(has_kernels)
    }
}

/// What a step makes of a [`ParameterUpdate`].
#[derive(Debug)]
pub struct UpdatedParameter {
    /// `p`.
    pub value: Tensor<1>,
    /// The state.
    pub slots: [Option<Tensor<1>>; 2],
}

/// Takes one step with gradients that are multiplied by `scale`, `[1]`, if it is there.
///
/// # Panics
///
/// Where the tensors of a parameter differ in length.
pub fn update(rule: &UpdateRule, scale: Option<&Tensor<1>>, parameters: Vec<ParameterUpdate>) -> Vec<UpdatedParameter> {
    if parameters.iter().all(ParameterUpdate::has_kernels) {
        let scale = scale.map_or(1.0, |scale| scale.clone().into_scalar::<f32>());
        return cpu::update(rule, scale, parameters);
    }
    let scaled = |gradient: Tensor<1>| match scale {
        Some(scale) => gradient * scale.clone(),
        None => gradient,
    };
    let parameters: Vec<_> = parameters
        .into_iter()
        .map(|parameter| ParameterUpdate { gradient: scaled(parameter.gradient), ..parameter })
        .collect();
    #[cfg(all(feature = "cuda", not(feature = "fusion")))]
    if let Some(updated) = super::gpu::step(rule, &parameters) {
        return updated;
    }
    let one =
        |ParameterUpdate { value, gradient, weight_decay, slots }| composed(rule, value, gradient, weight_decay, slots);
    parameters.into_iter().map(one).collect()
}

/// The step of one parameter by burn's operations.
fn composed(
    rule: &UpdateRule,
    value: Tensor<1>,
    gradient: Tensor<1>,
    weight_decay: f64,
    mut slots: [Option<Tensor<1>>; 2],
) -> UpdatedParameter {
    let value = match *rule {
        UpdateRule::Sgd { lr, momentum, nesterov } => {
            let mut direction = gradient;
            if weight_decay != 0.0 {
                direction = direction + value.clone().mul_scalar(weight_decay);
            }
            if momentum != 0.0 {
                // the first buffer is the direction itself: PyTorch applies no dampening to it
                let buffer = match slots[0].take() {
                    Some(buffer) => buffer.mul_scalar(momentum) + direction.clone(),
                    None => direction.clone(),
                };
                direction = match nesterov {
                    true => direction + buffer.clone().mul_scalar(momentum),
                    false => buffer.clone(),
                };
                slots[0] = Some(buffer);
            }
            value - direction.mul_scalar(lr)
        }
        UpdateRule::AdamW { lr, betas: [beta1, beta2], eps, step } => {
            let [first, second] = &mut slots;
            let square = (gradient.clone() * gradient.clone()).mul_scalar(1.0 - beta2);
            let gradient = gradient.mul_scalar(1.0 - beta1);
            let mean = match first.take() {
                Some(mean) => mean.mul_scalar(beta1) + gradient,
                None => gradient,
            };
            let variance = match second.take() {
                Some(variance) => variance.mul_scalar(beta2) + square,
                None => square,
            };
            (*first, *second) = (Some(mean.clone()), Some(variance.clone()));
            let [correction1, correction2] = bias_corrections([beta1, beta2], step);
            let denominator = variance.sqrt().div_scalar(correction2.sqrt()).add_scalar(eps);
            value.mul_scalar(1.0 - lr * weight_decay) - (mean / denominator).mul_scalar(lr / correction1)
        }
    };
    UpdatedParameter { value, slots }
}

/// `1 - b^t` of both moments.
pub(super) fn bias_corrections(betas: [f64; 2], step: u64) -> [f64; 2] {
    let power = step.min(i32::MAX as u64) as i32;
    betas.map(|beta| 1.0 - beta.powi(power))
}

/// `decay average + (1 - decay) value` of each pair `(average, value)` of flat tensors of one length.
///
/// # Panics
///
/// Where a pair differs in length.
pub fn follow(decay: f64, pairs: Vec<(Tensor<1>, Tensor<1>)>) -> Vec<Tensor<1>> {
    if pairs.iter().all(|(average, value)| has_kernels(average) && has_kernels(value)) {
        return cpu::follow(decay, pairs);
    }
    #[cfg(all(feature = "cuda", not(feature = "fusion")))]
    if let Some(moved) = super::gpu::follow(decay, &pairs) {
        return moved;
    }
    let one = |(average, value): (Tensor<1>, Tensor<1>)| average.mul_scalar(decay) + value.mul_scalar(1.0 - decay);
    pairs.into_iter().map(one).collect()
}

/// Sum of the squares of all values of all (flat) tensors, `[1]`; `None` of no tensors. The kernels add up in f64.
pub fn square_sum(tensors: &[&Tensor<1>]) -> Option<Tensor<1>> {
    let first = tensors.first()?;
    if tensors.iter().all(|tensor| has_kernels(tensor)) {
        let sum = cpu::square_sum(tensors);
        return Some(Tensor::from_floats([sum as f32], &first.device()));
    }
    let sums: Vec<_> = tensors.iter().map(|&g| (g.clone() * g.clone()).sum()).collect();
    Some(Tensor::cat(sums, 0).sum())
}
