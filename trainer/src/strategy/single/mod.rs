//! One process, one device.

mod step;

use burn::tensor::Device;
use data::loader::Batch;
use models::Network;

use super::{Evaluation, Learner, ResidentSets, Snapshot, StepOutcome, Strategy};
use crate::config::RunPlan;
use crate::failure::Failure;
use crate::signals::Stop;
use crate::snapshot::RunProgress;
use crate::timeline::Timeline;

/// The strategy of one process with one device.
#[derive(Debug)]
pub struct Single {
    learner: Learner,
}

impl Single {
    /// Takes a freshly built network on `device` (an autodiff device) with `classes` outputs.
    pub fn new(network: Network, device: Device, classes: usize, plan: &RunPlan) -> Self {
        Self { learner: Learner::new(network, device, classes, plan) }
    }
}

impl Strategy for Single {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn device_bytes(&self) -> Vec<u64> {
        self.learner.replica.held_bytes().into_iter().collect()
    }

    fn keep_resident(&mut self, sets: ResidentSets) {
        self.learner.replica.resident = Some(sets);
    }

    fn record(&mut self, timeline: &Timeline) {
        self.learner.replica.timeline = timeline.clone();
    }

    fn train_step(&mut self, batches: Vec<Batch>, lr: f64, stop: Option<i32>) -> Result<StepOutcome, Failure> {
        step::train_step(self, batches, lr, stop)
    }

    fn evaluate(&mut self, batches: &mut dyn Iterator<Item = Batch>, stop: &Stop) -> Result<Evaluation, Failure> {
        let tally = self.learner.replica.evaluate(&self.learner.evaluated_network(), batches, stop);
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
