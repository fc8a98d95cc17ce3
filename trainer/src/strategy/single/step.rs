//! The training step of one device: forward and backward of each batch, then the optimizer.

use data::loader::Batch;
use models::Context;

use super::Single;
use crate::{
    failure::Failure,
    optim::FlatGradients,
    strategy::{StepOutcome, graph},
};

/// See [`Strategy::train_step`](crate::strategy::Strategy::train_step).
///
/// # Errors
/// The loss is not finite, or the step cannot be recorded as a graph.
pub(super) fn train_step(
    single: &mut Single,
    batches: Vec<Batch>,
    lr: f64,
    stop: Option<i32>,
) -> Result<StepOutcome, Failure> {
    let mut outcome = StepOutcome::start(&batches, stop);

    let Some(batches) = graph::train_step(&mut single.learner, batches, lr, &mut outcome)? else { return Ok(outcome) };
    let replica = &single.learner.replica;
    let mut gradients = FlatGradients::default();
    for batch in batches {
        let forward = replica.forward(batch, Context::train(), &mut outcome);
        gradients.accumulate(replica.backward(forward, &mut outcome));
    }

    outcome.check_finite(lr)?;
    single.learner.optimizer_step(gradients, lr, &mut outcome);
    Ok(outcome)
}
