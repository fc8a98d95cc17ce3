//! Exact counts over samples: added up, never averaged, so that the result does not depend on batches or ranks.

use crate::loss;

/// Counts of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct Tally {
    /// Samples seen.
    pub samples: u64,
    /// Samples whose largest logit is at their label.
    pub top1: u64,
    /// Samples whose label is among the five largest logits (all of them where there are fewer classes than five).
    pub top5: u64,
    /// Sum of the samples' cross-entropies, without smoothing.
    pub loss_sum: f64,
    /// `confusion[true * classes + predicted]`.
    pub confusion: Vec<u64>,
    classes: usize,
}

impl Tally {
    /// Nothing counted yet.
    pub fn new(classes: usize) -> Self {
        Self { samples: 0, top1: 0, top5: 0, loss_sum: 0.0, confusion: vec![0; classes * classes], classes }
    }

    /// Counts one sample. `logits` has one entry a class.
    pub fn add(&mut self, logits: &[f32], label: usize) {
        let predicted = loss::argmax(logits);
        self.samples += 1;
        self.top1 += u64::from(predicted == label);
        // rank of the label: how many classes come before it, the lower index first among equals (torch.topk)
        let own = logits[label];
        let before = logits.iter().enumerate().filter(|&(i, &l)| l > own || (l == own && i < label)).count();
        self.top5 += u64::from(before < 5 && !own.is_nan());
        self.loss_sum += loss::row_loss(logits, (0..self.classes).map(|class| f32::from(u8::from(class == label))));
        self.confusion[label * self.classes + predicted] += 1;
    }

    /// Top-1 accuracy in percent.
    pub fn top1_percent(&self) -> f64 {
        percent(self.top1, self.samples)
    }

    /// Top-5 accuracy in percent.
    pub fn top5_percent(&self) -> f64 {
        percent(self.top5, self.samples)
    }

    /// Mean cross-entropy.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.samples as f64
    }
}

/// `part` of `whole` in percent; NaN of nothing.
pub fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_top1_top5_and_confusion() {
        let mut tally = Tally::new(7);
        tally.add(&[7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 0); // first
        tally.add(&[7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 4); // fifth
        tally.add(&[7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 5); // sixth
        tally.add(&[0.0; 7], 4); // equals: four come before
        tally.add(&[0.0; 7], 5); // equals: five come before
        assert_eq!((tally.samples, tally.top1, tally.top5), (5, 1, 3));
        assert_eq!(tally.confusion[0], 1);
        assert_eq!(tally.confusion[4 * 7], 2);
        assert_eq!(tally.confusion.iter().sum::<u64>(), 5);
        assert!((tally.top1_percent() - 20.0).abs() < 1e-12);
    }

    #[test]
    fn loss_is_the_mean_cross_entropy() {
        let mut tally = Tally::new(2);
        tally.add(&[0.0, 0.0], 1);
        tally.add(&[3.0, 0.0], 0);
        let expected = (2f64.ln() + (1.0 + (-3f64).exp()).ln()) / 2.0;
        assert!((tally.loss() - expected).abs() < 1e-7);
    }
}
