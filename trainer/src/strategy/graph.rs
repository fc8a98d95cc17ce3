//! The step of one GPU, recorded as a CUDA graph: one launch for the whole step (`torch.cuda.graph`).
//!
//! ```text
//! first full step        as usual: compiles kernels, makes the optimizer's state
//! next one like it       as usual, on inputs in fixed memory: leaves behind the memory that the step needs
//! next one like it       recorded, then launched
//! all like it            inputs written, launched
//! other steps            as usual: an epoch's last batch, if it is smaller
//! ```
//!
//! A graph runs the same kernels on the same memory with the same arguments. So inputs and learning rates are written to fixed
//! tensors before each launch, and weights, statistics, optimizer state and weight average are updated in place, which is checked.
//! The kernels and their arguments are those of a step without a graph, so the bits are, too.
//!
//! The host does not wait for a step: it prepares and launches the next one first, so that the GPU always has work. Whether the
//! loss is finite is therefore known late, and the optimizer's kernels leave weights and state alone if it is not.

use std::collections::VecDeque;
use std::time::Instant;

use burn::tensor::{Device, Tensor};
use data::loader::Batch;
use models::{Context, StateKind, state};
use ops::graph::{self, Graph, Reading};

use super::{Learner, StepOutcome, device_batch::DeviceBatch};
use crate::{
    config::{ClassWeights, OptimizerConfig, OptimizerKind, RunPlan},
    device::launches_block,
    failure::Failure,
    optim::{DeviceRates, FlatGradients, clip_on_device},
    timeline::Track,
};

/// Steps that one graph can take: the images of each batch, and the weight by which the loss is divided.
type Kind = (Vec<usize>, u64);

/// The graph of a learner's step.
#[derive(Debug, Default)]
pub struct StepGraph {
    phase: Phase,
    /// How often the state was in other memory after a step.
    moves: usize,
    /// Steps that may still run, the oldest first.
    queued: VecDeque<Queued>,
    /// Why steps are not recorded, until it is said.
    note: Option<String>,
}

#[derive(Debug, Default)]
enum Phase {
    /// Steps are not recorded.
    #[default]
    Off,
    /// Waits for two steps of one kind, one after the other.
    Waits(Option<Kind>),
    /// One step of the kind has run on these inputs; the next one is recorded.
    Prepared(Kind, Box<Inputs>),
    /// Steps of the kind are launched as a graph.
    Recorded(Kind, Box<Recorded>),
}

/// What a step reads, on the device.
#[derive(Debug)]
struct Inputs {
    batches: Vec<DeviceBatch>,
    rates: DeviceRates,
}

/// What a step leaves on the device.
#[derive(Debug)]
struct Outputs {
    /// Of each batch, row-major `[B, classes]`.
    logits: Vec<Tensor<1>>,
    /// `[1]`, where clipping is on.
    grad_norm: Option<Tensor<1>>,
}

/// A step that may still run.
#[derive(Debug)]
struct Queued {
    /// Of each batch the logits, then the norm of the gradients, where clipping is on.
    values: Reading,
    /// Row-major `[B, classes]`, and labels `[B]`, of each batch.
    expected: Vec<(Vec<f32>, Vec<i32>)>,
    outcome: StepOutcome,
    lr: f64,
}

/// A recorded step.
#[derive(Debug)]
struct Recorded {
    inputs: Box<Inputs>,
    outputs: Outputs,
    graph: Graph,
    /// Where the state was when the step was recorded.
    addresses: Vec<[u64; 2]>,
    /// Whether another step has run since.
    check: bool,
}

/// Attempts to find the state in the same memory after a step, before steps are no longer recorded.
const MOVES: usize = 5;

impl StepGraph {
    /// Records steps on `device`, if it is a GPU that can and the plan allows it.
    pub fn new(plan: &RunPlan, device: &Device) -> Self {
        // With CUDA_LAUNCH_BLOCKING each launch waits for its kernel: an error then names its kernel, which a graph would hide.
        if plan.train.graph == Some(false) || launches_block() || !graph::can_record(device) {
            return Self::default();
        }
        let OptimizerConfig { kind, momentum, .. } = plan.optimizer;
        let reason = if plan.is_multi_label() {
            Some("the loss of images with several classes copies from the host")
        } else if plan.train.class_weights != ClassWeights::None {
            Some("with train.class_weights the loss of each step is divided by another number")
        } else if kind == OptimizerKind::Sgd && momentum == 0.0 {
            Some("SGD without momentum makes new weights in each step")
        } else {
            None
        };
        let mut graph = Self { phase: Phase::Waits(None), ..Self::default() };
        if let Some(reason) = reason {
            graph.stop(reason);
        }
        graph
    }

