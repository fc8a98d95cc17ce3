//! The inputs and outputs of a step that is captured as a CUDA graph.

use burn::tensor::{Device, Tensor};
use data::loader::Batch;
use ops::graph::{Feed, GraphInput};

use super::{Learner, device_batch::DeviceBatch};
use crate::optim::DeviceScalars;

/// Maximum number of steps that are launched at once.
const MAX_STEPS_PER_LAUNCH: usize = 8;
/// Maximum size of the inputs of these steps in bytes.
const MAX_INPUT_BYTES: usize = 64 << 20;

/// The tensors that a step reads, on the device.
#[derive(Debug)]
pub(super) struct StepInputs {
    pub(super) batches: Vec<DeviceBatch>,
    pub(super) rates: DeviceScalars,
    /// Made in the first step with these inputs.
    feed: Option<Feed>,
    /// The number of steps for which the feed has room, and which are launched at once.
    feed_steps: usize,
}

/// The results of a step, on the device.
#[derive(Debug)]
pub(super) struct StepOutputs {
    /// The logits of each batch, row-major `[B, classes]`.
    pub(super) logits: Vec<Tensor<1>>,
    /// `[1]`, if clipping is on.
    pub(super) grad_norm: Option<Tensor<1>>,
}

impl StepOutputs {
    /// Returns all tensors that the CPU reads after the step.
    pub(super) fn tensors(&self) -> Vec<&Tensor<1>> {
        self.logits.iter().chain(&self.grad_norm).collect()
    }
}

impl StepInputs {
    pub(super) fn new(batches: Vec<DeviceBatch>, device: &Device) -> Self {
        Self { batches, rates: DeviceScalars::new(device), feed: None, feed_steps: 0 }
    }

    /// Returns the number of steps that are launched at once, if the inputs of a step are `words` words of 32 bits.
    pub(super) fn max_feed_steps(words: usize) -> usize {
        (MAX_INPUT_BYTES / size_of::<u32>() / words).clamp(1, MAX_STEPS_PER_LAUNCH)
    }

    /// Makes the feed for `steps` steps with outputs of the shapes of `outputs`.
    pub(super) fn make_feed(&mut self, outputs: &StepOutputs, steps: usize) -> Feed {
        let results = outputs.tensors().iter().map(|tensor| tensor.dims()[0]).sum();
        let feed = Feed::new(&self.tensors(), results, steps);
        (self.feed, self.feed_steps) = (Some(feed.clone()), steps);
        feed
    }

    /// Returns all tensors that the step reads.
    pub(super) fn tensors(&self) -> Vec<GraphInput> {
        let rates = self.rates.tensors().map(|rates| GraphInput::Floats(rates.clone()));
        self.batches.iter().flat_map(DeviceBatch::inputs).chain(rates).collect()
    }

    /// Returns the bits of the inputs of a step over `batches` with learning rate `lr`, in the order of [`StepInputs::tensors`].
    pub(super) fn words(&self, learner: &Learner, batches: &[Batch], lr: f64) -> Vec<u32> {
        let mut words = Vec::new();
        for (on_device, batch) in self.batches.iter().zip(batches) {
            on_device.write(&learner.replica, batch, &mut words);
        }
        words.extend(learner.optimizer.rates(&self.rates, lr).iter().map(|value| value.to_bits()));
        words
    }

    /// Returns the feed. The first step with these inputs has made it.
    pub(super) fn feed(&self) -> &Feed {
        self.feed.as_ref().expect("the first step has made the feed")
    }

    /// Returns the number of steps for which the feed has room, and which are launched at once.
    pub(super) fn feed_steps(&self) -> usize {
        self.feed_steps
    }
}
