//! One process, a thread pool a device: each batch is scattered over replicas of one network, as PyTorch's `DataParallel`.
//!
//! Device 0 owns the network, the optimizer and the loss. For every batch: replicate → scatter (`torch.chunk`) → forward on
//! all devices → gather the outputs on device 0, where the loss of the whole batch is computed → backward on all devices →
//! gradients summed on device 0, in device order → one optimizer step there.
//!
//! Batch norm (`parallel.batch_norm`): `local` and `broadcast` are PyTorch's way, in which each replica normalises by its own
//! chunk and only device 0's running statistics persist (they are replicated with the parameters); `sync` normalises by the
//! whole batch. There is no `reduce`: replicas live for one batch.
//!
//! On the CPU all devices are one memory. Replicas share the parameters' storage there and nothing is copied but the
//! chunks; what `bytes_moved` counts is what devices with memories of their own would have to send.

mod devices;
mod replicate;
mod scatter;
mod statistics;
mod step;

use std::sync::Arc;

use burn::tensor::Device;
use data::{ImageShape, loader::Batch};
use models::{Context, Network};

use self::{devices::Devices, scatter::Sizes};
use super::{Evaluation, Learner, ResidentSets, Snapshot, StepOutcome, Strategy, Tally, replica::host_logits};
use crate::config::{BatchNormPolicy, RunPlan};
use crate::device;
use crate::failure::Failure;
use crate::signals::Stop;
use crate::snapshot::RunProgress;
use crate::timeline::Timeline;

/// The strategy of one process with several devices.
pub struct Dp {
    learner: Learner,
    devices: Devices,
    classes: usize,
    batch_norm: BatchNormPolicy,
    sizes: Sizes,
    /// What each device is known to have held at once.
    held: Vec<u64>,
}

impl Dp {
    /// Takes a freshly built network that lives on the first of `devices` (autodiff devices; on the CPU all of them are the
    /// same one), for images of shape `image` and with `classes` outputs. Each device gets its share of this process's
    /// threads.
    ///
    /// # Errors
    /// There are no devices, or their threads cannot be started.
    pub fn new(
        network: Network,
        devices: Vec<Device>,
        image: ImageShape,
        classes: usize,
        plan: &RunPlan,
    ) -> Result<Self, Failure> {
        let devices = Devices::new(devices)?;
        let learner = Learner::new(network, devices.first().clone(), classes, plan);
        let held = vec![0; devices.len()];
        let batch_norm = plan.parallel.batch_norm;
        let sizes = replicate::sizes(learner.replica.network(), image.len(), classes);
        Ok(Self { learner, devices, classes, batch_norm, sizes, held })
    }

    /// Logits of a batch in its order, row-major `[B, classes]`: each device does its chunk.
    fn infer(&self, network: &Network, batch: Batch) -> Result<Vec<f32>, Failure> {
        let batch = Arc::new(batch);
        let jobs = scatter::chunks(batch.len(), self.devices.len()).into_iter().enumerate().map(|(index, range)| {
            let (batch, network) = (Arc::clone(&batch), replicate::moved(network.clone(), &self.devices, index));
            let device = self.devices.get(index).clone().inner();
            move || host_logits(network.forward(scatter::images(&batch, range, &device), &Context::eval()))
        });
        let parts = self.devices.run("evaluation", None, jobs.collect())?;
        Ok(parts.concat())
    }
}

impl Strategy for Dp {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn devices(&self) -> usize {
        self.devices.len()
    }

    fn device_bytes(&self) -> Vec<u64> {
        let held = |(index, known): (usize, &u64)| device::held_bytes(self.devices.get(index)).unwrap_or(*known);
        self.held.iter().enumerate().map(held).collect()
    }

    fn keep_resident(&mut self, _: ResidentSets) {
        // it scatters pixels; with batches that have none, `scatter::images` would find nothing to cut
        unreachable!("data parallelism takes its pixels from the loader");
    }

    fn record(&mut self, timeline: &Timeline) {
        self.learner.replica.timeline = timeline.clone();
    }

    fn train_step(&mut self, batches: Vec<Batch>, lr: f64, stop: Option<i32>) -> Result<StepOutcome, Failure> {
        step::train_step(self, batches, lr, stop)
    }

    fn evaluate(&mut self, batches: &mut dyn Iterator<Item = Batch>, stop: &Stop) -> Result<Evaluation, Failure> {
        let network = self.learner.evaluated_network();
        let mut tally = Tally::new(self.classes);
        while stop.signal().is_none()
            && let Some(batch) = batches.next()
        {
            let labels = batch.labels.clone();
            let logits = self.infer(&network, batch)?;
            for (row, &label) in logits.chunks_exact(self.classes).zip(&labels) {
                tally.add(row, label as usize);
            }
        }
        Ok(stop.signal().map_or(Evaluation::Done(tally), Evaluation::Stopped))
    }

    fn snapshot(&self) -> Snapshot {
        self.learner.snapshot()
    }

    fn start_from(&mut self, checkpoint: Option<(Snapshot, RunProgress)>) -> Result<RunProgress, Failure> {
        let Some((snapshot, progress)) = checkpoint else { return Ok(RunProgress::start()) };
        self.learner.restore(snapshot)?;
        Ok(progress)
    }
}
