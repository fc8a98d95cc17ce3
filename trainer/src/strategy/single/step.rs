//! The step of one device: forward and backward of each batch, clip, optimizer, average.

use std::time::Instant;

use data::loader::Batch;

use super::Single;
use crate::{failure::Failure, optim, strategy::StepOutcome};

pub(super) fn train_step(single: &mut Single, batches: Vec<Batch>, lr: f64) -> Result<StepOutcome, Failure> {
    let samples = batches.iter().map(|batch| batch.labels.len()).sum();
    let mut outcome = StepOutcome::default();

    let mut gradients: Option<optim::FlatGradients> = None;
    for batch in batches {
        let Some(new) = single.replica.forward_backward(batch, samples, &mut outcome) else {
            return Err(Failure::run(
                format!("the training loss is {} (learning rate {lr})", outcome.loss_sum),
                "training diverged: lower optimizer.lr, lengthen the warm-up, or set train.grad_clip; the checkpoints \
                 written before are untouched",
            ));
        };
        match &mut gradients {
            Some(sum) => sum.accumulate(new),
            None => gradients = Some(new),
        }
    }
    let Some(mut gradients) = gradients else { return Ok(outcome) };

    let start = Instant::now();
    if single.grad_clip > 0.0 {
        outcome.grad_norm = Some(optim::clip_global_norm(&mut gradients, single.grad_clip));
    }
    let network = single.replica.network.clone();
    single.replica.network = single.optimizer.step(network, gradients, lr);
    if let Some(ema) = &mut single.ema {
        ema.update(&single.replica.network);
    }
    outcome.seconds.optimizer = start.elapsed().as_secs_f64();
    Ok(outcome)
}
