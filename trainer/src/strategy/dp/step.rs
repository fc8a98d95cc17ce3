//! The step of several devices in one process: scatter, forward and backward of each chunk, reduce, then the optimizer.

use std::{sync::Arc, time::Instant};

use burn::tensor::Tensor;
use data::loader::Batch;
use models::{Context, Network};
use ops::StatisticsReduce;

use super::{Dp, replicate, scatter, statistics::Group};
use crate::config::BatchNormPolicy;
use crate::failure::Failure;
use crate::loss;
use crate::optim::FlatGradients;
use crate::strategy::replica::host_logits;
use crate::strategy::{StepOutcome, diverged};
use crate::timeline::Track;

pub(super) fn train_step(dp: &mut Dp, batches: Vec<Batch>, lr: f64, stop: Option<i32>) -> Result<StepOutcome, Failure> {
    let samples = batches.iter().map(Batch::len).sum();
    let mut outcome = StepOutcome { stop, ..StepOutcome::default() };

    let mut gradients: Option<FlatGradients> = None;
    for batch in batches {
        let new = forward_backward(dp, batch, samples, &mut outcome)?;
        match &mut gradients {
            Some(sum) => sum.accumulate(new),
            None => gradients = Some(new),
        }
    }
    if !outcome.loss_sum.is_finite() {
        return Err(diverged(outcome.loss_sum, lr));
    }
    if let Some(gradients) = gradients {
        dp.learner.apply(gradients, lr, &mut outcome);
    }
    Ok(outcome)
}

/// Forward and backward of one batch, the loss weighted as a part of a step of `step_samples` samples.
fn forward_backward(
    dp: &mut Dp,
    batch: Batch,
    step_samples: usize,
    outcome: &mut StepOutcome,
) -> Result<FlatGradients, Failure> {
    let Dp { learner, devices, held, sizes, .. } = dp;
    let replica = &mut learner.replica;
    let timeline = replica.timeline.clone();
    let start = Instant::now();
    let chunks = scatter::chunks(batch.len(), devices.len());
    let group = (dp.batch_norm == BatchNormPolicy::Sync).then(|| Group::new(chunks.len()));
    let networks = replicate::replicas(replica.network(), devices, chunks.len());
    let replicated = Instant::now();

    let keys = replica.dropout_keys(&batch);
    let batch = Arc::new(batch);
    let mut members = group.iter().flat_map(Group::members);
    let jobs = networks.into_iter().zip(chunks.clone()).enumerate().map(|(index, (network, range))| {
        let (batch, device, timeline) = (Arc::clone(&batch), devices.get(index).clone(), timeline.clone());
        let keys = keys[range.clone()].to_vec();
        let statistics = members.next().map(|member| member as Arc<dyn StatisticsReduce>);
        let cx = replica.configured(Context::train_with(statistics, None));
        move || {
            let (start, samples) = (Instant::now(), range.len());
            let cx = cx.with_dropout(keys);
            let logits = network.forward(scatter::images(&batch, range, &device), &cx);
            timeline.span(Track::Device(index), "forward", start, Instant::now(), &[("samples", samples)]);
            (network, logits)
        }
    });
    let forward = devices.run("forward", group.as_ref(), jobs.collect())?;
    let (ran_forward, shared_forward) = (Instant::now(), shared_seconds(group.as_deref()));

    // gather: from here to the loss everything is on device 0, and over the whole batch
    let logits = forward.iter().map(|(_, logits)| logits.clone().inner().to_device(&replica.inner_device())).collect();
    let gathered = Tensor::cat(logits, 0).autodiff().require_grad();
    let gathered_at = Instant::now();
    let targets = replica.targets(&batch);
    replica.count(&host_logits(gathered.clone()), &targets, &batch.labels, outcome);
    let loss = loss::cross_entropy(gathered.clone(), targets, step_samples);
    let with_loss = Instant::now();
    let upstream = gathered.grad(&loss.backward()).expect("the loss depends on the logits, which require gradients");

    let parameters: Arc<[_]> = replica.parameters.as_slice().into();
    let jobs = forward.into_iter().zip(chunks.clone()).enumerate().map(|(index, ((network, logits), range))| {
        let (parameters, timeline) = (Arc::clone(&parameters), timeline.clone());
        let upstream = upstream.clone().slice(range).to_device(&devices.get(index).clone().inner());
        move || {
            let start = Instant::now();
            // the gradient of this product is `upstream`, bit for bit
            let gradients = (logits * upstream.autodiff()).sum().backward();
            let gradients = FlatGradients::from_backward(gradients, &network, &parameters);
            timeline.span(Track::Device(index), "backward", start, Instant::now(), &[]);
            (network, gradients)
        }
    });
    let backward: Vec<(Network, FlatGradients)> = devices.run("backward", group.as_ref(), jobs.collect())?;
    let (ran_backward, shared_backward) = (Instant::now(), shared_seconds(group.as_deref()));

    // device 0's statistics are those that persist; the sum is in device order
    let mut parts = backward.into_iter();
    let (network, mut gradients) = parts.next().expect("a batch has a sample, so there is a first chunk");
    replica.change(|_| network);
    for (_, part) in parts {
        gradients.accumulate(part.to_device(&replica.inner_device()));
    }
    let end = Instant::now();

    let span = |name, start, end| timeline.span(Track::Step, name, start, end, &[]);
    span("replicate", start, replicated);
    timeline.span(Track::Step, "forward", replicated, with_loss, &[("samples", batch.len())]);
    span("gather", ran_forward, gathered_at);
    span("backward", with_loss, ran_backward);
    span("reduce", ran_backward, end);
    let between = |from: Instant, to: Instant| (to - from).as_secs_f64();
    let in_forward = between(ran_forward, gathered_at) + shared_forward;
    outcome.seconds.communication +=
        between(start, replicated) + in_forward + shared_backward + between(ran_backward, end);
    outcome.seconds.forward += between(replicated, with_loss) - in_forward;
    outcome.seconds.backward += between(with_loss, ran_backward) - shared_backward;
    outcome.bytes_moved += sizes.moved(&chunks) + group.map_or(0, |group| group.bytes());
    for (index, (held, chunk)) in held.iter_mut().zip(&chunks).enumerate() {
        *held = (*held).max(sizes.held(index, chunk.len(), batch.len()));
    }
    Ok(gradients)
}

/// Seconds that device 0 has spent on synchronised batch norm since the last call.
fn shared_seconds(group: Option<&Group>) -> f64 {
    group.map_or(0.0, Group::take_seconds)
}
