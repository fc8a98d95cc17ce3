//! Adam with decoupled weight decay: `torch.optim.AdamW`, arXiv:1711.05101.

use burn::tensor::Tensor;

use super::Slot;

/// What one update needs to know.
pub(super) struct AdamW {
    pub lr: f64,
    pub weight_decay: f64,
    pub betas: [f64; 2],
    pub eps: f64,
}

impl AdamW {
    /// `p *= 1 - lr wd; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g²; p -= lr/(1-b1^t) m / (sqrt(v)/sqrt(1-b2^t) + eps)`,
    /// with `step` = t from 1. All tensors are flat and of one length.
    pub(super) fn update(
        &self,
        moments: &mut [Slot; 2],
        step: u64,
        value: Tensor<1>,
        gradient: Tensor<1>,
    ) -> Tensor<1> {
        let [beta1, beta2] = self.betas;
        let [first, second] = moments;
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
        *first = Some(mean.clone());
        *second = Some(variance.clone());
        let power = step.min(i32::MAX as u64) as i32;
        let (correction1, correction2) = (1.0 - beta1.powi(power), 1.0 - beta2.powi(power));
        let denominator = variance.sqrt().div_scalar(correction2.sqrt()).add_scalar(self.eps);
        value.mul_scalar(1.0 - self.lr * self.weight_decay) - (mean / denominator).mul_scalar(self.lr / correction1)
    }
}
