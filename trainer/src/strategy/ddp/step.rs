//! The step of one rank among several: forward and backward of its share, with the reduction behind, then the optimizer.

use std::time::Instant;

use data::loader::Batch;
use models::Context;
use ops::StatisticsReduce;

use super::{Ddp, reducer::ReducedGradients};
use crate::{
    failure::Failure,
    optim::FlatGradients,
    strategy::{StepOutcome, diverged},
    timeline::Track,
};

pub(super) fn train_step(
    ddp: &mut Ddp,
    batches: Vec<Batch>,
    lr: f64,
    stop: Option<i32>,
) -> Result<StepOutcome, Failure> {
    // the whole step's samples, over all ranks: the weight of each sample is the same wherever it is
    let samples = batches.iter().map(|batch| batch.global_len).sum();
    let mut outcome = StepOutcome { stop, ..StepOutcome::default() };

    let (step, status) = (ddp.steps, ddp.status.clone());
    let count = batches.len();
    for (turn, batch) in batches.into_iter().enumerate() {
        // only the last backward pass completes the gradients: those before it are not synchronised
        ddp.reducer.prepare_for_backward(step, turn + 1 == count);
        status.set_status(format_args!("step {step}: forward"));
        let statistics = ddp.statistics.clone().map(|shared| shared as std::sync::Arc<dyn StatisticsReduce>);
        let cx = Context::train_with(statistics, Some(ddp.reducer.sink()));
        let loss = ddp.learner.replica.forward(batch, samples, cx, &mut outcome);
        ddp.check_statistics()?;
        status.set_status(format_args!("step {step}: backward"));
        ddp.learner.replica.backward(loss, &mut outcome);
        ddp.check_statistics()?;
    }

    let start = Instant::now();
    let ReducedGradients { gradients, used, buckets } =
        ddp.reducer.finalize_backward(&ddp.learner.replica.inner_device())?;
    status.set_status(format_args!("step {step}: comparing losses"));
    let unused = agree(&mut outcome, &used, ddp)?;
    let end = Instant::now();
    outcome.seconds.communication = (end - start).as_secs_f64();
    outcome.seconds.communication_hidden =
        buckets.iter().map(|b| (b.finished.min(start) - b.started.min(start)).as_secs_f64()).sum();
    // what a ring moves, the least that any algorithm does
    outcome.bytes_moved = buckets.iter().map(|b| 2 * (ddp.comm.world() as u64 - 1) * b.bytes as u64).sum();
    let timeline = &ddp.learner.replica.timeline;
    timeline.span(Track::Step, "waiting for sums", start, end, &[]);
    buckets.into_iter().for_each(|bucket| timeline.bucket(bucket));
    if !outcome.loss_sum.is_finite() {
        return Err(diverged(outcome.loss_sum, lr));
    }
    let gradients = without(gradients, &unused);

    status.set_status(format_args!("step {step}: optimizer"));
    ddp.learner.apply(gradients, lr, &mut outcome);
    // the optimizer's work is enqueued behind the sums: waiting for those costs nothing now
    ddp.reducer.synchronize()?;
    ddp.steps += 1;
    ddp.check_sync()?;
    Ok(outcome)
}

/// Sums the counts and the loss over ranks; the stop is that of any rank. Gives the parameters that no rank used.
fn agree(outcome: &mut StepOutcome, used: &[bool], ddp: &mut Ddp) -> Result<Vec<usize>, Failure> {
    const WORDS: usize = 5;
    let comm = &ddp.comm;
    let missing = used.iter().filter(|used| !**used).count();
    let own: [f64; WORDS] = [
        outcome.loss_sum,
        outcome.correct as f64,
        outcome.samples as f64,
        f64::from(outcome.stop.unwrap_or(0)),
        missing as f64,
    ];
    let mut all = vec![0.0; WORDS * comm.world()];
    comm.all_gather(&own, &mut all)?;
    let sum = |word: usize| all.iter().skip(word).step_by(WORDS).sum::<f64>();
    (outcome.loss_sum, outcome.correct, outcome.samples) = (sum(0), sum(1) as u64, sum(2) as u64);
    let stop = all.iter().skip(3).step_by(WORDS).fold(0.0, |a: f64, &b| a.max(b));
    outcome.stop = (stop != 0.0).then_some(stop as i32);
    if sum(4) == 0.0 {
        return Ok(Vec::new());
    }
    let own: Vec<u8> = used.iter().map(|&used| u8::from(used)).collect();
    let mut all = vec![0; own.len() * comm.world()];
    comm.all_gather(&own, &mut all)?;
    let by_rank: Vec<&[u8]> = all.chunks_exact(own.len()).collect();
    ddp.unused.warn(ddp.steps, &by_rank, &ddp.learner.replica.parameters, comm.rank() == 0);
    Ok((0..own.len()).filter(|&index| by_rank.iter().all(|used| used[index] == 0)).collect())
}

/// A parameter that nobody used has no gradient, and the optimizer leaves it and its momentum alone, as in one process.
fn without(gradients: FlatGradients, unused: &[usize]) -> FlatGradients {
    if unused.is_empty() {
        return gradients;
    }
    let mut gradients = gradients.into_inner();
    unused.iter().for_each(|&index| gradients[index] = None);
    FlatGradients::from_tensors(gradients)
}
