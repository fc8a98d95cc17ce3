//! The training loss: softmax, cross-entropy and its gradient in one pass over the logits.

use burn::backend::Dispatch;
use burn::tensor::{Gradients, Tensor, activation::log_softmax};

use crate::dispatch::{has_cpu_parameter_kernels, has_gpu_kernels};
use crate::extension::HeadOps;

/// Computes `scale · -(targets · log_softmax(logits)).sum()`, differentiable with respect to the logits. With `scale` 1 this is
/// `torch.nn.functional.cross_entropy(logits, targets, reduction="sum")` for targets that are probabilities.
///
/// The kernels compute the gradient together with the loss, so the backward pass only multiplies the gradient by that of the
/// result. [`backward`] leaves out this multiplication.
///
/// # Shapes
///
/// - logits and targets `[B, classes]`, targets without autodiff
/// - output `[1]`
///
/// # Panics
///
/// When the shapes differ.
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<2>, scale: f64) -> Tensor<1> {
    assert_eq!(logits.dims(), targets.dims(), "one target for each logit");
    let f32s = logits.dtype() == burn::tensor::DType::F32 && targets.dtype() == logits.dtype();
    if f32s && (has_cpu_parameter_kernels(&logits) || has_gpu_kernels(&logits)) {
        let (logits, targets) = (logits.into_dispatch(), targets.into_dispatch());
        return Tensor::from_dispatch(Dispatch::soft_cross_entropy(logits, targets, scale as f32));
    }
    (log_softmax(logits, 1) * targets).sum().mul_scalar(-scale)
}

/// Computes the gradients of a loss `[1]` of [`cross_entropy`], as burn's `loss.backward()`. The gradient of the loss itself is
/// one, so the backward pass does not multiply by it. Other losses are supported too.
pub fn backward(loss: Tensor<1>) -> Gradients {
    let loss = Tensor::<1>::from_dispatch(Dispatch::mark_backward_root(loss.into_dispatch()));
    loss.backward()
}
