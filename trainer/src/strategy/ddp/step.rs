//! The training step of one rank: forward and backward of its share while buckets are reduced, then the optimizer.

use std::{sync::Arc, time::Instant};

use data::loader::Batch;
use models::{Context, ParameterInfo};
use ops::StatisticsReduce;

use super::{Ddp, reducer::ReducedGradients, verify::UnusedParameterWarning};
use crate::{
    failure::Failure,
    signals::StopReason,
    strategy::{StepOutcome, graph, threads::on_threads},
    timeline::{BucketSpan, Track},
};
use comm::Communicator;

/// See [`Strategy::queue_step`](crate::strategy::Strategy::queue_step).
///
/// # Errors
/// The loss is not finite, a rank is gone, the ranks no longer hold the same bits, or the step cannot be captured or launched as a
/// graph.
pub(super) fn queue_step(
    ddp: &mut Ddp,
    mut batches: Vec<Batch>,
    lr: f64,
    stop: Option<StopReason>,
) -> Result<Option<StepOutcome>, Failure> {
    let mut outcome = StepOutcome::start(&batches, stop);
    // Autotuning changes the buckets, and so the launches of a step.
    if ddp.tuner.is_none() {
        ddp.status.set_status(format_args!("step {}: launching", ddp.steps));
        let (learner, mut parts) = ddp.graph_parts();
        match graph::queue_step(learner, &mut parts, batches, lr, outcome)? {
            Some(left) => batches = left,
            None => {
                ddp.steps += 1;
                return Ok(None);
            }
        }
    }

    let (step, status) = (ddp.steps, ddp.status.clone());
    let replica = &ddp.learner.replica;
    let (count, device) = (batches.len(), replica.inner_device());
    let mut backward_end = Instant::now();
    for (index, batch) in batches.into_iter().enumerate() {
        // Only the last backward pass launches buckets. The passes before it only accumulate, as under `no_sync`.
        let last = index + 1 == count;
        ddp.reducer.prepare_for_backward(step, last);
        let statistics = ddp.statistics.clone().map(|shared| shared as Arc<dyn StatisticsReduce>);
        let cx = Context::train_with(statistics, Some(ddp.reducer.sink()));
        status.set_status(format_args!("step {step}: forward"));
        let threads = ddp.threads.as_ref();
        let forward = on_threads(threads, &device, || replica.forward(batch, cx, &mut outcome));
        ddp.check_statistics()?;
        status.set_status(format_args!("step {step}: backward"));
        backward_end = on_threads(threads, &device, || replica.backward_into_sink(forward, &mut outcome));
        ddp.check_statistics()?;
    }

    let start = Instant::now();
    let ReducedGradients { mut gradients, used, buckets, .. } =
        ddp.reducer.finalize_backward(&replica.inner_device())?;
    status.set_status(format_args!("step {step}: comparing losses"));
    let unused = reduce_outcome(&mut outcome, &used, ddp)?;
    let end = Instant::now();
    outcome.seconds.communication = (end - start).as_secs_f64();
    // Count a reduction as hidden only until the backward pass ended (`backward_end`): this thread may be scheduled much later.
    let hidden = |b: &BucketSpan| b.finished.min(backward_end) - b.started.min(backward_end);
    outcome.seconds.communication_hidden = buckets.iter().map(|b| hidden(b).as_secs_f64()).sum();
    outcome.bytes_moved = ddp.reducer.bytes_moved();
    let timeline = &ddp.learner.replica.timeline;
    timeline.span(Track::Step, "waiting for sums", start, end, &[]);
    buckets.into_iter().for_each(|bucket| timeline.bucket(bucket));

    outcome.check_finite(lr)?;
    // Without a gradient the optimizer does not change a parameter and its momentum, as in one process.
    gradients.set_none(&unused);
    status.set_status(format_args!("step {step}: optimizer"));
    ddp.learner.optimizer_step(gradients, lr, &mut outcome);
    // Wait for the sums only now, so that the GPU already has the optimizer's work in its queue.
    ddp.reducer.synchronize()?;
    ddp.steps += 1;
    ddp.check_sync()?;
    Ok(Some(outcome))
}

/// Counts of a step: of one rank, or summed over ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct StepCounts {
    loss_sum: f64,
    correct: u64,
    samples: u64,
    stop: Option<StopReason>,
    /// Number of parameters that got no gradient.
    unused: u64,
}

impl StepCounts {
    /// Numbers per step in the all-gather.
    const LEN: usize = 5;

