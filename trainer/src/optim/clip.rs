//! Clipping by the norm of all gradients together: `torch.nn.utils.clip_grad_norm_`.

use burn::tensor::Tensor;

use super::FlatGradients;

/// Scales all gradients by `min(1, max_norm / (norm + 1e-6))`, and returns the norm before. The scaling happens when the
/// gradients are read next.
pub fn clip_grad_norm(gradients: &mut FlatGradients, max_norm: f64) -> f64 {
    clip_on_device(gradients, max_norm).map_or(0.0, |norm| f64::from(norm.into_scalar::<f32>()))
}

/// Clips as [`clip_grad_norm`], but does not wait for the device. Returns the norm, `[1]`, or `None` if there are no gradients.
pub(crate) fn clip_on_device(gradients: &mut FlatGradients, max_norm: f64) -> Option<Tensor<1>> {
    let norm = gradients.square_sum()?.sqrt();
    let factor = norm.clone().add_scalar(1e-6).recip().mul_scalar(max_norm).clamp_max(1.0);
    gradients.scale(factor);
    Some(norm)
}
