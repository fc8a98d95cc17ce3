//! Exact counts of an evaluation. Counts are summed, never averaged, so the result does not depend on batches or ranks.

use burn::tensor::Tensor;
use data::{CENTRE_CROP, DataError, TEN_CROP, loader::Batch};
use models::{Context, Network};

use super::{Batches, Scores, multi_label, replica::host_logits};
use crate::{config::Tta, loss, signals::StopFlag};

/// The logits of one batch on the host, row-major `[B, classes]`.
#[derive(Debug, Default)]
pub struct Logits {
    /// The logits of the images themselves.
    pub plain: Vec<f32>,
    /// The logits with test-time augmentation, if it is on.
    pub tta: Option<Vec<f32>>,
}

impl Logits {
    /// Computes the logits of `images`, `[B, C, H, W]`, with an inference copy of a network.
    pub fn of(network: &Network, images: Tensor<4>, tta: Tta) -> Self {
        let plain = network.forward(images.clone(), &Context::eval());
        let tta = match tta {
            Tta::None => None,
            Tta::Flip => {
                let mirrored = network.forward(images.flip([3]), &Context::eval());
                Some(host_logits((plain.clone() + mirrored).div_scalar(2.0)))
            }
        };
        Self { plain: host_logits(plain), tta }
    }

    /// Computes the logits of ten views of each image, `[B * 10, C, H, W]` ([`data::TEN_CROP`]). `plain` has the logits of the
    /// centre crop, `tta` the mean over all ten views.
    pub fn of_ten_crops(network: &Network, images: Tensor<4>) -> Self {
        let all = network.forward(images, &Context::eval());
        let classes = all.dims()[1];
        let all = host_logits(all);
        let (mut plain, mut tta) = (Vec::new(), Vec::new());
        for views in all.chunks_exact(TEN_CROP * classes) {
            plain.extend_from_slice(&views[CENTRE_CROP * classes..][..classes]);
            let sum =
                |class: usize| views.iter().skip(class).step_by(classes).map(|&logit| f64::from(logit)).sum::<f64>();
            tta.extend((0..classes).map(|class| (sum(class) / TEN_CROP as f64) as f32));
        }
        Self { plain, tta: Some(tta) }
    }

    /// Keeps the first `len` values, to remove the logits of padding images.
    pub fn truncate(&mut self, len: usize) {
        self.plain.truncate(len);
        if let Some(tta) = &mut self.tta {
            tta.truncate(len);
        }
    }

    /// Appends the logits of the batch's next images.
    pub fn append(&mut self, next: Self) {
        self.plain.extend(next.plain);
        match (&mut self.tta, next.tta) {
            (Some(tta), Some(next)) => tta.extend(next),
            (tta, next) => *tta = next,
        }
    }
}

/// Counts of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct EvalCounts {
    /// Samples seen.
    pub samples: u64,
    /// Samples whose largest logit is that of their label.
    pub top1: u64,
    /// Samples whose label is among the five largest logits (all samples if there are fewer than five classes).
    pub top5: u64,
    /// Like `top1`, with test-time augmentation, if it is on.
    pub tta_top1: Option<u64>,
    /// Sum of the samples' cross-entropies, without smoothing.
    pub loss_sum: f64,
    /// `confusion[true * classes + predicted]`; empty for multi-label samples.
    pub confusion: Vec<u64>,
    /// The scores of multi-label samples. `None` if each sample has one class.
    pub scores: Option<Scores>,
    classes: usize,
}

impl EvalCounts {
    /// Starts at zero.
    pub fn new(classes: usize) -> Self {
        let confusion = vec![0; classes * classes];
        Self { samples: 0, top1: 0, top5: 0, tta_top1: None, loss_sum: 0.0, confusion, scores: None, classes }
    }

    /// Starts at zero. With `multi_label` a sample has any number of classes.
    pub(super) fn empty(classes: usize, multi_label: bool) -> Self {
        match multi_label {
            true => Self { confusion: Vec::new(), scores: Some(Scores::new(classes)), ..Self::new(classes) },
            false => Self::new(classes),
        }
    }

