//! One copy of the network on one device: computes gradients from a batch, and evaluates.

use std::time::Instant;

use burn::{
    module::Module,
    tensor::{Device, Gradients, Tensor, TensorData},
};
use data::{DataError, loader::Batch};
use models::{Context, Network, state::ParameterInfo};

use super::{Batches, DeviceDataset, DeviceDatasets, EvalCounts, StepOutcome, eval_counts::Logits};
use crate::{
    config::{Precision, Tta},
    device,
    loss::{self, binary},
    optim::FlatGradients,
    signals::StopFlag,
    timeline::{Timeline, Track},
};

/// The output of a forward pass: the loss for the backward pass, and the values from which counts are computed.
#[derive(Debug)]
pub struct ForwardOutput {
    /// `[1]`, with autodiff.
    loss: Tensor<1>,
    /// `[B, classes]`, without autodiff.
    logits: Tensor<2>,
    /// Row-major `[B, classes]`.
    targets: Vec<f32>,
    /// `[B]`.
    labels: Vec<i32>,
}

/// A network on a device, with the settings of the run's forward passes and of its loss.
#[derive(Debug)]
pub struct Replica {
    /// The network, its parameters tracked by autodiff. `None` only while [`Replica::change`] runs.
    network: Option<Network>,
    /// The network's learnable parameters in registration order.
    pub parameters: Vec<ParameterInfo>,
    /// Records spans of forward, backward and the optimizer's step.
    pub timeline: Timeline,
    /// The weight of each class in the training loss, `[classes]`. If empty, all classes have the same weight.
    pub class_weights: Vec<f64>,
    /// The weight of positive examples of each class in a multi-label training loss, `[classes]` (`pos_weight` of PyTorch's
    /// `BCEWithLogitsLoss`). If empty, all weights are 1.
    pub pos_weights: Vec<f64>,
    /// The data sets, if they are kept on the device. Then batches may have no pixels.
    pub datasets: Option<DeviceDatasets>,
    device: Device,
    classes: usize,
    label_smoothing: f64,
    seed: u64,
    precision: Precision,
    tta: Tta,
    multi_label: bool,
}

impl Replica {
    /// Wraps a network that is on `device` (an autodiff device). Dropout is drawn from `seed`.
    pub fn new(network: Network, device: Device, classes: usize, label_smoothing: f64, seed: u64) -> Self {
        let parameters = models::state::parameters(&network);
        Self {
            network: Some(network),
            parameters,
            timeline: Timeline::off(),
            class_weights: Vec::new(),
            pos_weights: Vec::new(),
            datasets: None,
            device,
            classes,
            label_smoothing,
            seed,
            precision: Precision::F32,
            tta: Tta::None,
            multi_label: false,
        }
    }

    /// Sets whether an image has any number of classes (a sigmoid per class). Otherwise an image has one class (a softmax).
    pub fn with_multi_label(mut self, multi_label: bool) -> Self {
        self.multi_label = multi_label;
        self
    }

    /// Sets the test-time augmentation of evaluations.
    pub fn with_tta(mut self, tta: Tta) -> Self {
        self.tta = tta;
        self
    }

    /// Sets the precision in which training's forward and backward passes compute. Evaluation is in f32.
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Returns the network, its parameters tracked by autodiff.
    pub fn network(&self) -> &Network {
        self.network.as_ref().expect("the network is away only while it is changed")
    }

    /// Replaces the network by `change(network)`. `change` gets the only copy, so it can change tensors in place.
    pub fn change(&mut self, change: impl FnOnce(Network) -> Network) {
        let network = self.network.take().expect("the network is away only while it is changed");
        self.network = Some(change(network));
    }

    /// Replaces the network by `change(network)`. Keeps the old network if `change` fails.
    ///
    /// # Errors
    /// Those of `change`.
    pub fn try_change<E>(&mut self, change: impl FnOnce(Network) -> Result<Network, E>) -> Result<(), E> {
        self.network = Some(change(self.network().clone())?);
        Ok(())
    }

