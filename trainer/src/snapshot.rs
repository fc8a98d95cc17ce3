//! The content of a checkpoint: the tensors ([`Snapshot`]) and the counters ([`RunProgress`]).

use data::{Dataset, sampler::FIRST_EPOCH};
use models::state::StateTensor;
use serde::{Deserialize, Deserializer, Serialize};

use crate::config::BestBy;
use crate::state_file::NamedTensor;

/// Everything that a checkpoint saves of a strategy, in host memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// Parameters and batch-norm statistics in PyTorch's order.
    pub model: Vec<StateTensor>,
    /// Optimizer state, `<slot>.<parameter>`.
    pub optimizer: Vec<NamedTensor>,
    /// Optimizer steps taken.
    pub optimizer_steps: u64,
    /// The weight average; `None` if it is off.
    pub ema: Option<Vec<StateTensor>>,
}

impl Snapshot {
    /// Keeps only the weights for an evaluation: the averaged weights if there are any. With `averages`, also sets `ema` to these
    /// weights. Drops the optimizer's state: it would not fit if the resumed run trains other layers or changed `train.ema`.
    pub fn for_evaluation(self, averages: bool) -> Self {
        let model = self.ema.unwrap_or(self.model);
        Self { ema: averages.then(|| model.clone()), model, ..Self::default() }
    }

    /// Returns the name of a weight that has a value which is not finite.
    pub fn not_finite(&self) -> Option<&str> {
        let broken = |tensor: &&StateTensor| tensor.values.iter().any(|value| !value.is_finite());
        self.model.iter().chain(self.ema.iter().flatten()).find(broken).map(|tensor| tensor.name.as_str())
    }
}

/// The facts about the data set that a checkpoint has, so that `trainer predict` needs only the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetRecord {
    /// Colour planes, rows and columns of the network's images, `[C, H, W]`.
    pub shape: [usize; 3],
    /// Names of the classes in label order.
    pub classes: Vec<String>,
    /// Whether an image has any number of these classes (`data.label_delim`). The network then has a sigmoid per class.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub multi_label: bool,
}

impl DatasetRecord {
    /// Returns the record of a split's data set.
    pub fn of(split: &Dataset) -> Self {
        Self {
            shape: [split.shape.channels, split.shape.height, split.shape.width],
            classes: split.classes.clone(),
            multi_label: split.label_sets.is_some(),
        }
    }

    /// Compares the images with which a checkpoint was trained with those of `data`. Returns how their shapes differ, or `None`.
    pub fn shape_difference(&self, data: &Self) -> Option<String> {
        let shown = |[channels, height, width]: [usize; 3]| format!("{channels}x{height}x{width}");
        (self.shape != data.shape)
            .then(|| format!("was trained on images of {}, and these are {}", shown(self.shape), shown(data.shape)))
    }

    /// Compares the classes with which a checkpoint was trained with those of `data`. Their order matters, since a label is an
    /// index into the list. Returns the kind of difference and its description, or `None`.
    pub fn class_difference(&self, data: &Self) -> Option<(ClassDifference, String)> {
        let list = |classes: &[String]| {
            let shown = classes.iter().take(10).map(String::as_str).collect::<Vec<_>>().join(", ");
            if classes.len() > 10 { format!("{shown}, … ({} classes)", classes.len()) } else { shown }
        };
        let kind = |record: &Self| if record.multi_label { "any number of classes" } else { "one class" };
        if self.multi_label != data.multi_label {
            let cause = format!("was trained on images that have {}, and these have {}", kind(self), kind(data));
            return Some((ClassDifference::MultiLabel, cause));
        }
        if self.classes.len() != data.classes.len() {
            let [trained, now] = [self, data].map(|record| list(&record.classes));
            let cause = format!("was trained on the classes {trained}, and the data set has {now}");
            return Some((ClassDifference::Number, cause));
        }
        let at = (0..self.classes.len()).find(|&at| self.classes[at] != data.classes[at])?;
        let (before, now) = (&self.classes[at], &data.classes[at]);
        let cause = format!("class {at} was {before:?} when it was trained, and is {now:?} in the data set");
        Some((ClassDifference::Name, cause))
    }
}