    /// Evaluates `batches` until `stop`, and adds the results to `counts`, which the caller makes with [`EvalCounts::empty`].
    /// `infer` returns a batch's logits.
    ///
    /// # Errors
    /// Those of `infer`; a batch that is an error; or a batch with one class per image in a multi-label evaluation, or the
    /// reverse.
    pub(super) fn count_batches<E: From<DataError>>(
        mut counts: Self,
        batches: &mut Batches<'_>,
        stop: &StopFlag,
        mut infer: impl FnMut(Batch) -> Result<Logits, E>,
    ) -> Result<Self, E> {
        let classes = counts.classes;
        while stop.signal().is_none()
            && let Some(batch) = batches.next()
        {
            let batch = batch?;
            let (labels, multi_hot) = (batch.labels.clone(), batch.multi_hot.clone());
            multi_label::check_batch(counts.scores.is_some(), &multi_hot)?;
            let Logits { plain, tta } = infer(batch)?;
            let rows = plain.chunks_exact(classes);
            match multi_hot.is_empty() {
                true => rows.zip(&labels).for_each(|(row, &label)| counts.add(row, label as usize)),
                false => {
                    rows.zip(multi_hot.chunks_exact(classes)).for_each(|(row, set)| counts.add_multi_label(row, set))
                }
            }
            if let Some(tta) = tta {
                let rows = tta.chunks_exact(classes).zip(&labels);
                let right = rows.filter(|(row, label)| loss::argmax(row) == **label as usize).count();
                *counts.tta_top1.get_or_insert(0) += right as u64;
            }
        }
        Ok(counts)
    }

    /// Counts one sample. `logits` has one entry per class.
    pub fn add(&mut self, logits: &[f32], label: usize) {
        let predicted = loss::argmax(logits);
        self.samples += 1;
        self.top1 += u64::from(predicted == label);
        // The label's position is the number of classes before it. Of equal logits the lower index is first (`torch.topk`).
        let own = logits[label];
        let before = logits.iter().enumerate().filter(|&(i, &l)| l > own || (l == own && i < label)).count();
        self.top5 += u64::from(before < 5 && !own.is_nan());
        self.loss_sum += loss::sample_loss(logits, (0..self.classes).map(|class| f32::from(u8::from(class == label))));
        self.confusion[label * self.classes + predicted] += 1;
    }

    /// Counts one multi-label sample. `logits` and `target` (1 or 0) have one entry per class.
    fn add_multi_label(&mut self, logits: &[f32], target: &[f32]) {
        let (loss, right) = multi_label::loss_and_exact_match(logits, target);
        self.samples += 1;
        self.top1 += u64::from(right);
        self.loss_sum += loss;
        self.scores.get_or_insert_with(|| Scores::new(logits.len())).add(logits, target);
    }

    /// Returns the top-1 accuracy in percent. For multi-label samples this is the exact-match ratio.
    pub fn top1_percent(&self) -> f64 {
        percent(self.top1, self.samples)
    }

    /// Returns the mean of the classes' recalls in percent, over the classes that have samples
    /// (`sklearn.metrics.balanced_accuracy_score`); NaN without samples.
    pub fn balanced_percent(&self) -> f64 {
        let recall = |(class, row): (usize, &[u64])| {
            let total = row.iter().sum::<u64>();
            (total > 0).then(|| percent(row[class], total))
        };
        let recalls: Vec<f64> = self.confusion.chunks_exact(self.classes).enumerate().filter_map(recall).collect();
        recalls.iter().sum::<f64>() / recalls.len() as f64
    }

    /// Returns the top-1 accuracy with test-time augmentation in percent, if it is on.
    pub fn tta_top1_percent(&self) -> Option<f64> {
        self.tta_top1.map(|right| percent(right, self.samples))
    }

    /// Returns the top-5 accuracy in percent.
    pub fn top5_percent(&self) -> f64 {
        percent(self.top5, self.samples)
    }

    /// Returns the mean cross-entropy.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.samples as f64
    }
}

