//! Stochastic gradient descent with momentum, Nesterov momentum and coupled weight decay: `torch.optim.SGD`.

use burn::tensor::Tensor;

use super::Slot;

/// What one update needs to know.
pub(super) struct Sgd {
    pub lr: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub nesterov: bool,
}

impl Sgd {
    /// `d = g + wd p; b = mu b + d; p -= lr (nesterov ? d + mu b : b)`. All tensors are flat and of one length.
    pub(super) fn update(&self, momentum_buffer: &mut Slot, value: Tensor<1>, gradient: Tensor<1>) -> Tensor<1> {
        let mut direction = gradient;
        if self.weight_decay != 0.0 {
            direction = direction + value.clone().mul_scalar(self.weight_decay);
        }
        if self.momentum != 0.0 {
            // the first buffer is the direction itself: PyTorch applies no dampening to it
            let buffer = match momentum_buffer.take() {
                Some(buffer) => buffer.mul_scalar(self.momentum) + direction.clone(),
                None => direction.clone(),
            };
            direction = match self.nesterov {
                true => direction + buffer.clone().mul_scalar(self.momentum),
                false => buffer.clone(),
            };
            *momentum_buffer = Some(buffer);
        }
        value - direction.mul_scalar(self.lr)
    }
}
