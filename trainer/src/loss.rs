//! Cross-entropy over soft targets.
//!
//! Label smoothing, mixup, cutmix and class weights only change the targets, so one loss serves them all:
//! `-(target * log_softmax(logits)).sum() / weight` with targets built on the host. `weight` is the number of samples, or with
//! class weights the sum of the weights of the samples' labels, of all batches and ranks of the optimizer step. Mixed batches
//! divide by the number of samples, as PyTorch does for targets that are probabilities.
//! Source: `torch.nn.functional.cross_entropy(…, weight, label_smoothing)`; mixup arXiv:1710.09412.

pub mod binary;

use burn::tensor::{Device, Tensor, TensorData};
use data::loader::Mix;

/// Returns the target distribution of one batch, row-major `[B, classes]`. `labels` is `[B]`. With label smoothing, the label has
/// the mass `1 - smoothing + smoothing / classes`, and each other class has `smoothing / classes`. With `mix`, the distribution
/// of each sample is then mixed with that of its partner.
pub fn soft_targets(labels: &[i32], mix: Option<&Mix>, classes: usize, smoothing: f64) -> Vec<f32> {
    let rest = (smoothing / classes as f64) as f32;
    let mut targets = vec![rest; labels.len() * classes];
    let mass = 1.0 - smoothing;
    for (row, (target, &label)) in targets.chunks_exact_mut(classes).zip(labels).enumerate() {
        match mix {
            None => target[label as usize] += mass as f32,
            Some(mix) => {
                let lambda = f64::from(mix.lambda);
                target[label as usize] += (mass * lambda) as f32;
                target[mix.labels[row] as usize] += (mass * (1.0 - lambda)) as f32;
            }
        }
    }
    targets
}

/// Multiplies targets, row-major `[B, classes]`, by the weight of each class, `[classes]`. Without weights nothing changes.
pub fn apply_class_weights(targets: &mut [f32], weights: &[f64]) {
    if weights.is_empty() {
        return;
    }
    for row in targets.chunks_exact_mut(weights.len()) {
        row.iter_mut().zip(weights).for_each(|(target, &weight)| *target = (f64::from(*target) * weight) as f32);
    }
}

/// Returns the differentiable loss `[1]`: the sum over the batch divided by `weight`. For a mean over one batch, `weight` is the
/// sum of the batch's sample weights. With accumulation or several ranks, `weight` is the sum over the whole optimizer step. If
/// `weight` is 0, the loss is 0.
///
/// `torch.nn.functional.cross_entropy` with class probabilities as targets and `reduction="sum"`, divided by `weight`.
///
/// # Shapes
/// `logits` `[B, classes]`, `targets` row-major of the same length.
pub fn cross_entropy(logits: Tensor<2>, targets: Vec<f32>, weight: f64) -> Tensor<1> {
    let [batch, classes] = logits.dims();
    let device: Device = logits.device();
    let targets = Tensor::<2>::from_data(TensorData::new(targets, [batch, classes]), &device.inner());
    cross_entropy_on_device(logits, targets, weight)
}

/// Returns the loss of [`cross_entropy`]. `targets` are on the device, `[B, classes]`, without autodiff.
pub fn cross_entropy_on_device(logits: Tensor<2>, targets: Tensor<2>, weight: f64) -> Tensor<1> {
    ops::cross_entropy(logits, targets, if weight > 0.0 { 1.0 / weight } else { 0.0 })
}

/// Returns the cross-entropy of one sample, computed on the host in f64. `logits` and `target` have one entry per class.
pub fn sample_loss(logits: &[f32], target: impl Iterator<Item = f32>) -> f64 {
    let log_sum = log_sum_exp(logits);
    logits.iter().zip(target).map(|(&logit, target)| f64::from(target) * (log_sum - f64::from(logit))).sum()
}

/// Returns `log(sum(exp(logits)))` (`torch.logsumexp`), shifted by the largest logit so that nothing overflows.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !max.is_finite() {
        return f64::from(logits.iter().sum::<f32>());
    }
    f64::from(max) + logits.iter().map(|&l| f64::from(l - max).exp()).sum::<f64>().ln()
}

