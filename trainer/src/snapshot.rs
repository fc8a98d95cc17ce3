//! What a checkpoint keeps of a run: the tensors ([`Snapshot`]) and the counters ([`RunProgress`]).

use data::sampler::FIRST_EPOCH;
use models::state::StateTensor;
use serde::{Deserialize, Deserializer, Serialize};

use crate::state_file::NamedTensor;

/// Everything a checkpoint keeps of a strategy, on the host.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// Parameters and batch-norm statistics in PyTorch's order.
    pub model: Vec<StateTensor>,
    /// Optimizer state, `<slot>.<parameter>`.
    pub optimizer: Vec<NamedTensor>,
    /// Optimizer steps taken.
    pub optimizer_steps: u64,
    /// The weight average, where it is on.
    pub ema: Option<Vec<StateTensor>>,
}

/// How far a run has come, with the sums of the epoch in progress: everything of a checkpoint that is not a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunProgress {
    /// Epoch in progress, from [`FIRST_EPOCH`]; `epochs + 1` when all epochs are done.
    pub epoch: usize,
    /// Next batch of that epoch, from 0: the sampler's position.
    pub batch: usize,
    /// Optimizer steps taken.
    pub step: u64,
    /// Sums over the epoch in progress.
    pub partial: PartialEpoch,
    /// Best evaluation by top-1 so far.
    pub best: Option<Evaluated>,
    /// Last evaluation.
    pub last: Option<Evaluated>,
    /// Seconds of training over all sessions of the run.
    pub elapsed_s: f64,
}

impl RunProgress {
    /// Before the first step.
    pub fn start() -> Self {
        Self {
            epoch: FIRST_EPOCH,
            batch: 0,
            step: 0,
            partial: PartialEpoch::default(),
            best: None,
            last: None,
            elapsed_s: 0.0,
        }
    }
}

/// Sums over the steps of an epoch that is not finished.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PartialEpoch {
    /// Sum of sample losses.
    pub loss_sum: f64,
    /// Samples classified right.
    pub correct: u64,
    /// Samples seen.
    pub samples: u64,
    /// Seconds of training.
    pub seconds: f64,
}

/// One exact evaluation: every sample counted once.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct EvalRecord {
    /// Mean loss over all samples.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// Samples whose best class is the right one, in percent.
    pub top1: f64,
    /// Samples with the right class among the best five, in percent.
    pub top5: f64,
    /// Samples whose best class is the right one.
    pub correct: u64,
    /// Samples.
    pub total: u64,
}

/// An evaluation and the epoch after which it was made.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// The epoch, from 1.
    pub epoch: usize,
    /// Its result.
    #[serde(flatten)]
    pub eval: EvalRecord,
}

/// JSON has no NaN: what is not finite is written as `null` (by `serde_json`) and read back as NaN.
pub(crate) fn null_is_nan<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}
