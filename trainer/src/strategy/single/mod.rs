//! One process, one device.

mod step;

use burn::tensor::Device;
use data::loader::Batch;
use models::{
    Network,
    state::{self, StateTensor},
};

use super::{Evaluation, Replica, Snapshot, StepOutcome, Strategy};
use crate::{
    config::RunPlan,
    failure::Failure,
    optim::{Ema, Optimizer},
    signals::Stop,
};

/// The strategy of one process with one device.
#[derive(Debug)]
pub struct Single {
    replica: Replica,
    optimizer: Optimizer,
    ema: Option<Ema>,
    grad_clip: f64,
}

impl Single {
    /// Takes a freshly built network on `device` (an autodiff device) with `classes` outputs.
    pub fn new(network: Network, device: Device, classes: usize, plan: &RunPlan) -> Self {
        Self {
            ema: (plan.train.ema > 0.0).then(|| Ema::new(&network, plan.train.ema)),
            replica: Replica::new(network, device, classes, plan.train.label_smoothing),
            optimizer: Optimizer::new(&plan.optimizer),
            grad_clip: plan.train.grad_clip,
        }
    }

    /// The network's weights, averaged where the average is on, without autodiff.
    fn evaluated_network(&self) -> Network {
        let network = self.replica.inference();
        match &self.ema {
            Some(ema) => ema.apply(network),
            None => network,
        }
    }
}

impl Strategy for Single {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn train_step(&mut self, batches: Vec<Batch>, lr: f64, stop: Option<i32>) -> Result<StepOutcome, Failure> {
        step::train_step(self, batches, lr, stop)
    }

    fn evaluate(&mut self, batches: &mut dyn Iterator<Item = Batch>, stop: &Stop) -> Result<Evaluation, Failure> {
        let tally = self.replica.evaluate(&self.evaluated_network(), batches, stop);
        Ok(stop.signal().map_or(Evaluation::Done(tally), Evaluation::Stopped))
    }

    fn snapshot(&self) -> Snapshot {
        let (optimizer, optimizer_steps) = self.optimizer.state(&self.replica.parameters);
        let averaged = |ema: &Ema| -> Vec<StateTensor> { state::state_dict(&ema.apply(self.replica.inference())) };
        Snapshot {
            model: state::state_dict(&self.replica.network),
            optimizer,
            optimizer_steps,
            ema: self.ema.as_ref().map(averaged),
        }
    }

    fn restore(&mut self, snapshot: Snapshot) -> Result<(), Failure> {
        let refused = |what: String| {
            Failure::usage(
                what,
                "the checkpoint is of another model or optimizer; resume with the run's own config.toml",
            )
        };
        let network = state::load_state_dict(self.replica.network.clone(), &snapshot.model)
            .map_err(|error| refused(error.to_string()))?;
        self.replica.network = network;
        let device = self.replica.inner_device();
        self.optimizer
            .load_state(snapshot.optimizer, snapshot.optimizer_steps, &self.replica.parameters, &device)
            .map_err(refused)?;
        match (&mut self.ema, snapshot.ema) {
            (Some(ema), Some(tensors)) => {
                // through the network: names and shapes are checked, and the order is the network's
                let averaged = state::load_state_dict(self.replica.inference(), &tensors)
                    .map_err(|error| refused(error.to_string()))?;
                ema.load(&state::state_dict(&averaged), &device);
            }
            (None, None) => {}
            (Some(_), None) => return Err(refused("the checkpoint has no weight average (train.ema)".into())),
            (None, Some(_)) => return Err(refused("the checkpoint has a weight average, train.ema is 0".into())),
        }
        Ok(())
    }
}