/// Returns the index of the largest logit. Of equal logits, returns the first. Skips NaN, unlike `torch.argmax`.
pub fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for (index, &logit) in logits.iter().enumerate() {
        if logit > logits[best] || logits[best].is_nan() {
            best = index;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads `losses.json`, computed by PyTorch in float64: logits 3 cos(0.9 i + 1.7 j), 4 x 10, labels 0 3 7 9.
    fn golden() -> serde_json::Value {
        serde_json::from_str(include_str!("../tests/reference/losses.json")).expect("golden file")
    }

    fn logits() -> Vec<f32> {
        (0..4).flat_map(|i| (0..10).map(move |j| (3.0 * (0.9 * i as f64 + 1.7 * j as f64).cos()) as f32)).collect()
    }

    fn check(key: &str, mix: Option<Mix>, smoothing: f64) {
        let expected = golden()[key].as_f64().expect(key);
        let targets = soft_targets(&[0, 3, 7, 9], mix.as_ref(), 10, smoothing);
        let device = Device::flex();
        let tensor = Tensor::<2>::from_data(TensorData::new(logits(), [4, 10]), &device);
        let loss = f64::from(cross_entropy(tensor, targets.clone(), 4.0).into_scalar::<f32>());
        assert!((loss - expected).abs() < 1e-6, "{key}: {loss} against {expected}");
        let host = logits()
            .chunks(10)
            .zip(targets.chunks(10))
            .map(|(row, target)| sample_loss(row, target.iter().copied()))
            .sum::<f64>()
            / 4.0;
        assert!((host - expected).abs() < 1e-6, "{key} on the host: {host} against {expected}");
    }

    #[test]
    fn losses_equal_pytorch() {
        let mix = || Some(Mix { labels: vec![9, 7, 3, 0], lambda: 0.3 });
        check("cross_entropy", None, 0.0);
        check("label_smoothing_0.1", None, 0.1);
        check("mixup_0.3_with_reversed_batch", mix(), 0.0);
        check("mixup_and_smoothing_0.1", mix(), 0.1);
    }

    /// Compares loss and gradient with `class_weights.json`, for the same logits and labels.
    fn check_weighted(key: &str, mix: Option<Mix>, smoothing: f64) {
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../tests/reference/class_weights.json")).expect("golden file");
        let list = |value: &serde_json::Value| -> Vec<f64> {
            value.as_array().expect("a list").iter().map(|number| number.as_f64().expect("a number")).collect()
        };
        let weights = list(&golden["weights"]);
        let labels = [0, 3, 7, 9];
        let weight = if mix.is_some() { 4.0 } else { labels.iter().map(|&label| weights[label as usize]).sum() };
        let mut targets = soft_targets(&labels, mix.as_ref(), 10, smoothing);
        apply_class_weights(&mut targets, &weights);
        let device = Device::flex().autodiff();
        let tensor = Tensor::<2>::from_data(TensorData::new(logits(), [4, 10]), &device).require_grad();
        let loss = cross_entropy(tensor.clone(), targets.clone(), weight);
        let gradients = loss.backward();
        let expected = golden[key]["loss"].as_f64().expect(key);
        let found = f64::from(loss.into_scalar::<f32>());
        assert!((found - expected).abs() < 1e-6, "{key}: {found} against {expected}");
        let rows = logits()
            .chunks(10)
            .zip(targets.chunks(10))
            .map(|(row, t)| sample_loss(row, t.iter().copied()))
            .sum::<f64>();
        assert!((rows / weight - expected).abs() < 1e-6, "{key} on the host: {} against {expected}", rows / weight);
        let found = tensor.grad(&gradients).expect("a gradient").into_data().try_into_vec::<f32>().expect("f32");
        for (index, (found, expected)) in found.iter().zip(list(&golden[key]["gradient"])).enumerate() {
            assert!((f64::from(*found) - expected).abs() < 1e-6, "{key}, gradient {index}: {found} against {expected}");
        }
    }

    #[test]
    fn weighted_losses_and_gradients_equal_pytorch() {
        let mix = || Some(Mix { labels: vec![9, 7, 3, 0], lambda: 0.3 });
        check_weighted("weighted", None, 0.0);
        check_weighted("weighted_and_smoothing_0.1", None, 0.1);
        check_weighted("mixup_0.3_with_reversed_batch", mix(), 0.0);
        check_weighted("mixup_and_smoothing_0.1", mix(), 0.1);
    }

    #[test]
    fn samples_of_weight_zero_have_no_gradient() {
        let mut targets = soft_targets(&[1], None, 3, 0.0);
        apply_class_weights(&mut targets, &[1.0, 0.0, 1.0]);
        let device = Device::flex().autodiff();
        let tensor = Tensor::<2>::from_floats([[1.0, 2.0, 3.0]], &device).require_grad();
        let loss = cross_entropy(tensor.clone(), targets, 0.0);
        let gradient = tensor.grad(&loss.backward()).expect("a gradient").into_data().try_into_vec::<f32>();
        assert_eq!(gradient.expect("f32"), [0.0; 3]);
        assert_eq!(loss.into_scalar::<f32>(), 0.0);
    }

    #[test]
    fn the_host_loss_does_not_overflow_and_keeps_nan() {
        assert_eq!(sample_loss(&[1e30, 0.0], [1.0, 0.0].into_iter()), 0.0);
        assert!(sample_loss(&[f32::NAN, 0.0], [1.0, 0.0].into_iter()).is_nan());
    }

    #[test]
    fn argmax_takes_the_first_of_equals() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
        assert_eq!(argmax(&[f32::NAN, -1.0, 0.5]), 2);
    }
}
