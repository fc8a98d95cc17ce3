//! One copy of the network on one device, and how a batch becomes gradients there.

use std::time::Instant;

use burn::{
    module::Module,
    tensor::{Device, Tensor, TensorData},
};
use data::loader::Batch;
use models::{Context, Network, state::ParameterInfo};

use super::{Resident, ResidentSets, StepOutcome, Tally};
use crate::config::Precision;
use crate::device;
use crate::loss;
use crate::optim::FlatGradients;
use crate::signals::Stop;
use crate::timeline::{Timeline, Track};

/// A forward pass on its way: what its backward pass starts from, and what is to be counted of it.
#[derive(Debug)]
pub struct Ahead {
    loss: Tensor<1>,
    logits: Tensor<2>,
    targets: Vec<f32>,
    labels: Vec<i32>,
}

/// A network on a device.
#[derive(Debug)]
pub struct Replica {
    /// The network, its parameters tracked by autodiff. Away only while [`Replica::change`] runs.
    network: Option<Network>,
    /// Its learnable parameters in registration order.
    pub parameters: Vec<ParameterInfo>,
    /// Where forward, backward and the optimizer's step are recorded.
    pub timeline: Timeline,
    /// The data sets, where they are on the device: batches come without pixels then.
    pub resident: Option<ResidentSets>,
    device: Device,
    classes: usize,
    label_smoothing: f64,
    seed: u64,
    precision: Precision,
}

impl Replica {
    /// Wraps a network that lives on `device` (an autodiff device); dropout is drawn from `seed`.
    pub fn new(network: Network, device: Device, classes: usize, label_smoothing: f64, seed: u64) -> Self {
        let parameters = models::state::parameters(&network);
        Self {
            network: Some(network),
            parameters,
            timeline: Timeline::off(),
            resident: None,
            device,
            classes,
            label_smoothing,
            seed,
            precision: Precision::F32,
        }
    }

    /// The network, its parameters tracked by autodiff.
    pub fn network(&self) -> &Network {
        self.network.as_ref().expect("the network is away only while it is changed")
    }

    /// Replaces the network by what `change` makes of it, who gets it alone: its tensors can be changed in place.
    pub fn change(&mut self, change: impl FnOnce(Network) -> Network) {
        let network = self.network.take().expect("the network is away only while it is changed");
        self.network = Some(change(network));
    }

    /// [`Replica::change`] by something that may fail, and then changes nothing.
    ///
    /// # Errors
    /// Those of `change`.
    pub fn try_change<E>(&mut self, change: impl FnOnce(Network) -> Result<Network, E>) -> Result<(), E> {
        self.network = Some(change(self.network().clone())?);
        Ok(())
    }

    /// Training's forward and backward passes compute in `precision`; evaluation is in f32.
    pub fn in_precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Bytes of device memory that are held, on a device that tells.
    pub fn held_bytes(&self) -> Option<u64> {
        device::held_bytes(&self.inner_device())
    }

    /// The device without autodiff: optimizer state and evaluation live there.
    pub fn inner_device(&self) -> Device {
        self.device.clone().inner()
    }

    /// Forward pass of one batch, its loss weighted as a part of a step of `step_samples` samples. Adds its time to `outcome`:
    /// on a GPU, the time to queue the work.
    pub fn forward(&self, batch: Batch, step_samples: usize, cx: Context, outcome: &mut StepOutcome) -> Ahead {
        let start = Instant::now();
        let labels = batch.labels.clone();
        let targets = self.targets(&batch);
        let cx = self.configured(cx).with_dropout(self.dropout_keys(&batch));
        let logits = self.network().forward(self.images(batch, |sets| &sets.train), &cx);
        let loss = loss::cross_entropy(logits.clone(), targets.clone(), step_samples);
        let end = Instant::now();
        self.timeline.span(Track::Step, "forward", start, end, &[("samples", labels.len())]);
        outcome.seconds.forward += (end - start).as_secs_f64();
        Ahead { loss, logits: logits.inner(), targets, labels }
    }

    /// Backward pass of [`Replica::forward`]'s; the gradients that did not go to a sink. Adds counts and its time to
    /// `outcome`. A loss that is not finite is the caller's to see, in `outcome`: where several ranks share a step, all of
    /// them have to take part in it before one may refuse it.
    pub fn backward(&self, ahead: Ahead, outcome: &mut StepOutcome) -> FlatGradients {
        let start = Instant::now();
        let Ahead { loss, logits, targets, labels } = ahead;
        let gradients = FlatGradients::from_backward(loss.backward(), self.network(), &self.parameters);
        // not before: reading waits for a GPU, whose backward pass is queued by now
        self.count(&host_logits(logits), &targets, &labels, outcome);
        let end = Instant::now();
        self.timeline.span(Track::Step, "backward", start, end, &[]);
        outcome.seconds.backward += (end - start).as_secs_f64();
        gradients
    }

    /// The batch's pixels on the device, `[B, C, H, W]`: those that the loader has made, or those of a resident data set.
    fn images(&self, batch: Batch, set: fn(&ResidentSets) -> &Resident) -> Tensor<4> {
        if let Some(sets) = &self.resident {
            return set(sets).batch(&batch).autodiff();
        }
        let shape = [batch.labels.len(), batch.shape.channels, batch.shape.height, batch.shape.width];
        Tensor::from_data(TensorData::new(batch.images, shape), &self.device)
    }

    /// A training context as this run's precision wants it.
    pub(super) fn configured(&self, cx: Context) -> Context {
        cx.autocast_bf16(self.precision == Precision::Bf16)
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
        self.network().valid()
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
        let logits = host_logits(network.forward(self.images(batch, |sets| &sets.test).inner(), &Context::eval()));
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

/// Logits as host f32, row-major `[B, classes]`.
pub(super) fn host_logits(logits: Tensor<2>) -> Vec<f32> {
    logits.try_into_vec_as::<f32>().expect("a device that computed the logits can copy them back")
}
