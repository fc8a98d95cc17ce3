//! The training step of one rank: forward and backward of its share while buckets are reduced, then the optimizer.

use std::{sync::Arc, time::Instant};

use burn::tensor::Device;
use data::loader::Batch;
use models::Context;
use ops::StatisticsReduce;
use rayon::ThreadPool;

use super::{Ddp, reducer::ReducedGradients};
use crate::{device::StreamEvent, failure::Failure, strategy::StepOutcome, timeline::Track};

/// See [`Strategy::train_step`](crate::strategy::Strategy::train_step).
///
/// # Errors
/// The loss is not finite, a rank is gone, or the ranks no longer hold the same bits.
pub(super) fn train_step(
    ddp: &mut Ddp,
    batches: Vec<Batch>,
    lr: f64,
    stop: Option<i32>,
) -> Result<StepOutcome, Failure> {
    let mut outcome = StepOutcome::start(&batches, stop);

    let (step, status) = (ddp.steps, ddp.status.clone());
    let replica = &ddp.learner.replica;
    let (count, device) = (batches.len(), replica.inner_device());
    for (index, batch) in batches.into_iter().enumerate() {
        // Only the last backward pass launches buckets. The passes before it only accumulate, as under `no_sync`.
        ddp.reducer.prepare_for_backward(step, index + 1 == count);
        let statistics = ddp.statistics.clone().map(|shared| shared as Arc<dyn StatisticsReduce>);
        let cx = Context::train_with(statistics, Some(ddp.reducer.sink()));
        status.set_status(format_args!("step {step}: forward"));
        let threads = ddp.threads.as_ref();
        let forward = on_threads(threads, &device, || replica.forward(batch, cx, &mut outcome));
        ddp.check_statistics()?;
        status.set_status(format_args!("step {step}: backward"));
        on_threads(threads, &device, || replica.backward_into_sink(forward, &mut outcome));
        ddp.check_statistics()?;
    }

    let start = Instant::now();
    let ReducedGradients { mut gradients, used, buckets } = ddp.reducer.finalize_backward(&replica.inner_device())?;
    status.set_status(format_args!("step {step}: comparing losses"));
    let unused = reduce_outcome(&mut outcome, &used, ddp)?;
    let end = Instant::now();
    outcome.seconds.communication = (end - start).as_secs_f64();
    outcome.seconds.communication_hidden =
        buckets.iter().map(|b| (b.finished.min(start) - b.started.min(start)).as_secs_f64()).sum();
    // Count the bytes that a ring moves. No algorithm moves less.
    outcome.bytes_moved = buckets.iter().map(|b| 2 * (ddp.comm.world() as u64 - 1) * b.bytes as u64).sum();
    let timeline = &ddp.learner.replica.timeline;
    timeline.span(Track::Step, "waiting for sums", start, end, &[]);
    buckets.into_iter().for_each(|bucket| timeline.bucket(bucket));

    outcome.check_finite(lr)?;
    // Without a gradient the optimizer does not change a parameter and its momentum, as in one process.
    gradients.set_none(&unused);
    status.set_status(format_args!("step {step}: optimizer"));
    ddp.learner.optimizer_step(gradients, lr, &mut outcome);
    // Wait for the sums only now: the GPU already has the optimizer's work in its queue.
    ddp.reducer.synchronize()?;
    ddp.steps += 1;
    ddp.check_sync()?;
    Ok(outcome)
}

/// Runs `compute` on the thread pool of `parallel.threads`, or on the calling thread if there is no such pool.
fn on_threads<R: Send>(threads: Option<&ThreadPool>, device: &Device, compute: impl FnOnce() -> R + Send) -> R {
    let Some(threads) = threads else { return compute() };
    // Each thread has its own stream on a GPU, and weights and statistics are updated in place, so order the streams by events.
    let before = StreamEvent::record(device);
    let (result, after) = threads.install(|| {
        before.wait();
        (compute(), StreamEvent::record(device))
    });
    after.wait();
    result
}

/// Sums the counts and the loss over ranks, and takes the signal of any rank as the common stop signal. Returns the parameters
/// that no rank used, as indices in registration order.
fn reduce_outcome(outcome: &mut StepOutcome, used: &[bool], ddp: &mut Ddp) -> Result<Vec<usize>, Failure> {
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
