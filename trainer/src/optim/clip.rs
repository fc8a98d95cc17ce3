//! Clipping by the norm of all gradients together: `torch.nn.utils.clip_grad_norm_`.

use super::FlatGradients;

/// Scales all gradients by `min(1, max_norm / (norm + 1e-6))`, where they are next read, and returns the norm before.
pub fn clip_grad_norm(gradients: &mut FlatGradients, max_norm: f64) -> f64 {
    let Some(square_sum) = gradients.square_sum() else { return 0.0 };
    let norm = square_sum.sqrt();
    // The factor stays on the device: clipping does not wait for it.
    let factor = norm.clone().add_scalar(1e-6).recip().mul_scalar(max_norm).clamp_max(1.0);
    gradients.scale(factor);
    f64::from(norm.into_scalar::<f32>())
}
