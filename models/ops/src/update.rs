//! The optimizer's step and the weight average: elementwise passes over lists of flat tensors.
//!
//! On burn's CPU backend, the f32 kernels read and write every value once. They write in place if no other tensor shares the
//! memory. A list of tensors is one parallel section, so hundreds of small parameters cost no more than one large one. On a
//! GPU, for f32, one launch updates many parameters in place; the first step, which creates the optimizer state, is an exception.
//! That step, other devices and other element types run the same formulas as chains of burn's operations.
//!
//! The CPU kernels' results depend neither on the number of threads nor on the instruction set: no product is fused with a
//! sum, and the order of sums is fixed.

use burn::tensor::Tensor;

use crate::cpu::update as cpu;
use crate::dispatch::has_cpu_parameter_kernels;
use crate::optimizer::{ParameterUpdate, StepScalars, UpdateRule, UpdatedParameter, bias_corrections};

/// Takes one optimizer step. The gradients are multiplied by `scale`, `[1]`, if given.
///
/// With `scalars`, the GPU kernels read the step's scalars there and not in `rule`. All other code ignores `scalars`.
///
/// # Panics
///
/// When the tensors of a parameter differ in length.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn update(
    rule: &UpdateRule,
    scalars: Option<&StepScalars>,
    scale: Option<&Tensor<1>>,
    parameters: Vec<ParameterUpdate>,
) -> Vec<UpdatedParameter> {
    if parameters.iter().all(ParameterUpdate::has_cpu_kernels) {
        let scale = scale.map_or(1.0, |scale| scale.clone().into_scalar::<f32>());
        return cpu::update(rule, scale, parameters);
    }
    #[cfg(feature = "cuda")]
    if let (Some(first), true) = (parameters.first(), crate::gpu::supports(rule, &parameters)) {
        let from_rule = || {
            let scalars = Tensor::from_floats(rule.scalars(), &first.value.device());
            // The kernels only check that the first value of `loss` is finite. Here it is the learning rate.
            StepScalars { loss: scalars.clone(), scalars }
        };
        let scalars = scalars.cloned().unwrap_or_else(from_rule);
        return crate::gpu::update(rule, &scalars, scale, parameters);
    }
    let scaled = |gradient: Tensor<1>| match scale {
        Some(scale) => gradient * scale.clone(),
        None => gradient,
    };
    let one = |parameter: ParameterUpdate| {
        update_one(rule, ParameterUpdate { gradient: scaled(parameter.gradient), ..parameter })
    };
    parameters.into_iter().map(one).collect()
}

/// Takes the step of one parameter with burn's operations.
fn update_one(rule: &UpdateRule, parameter: ParameterUpdate) -> UpdatedParameter {
    let ParameterUpdate { value, gradient, weight_decay, mut state } = parameter;
    let value = match *rule {
        UpdateRule::Sgd { lr, momentum, nesterov } => {
            let mut direction = gradient;
            if weight_decay != 0.0 {
                direction = direction + value.clone().mul_scalar(weight_decay);
            }
            if momentum != 0.0 {
                // The first buffer is the direction itself: PyTorch applies no dampening to it.
                let buffer = match state[0].take() {
                    Some(buffer) => buffer.mul_scalar(momentum) + direction.clone(),
                    None => direction.clone(),
                };
                direction = match nesterov {
                    true => direction + buffer.clone().mul_scalar(momentum),
                    false => buffer.clone(),
                };
                state[0] = Some(buffer);
            }
            value - direction.mul_scalar(lr)
        }
        UpdateRule::AdamW { lr, betas: [beta1, beta2], eps, step } => {
            let [first, second] = &mut state;
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
    UpdatedParameter { value, state }
}

/// Updates exponential moving averages: returns `decay · average + (1 − decay) · value` of each pair `(average, value)` of
/// flat tensors, as `torch.optim.swa_utils.get_ema_multi_avg_fn(decay)`.
///
/// # Panics
///
/// When the tensors of a pair differ in length.
pub fn ema_update(decay: f64, pairs: Vec<(Tensor<1>, Tensor<1>)>) -> Vec<Tensor<1>> {
    if pairs.iter().all(|(average, value)| has_cpu_parameter_kernels(average) && has_cpu_parameter_kernels(value)) {
        return cpu::ema_update(decay, pairs);
    }
    #[cfg(feature = "cuda")]
    let pairs = match crate::gpu::ema_update(decay, pairs) {
        Ok(averages) => return averages,
        Err(pairs) => pairs,
    };
    let one = |(average, value): (Tensor<1>, Tensor<1>)| average.mul_scalar(decay) + value.mul_scalar(1.0 - decay);
    pairs.into_iter().map(one).collect()
}

/// Returns the sum of the squares of all values of flat tensors, `[1]`; `None` for an empty list. The CPU kernels sum in f64,
/// the GPU kernels in f32. In both, the order of sums is fixed.
pub fn square_sum(tensors: &[&Tensor<1>]) -> Option<Tensor<1>> {
    let first = tensors.first()?;
    if tensors.iter().all(|tensor| has_cpu_parameter_kernels(tensor)) {
        let sum = cpu::square_sum(tensors);
        return Some(Tensor::from_floats([sum as f32], &first.device()));
    }
    #[cfg(feature = "cuda")]
    if let Some(sum) = crate::gpu::square_sum(tensors) {
        return Some(sum);
    }
    let sums: Vec<_> = tensors.iter().map(|&g| (g.clone() * g.clone()).sum()).collect();
    Some(Tensor::cat(sums, 0).sum())
}
