//! The step of one device: forward and backward of each batch, clip, optimizer, average.

use std::time::Instant;

use data::loader::Batch;

use super::Single;
use crate::{
    failure::Failure,
    optim::{FlatGradients, clip_global_norm},
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

    let mut gradients: Option<FlatGradients> = None;
    for batch in batches {
        let new = single.replica.forward_backward(batch, samples, &mut outcome);
        match &mut gradients {
            Some(sum) => sum.accumulate(new),
            None => gradients = Some(new),
        }
    }
    if !outcome.loss_sum.is_finite() {
        return Err(diverged(outcome.loss_sum, lr));
    }
    let Some(mut gradients) = gradients else { return Ok(outcome) };

    let start = Instant::now();
    if single.grad_clip > 0.0 {
        outcome.grad_norm = Some(clip_global_norm(&mut gradients, single.grad_clip));
    }
    let network = single.replica.network.clone();
    single.replica.network = single.optimizer.step(network, gradients, lr);
    if let Some(ema) = &mut single.ema {
        ema.update(&single.replica.network);
    }
    outcome.seconds.optimizer = start.elapsed().as_secs_f64();
    Ok(outcome)
}
