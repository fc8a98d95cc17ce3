//! The training step of several devices in one process: forward and backward of each chunk, reduce, then the optimizer.

use std::{ops::Range, sync::Arc, time::Instant};

use burn::tensor::Tensor;
use data::loader::Batch;
use models::{Context, Network};
use ops::StatisticsReduce;

use super::{
    Dp, copy,
    devices::DevicePools,
    replicate,
    scatter::{self, gather},
    statistics::SyncGroup,
};
use crate::{
    config::BatchNormPolicy,
    failure::Failure,
    optim::FlatGradients,
    signals::StopReason,
    strategy::{Replica, StepOutcome, replica::host_logits},
    timeline::{Timeline, Track},
};

/// See [`Strategy::train_step`](crate::strategy::Strategy::train_step).
///
/// # Errors
/// The loss is not finite, or a device fails.
pub(super) fn train_step(
    dp: &mut Dp,
    batches: Vec<Batch>,
    lr: f64,
    stop: Option<StopReason>,
) -> Result<StepOutcome, Failure> {
    let mut outcome = StepOutcome::start(&batches, stop);

    let mut gradients = FlatGradients::default();
    for batch in batches {
        gradients.accumulate(forward_backward(dp, batch, &mut outcome)?);
    }

    outcome.check_finite(lr)?;
    dp.learner.optimizer_step(gradients, lr, &mut outcome);
    Ok(outcome)
}

/// Runs forward and backward of one batch. The loss is divided by the weight of the whole step in `outcome`.
fn forward_backward(dp: &mut Dp, batch: Batch, outcome: &mut StepOutcome) -> Result<FlatGradients, Failure> {
    let Dp { learner, devices, held, sizes, .. } = dp;
    let replica = &mut learner.replica;
    let timeline = replica.timeline.clone();
    let start = Instant::now();
    let chunks = scatter::chunks(batch.len(), devices.len());
    let group = (dp.batch_norm == BatchNormPolicy::Sync).then(|| SyncGroup::new(chunks.len()));
    let networks = replicate::replicate(replica.network(), devices, chunks.len());
    let replicated = Instant::now();

    let batch = Arc::new(batch);
    let forward = parallel_forward(replica, devices, networks, &batch, &chunks, group.as_ref())?;
    let (ran_forward, sync_forward) = (Instant::now(), sync_seconds(group.as_deref()));

    // The loss of the whole batch is computed on device 0.
    let logits = forward.iter().map(|(_, logits)| logits.clone().inner());
    let gathered_logits = gather(logits, &replica.inner_device()).autodiff().require_grad();
    let gathered = Instant::now();
    let targets = replica.targets(&batch);
    replica.count(&host_logits(gathered_logits.clone()), &targets, &batch.labels, outcome);
    let loss = replica.loss(gathered_logits.clone(), &targets, outcome.weight);
    let with_loss = Instant::now();
    let grad_output = gathered_logits.grad(&loss.backward());
    let grad_output = grad_output.expect("the loss depends on the logits, which require gradients");

    let backward = parallel_backward(devices, forward, &grad_output, &chunks, group.as_ref(), &timeline)?;
    let (ran_backward, sync_backward) = (Instant::now(), sync_seconds(group.as_deref()));

    // Keep device 0's network, with its running statistics. Sum the gradients in device order.
    let mut parts = backward.into_iter();
    let (network, mut gradients) = parts.next().expect("a batch has a sample, so there is a first chunk");
    replica.change(|_| network);
    for (_, part) in parts {
        gradients.accumulate(part.map_all(|tensors| copy::all_to_device(tensors, &replica.inner_device())));
    }
    let reduced = Instant::now();

    // Only timing and counting from here on.
    let times = StepTimes {
        start,
        replicated,
        ran_forward,
        gathered,
        with_loss,
        ran_backward,
        reduced,
        sync_forward,
        sync_backward,
    };
    record_times(&times, &timeline, batch.len(), outcome);
    let image = (batch.shape.len() * size_of::<f32>()) as u64;
    outcome.bytes_moved += sizes.bytes_sent(&chunks, image) + group.map_or(0, |group| group.bytes());
    for (index, (held, chunk)) in held.iter_mut().zip(&chunks).enumerate() {
        *held = (*held).max(sizes.peak_bytes(index, chunk.len(), batch.len(), image));
    }
    Ok(gradients)
}