/// How the classes of a data set differ from those of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClassDifference {
    /// Images have one class instead of any number, or the reverse.
    MultiLabel,
    /// There are more or fewer classes.
    Number,
    /// A class has another name, or another position in the list.
    Name,
}

/// A run's progress, with the sums of the epoch in progress: all checkpoint content that is not a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunProgress {
    /// Epoch in progress, from [`FIRST_EPOCH`]; `epochs + 1` when all epochs are done.
    pub epoch: usize,
    /// Next batch of the epoch, from 0: the sampler's position.
    pub batch: usize,
    /// Optimizer steps taken.
    pub step: u64,
    /// Optimizer steps of an epoch. Absent in checkpoints of older versions.
    #[serde(default)]
    pub steps_per_epoch: Option<u64>,
    /// Loader batches of an epoch. Absent in checkpoints of older versions.
    #[serde(default)]
    pub batches_per_epoch: Option<usize>,
    /// Training images. Absent in checkpoints of older versions.
    #[serde(default)]
    pub images: Option<usize>,
    /// Images of a batch over all ranks. Absent in checkpoints of older versions.
    #[serde(default)]
    pub global_batch: Option<usize>,
    /// Sums over the epoch in progress.
    pub partial: PartialEpoch,
    /// Best evaluation so far, by `checkpoint.best`.
    pub best: Option<Evaluated>,
    /// The name of `checkpoint.best`, by which `best` was chosen. Absent in checkpoints of older versions.
    #[serde(default)]
    pub best_by: Option<String>,
    /// Checksum of the images of the evaluations ([`Loader::eval_checksum`](data::loader::Loader::eval_checksum)). Absent in checkpoints
    /// of older versions.
    #[serde(default)]
    pub eval_crc: Option<u32>,
    /// Last evaluation.
    pub last: Option<Evaluated>,
    /// Optimizer steps taken before the last evaluation. Absent in checkpoints of older versions.
    #[serde(default)]
    pub last_step: Option<u64>,
    /// Seconds of training over all sessions of the run.
    pub elapsed_s: f64,
}

impl RunProgress {
    /// Returns the progress before the first step.
    pub fn start() -> Self {
        Self {
            epoch: FIRST_EPOCH,
            batch: 0,
            step: 0,
            steps_per_epoch: None,
            batches_per_epoch: None,
            images: None,
            global_batch: None,
            partial: PartialEpoch::default(),
            best: None,
            best_by: None,
            eval_crc: None,
            last: None,
            last_step: None,
            elapsed_s: 0.0,
        }
    }
}

/// Sums over the steps of an unfinished epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PartialEpoch {
    /// Sum of sample losses.
    pub loss_sum: f64,
    /// Sum of the samples' weights (`train.class_weights`). `None` as long as every sample has counted 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// Number of samples classified correctly.
    pub correct: u64,
    /// Number of samples seen.
    pub samples: u64,
    /// Seconds of training.
    pub seconds: f64,
}

/// The result of one exact evaluation, which counts every sample once.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct EvalRecord {
    /// Mean loss over all samples.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// Samples whose best class is correct, in percent. Multi-label: samples all of whose classes are right (exact match).
    pub top1: f64,
    /// Samples whose correct class is among the best five, in percent. NaN for multi-label samples.
    #[serde(deserialize_with = "null_is_nan")]
    pub top5: f64,
    /// Number of samples that are right in the sense of `top1`.
    pub correct: u64,
    /// Number of samples.
    pub total: u64,
    /// Mean of the classes' recalls in percent, over the classes that have samples (`balanced_accuracy_score` of
    /// scikit-learn). Absent in records of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balanced_accuracy: Option<f64>,
    /// `top1` with test-time augmentation (`train.tta`), in percent. Nothing else depends on this number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tta_top1: Option<f64>,
    /// Mean of the classes' average precisions in percent, over the classes that samples have. Present for multi-label samples
    /// only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_average_precision: Option<f64>,
}