    /// Returns the counts of a rank in whose step `unused` parameters got no gradient.
    pub(super) fn of_rank(outcome: &StepOutcome, unused: usize) -> Self {
        let &StepOutcome { loss_sum, correct, samples, stop, .. } = outcome;
        Self { loss_sum, correct, samples, stop, unused: unused as u64 }
    }

    /// Replaces the counts in `outcome` by these counts.
    pub(super) fn write(&self, outcome: &mut StepOutcome) {
        let &Self { loss_sum, correct, samples, stop, .. } = self;
        (outcome.loss_sum, outcome.correct, outcome.samples, outcome.stop) = (loss_sum, correct, samples, stop);
    }

    fn encode(&self) -> [f64; Self::LEN] {
        let stop = f64::from(StopReason::encode(self.stop));
        [self.loss_sum, self.correct as f64, self.samples as f64, stop, self.unused as f64]
    }

    /// Sums the encoded counts of ranks, in rank order. If ranks have different reasons to stop, the largest code wins.
    fn sum<'a>(ranks: impl Iterator<Item = &'a [f64; Self::LEN]> + Clone) -> Self {
        let of_ranks = |index: usize| ranks.clone().map(move |counts| counts[index]);
        let sum = |index| of_ranks(index).sum::<f64>();
        let stop = StopReason::decode(of_ranks(3).fold(0.0, f64::max) as i32);
        Self { loss_sum: sum(0), correct: sum(1) as u64, samples: sum(2) as u64, stop, unused: sum(4) as u64 }
    }
}

/// Sums the counts of steps over ranks. `own` has this rank's counts of each step.
///
/// # Errors
/// A rank is gone.
pub(super) fn sum_counts(own: &[StepCounts], comm: &Communicator) -> Result<Vec<StepCounts>, Failure> {
    let own: Vec<_> = own.iter().map(StepCounts::encode).collect();
    let mut all = vec![[0.0; StepCounts::LEN]; own.len() * comm.world_size()];
    comm.all_gather(own.as_flattened(), all.as_flattened_mut())?;
    Ok((0..own.len()).map(|step| StepCounts::sum(all.iter().skip(step).step_by(own.len()))).collect())
}

/// Replaces the counts in `outcome` with the sums over ranks. Returns the parameters that no rank used, as indices in registration
/// order.
fn reduce_outcome(outcome: &mut StepOutcome, used: &[bool], ddp: &mut Ddp) -> Result<Vec<usize>, Failure> {
    let unused = used.iter().filter(|used| !**used).count();
    let sums = sum_counts(&[StepCounts::of_rank(outcome, unused)], &ddp.comm)?.remove(0);
    sums.write(outcome);
    if sums.unused == 0 {
        return Ok(Vec::new());
    }
    globally_unused_parameters(used, &mut ddp.unused, &ddp.learner.replica.parameters, ddp.steps, &ddp.comm)
}

/// Returns the parameters that no rank used, as indices in registration order. Warns about parameters that only some ranks used.
///
/// # Errors
/// A rank is gone.
pub(super) fn globally_unused_parameters(
    used: &[bool],
    known: &mut UnusedParameterWarning,
    parameters: &[ParameterInfo],
    step: u64,
    comm: &Communicator,
) -> Result<Vec<usize>, Failure> {
    let own: Vec<u8> = used.iter().map(|&used| u8::from(used)).collect();
    let mut all = vec![0; own.len() * comm.world_size()];
    comm.all_gather(&own, &mut all)?;
    let by_rank: Vec<&[u8]> = all.chunks_exact(own.len()).collect();
    known.warn(comm.rank(), step, &by_rank, parameters);
    Ok((0..own.len()).filter(|&index| by_rank.iter().all(|used| used[index] == 0)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If two ranks have different reasons to stop, all ranks stop for the same reason.
    #[test]
    fn counts_are_summed_and_all_ranks_stop_for_one_reason() {
        let counts = |loss_sum, stop| StepCounts { loss_sum, correct: 3, samples: 4, stop, unused: 1 };
        let (signal, time) = (Some(StopReason::Signal(15)), Some(StopReason::TimeLimit));
        for (stops, expected) in
            [([None, None], None), ([None, signal], signal), ([time, None], time), ([time, signal], time)]
        {
            let ranks = [counts(0.5, stops[0]).encode(), counts(0.25, stops[1]).encode()];
            let sum = StepCounts { loss_sum: 0.75, correct: 6, samples: 8, stop: expected, unused: 2 };
            assert_eq!(StepCounts::sum(ranks.iter()), sum);
        }
    }
}
