//! One copy of the network on one device, and how a batch becomes gradients there.

use std::time::Instant;

use burn::{
    module::Module,
    tensor::{Device, Tensor, TensorData},
};
use data::loader::Batch;
use models::{Context, Network, state::ParameterInfo};

use super::{StepOutcome, Tally};
use crate::{
    loss,
    optim::FlatGradients,
    report::{Timeline, Track},
    signals::Stop,
};

/// A network on a device.
#[derive(Debug)]
pub struct Replica {
    /// The network, its parameters tracked by autodiff.
    pub network: Network,
    /// Its learnable parameters in registration order.
    pub parameters: Vec<ParameterInfo>,
    /// Where forward, backward and the optimizer's step are recorded.
    pub timeline: Timeline,
    device: Device,
    classes: usize,
    label_smoothing: f64,
    seed: u64,
}

impl Replica {
    /// Wraps a network that lives on `device` (an autodiff device); dropout is drawn from `seed`.
    pub fn new(network: Network, device: Device, classes: usize, label_smoothing: f64, seed: u64) -> Self {
        let parameters = models::state::parameters(&network);
        Self { network, parameters, timeline: Timeline::off(), device, classes, label_smoothing, seed }
    }

    /// The device without autodiff: optimizer state and evaluation live there.
    pub fn inner_device(&self) -> Device {
        self.device.clone().inner()
    }

    /// Forward pass of one batch; the loss, `[1]`, weighted as a part of a step of `step_samples` samples. Adds counts and
    /// times to `outcome`. A loss that is not finite is the caller's to see, in `outcome`: where several ranks share a
    /// step, all of them have to take part in it before one may refuse it.
    pub fn forward(&self, batch: Batch, step_samples: usize, cx: Context, outcome: &mut StepOutcome) -> Tensor<1> {
        let start = Instant::now();
        let labels = batch.labels.clone();
        let targets = self.targets(&batch);
        let cx = cx.with_dropout(self.dropout_keys(&batch));
        let logits = self.network.forward(images(batch, &self.device), &cx);
        let host = host_logits(logits.clone());
        self.count(&host, &targets, &labels, outcome);
        let loss = loss::cross_entropy(logits, targets, step_samples);
        let end = Instant::now();
        self.timeline.span(Track::Step, "forward", start, end, &[("samples", labels.len())]);
        outcome.seconds.forward += (end - start).as_secs_f64();
        loss
    }

    /// Backward pass from a loss of [`Replica::forward`]; the gradients that did not go to a sink.
    pub fn backward(&self, loss: Tensor<1>, outcome: &mut StepOutcome) -> FlatGradients {
        let start = Instant::now();
        let gradients = FlatGradients::from_backward(loss.backward(), &self.network, &self.parameters);
        let end = Instant::now();
        self.timeline.span(Track::Step, "backward", start, end, &[]);
        outcome.seconds.backward += (end - start).as_secs_f64();
        gradients
    }

    /// The batch's target distribution, row-major `[B, classes]`.
    pub(super) fn targets(&self, batch: &Batch) -> Vec<f32> {
        loss::soft_targets(&batch.labels, batch.mix.as_ref(), self.classes, self.label_smoothing)
    }

    /// What each sample's dropout depends on, `[B]`.
    pub(super) fn dropout_keys(&self, batch: &Batch) -> Vec<u64> {
        batch.ids.iter().map(|&id| dropout_key(self.seed, batch.epoch, id)).collect()
    }

    /// Adds up losses and right answers of a batch's logits, row-major `[B, classes]`.
    pub(super) fn count(&self, logits: &[f32], targets: &[f32], labels: &[i32], outcome: &mut StepOutcome) {
        let rows = logits.chunks_exact(self.classes).zip(targets.chunks_exact(self.classes));
        for ((row, target), &label) in rows.zip(labels) {
            outcome.loss_sum += loss::row_loss(row, target.iter().copied());
            outcome.correct += u64::from(loss::argmax(row) == label as usize);
        }
        outcome.samples += labels.len() as u64;
    }

    /// Forward and backward of all batches of a step, their gradients added up; `None` without a batch.
    pub fn accumulate(
        &self,
        batches: Vec<Batch>,
        step_samples: usize,
        outcome: &mut StepOutcome,
    ) -> Option<FlatGradients> {
        let mut gradients: Option<FlatGradients> = None;
        for batch in batches {
            let loss = self.forward(batch, step_samples, Context::train(), outcome);
            let new = self.backward(loss, outcome);
            match &mut gradients {
                Some(sum) => sum.accumulate(new),
                None => gradients = Some(new),
            }
        }
        gradients
    }

    /// A copy of the network for evaluation: same values, no autodiff.
    pub fn inference(&self) -> Network {
        self.network.valid()
    }

    /// Counts every batch with `network`, an inference copy, until `stop`.
    pub fn evaluate(&self, network: &Network, batches: &mut dyn Iterator<Item = Batch>, stop: &Stop) -> Tally {
        let mut tally = Tally::new(self.classes);
        while stop.signal().is_none()
            && let Some(batch) = batches.next()
        {
            self.evaluate_batch(network, batch, &mut tally);
        }
        tally
    }

    fn evaluate_batch(&self, network: &Network, batch: Batch, tally: &mut Tally) {
        let labels = batch.labels.clone();
        let logits = host_logits(network.forward(images(batch, &self.inner_device()), &Context::eval()));
        for (row, &label) in logits.chunks_exact(self.classes).zip(&labels) {
            tally.add(row, label as usize);
        }
    }
}

/// What dropout draws for a sample: another number for each seed, epoch and sample, the same on any number of ranks.
fn dropout_key(seed: u64, epoch: usize, id: u32) -> u64 {
    let mix = |key: u64, word: u64| (key ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    mix(mix(seed, epoch as u64 + 1), u64::from(id) + 1)
}

/// The batch's pixels on `device`, `[B, C, H, W]`.
fn images(batch: Batch, device: &Device) -> Tensor<4> {
    let shape = [batch.labels.len(), batch.shape.channels, batch.shape.height, batch.shape.width];
    Tensor::from_data(TensorData::new(batch.images, shape), device)
}

/// Logits as host f32, row-major `[B, classes]`.
pub(super) fn host_logits(logits: Tensor<2>) -> Vec<f32> {
    logits.try_into_vec_as::<f32>().expect("a device that computed the logits can copy them back")
}