    /// Begins again, as the state is in other memory than before.
    fn moved(&mut self, kind: Kind) {
        self.phase = Phase::Waits(Some(kind));
        self.moves += 1;
        if self.moves >= MOVES {
            self.stop("the training state is in other memory after each step; please report this");
        }
    }

    fn stop(&mut self, reason: &str) {
        self.phase = Phase::Off;
        self.note = Some(format!("note: the step is launched kernel by kernel, not as a CUDA graph: {reason}"));
    }

    /// Returns why steps are not recorded, once.
    pub fn take_note(&mut self) -> Option<String> {
        self.note.take()
    }

    /// Forgets a graph, as the state of training gets other memory on `device`.
    pub fn forget(&mut self, device: &Device) {
        if let Phase::Prepared(..) = self.phase {
            graph::cancel(device);
        }
        if !matches!(self.phase, Phase::Off) {
            self.phase = Phase::Waits(None);
        }
    }
}

/// Queues a step as a graph, or on the way to one: [`finish_step`] has its outcome. Gives the batches back where the step is to be
/// taken as usual.
///
/// # Errors
/// The step cannot be recorded or launched.
pub(super) fn queue_step(
    learner: &mut Learner,
    batches: Vec<Batch>,
    lr: f64,
    mut outcome: StepOutcome,
) -> Result<Option<Vec<Batch>>, Failure> {
    let kind = (batches.iter().map(Batch::len).collect(), outcome.weight.to_bits());
    // A timeline shows the launches of a step, which a graph hides.
    if learner.replica.timeline.is_on() {
        return Ok(Some(batches));
    }
    let (start, weight) = (Instant::now(), outcome.weight);
    let values = match std::mem::take(&mut learner.graph.phase) {
        Phase::Off => return Ok(Some(batches)),
        Phase::Waits(Some(before)) if before == kind => learner.prepare(kind, &batches, lr, weight)?,
        Phase::Prepared(prepared, inputs) if prepared == kind => {
            inputs.write(learner, &batches, lr);
            let recorded = learner.record(inputs, &batches, lr, weight)?;
            learner.launch(kind, recorded)?
        }
        Phase::Recorded(of_graph, mut recorded) if of_graph == kind => {
            // A step without the graph writes in place too, unless something else has the state's memory.
            if std::mem::take(&mut recorded.check) && learner.addresses()? != recorded.addresses {
                learner.graph.moved(kind);
                return Ok(Some(batches));
            }
            recorded.inputs.write(learner, &batches, lr);
            learner.optimizer.count_step();
            learner.launch(kind, recorded)?
        }
        Phase::Recorded(of_graph, mut recorded) => {
            recorded.check = true;
            learner.graph.phase = Phase::Recorded(of_graph, recorded);
            return Ok(Some(batches));
        }
        other => {
            learner.graph.phase = other;
            learner.graph.forget(&learner.replica.inner_device());
            learner.graph.phase = Phase::Waits(Some(kind));
            return Ok(Some(batches));
        }
    };
    let expected = batches.into_iter().map(|batch| (learner.replica.targets(&batch), batch.labels)).collect();
    let end = Instant::now();
    learner.replica.timeline.span(Track::Step, "launch", start, end, &[]);
    outcome.seconds.forward += (end - start).as_secs_f64();
    learner.graph.queued.push_back(Queued { values, expected, outcome, lr });
    Ok(None)
}

/// Waits for the oldest queued step, and returns its outcome; `None` where no step is queued.
///
/// # Errors
/// The loss is not finite: the step has left the weights as they were. Or the GPU has failed.
pub(super) fn finish_step(learner: &mut Learner) -> Result<Option<StepOutcome>, Failure> {
    let Some(Queued { values, expected, mut outcome, lr }) = learner.graph.queued.pop_front() else { return Ok(None) };
    let start = Instant::now();
    let mut values = values.wait().map_err(|error| Failure::run(format!("the GPU: {error}"), HINT))?.into_iter();
    let end = Instant::now();
    outcome.seconds.backward += (end - start).as_secs_f64();
    for (logits, (targets, labels)) in values.by_ref().zip(&expected) {
        learner.replica.count(&logits, targets, labels, &mut outcome);
    }
    outcome.grad_norm = values.next().map(|norm| f64::from(norm[0]));
    outcome.check_finite(lr)?;
    Ok(Some(outcome))
}

const HINT: &str = "set train.graph = false, and please report this";

impl Outputs {
    /// Queues the copies to the host.
    fn read(&self) -> Reading {
        graph::read(&self.logits.iter().chain(&self.grad_norm).collect::<Vec<_>>())
    }
}

