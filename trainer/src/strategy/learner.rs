//! The training state of a process, which all strategies have: a replica, its optimizer and its weight average.

use std::time::Instant;

use burn::tensor::Device;
use models::{Network, StateTensor, state};

use super::{Replica, StepGraph, StepOutcome};
use crate::{
    config::RunPlan,
    failure::Failure,
    optim::{Ema, FlatGradients, Optimizer, clip_grad_norm},
    snapshot::Snapshot,
    timeline::Track,
};

/// The hint for a checkpoint whose tensors are not those of the model and the optimizer.
pub const RESUME_MISMATCH_HINT: &str = "a run keeps its model and its optimizer: resume it with the model.name and the \
     optimizer.kind of its config.toml, or start a new run from its weights: model.weights = \"RUN/checkpoints/last\"";

/// A network with its optimizer and, if `train.ema` is on, its weight average.
#[derive(Debug)]
pub struct Learner {
    /// The network on its device.
    pub replica: Replica,
    /// The step as a CUDA graph.
    pub graph: StepGraph,
    pub(super) optimizer: Optimizer,
    pub(super) ema: Option<Ema>,
    pub(super) grad_clip: f64,
}

impl Learner {
    /// Takes a new network on `device` (an autodiff device) with `classes` outputs.
    pub fn new(network: Network, device: Device, classes: usize, plan: &RunPlan) -> Self {
        let optimizer = Optimizer::new(&plan.optimizer).for_layers_of(&network);
        Self {
            ema: (plan.train.ema > 0.0).then(|| Ema::new(&network, plan.train.ema)),
            replica: Replica::new(network, device, classes, plan.train.label_smoothing, plan.train.seed)
                .with_precision(plan.train.precision)
                .with_tta(plan.train.tta)
                .with_multi_label(plan.is_multi_label()),
            optimizer,
            grad_clip: plan.train.grad_clip,
            graph: StepGraph::default(),
        }
    }

    /// Clips the gradients, takes the optimizer's step and updates the weight average. Adds the time to `outcome`, and the norm of
    /// the gradients if clipping is on.
    pub fn optimizer_step(&mut self, mut gradients: FlatGradients, lr: f64, outcome: &mut StepOutcome) {
        let start = Instant::now();
        if self.grad_clip > 0.0 {
            outcome.grad_norm = Some(clip_grad_norm(&mut gradients, self.grad_clip));
        }
        self.replica.change(|network| self.optimizer.step(network, gradients, lr));
        if let Some(ema) = &mut self.ema {
            ema.update(self.replica.network());
        }
        let end = Instant::now();
        self.replica.timeline.span(Track::Step, "optimizer", start, end, &[]);
        outcome.seconds.optimizer += (end - start).as_secs_f64();
    }

    /// Returns the network to evaluate, without autodiff. It has the averaged weights if the average is on.
    pub fn evaluated_network(&self) -> Network {
        let network = self.replica.inference();
        match &self.ema {
            Some(ema) => ema.apply(network),
            None => network,
        }
    }

    /// Copies the weights, the optimizer state and the weight average to the host.
    pub fn snapshot(&self) -> Snapshot {
        let (optimizer, optimizer_steps) = self.optimizer.state(&self.replica.parameters);
        let averaged = |ema: &Ema| -> Vec<StateTensor> { state::state_dict(&ema.apply(self.replica.inference())) };
        Snapshot {
            model: state::state_dict(self.replica.network()),
            optimizer,
            optimizer_steps,
            ema: self.ema.as_ref().map(averaged),
        }
    }

    /// Loads the state that [`Learner::snapshot`] returned.
    ///
    /// # Errors
    /// The state does not fit the network or the optimizer. The error names the tensors that are missing, unexpected or of
    /// another shape.
    pub fn restore(&mut self, snapshot: Snapshot) -> Result<(), Failure> {
        let refused = |what: String| Failure::usage(what, RESUME_MISMATCH_HINT);
        let load = |network: Network, tensors: &[StateTensor]| {
            state::load_state_dict(network, tensors).map_err(|error| refused(error.to_string()))
        };
        let device = self.replica.inner_device();
        self.graph.reset(&device);
        self.replica.try_change(|network| load(network, &snapshot.model))?;
        self.optimizer
            .load_state(snapshot.optimizer, snapshot.optimizer_steps, &self.replica.parameters, &device)
            .map_err(refused)?;
        match (&mut self.ema, snapshot.ema) {
            (Some(ema), Some(tensors)) => {
                // Load through the network, which checks names and shapes, and returns the tensors in the network's order.
                let averaged = load(self.replica.inference(), &tensors)?;
                ema.load(&state::state_dict(&averaged), self.replica.network(), &device);
                Ok(())
            }
            (None, None) => Ok(()),
            (Some(_), None) => Err(refused("the checkpoint has no weight average (train.ema)".into())),
            (None, Some(_)) => Err(refused("the checkpoint has a weight average, train.ema is 0".into())),
        }
    }
}
