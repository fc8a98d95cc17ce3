//! Types of an optimizer's step.

use burn::tensor::Tensor;

use crate::dispatch::has_cpu_parameter_kernels;

/// Update rule of an optimizer.
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
        /// Whether Nesterov momentum is used.
        nesterov: bool,
    },
    /// `torch.optim.AdamW`, <https://arxiv.org/abs/1711.05101>: `p *= 1 - lr wd; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g²;
    /// p -= lr/(1-b1^t) m / (sqrt(v)/sqrt(1-b2^t) + eps)`.
    AdamW {
        /// Learning rate.
        lr: f64,
        /// `b1` and `b2`.
        betas: [f64; 2],
        /// Is added to the denominator, so that it is never zero.
        eps: f64,
        /// `t`, from 1.
        step: u64,
    },
}

impl UpdateRule {
    /// Returns the number of state tensors that kernels need: none for SGD without momentum.
    #[cfg(feature = "cuda")]
    pub(crate) fn state_tensors(&self) -> usize {
        match *self {
            Self::Sgd { momentum, .. } => usize::from(momentum != 0.0),
            Self::AdamW { .. } => 2,
        }
    }

    /// Returns the scalars that change from step to step, for [`StepScalars::scalars`].
    pub fn scalars(&self) -> [f32; 3] {
        match *self {
            Self::Sgd { lr, .. } => [lr as f32, 0.0, 0.0],
            Self::AdamW { lr, betas, step, .. } => {
                let [correction1, correction2] = bias_corrections(betas, step);
                [lr as f32, (lr / correction1) as f32, correction2.sqrt() as f32]
            }
        }
    }
}

/// Scalars of a step in device memory, all f32 and without autodiff. A captured graph reads them again in each run.
#[derive(Debug, Clone)]
pub struct StepScalars {
    /// [`UpdateRule::scalars`], `[3]`: the learning rate; for AdamW also `lr/(1-b1^t)` and `sqrt(1-b2^t)`.
    pub scalars: Tensor<1>,
    /// `[1]`. If it is not finite, values and state stay as they are.
    pub loss: Tensor<1>,
}

/// Input of one parameter's step. All tensors are flat, `[N]`, of the same length, on one device and without autodiff.
#[derive(Debug)]
pub struct ParameterUpdate {
    /// `p`, which the step replaces.
    pub value: Tensor<1>,
    /// `g`. It may be a view of a longer tensor.
    pub gradient: Tensor<1>,
    /// `wd`.
    pub weight_decay: f64,
    /// Optimizer state: SGD's momentum buffer, or AdamW's first and second moments. `None` before the first step, which creates
    /// the state.
    pub state: [Option<Tensor<1>>; 2],
}

impl ParameterUpdate {
    /// Returns true if the CPU kernels accept all tensors.
    pub(crate) fn has_cpu_kernels(&self) -> bool {
        let tensors = [&self.value, &self.gradient].into_iter().chain(self.state.iter().flatten());
        tensors.into_iter().all(has_cpu_parameter_kernels)
    }
}

/// Result of one parameter's step.
#[derive(Debug)]
pub struct UpdatedParameter {
    /// `p`.
    pub value: Tensor<1>,
    /// The new optimizer state.
    pub state: [Option<Tensor<1>>; 2],
}

/// Returns AdamW's bias corrections, `1 - b^t` of both moments.
pub(crate) fn bias_corrections(betas: [f64; 2], step: u64) -> [f64; 2] {
    let power = step.min(i32::MAX as u64) as i32;
    betas.map(|beta| 1.0 - beta.powi(power))
}
