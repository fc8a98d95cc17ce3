//! Exact counts of an evaluation. They are added up, never averaged, so that the result does not depend on batches or ranks.

use data::loader::Batch;

use crate::{loss, signals::Stop};

/// Counts of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct EvalCounts {
    /// Samples seen.
    pub samples: u64,
    /// Samples whose largest logit is that of their label.
    pub top1: u64,
    /// Samples whose label is among the five largest logits (all samples where there are fewer than five classes).
    pub top5: u64,
    /// Sum of the samples' cross-entropies, without smoothing.
    pub loss_sum: f64,
    /// `confusion[true * classes + predicted]`.
    pub confusion: Vec<u64>,
    classes: usize,
}

impl EvalCounts {
    /// Starts at zero.
    pub fn new(classes: usize) -> Self {
        Self { samples: 0, top1: 0, top5: 0, loss_sum: 0.0, confusion: vec![0; classes * classes], classes }
    }

    /// Counts `batches` until `stop`. `infer` returns a batch's logits, row-major `[B, classes]`.
    ///
    /// # Errors
    /// Those of `infer`.
    pub fn of_batches<E>(
        classes: usize,
        batches: &mut dyn Iterator<Item = Batch>,
        stop: &Stop,
        mut infer: impl FnMut(Batch) -> Result<Vec<f32>, E>,
    ) -> Result<Self, E> {
        let mut counts = Self::new(classes);
        while stop.signal().is_none()
            && let Some(batch) = batches.next()
        {
            let labels = batch.labels.clone();
            let logits = infer(batch)?;
            for (row, &label) in logits.chunks_exact(classes).zip(&labels) {
                counts.add(row, label as usize);
            }
        }
        Ok(counts)
    }

    /// Counts one sample. `logits` has one entry per class.
    pub fn add(&mut self, logits: &[f32], label: usize) {
        let predicted = loss::argmax(logits);
        self.samples += 1;
        self.top1 += u64::from(predicted == label);
        // The label's rank is the number of classes in front of it; of equal logits the lower index is first (`torch.topk`).
        let own = logits[label];
        let before = logits.iter().enumerate().filter(|&(i, &l)| l > own || (l == own && i < label)).count();
        self.top5 += u64::from(before < 5 && !own.is_nan());
        self.loss_sum += loss::row_loss(logits, (0..self.classes).map(|class| f32::from(u8::from(class == label))));
        self.confusion[label * self.classes + predicted] += 1;
    }

    /// Returns the top-1 accuracy in percent.
    pub fn top1_percent(&self) -> f64 {
        percent(self.top1, self.samples)
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

/// Returns `part` of `whole` in percent; NaN where `whole` is 0.
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

    #[test]
    fn loss_is_the_mean_cross_entropy() {
        let mut counts = EvalCounts::new(2);
        counts.add(&[0.0, 0.0], 1);
        counts.add(&[3.0, 0.0], 0);
        let expected = (2f64.ln() + (1.0 + (-3f64).exp()).ln()) / 2.0;
        assert!((counts.loss() - expected).abs() < 1e-7);
    }
}
