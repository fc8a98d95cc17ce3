//! `torch.nn.DataParallel`: one process with a thread pool per device. Each batch is scattered over replicas of one network.
//!
//! Device 0 owns the network, the optimizer and the loss. For every batch: `replicate` → `scatter` (`torch.chunk`) → forward
//! on all devices (`parallel_apply`) → `gather` of the outputs on device 0, where the loss of the whole batch is computed →
//! backward on all devices → gradients summed on device 0 in device order → one optimizer step there.
//!
//! Batch norm (`parallel.batch_norm`): `local` and `broadcast` are as in PyTorch: each replica normalises by its own chunk,
//! and only device 0's running statistics persist (they are replicated with the parameters). `sync` normalises by the whole
//! batch. There is no `reduce`, because replicas live for one batch.
//!
//! All copies between devices go through host memory (`copy.rs` explains why).
//!
//! On the CPU all devices share one memory. There the replicas share the parameters' storage, and only the chunks are copied.
//! `bytes_moved` counts the bytes that devices with separate memories would send.

mod copy;
mod devices;
mod replicate;
pub(crate) mod scatter;
mod statistics;
mod step;

use std::sync::Arc;

use burn::tensor::Device;
use data::loader::Batch;
use models::Network;

use self::{devices::DevicePools, scatter::TransferSizes};
use super::{Batches, DeviceDatasets, EvalCounts, Evaluation, Learner, StepOutcome, Strategy, eval_counts::Logits};
use crate::{
    config::{BatchNormPolicy, RunPlan, Tta},
    device,
    failure::Failure,
    signals::{StopFlag, StopReason},
};

/// The strategy of one process with several devices.
pub struct Dp {
    learner: Learner,
    devices: DevicePools,
    classes: usize,
    batch_norm: BatchNormPolicy,
    tta: Tta,
    multi_label: bool,
    sizes: TransferSizes,
    /// Per device: the largest number of bytes held at once, as counted by [`TransferSizes::peak_bytes`].
    held: Vec<u64>,
}

impl Dp {
    /// Takes a new network with `classes` outputs on the first of `devices`. All are autodiff devices; on the CPU all are the same
    /// device. Each CPU device gets an equal share of this process's threads.
    ///
    /// # Errors
    /// `devices` is empty, or their threads cannot be started.
    pub fn new(network: Network, devices: Vec<Device>, classes: usize, plan: &RunPlan) -> Result<Self, Failure> {
        let devices = DevicePools::new(devices)?;
        let learner = Learner::new(network, devices.first().clone(), classes, plan);
        let held = vec![0; devices.len()];
        let batch_norm = plan.parallel.batch_norm;
        let sizes = replicate::transfer_sizes(learner.replica.network(), classes);
        let (tta, multi_label) = (plan.train.tta, plan.is_multi_label());
        Ok(Self { learner, devices, classes, batch_norm, tta, multi_label, sizes, held })
    }

    /// Returns the logits of a batch in its order. Each device computes its chunk with its network.
    fn infer(&self, networks: &[Network], batch: Batch) -> Result<Logits, Failure> {
        let batch = Arc::new(batch);
        let jobs = scatter::chunks(batch.len(), self.devices.len()).into_iter().enumerate().map(|(index, range)| {
            let (batch, network) = (Arc::clone(&batch), networks[index].clone());
            let device = self.devices.get(index).clone().inner();
            let tta = self.tta;
            move || Logits::of(&network, scatter::images(&batch, range, &device), tta)
        });
        let parts = self.devices.parallel_apply("evaluation", None, jobs.collect())?;
        let mut all = Logits::default();
        parts.into_iter().for_each(|part| all.append(part));
        Ok(all)
    }
}

impl Strategy for Dp {
    fn learner(&self) -> &Learner {
        &self.learner
    }

    fn learner_mut(&mut self) -> &mut Learner {
        &mut self.learner
    }

    fn device_count(&self) -> usize {
        self.devices.len()
    }

    fn device_bytes(&self) -> Vec<u64> {
        let held = |(index, known): (usize, &u64)| device::reserved_bytes(self.devices.get(index)).unwrap_or(*known);
        self.held.iter().enumerate().map(held).collect()
    }

    fn set_device_datasets(&mut self, _: DeviceDatasets) -> Result<(), Failure> {
        // Pixels are scattered from host memory, so every batch needs pixels.
        Err(Failure::run("mode dp takes its pixels from the loader", "please report this"))
    }

    fn train_step(&mut self, batches: Vec<Batch>, lr: f64, stop: Option<StopReason>) -> Result<StepOutcome, Failure> {
        step::train_step(self, batches, lr, stop)
    }

    fn evaluate(&mut self, batches: &mut Batches<'_>, stop: &StopFlag) -> Result<Evaluation, Failure> {
        let networks = replicate::replicate(&self.learner.evaluated_network(), &self.devices, self.devices.len());
        let empty = EvalCounts::empty(self.classes, self.multi_label);
        let counts = EvalCounts::count_batches(empty, batches, stop, |batch| self.infer(&networks, batch))?;
        Ok(Evaluation::of_one_process(counts, stop))
    }
}