impl EvalRecord {
    /// Returns whether this evaluation is better than the earlier evaluation `other`. If both are equally good, `other` stays the
    /// best. If `other` lacks the number or has NaN, this evaluation is better.
    pub fn is_better(&self, other: &Self, by: BestBy) -> bool {
        let score = |record: &Self| match by {
            BestBy::Accuracy => record.top1,
            BestBy::BalancedAccuracy => record.balanced_accuracy.unwrap_or(f64::NAN),
            BestBy::MeanAveragePrecision => record.mean_average_precision.unwrap_or(f64::NAN),
            BestBy::Loss => -record.loss,
        };
        score(self) > score(other) || score(other).is_nan()
    }

    /// Returns the balanced accuracy if it differs from the top-1 accuracy in the two decimals that are shown. They are equal for
    /// classes of equal size.
    pub fn distinct_balanced_accuracy(&self) -> Option<f64> {
        // Percentages are shown with two decimals.
        self.balanced_accuracy.filter(|balanced| (balanced - self.top1).abs() >= 0.005)
    }
}

/// An evaluation and its epoch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// The epoch after which the evaluation ran, from 1.
    pub epoch: usize,
    /// The result of the evaluation.
    #[serde(flatten)]
    pub eval: EvalRecord,
}

impl Evaluated {
    /// Returns whether this is the same evaluation. An epoch that was continued may have several.
    pub fn is_same(&self, other: &Self) -> bool {
        let [this, that] = [self, other].map(|one| (one.epoch, one.eval.correct, one.eval.loss.to_bits()));
        this == that
    }
}

/// Reads `null` as NaN. JSON has no NaN, so `serde_json` writes values that are not finite as `null`.
pub(crate) fn null_is_nan<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_better_evaluation_has_more_accuracy_or_less_loss() {
        let one = EvalRecord { loss: 0.5, top1: 80.0, balanced_accuracy: Some(60.0), ..EvalRecord::default() };
        let other = EvalRecord { loss: 0.7, top1: 81.0, balanced_accuracy: Some(59.0), ..EvalRecord::default() };
        for (by, is_better) in [(BestBy::Loss, true), (BestBy::BalancedAccuracy, true), (BestBy::Accuracy, false)] {
            assert_eq!((one.is_better(&other, by), other.is_better(&one, by)), (is_better, !is_better), "{by}");
            assert!(!one.is_better(&one, by), "{by}: of equal ones the first");
        }
        // Older records have no balanced accuracy; a loss may be NaN.
        let old = EvalRecord { balanced_accuracy: None, loss: f64::NAN, ..other };
        for by in [BestBy::Loss, BestBy::BalancedAccuracy] {
            assert!(one.is_better(&old, by) && !old.is_better(&one, by), "{by}");
        }
        let map = |map| EvalRecord { mean_average_precision: Some(map), ..EvalRecord::default() };
        assert!(map(51.0).is_better(&map(50.0), BestBy::MeanAveragePrecision));
    }

    #[test]
    fn a_weight_that_is_not_finite_is_named() {
        let tensor = |name: &str, value| StateTensor::new(name, vec![2], vec![1.0, value]);
        let mut snapshot = Snapshot { model: vec![tensor("a", 0.0), tensor("b", f32::MAX)], ..Snapshot::default() };
        assert_eq!(snapshot.not_finite(), None);
        snapshot.ema = Some(vec![tensor("a", 0.0), tensor("c", f32::NAN)]);
        assert_eq!(snapshot.not_finite(), Some("c"));
        snapshot.model.push(tensor("d", f32::NEG_INFINITY));
        assert_eq!(snapshot.not_finite(), Some("d"));
    }
}