    /// Returns the bytes that the device's allocator has reserved; `None` on the CPU.
    pub fn reserved_bytes(&self) -> Option<u64> {
        device::reserved_bytes(&self.inner_device())
    }

    /// Returns the device without autodiff, on which optimizer state is stored and evaluation runs.
    pub fn inner_device(&self) -> Device {
        self.device.clone().inner()
    }

    /// Runs the forward pass of one batch. The loss is divided by the weight of the whole step in `outcome`. Adds the time to
    /// `outcome`; on a GPU this is the time to queue the work.
    pub fn forward(&self, batch: Batch, cx: Context, outcome: &mut StepOutcome) -> ForwardOutput {
        let start = Instant::now();
        let labels = batch.labels.clone();
        let targets = self.targets(&batch);
        let cx = self.autocast(cx).with_dropout(self.dropout_keys(&batch));
        let logits = self.network().forward(self.images(batch, |sets| &sets.train), &cx);
        let loss = self.loss(logits.clone(), &targets, outcome.weight);
        let end = Instant::now();
        self.timeline.span(Track::Step, "forward", start, end, &[("samples", labels.len())]);
        outcome.seconds.forward += (end - start).as_secs_f64();
        ForwardOutput { loss, logits: logits.inner(), targets, labels }
    }

    /// Runs the backward pass of a forward pass without a gradient sink, and returns the gradients. Adds loss, counts and time to
    /// `outcome`. A loss that is not finite is not an error here: the strategy checks [`StepOutcome`] after all ranks have added
    /// their losses.
    pub fn backward(&self, forward: ForwardOutput, outcome: &mut StepOutcome) -> FlatGradients {
        let collect = |gradients| FlatGradients::from_backward(gradients, self.network());
        self.backward_with(forward, outcome, collect).0
    }

    /// Runs the backward pass of a forward pass whose context has a gradient sink ([`Context::train_with`]). The sink gets the
    /// gradients while the pass runs. Adds loss, counts and time to `outcome`, as [`Replica::backward`] does. Returns the time at
    /// which the pass ended.
    pub fn backward_into_sink(&self, forward: ForwardOutput, outcome: &mut StepOutcome) -> Instant {
        self.backward_with(forward, outcome, drop).1
    }

    fn backward_with<G>(
        &self,
        forward: ForwardOutput,
        outcome: &mut StepOutcome,
        collect: impl FnOnce(Gradients) -> G,
    ) -> (G, Instant) {
        let start = Instant::now();
        let ForwardOutput { loss, logits, targets, labels } = forward;
        let gradients = collect(ops::backward(loss));
        // Read the logits after the backward pass was queued, since reading waits for the GPU.
        self.count(&host_logits(logits), &targets, &labels, outcome);
        let end = Instant::now();
        self.timeline.span(Track::Step, "backward", start, end, &[]);
        outcome.seconds.backward += (end - start).as_secs_f64();
        (gradients, end)
    }

    /// Returns the batch's pixels on the device, `[B * views, C, H, W]`. If the loader has made no pixels, takes them from the
    /// data set on the device.
    fn images(&self, batch: Batch, set: fn(&DeviceDatasets) -> &DeviceDataset) -> Tensor<4> {
        if let (true, Some(sets)) = (batch.images.is_empty(), &self.datasets) {
            return set(sets).batch(&batch).autodiff();
        }
        let shape = [batch.labels.len() * batch.views, batch.shape.channels, batch.shape.height, batch.shape.width];
        Tensor::from_data(TensorData::new(batch.images, shape), &self.device)
    }

    /// Sets the precision of the run in a training context (`torch.autocast`).
    pub(super) fn autocast(&self, cx: Context) -> Context {
        cx.autocast_bf16(self.precision == Precision::Bf16)
    }

    /// Returns the training loss `[1]` of a batch, divided by `weight`. `logits` are `[B, classes]`, `targets` come from
    /// [`Replica::targets`].
    pub(super) fn loss(&self, logits: Tensor<2>, targets: &[f32], weight: f64) -> Tensor<1> {
        match self.multi_label {
            true => binary::binary_cross_entropy(logits, targets, &self.pos_weights, weight),
            false => loss::cross_entropy(logits, targets.to_vec(), weight),
        }
    }