/// Runs the forward pass of each chunk on its device, and returns each device's network and logits `[chunk, classes]`.
///
/// # Errors
/// A device fails.
fn parallel_forward(
    replica: &Replica,
    devices: &DevicePools,
    networks: Vec<Network>,
    batch: &Arc<Batch>,
    chunks: &[Range<usize>],
    group: Option<&Arc<SyncGroup>>,
) -> Result<Vec<(Network, Tensor<2>)>, Failure> {
    let keys = replica.dropout_keys(batch);
    let mut members = group.into_iter().flat_map(SyncGroup::members);
    let jobs = networks.into_iter().zip(chunks.iter().cloned()).enumerate().map(|(index, (network, range))| {
        let (batch, device) = (Arc::clone(batch), devices.get(index).clone());
        let (timeline, keys) = (replica.timeline.clone(), keys[range.clone()].to_vec());
        let statistics = members.next().map(|member| member as Arc<dyn StatisticsReduce>);
        let cx = replica.autocast(Context::train_with(statistics, None));
        move || {
            let (start, samples) = (Instant::now(), range.len());
            let cx = cx.with_dropout(keys);
            let logits = network.forward(scatter::images(&batch, range, &device), &cx);
            timeline.span(Track::Device(index), "forward", start, Instant::now(), &[("samples", samples)]);
            (network, logits)
        }
    });
    devices.parallel_apply("forward", group, jobs.collect())
}

/// Runs the backward pass of each chunk on its device, and returns each device's network and gradients. `grad_output` is the
/// gradient of the loss with respect to the logits of all chunks, `[B, classes]`.
///
/// # Errors
/// A device fails.
fn parallel_backward(
    devices: &DevicePools,
    forward: Vec<(Network, Tensor<2>)>,
    grad_output: &Tensor<2>,
    chunks: &[Range<usize>],
    group: Option<&Arc<SyncGroup>>,
    timeline: &Timeline,
) -> Result<Vec<(Network, FlatGradients)>, Failure> {
    let jobs =
        forward.into_iter().zip(chunks.iter().cloned()).enumerate().map(|(index, ((network, logits), range))| {
            let timeline = timeline.clone();
            let grad_output = copy::to_device(grad_output.clone().slice(range), &devices.get(index).clone().inner());
            move || {
                let start = Instant::now();
                // The gradient of this sum with respect to the logits is `grad_output`, bit for bit.
                let gradients = (logits * grad_output.autodiff()).sum().backward();
                let gradients = FlatGradients::from_backward(gradients, &network);
                timeline.span(Track::Device(index), "backward", start, Instant::now(), &[]);
                (network, gradients)
            }
        });
    devices.parallel_apply("backward", group, jobs.collect())
}

/// When the parts of a step ended.
struct StepTimes {
    start: Instant,
    replicated: Instant,
    ran_forward: Instant,
    gathered: Instant,
    with_loss: Instant,
    ran_backward: Instant,
    reduced: Instant,
    /// Seconds of synchronised batch norm in the forward pass.
    sync_forward: f64,
    /// Seconds of synchronised batch norm in the backward pass.
    sync_backward: f64,
}

/// Draws the parts of a step of `samples` in the timeline, and adds their seconds to `outcome`.
fn record_times(times: &StepTimes, timeline: &Timeline, samples: usize, outcome: &mut StepOutcome) {
    let &StepTimes { start, replicated, ran_forward, gathered, with_loss, ran_backward, reduced, .. } = times;
    let span = |name, start, end| timeline.span(Track::Step, name, start, end, &[]);
    span("replicate", start, replicated);
    timeline.span(Track::Step, "forward", replicated, with_loss, &[("samples", samples)]);
    span("gather", ran_forward, gathered);
    span("backward", with_loss, ran_backward);
    span("reduce", ran_backward, reduced);
    let between = |from: Instant, to: Instant| (to - from).as_secs_f64();
    let in_forward = between(ran_forward, gathered) + times.sync_forward;
    outcome.seconds.communication +=
        between(start, replicated) + in_forward + times.sync_backward + between(ran_backward, reduced);
    outcome.seconds.forward += between(replicated, with_loss) - in_forward;
    outcome.seconds.backward += between(with_loss, ran_backward) - times.sync_backward;
}

/// Returns the seconds that device 0 has spent in synchronised batch norm since the last call.
fn sync_seconds(group: Option<&SyncGroup>) -> f64 {
    group.map_or(0.0, SyncGroup::take_seconds)
}