impl Inputs {
    /// Replaces the inputs by those of a step with learning rate `lr`.
    fn write(&self, learner: &Learner, batches: &[Batch], lr: f64) {
        for (on_device, batch) in self.batches.iter().zip(batches) {
            on_device.write(&learner.replica, batch);
        }
        learner.optimizer.write_rates(&self.rates, lr);
    }
}

impl Learner {
    /// Queues a step as usual, on inputs that stay.
    fn prepare(&mut self, kind: Kind, batches: &[Batch], lr: f64, weight: f64) -> Result<Reading, Failure> {
        let device = self.replica.inner_device();
        graph::prepare(&device).map_err(|error| Failure::run(format!("no step can be recorded: {error}"), HINT))?;
        let on_device = batches.iter().map(|batch| DeviceBatch::new(&self.replica, batch)).collect();
        let mut inputs = Inputs { batches: on_device, rates: DeviceRates::new(&device) };
        let before = self.addresses()?;
        let (outputs, dropped) = self.run(&mut inputs, batches, lr, weight);
        let stays = self.addresses()? == before;
        let graph = &mut self.graph;
        graph.phase = Phase::Prepared(kind.clone(), Box::new(inputs));
        if dropped || !stays {
            graph.forget(&device);
            graph.moved(kind);
        }
        if dropped {
            graph.stop("the network's dropout is drawn on the host");
        }
        Ok(outputs.read())
    }

    /// Records a step. None of it runs.
    fn record(
        &mut self,
        mut inputs: Box<Inputs>,
        batches: &[Batch],
        lr: f64,
        weight: f64,
    ) -> Result<Box<Recorded>, Failure> {
        let (device, before) = (self.replica.inner_device(), self.addresses()?);
        let recorded = graph::record(&device, || self.run(&mut inputs, batches, lr, weight));
        let (graph, (outputs, _)) =
            recorded.map_err(|error| Failure::run(format!("the step cannot be recorded: {error}"), HINT))?;
        let addresses = self.addresses()?;
        if addresses != before {
            return Err(Failure::run("the recorded step does not update the training state in place", HINT));
        }
        tracing::info!("the step is recorded as a CUDA graph");
        Ok(Box::new(Recorded { inputs, outputs, graph, addresses, check: false }))
    }

    /// Launches the graph on its inputs.
    fn launch(&mut self, kind: Kind, recorded: Box<Recorded>) -> Result<Reading, Failure> {
        let launched = recorded.graph.launch();
        launched.map_err(|error| Failure::run(format!("the step's graph cannot be launched: {error}"), HINT))?;
        let values = recorded.outputs.read();
        self.graph.phase = Phase::Recorded(kind, recorded);
        Ok(values)
    }

    /// Queues a step: forward and backward of each batch, then the optimizer. Returns also whether dropout was drawn.
    fn run(&mut self, inputs: &mut Inputs, batches: &[Batch], lr: f64, weight: f64) -> (Outputs, bool) {
        let replica = &self.replica;
        let (mut gradients, mut logits) = (FlatGradients::default(), Vec::new());
        let (mut loss, mut dropped) = (None, false);
        for (on_device, batch) in inputs.batches.iter().zip(batches) {
            let cx = replica.configured(Context::train()).with_dropout(replica.dropout_keys(batch));
            let (of_batch, of_logits) = on_device.forward(replica, &cx, weight);
            dropped |= cx.has_dropped();
            let [images, classes] = of_logits.dims();
            logits.push(of_logits.reshape([images * classes]));
            let value = of_batch.clone().inner();
            loss = Some(loss.map_or(value.clone(), |sum: Tensor<1>| sum + value));
            gradients.accumulate(FlatGradients::from_backward(of_batch.backward(), replica.network()));
        }
        let loss = loss.expect("a step has at least one batch");
        let grad_norm = (self.grad_clip > 0.0).then(|| clip_on_device(&mut gradients, self.grad_clip)).flatten();
        inputs.rates.loss = loss;
        self.replica.change(|network| self.optimizer.step_with(network, gradients, lr, Some(&mut inputs.rates)));
        if let Some(ema) = &mut self.ema {
            ema.update(self.replica.network());
        }
        (Outputs { logits, grad_norm }, dropped)
    }

    /// Returns where the training state is in the GPU's memory.
    fn addresses(&self) -> Result<Vec<[u64; 2]>, Failure> {
        let mut tensors = Vec::new();
        state::visit(self.replica.network(), |_, kind, value| {
            if kind != StateKind::Frozen {
                tensors.push(value);
            }
        });
        let average = self.ema.iter().flat_map(|ema| ema.tensors().iter());
        let all = tensors.iter().chain(self.optimizer.tensors()).chain(average);
        let found = all.map(graph::address).chain(graph::addresses_of_copies().into_iter().map(Some));
        found
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| Failure::run("a part of the training state is not on the GPU", HINT))
    }
}
