//! Binary cross-entropy: each class of a multi-label image is decided by itself.
//!
//! Source: `torch.nn.BCEWithLogitsLoss(pos_weight)`, the mean over images and classes.

use burn::tensor::{Tensor, TensorData, activation::log_sigmoid};

/// Returns the differentiable loss `[1]`: the mean over the classes of each image, summed over the batch and divided by `weight`,
/// which is the same as in [`cross_entropy`](super::cross_entropy). `pos_weights`, `[classes]`, are the weights of the images that
/// have a class. If `pos_weights` is empty, all weights are 1.
///
/// `torch.nn.functional.binary_cross_entropy_with_logits(…, reduction="sum", pos_weight)`, divided by `weight` and `classes`.
///
/// # Shapes
/// `logits` `[B, classes]`, `targets` row-major of the same length: 1 for a class of the image, else 0.
pub fn binary_cross_entropy(logits: Tensor<2>, targets: &[f32], pos_weights: &[f64], weight: f64) -> Tensor<1> {
    let [batch, classes] = logits.dims();
    let device = logits.device();
    let tensor = |values: Vec<f32>| Tensor::<2>::from_data(TensorData::new(values, [batch, classes]), &device);
    let absent = tensor(targets.iter().map(|target| 1.0 - target).collect());
    let factors =
        tensor(targets.iter().enumerate().map(|(at, &target)| factor(target, at % classes, pos_weights)).collect());
    let scale = if weight > 0.0 { 1.0 / (weight * classes as f64) } else { 0.0 };
    // PyTorch's form: log(sigmoid(-x)) = log(sigmoid(x)) - x.
    (logits.clone() * absent - log_sigmoid(logits) * factors).sum().mul_scalar(scale)
}

/// Returns the binary cross-entropy of one image, computed on the host in f64: the mean over the classes.
pub fn sample_loss(logits: &[f32], target: &[f32], pos_weights: &[f64]) -> f64 {
    let of_class = |(class, (&logit, &target)): (usize, (&f32, &f32))| {
        let x = f64::from(logit);
        let log_sigmoid = x.min(0.0) - (-x.abs()).exp().ln_1p();
        (1.0 - f64::from(target)) * x - f64::from(factor(target, class, pos_weights)) * log_sigmoid
    };
    logits.iter().zip(target).enumerate().map(of_class).sum::<f64>() / logits.len() as f64
}

/// Returns the factor of the log-sigmoid: the weight of the class if the image has the class, otherwise 1.
fn factor(target: f32, class: usize, pos_weights: &[f64]) -> f32 {
    let weight = pos_weights.get(class).copied().unwrap_or(1.0) as f32;
    1.0 + (weight - 1.0) * target
}

/// Returns whether a class is predicted: its logit is above 0, which is a probability above 0.5 (`preds > threshold` of
/// torchmetrics).
pub fn is_predicted(logit: f32) -> bool {
    logit > 0.0
}

/// Returns whether every class is predicted correctly. (`MultilabelExactMatch` of torchmetrics; scikit-learn's `accuracy_score` of
/// indicator matrices.)
pub fn exact_match(logits: &[f32], target: &[f32]) -> bool {
    logits.iter().zip(target).all(|(&logit, &target)| !logit.is_nan() && is_predicted(logit) == (target > 0.5))
}

/// Returns the probability of a class (`torch.sigmoid`).
pub fn sigmoid(logit: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(logit)).exp())
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    const LOGITS: [f32; 6] = [2.0, -1.5, 0.25, -40.0, 0.0, 90.0];
    const TARGETS: [f32; 6] = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0];

    /// Compares loss and gradient, on the device and on the host.
    fn check(pos_weights: &[f64], expected: f64, gradient: [f64; 6]) {
        let device = Device::flex().autodiff();
        let logits = Tensor::<2>::from_data(TensorData::new(LOGITS.to_vec(), [2, 3]), &device).require_grad();
        let loss = binary_cross_entropy(logits.clone(), &TARGETS, pos_weights, 2.0);
        let found = logits.grad(&loss.backward()).expect("a gradient").into_data().try_into_vec::<f32>().expect("f32");
        for (class, (found, expected)) in found.iter().zip(gradient).enumerate() {
            assert!((f64::from(*found) - expected).abs() < 1e-6, "gradient {class}: {found} against {expected}");
        }
        let loss = f64::from(loss.into_scalar::<f32>());
        assert!((loss - expected).abs() < 1e-5, "{loss} against {expected}");
        let rows = LOGITS.chunks(3).zip(TARGETS.chunks(3)).map(|(row, target)| sample_loss(row, target, pos_weights));
        let host = rows.sum::<f64>() / 2.0;
        assert!((host - expected).abs() < 1e-9, "on the host: {host} against {expected}");
    }

    /// PyTorch 2.15.0 in float64: `binary_cross_entropy_with_logits(x, t, pos_weight=p)` and its gradient.
    #[test]
    fn loss_and_gradient_equal_pytorch() {
        check(&[], 6.932904648244, [-0.019867154, 0.030404254, -0.072970583, -0.166666667, 0.083333333, 0.000000000]);
        check(
            &[3.0, 0.5, 2.0],
            20.404537221905,
            [-0.059601461, 0.030404254, -0.145941166, -0.500000000, 0.083333333, 0.000000000],
        );
    }

    #[test]
    fn the_loss_is_zero_if_the_weight_is_zero() {
        let logits = Tensor::<2>::from_floats([[1.0, -2.0]], &Device::flex());
        assert_eq!(binary_cross_entropy(logits, &[1.0, 0.0], &[], 0.0).into_scalar::<f32>(), 0.0);
    }

    #[test]
    fn an_exact_match_has_every_class_right() {
        assert!(exact_match(&[0.1, -0.1], &[1.0, 0.0]));
        assert!(!exact_match(&[0.1, -0.1], &[1.0, 1.0]));
        // `MultilabelExactMatch` compares with `>`, so a probability of 0.5 is not a prediction.
        assert!(exact_match(&[0.1, 0.0], &[1.0, 0.0]));
        assert!(!exact_match(&[0.0, -0.1], &[1.0, 0.0]));
        assert!(!exact_match(&[-0.1, -0.1], &[1.0, 0.0]));
        assert!(!exact_match(&[f32::NAN, -0.1], &[0.0, 0.0]));
        assert!((sigmoid(0.0) - 0.5).abs() < 1e-12 && sigmoid(-1000.0) == 0.0 && sigmoid(1000.0) == 1.0);
    }
}
