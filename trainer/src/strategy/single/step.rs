//! The step of one device: forward and backward of each batch, then the optimizer.

use data::loader::Batch;

use super::Single;
use crate::{
    failure::Failure,
    strategy::{StepOutcome, diverged},
};

pub(super) fn train_step(
    single: &mut Single,
    batches: Vec<Batch>,
    lr: f64,
    stop: Option<i32>,
) -> Result<StepOutcome, Failure> {
    let samples = batches.iter().map(|batch| batch.labels.len()).sum();
    let mut outcome = StepOutcome { stop, ..StepOutcome::default() };

    let gradients = single.learner.replica.accumulate(batches, samples, &mut outcome);
    if !outcome.loss_sum.is_finite() {
        return Err(diverged(outcome.loss_sum, lr));
    }
    if let Some(gradients) = gradients {
        single.learner.apply(gradients, lr, &mut outcome);
    }
    Ok(outcome)
}
