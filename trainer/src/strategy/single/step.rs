//! The training step of one device: forward and backward of each batch, then the optimizer.

use data::loader::Batch;
use models::Context;

use super::Single;
use crate::{
    failure::Failure,
    optim::FlatGradients,
    signals::StopReason,
    strategy::{StepOutcome, graph, graph_capture::SingleGraphStep, threads},
};

/// See [`Strategy::queue_step`](crate::strategy::Strategy::queue_step).
///
/// # Errors
/// The loss is not finite, or the step cannot be captured or launched as a graph.
pub(super) fn queue_step(
    single: &mut Single,
    batches: Vec<Batch>,
    lr: f64,
    stop: Option<StopReason>,
) -> Result<Option<StepOutcome>, Failure> {
    let mut outcome = StepOutcome::start(&batches, stop);
    let queued = graph::queue_step(&mut single.learner, &mut SingleGraphStep::default(), batches, lr, outcome)?;
    let Some(batches) = queued else { return Ok(None) };

    let device = single.learner.replica.inner_device();
    threads::on_threads(None, &device, || {
        let replica = &single.learner.replica;
        let mut gradients = FlatGradients::default();
        for batch in batches {
            let forward = replica.forward(batch, Context::train(), &mut outcome);
            gradients.accumulate(replica.backward(forward, &mut outcome));
        }

        outcome.check_finite(lr)?;
        single.learner.optimizer_step(gradients, lr, &mut outcome);
        Ok(Some(outcome))
    })
}
