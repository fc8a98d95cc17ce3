//! One process, one device.

mod step;

use burn::tensor::Device;
use data::loader::Batch;
use models::Network;

use super::{Batches, Evaluation, Learner, StepGraph, StepOutcome, Strategy, graph, graph_capture::SingleGraphStep};
use crate::{
    config::RunPlan,
    failure::Failure,
    signals::{StopFlag, StopReason},
};

/// The strategy of one process with one device.
#[derive(Debug)]
pub struct Single {
    learner: Learner,
}

impl Single {
    /// Takes a new network on `device` (an autodiff device) with `classes` outputs.
    pub fn new(network: Network, device: Device, classes: usize, plan: &RunPlan) -> Self {
        let mut learner = Learner::new(network, device, classes, plan);
        learner.graph = StepGraph::new(plan, &learner.replica.inner_device());
        Self { learner }
    }
}

impl Strategy for Single {
    fn learner(&self) -> &Learner {
        &self.learner
    }

    fn learner_mut(&mut self) -> &mut Learner {
        &mut self.learner
    }

    fn train_step(&mut self, batches: Vec<Batch>, lr: f64, stop: Option<StopReason>) -> Result<StepOutcome, Failure> {
        match self.queue_step(batches, lr, stop)? {
            Some(outcome) => Ok(outcome),
            None => Ok(self.finish_step()?.expect("the step is queued, and none before it")),
        }
    }

    fn queue_step(
        &mut self,
        batches: Vec<Batch>,
        lr: f64,
        stop: Option<StopReason>,
    ) -> Result<Option<StepOutcome>, Failure> {
        step::queue_step(self, batches, lr, stop)
    }

    fn max_queued(&self) -> usize {
        self.learner.graph.max_queued()
    }

    fn finish_step(&mut self) -> Result<Option<StepOutcome>, Failure> {
        graph::finish_step(&mut self.learner, &mut SingleGraphStep::default())
    }

    fn evaluate(&mut self, batches: &mut Batches<'_>, stop: &StopFlag) -> Result<Evaluation, Failure> {
        self.learner.graph.restart_warm_up(&self.learner.replica.inner_device());
        let counts = self.learner.replica.evaluate(&self.learner.evaluated_network(), batches, stop)?;
        Ok(Evaluation::of_one_process(counts, stop))
    }
}