    /// Returns the batch's targets, row-major `[B, classes]`: the distribution over classes times the class weights. In a
    /// multi-label run, 1 for each class of the image and 0 for the others.
    pub(super) fn targets(&self, batch: &Batch) -> Vec<f32> {
        if self.multi_label {
            return batch.multi_hot.clone();
        }
        let mut targets = loss::soft_targets(&batch.labels, batch.mix.as_ref(), self.classes, self.label_smoothing);
        loss::apply_class_weights(&mut targets, &self.class_weights);
        targets
    }

    /// Returns the key from which each sample's dropout is drawn, `[B]`.
    pub(super) fn dropout_keys(&self, batch: &Batch) -> Vec<u64> {
        let key = |(index, &id): (usize, &u32)| {
            // A weighted sampler may draw a sample several times per epoch. Each draw has another mask.
            let repetition = batch.repetitions.get(index).copied().unwrap_or(0);
            dropout_key(self.seed.wrapping_add(u64::from(repetition) << 32), batch.epoch, id)
        };
        batch.ids.iter().enumerate().map(key).collect()
    }

    /// Adds a batch's losses and correct predictions to `outcome`. `logits` and `targets` are row-major `[B, classes]`, `labels`
    /// is `[B]`.
    pub(super) fn count(&self, logits: &[f32], targets: &[f32], labels: &[i32], outcome: &mut StepOutcome) {
        let rows = logits.chunks_exact(self.classes).zip(targets.chunks_exact(self.classes));
        for ((row, target), &label) in rows.zip(labels) {
            let (loss, right) = match self.multi_label {
                true => (binary::sample_loss(row, target, &self.pos_weights), binary::exact_match(row, target)),
                false => (loss::sample_loss(row, target.iter().copied()), loss::argmax(row) == label as usize),
            };
            outcome.loss_sum += loss;
            outcome.correct += u64::from(right);
        }
        outcome.samples += labels.len() as u64;
    }

    /// Returns a copy of the network for evaluation: the same values, no autodiff.
    pub fn inference(&self) -> Network {
        self.network().valid()
    }

    /// Returns whether the device tunes its kernels for each shape of their inputs.
    fn tunes_kernels(&self) -> bool {
        self.inner_device() != Device::flex()
    }

    /// Evaluates every batch with `network`, an inference copy, until `stop`.
    ///
    /// # Errors
    /// A batch is an error.
    pub fn evaluate(
        &self,
        network: &Network,
        batches: &mut Batches<'_>,
        stop: &StopFlag,
    ) -> Result<EvalCounts, DataError> {
        let mut full = 0;
        let infer = |batch: Batch| {
            let count = batch.len();
            full = full.max(count);
            // Kernels on GPUs are tuned for each batch size, so pad the last batch to the size of the others. This does not
            // change results: an evaluation computes each image independently, and the padding is not counted. (In training,
            // batch norm's statistics would include the padding.)
            let batch = if self.tunes_kernels() { batch.padded(full) } else { batch };
            let views = batch.views;
            let images = self.images(batch, |sets| &sets.eval).inner();
            let mut logits = match views {
                1 => Logits::of(network, images, self.tta),
                _ => Logits::of_ten_crops(network, images),
            };
            logits.truncate(count * self.classes);
            Ok(logits)
        };
        EvalCounts::count_batches(EvalCounts::empty(self.classes, self.multi_label), batches, stop, infer)
    }
}

/// Returns the key of a sample's dropout. The key depends on the seed, the epoch and the sample, but not on the number of ranks.
fn dropout_key(seed: u64, epoch: usize, id: u32) -> u64 {
    let mix = |key: u64, word: u64| (key ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    mix(mix(seed, epoch as u64 + 1), u64::from(id) + 1)
}

/// Copies logits `[B, classes]` to the host: f32, row-major.
pub(super) fn host_logits(logits: Tensor<2>) -> Vec<f32> {
    logits.try_into_vec_as::<f32>().expect("a device that computed the logits can copy them back")
}
