//! The scores of a multi-label evaluation, and the average precision of each class.

use data::DataError;

use crate::loss::binary;

/// The logits and classes of every evaluated image. Average precision sorts the scores of all images, so ranks cannot sum
/// partial results. Instead, ranks gather the scores of all ranks (`Scores::to_bytes`), and every rank computes the same result
/// from them. The order of images does not matter.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scores {
    classes: usize,
    /// Row-major `[N, classes]`.
    logits: Vec<f32>,
    /// Whether the image has the class, row-major `[N, classes]`.
    positive: Vec<bool>,
}

impl Scores {
    /// Starts without images.
    pub fn new(classes: usize) -> Self {
        Self { classes, ..Self::default() }
    }

    /// Returns empty scores for the same classes.
    pub(super) fn without_images(&self) -> Self {
        Self::new(self.classes)
    }

    /// Adds an image. `logits` and `target` (1 or 0) have one entry per class.
    pub(super) fn add(&mut self, logits: &[f32], target: &[f32]) {
        self.logits.extend_from_slice(logits);
        self.positive.extend(target.iter().map(|&target| target > 0.5));
    }

    /// Encodes the scores for another rank: 5 bytes per image and class.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let one = |(logit, &positive): (&f32, &bool)| {
            let [a, b, c, d] = logit.to_le_bytes();
            [a, b, c, d, u8::from(positive)]
        };
        self.logits.iter().zip(&self.positive).flat_map(one).collect()
    }

    /// Adds the scores that [`Scores::to_bytes`] returned on another rank.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        for &[a, b, c, d, positive] in bytes.as_chunks::<5>().0 {
            self.logits.push(f32::from_le_bytes([a, b, c, d]));
            self.positive.push(positive == 1);
        }
    }

    /// Returns the number of images that have each class, `[classes]`.
    pub fn images_per_class(&self) -> Vec<u64> {
        let count = |class: usize| self.positive.iter().skip(class).step_by(self.classes).filter(|has| **has).count();
        (0..self.classes).map(|class| count(class) as u64).collect()
    }

    /// Returns the average precision of each class, `[classes]`, from 0 to 1: `sum((R[k] - R[k - 1]) * P[k])` over the distinct
    /// scores in descending order, where `R` is the recall and `P` the precision (`sklearn.metrics.average_precision_score`).
    /// `None` for a class that no image has.
    pub fn average_precision(&self) -> Vec<Option<f64>> {
        let images = self.images_per_class();
        (0..self.classes)
            .map(|class| (images[class] > 0).then(|| self.class_average_precision(class, images[class])))
            .collect()
    }

    fn class_average_precision(&self, class: usize, images: u64) -> f64 {
        let column = self.logits.iter().zip(&self.positive).skip(class).step_by(self.classes);
        let mut ranked: Vec<(f32, bool)> = column.map(|(&logit, &positive)| (logit, positive)).collect();
        ranked.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        let (mut seen, mut found, mut sum) = (0u64, 0u64, 0.0);
        // Images with equal scores have no order, so they are counted together.
        for equal in ranked.chunk_by(|a, b| a.0 == b.0) {
            let more = equal.iter().filter(|(_, positive)| *positive).count() as u64;
            (seen, found) = (seen + equal.len() as u64, found + more);
            sum += more as f64 * (found as f64 / seen as f64);
        }
        sum / images as f64
    }

    /// Returns the mean average precision in percent, over the classes that at least one image has (`average="macro"` of
    /// torchmetrics' `MultilabelAveragePrecision`). NaN if no image has a class.
    pub fn mean_percent(&self) -> f64 {
        let known: Vec<f64> = self.average_precision().into_iter().flatten().collect();
        100.0 * known.iter().sum::<f64>() / known.len() as f64
    }
}

/// Returns the loss of one image without `pos_weight`, and whether all its classes are predicted correctly. `logits` and `target`
/// (1 or 0) have one entry per class.
pub(super) fn loss_and_exact_match(logits: &[f32], target: &[f32]) -> (f64, bool) {
    (binary::sample_loss(logits, target, &[]), binary::exact_match(logits, target))
}

/// Checks that a batch belongs to a multi-label data set if `multi_label` is set, and to a single-label data set otherwise.
pub(super) fn check_batch(multi_label: bool, multi_hot: &[f32]) -> Result<(), DataError> {
    let mistake = |cause: &str, hint: &str| Err(DataError::new("", cause, hint));
    match (multi_label, multi_hot.is_empty()) {
        (true, true) => mistake(
            "the run is multi-label, and each image of the data set has one class",
            "set data.label_delim as it was in training (--label-delim of `trainer eval`)",
        ),
        (false, false) => mistake(
            "the run is single-label, and the data set's images have several classes",
            "remove data.label_delim, which the training did not have",
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores of one class; the other class has the opposite labels and scores.
    fn scores(values: &[(f32, bool)]) -> Scores {
        let mut scores = Scores::new(2);
        for &(logit, positive) in values {
            let target = f32::from(u8::from(positive));
            scores.add(&[logit, -logit], &[target, 1.0 - target]);
        }
        scores
    }

    const VALUES: [(f32, bool); 7] =
        [(3.0, true), (2.5, false), (2.5, true), (1.0, true), (0.5, false), (-1.0, false), (-2.0, true)];

    /// scikit-learn 1.9.1: `average_precision_score([1, 0, 1, 1, 0, 0, 1], [3, 2.5, 2.5, 1, 0.5, -1, -2])` is 0.7470238. For the
    /// opposite labels and scores it is 0.5555556.
    #[test]
    fn the_average_precision_is_scikit_learns() {
        let found = scores(&VALUES).average_precision();
        let by_hand = (1.0 + 2.0 / 3.0 + 3.0 / 4.0 + 4.0 / 7.0) / 4.0;
        assert!((found[0].unwrap() - by_hand).abs() < 1e-12, "{found:?}");
        let opposite = (1.0 / 2.0 + 2.0 / 3.0 + 3.0 / 6.0) / 3.0;
        assert!((found[1].unwrap() - opposite).abs() < 1e-12, "{found:?}");
        let mean = scores(&VALUES).mean_percent();
        assert!((mean - 50.0 * (by_hand + opposite)).abs() < 1e-10, "{mean}");
        assert_eq!(scores(&VALUES).images_per_class(), [4, 3]);
    }

    #[test]
    fn the_average_precision_does_not_depend_on_the_order_or_the_ranks_of_images() {
        let whole = scores(&VALUES);
        let mut gathered = Scores::new(2);
        for part in [&VALUES[4..], &VALUES[..0], &VALUES[1..4], &VALUES[..1]] {
            gathered.append(&scores(part).to_bytes());
        }
        assert_eq!(gathered.average_precision(), whole.average_precision());
        assert_eq!(gathered.images_per_class(), whole.images_per_class());
    }

    #[test]
    fn classes_without_images_are_left_out() {
        let mut scores = Scores::new(3);
        scores.add(&[1.0, 2.0, 3.0], &[1.0, 0.0, 0.0]);
        scores.add(&[2.0, 2.0, 3.0], &[0.0, 0.0, 1.0]);
        assert_eq!(scores.average_precision(), [Some(0.5), None, Some(0.5)]);
        assert_eq!(scores.mean_percent(), 50.0);
        assert!(Scores::new(2).mean_percent().is_nan());
    }
}