/// Returns `part` of `whole` in percent, or NaN if `whole` is 0.
pub fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_top1_top5_and_confusion() {
        let mut counts = EvalCounts::new(7);
        counts.add(&[7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 0); // first
        counts.add(&[7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 4); // fifth
        counts.add(&[7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 5); // sixth
        counts.add(&[0.0; 7], 4); // equal logits: four are in front
        counts.add(&[0.0; 7], 5); // equal logits: five are in front
        assert_eq!((counts.samples, counts.top1, counts.top5), (5, 1, 3));
        assert_eq!(counts.confusion[0], 1);
        assert_eq!(counts.confusion[4 * 7], 2);
        assert_eq!(counts.confusion.iter().sum::<u64>(), 5);
        assert!((counts.top1_percent() - 20.0).abs() < 1e-12);
    }

    /// `balanced_accuracy_score([0, 0, 0, 0, 1, 1, 3], [0, 0, 0, 2, 0, 1, 3])` of scikit-learn is (3/4 + 1/2 + 1) / 3.
    #[test]
    fn the_balanced_accuracy_is_the_mean_recall_of_the_classes_with_samples() {
        let mut counts = EvalCounts::new(4);
        for (label, predicted) in [(0, 0), (0, 0), (0, 0), (0, 2), (1, 0), (1, 1), (3, 3)] {
            let logits: Vec<f32> = (0..4).map(|class| f32::from(u8::from(class == predicted))).collect();
            counts.add(&logits, label);
        }
        assert!((counts.balanced_percent() - 75.0).abs() < 1e-12, "{}", counts.balanced_percent());
        assert!((counts.top1_percent() - 500.0 / 7.0).abs() < 1e-12);
        assert!(EvalCounts::new(4).balanced_percent().is_nan());
    }

    #[test]
    fn logits_with_mirror_images_are_the_mean_of_both() {
        let device = burn::tensor::Device::flex();
        let spec = models::find("lenet").unwrap().spec;
        let network = models::build("lenet", &spec, 1, &device).unwrap();
        let pixels: Vec<f32> = (0..2 * 3072).map(|i| (i as f32 * 0.7).sin()).collect();
        // Rows of 32 pixels, read backwards.
        let mirrored: Vec<f32> = pixels.chunks_exact(32).flat_map(|row| row.iter().rev().copied()).collect();
        let tensor = |values: &[f32]| Tensor::<1>::from_floats(values, &device).reshape([2, 3, 32, 32]);
        let of = |values: &[f32], tta| Logits::of(&network, tensor(values), tta);
        let (both, image, mirror) = (of(&pixels, Tta::Flip), of(&pixels, Tta::None), of(&mirrored, Tta::None));
        assert!(image.tta.is_none());
        assert_eq!(both.plain, image.plain);
        let mean: Vec<f32> = image.plain.iter().zip(&mirror.plain).map(|(a, b)| (a + b) / 2.0).collect();
        assert_eq!(both.tta.unwrap(), mean);
        assert_ne!(image.plain, mirror.plain);
    }

    #[test]
    fn logits_of_ten_crops_are_the_mean_of_all_and_those_of_the_centre() {
        let device = burn::tensor::Device::flex();
        let spec = models::find("lenet").unwrap().spec;
        let network = models::build("lenet", &spec, 1, &device).unwrap();
        let pixels: Vec<f32> = (0..2 * TEN_CROP * 3072).map(|i| (i as f32 * 0.37).sin()).collect();
        let tensor = |values: &[f32], count| Tensor::<1>::from_floats(values, &device).reshape([count, 3, 32, 32]);
        let ten = Logits::of_ten_crops(&network, tensor(&pixels, 2 * TEN_CROP));
        let close = |a: &[f32], b: &[f32]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
        for image in 0..2 {
            let views: Vec<Vec<f32>> = (0..TEN_CROP)
                .map(|view| {
                    Logits::of(&network, tensor(&pixels[(image * TEN_CROP + view) * 3072..][..3072], 1), Tta::None)
                        .plain
                })
                .collect();
            let row = image * 10..(image + 1) * 10;
            assert!(close(&ten.plain[row.clone()], &views[CENTRE_CROP]));
            let mean: Vec<f32> =
                (0..10).map(|class| views.iter().map(|view| view[class]).sum::<f32>() / 10.0).collect();
            assert!(close(&ten.tta.as_ref().unwrap()[row], &mean));
            assert!(!close(&mean, &views[CENTRE_CROP]));
        }
    }

    #[test]
    fn loss_is_the_mean_cross_entropy() {
        let mut counts = EvalCounts::new(2);
        counts.add(&[0.0, 0.0], 1);
        counts.add(&[3.0, 0.0], 0);
        let expected = (2f64.ln() + (1.0 + (-3f64).exp()).ln()) / 2.0;
        assert!((counts.loss() - expected).abs() < 1e-7);
    }
}
