//! The step of one GPU, recorded as a CUDA graph: one launch for the whole step (`torch.cuda.graph`).
//!
//! ```text
//! first full step         launched kernel by kernel: compiles kernels, makes the optimizer's state
//! next step of this kind  launched kernel by kernel, on inputs in fixed memory: allocates the memory that the recording needs
//! next step of this kind  recorded, then launched as a graph
//! all further such steps  collected, then launched as graphs, several at once
//! other steps             launched kernel by kernel: an epoch's last batch, if it is smaller
//! ```
//!
//! A graph runs the same kernels on the same memory with the same arguments. So the graph's first kernel copies inputs and
//! learning rates to fixed tensors. Weights, statistics, optimizer state and weight average are updated in place, and the code
//! checks this. The kernels of the step and their arguments are the same as without a graph, so the bits are the same.
//!
//! The CPU writes the inputs of several steps at once, and reads their results at once ([`ops::graph::Feed`]). So most steps
//! are one launch without a copy. The CPU does not wait for these steps: it first prepares and launches the next steps, so the
//! GPU always has work. Therefore the CPU learns late that a loss is not finite. In this case the optimizer's kernels
//! themselves do not change weights and state, neither in this step nor in the steps after it.

use std::collections::VecDeque;
use std::time::Instant;

use burn::tensor::{Device, Tensor};
use data::loader::Batch;
use models::{Context, StateKind, state};
use ops::graph::{self, Graph, PendingRead};

use super::graph_inputs::{Inputs, Outputs};
use super::{Learner, StepOutcome, device_batch::DeviceBatch};
use crate::{
    config::{ClassWeights, OptimizerConfig, OptimizerKind, RunPlan},
    device::launches_block,
    failure::Failure,
    optim::{FlatGradients, clip_on_device},
    timeline::Track,
};

/// The kind of a step: the number of images of each batch, and the bits of the weight by which the loss is divided. A graph can
/// run steps of one kind only.
type Kind = (Vec<usize>, u64);

/// The graph of a learner's step.
#[derive(Debug, Default)]
pub struct StepGraph {
    phase: Phase,
    /// Number of steps after which the training state was at other addresses.
    moves: usize,
    /// Steps whose outcome is not known yet, the oldest first.
    queued: VecDeque<Queued>,
    /// The pending results of launched steps, each with the number of these steps.
    readings: VecDeque<(PendingRead, usize)>,
    /// The bits of the inputs of steps that are not launched yet, and the number of these steps.
    waiting: (Vec<u32>, usize),
    /// When results were last read.
    read: Option<Instant>,
    /// The note why steps are not recorded, until the note is taken.
    note: Option<String>,
}

#[derive(Debug, Default)]
enum Phase {
    /// Steps are not recorded.
    #[default]
    Off,
    /// Waits for two consecutive steps of one kind. Holds the kind of the last step.
    Waits(Option<Kind>),
    /// One step of this kind has run on these inputs. The next step of this kind will be recorded.
    Prepared(Kind, Box<Inputs>),
    /// Steps of this kind are launched as a graph.
    Recorded(Kind, Box<Recorded>),
}

/// A step whose outcome is not known.
#[derive(Debug)]
struct Queued {
    /// The logits of each batch, then the norm of the gradients if clipping is on. `None` until the results are read.
    results: Option<Vec<f32>>,
    /// The targets, row-major `[B, classes]`, and the labels `[B]` of each batch.
    expected: Vec<(Vec<f32>, Vec<i32>)>,
    outcome: StepOutcome,
    lr: f64,
    start: Instant,
}

/// A recorded step.
#[derive(Debug)]
struct Recorded {
    inputs: Box<Inputs>,
    graph: Graph,
    /// The addresses of the training state when the step was recorded.
    addresses: Vec<[u64; 2]>,
    /// Whether a step without the graph has run since, so the addresses must be checked again.
    check: bool,
}

/// If the state has moved to other memory this many times, no further step is recorded.
const MOVES: usize = 5;

impl StepGraph {
    /// Prepares to record steps on `device`, if the device is a GPU that supports graphs and the plan allows graphs.
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

    /// Starts again, since the state has moved to other memory.
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

    /// Drops the graph, since the training state moves to other memory on `device`.
    pub fn forget(&mut self, device: &Device) {
        if let Phase::Prepared(..) = self.phase {
            graph::cancel(device);
        }
        if !matches!(self.phase, Phase::Off) {
            self.phase = Phase::Waits(None);
        }
    }
}

/// Queues a step as a graph, or prepares or records the graph with it. Then returns `None`, and [`finish_step`] returns the
/// outcome. Returns the batches if the caller must run the step kernel by kernel.
///
/// # Errors
/// The step cannot be recorded or launched.
pub(super) fn queue_step(
    learner: &mut Learner,
    batches: Vec<Batch>,
    lr: f64,
    outcome: StepOutcome,
) -> Result<Option<Vec<Batch>>, Failure> {
    let kind = (batches.iter().map(Batch::len).collect(), outcome.weight.to_bits());
    // A timeline shows the launches of a step, which a graph hides.
    if learner.replica.timeline.is_on() {
        learner.graph.launch()?;
        return Ok(Some(batches));
    }
    let (start, weight) = (Instant::now(), outcome.weight);
    match std::mem::take(&mut learner.graph.phase) {
        Phase::Off => return Ok(Some(batches)),
        Phase::Waits(Some(before)) if before == kind => learner.prepare(kind, &batches, lr, weight)?,
        Phase::Prepared(prepared, inputs) if prepared == kind => {
            let words = inputs.words(learner, &batches, lr);
            let recorded = learner.record(inputs, &batches, lr, weight)?;
            learner.graph.phase = Phase::Recorded(kind, recorded);
            learner.graph.waiting = (words, 1);
        }
        Phase::Recorded(of_graph, mut recorded) if of_graph == kind => {
            // Steps without the graph usually update in place too. But if another tensor shares the state's memory, they do not.
            if std::mem::take(&mut recorded.check) && learner.addresses()? != recorded.addresses {
                learner.graph.moved(kind);
                return Ok(Some(batches));
            }
            let words = recorded.inputs.words(learner, &batches, lr);
            learner.optimizer.count_step();
            learner.graph.phase = Phase::Recorded(of_graph, recorded);
            learner.graph.waiting.0.extend(words);
            learner.graph.waiting.1 += 1;
        }
        Phase::Recorded(of_graph, mut recorded) => {
            recorded.check = true;
            learner.graph.phase = Phase::Recorded(of_graph, recorded);
            learner.graph.launch()?;
            return Ok(Some(batches));
        }
        other => {
            learner.graph.phase = other;
            learner.graph.forget(&learner.replica.inner_device());
            learner.graph.phase = Phase::Waits(Some(kind));
            return Ok(Some(batches));
        }
    }
    let expected = batches.into_iter().map(|batch| (learner.replica.targets(&batch), batch.labels)).collect();
    learner.graph.queued.push_back(Queued { results: None, expected, outcome, lr, start });
    if learner.graph.waiting.1 >= learner.graph.steps_at_once() {
        learner.graph.launch()?;
    }
    let end = Instant::now();
    learner.replica.timeline.span(Track::Step, "launch", start, end, &[]);
    let queued = learner.graph.queued.back_mut().expect("the step was just queued");
    queued.outcome.seconds.forward += (end - start).as_secs_f64();
    Ok(None)
}

/// Waits for the oldest queued step, and returns its outcome. Returns `None` if no step is queued.
///
/// # Errors
/// The loss is not finite; then the step has not changed the weights. Or the GPU has failed.
pub(super) fn finish_step(learner: &mut Learner) -> Result<Option<StepOutcome>, Failure> {
    let start = Instant::now();
    learner.graph.read_oldest()?;
    let Some(Queued { results, expected, mut outcome, lr, .. }) = learner.graph.queued.pop_front() else {
        return Ok(None);
    };
    let results = results.expect("the oldest step's results are read");
    outcome.seconds.backward += start.elapsed().as_secs_f64();
    let mut left = &results[..];
    for (targets, labels) in &expected {
        let logits;
        (logits, left) = left.split_at(targets.len());
        learner.replica.count(logits, targets, labels, &mut outcome);
    }
    outcome.grad_norm = left.first().map(|norm| f64::from(*norm));
    outcome.check_finite(lr)?;
    Ok(Some(outcome))
}

impl StepGraph {
    /// Returns the number of steps that may be queued before the caller must wait for the oldest step. It allows two groups of
    /// steps, so the GPU runs one group while the CPU prepares the next one.
    pub fn most_queued(&self) -> usize {
        2 * self.steps_at_once() - 1
    }

    fn steps_at_once(&self) -> usize {
        match &self.phase {
            Phase::Recorded(_, recorded) => recorded.inputs.feed().1,
            _ => 1,
        }
    }

    /// Launches the collected steps.
    fn launch(&mut self) -> Result<(), Failure> {
        let (words, count) = std::mem::take(&mut self.waiting);
        if count == 0 {
            return Ok(());
        }
        let Phase::Recorded(_, recorded) = &self.phase else { unreachable!("steps wait for a graph") };
        let feed = &recorded.inputs.feed().0;
        feed.write(words);
        for _ in 0..count {
            let launched = recorded.graph.launch();
            launched.map_err(|error| Failure::run(format!("the step's graph cannot be launched: {error}"), HINT))?;
        }
        self.readings.push_back((feed.read(count), count));
        Ok(())
    }

    /// Waits for the results of the oldest queued step, and of the steps that were launched with it.
    fn read_oldest(&mut self) -> Result<(), Failure> {
        if self.queued.front().is_none_or(|queued| queued.results.is_some()) {
            return Ok(());
        }
        if self.readings.is_empty() {
            self.launch()?;
        }
        let (reading, count) = self.readings.pop_front().expect("queued steps are launched");
        let results = reading.wait().map_err(|error| Failure::run(format!("the GPU: {error}"), HINT))?;
        // The steps have run one after the other, so each step's time is the mean.
        let (end, first) = (Instant::now(), self.queued[0].start);
        let seconds = (end - self.read.map_or(first, |read| read.max(first))).as_secs_f64() / count as f64;
        self.read = Some(end);
        for (queued, results) in self.queued.iter_mut().zip(results.chunks_exact(results.len() / count)) {
            queued.results = Some(results.to_vec());
            queued.outcome.on_device = Some(seconds);
        }
        Ok(())
    }
}

const HINT: &str = "set train.graph = false, and please report this";

impl Learner {
    /// Runs a step kernel by kernel, on inputs in fixed memory, and makes the feed. The next step of this kind can then be
    /// recorded.
    fn prepare(&mut self, kind: Kind, batches: &[Batch], lr: f64, weight: f64) -> Result<(), Failure> {
        let device = self.replica.inner_device();
        graph::prepare(&device).map_err(|error| Failure::run(format!("no step can be recorded: {error}"), HINT))?;
        let on_device = batches.iter().map(|batch| DeviceBatch::new(&self.replica, batch)).collect();
        let mut inputs = Inputs::new(on_device, &device);
        let before = self.addresses()?;
        let (outputs, dropped) = self.run(&mut inputs, batches, lr, weight);
        // These values only set the size of the feed and are used in the trial run below. `run` has already used the step's
        // inputs.
        let words = inputs.words(self, batches, lr);
        let feed = inputs.make_feed(&outputs, words.len());
        // Run the feed's kernels once before they are recorded. The inputs may be overwritten, since the step has been queued.
        feed.write(words);
        feed.take_inputs();
        feed.keep_results(&outputs.tensors(), &inputs.rates.loss);
        self.graph.readings.push_back((feed.read(1), 1));
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
        Ok(())
    }

    /// Records a step. Its kernels do not run.
    fn record(
        &mut self,
        mut inputs: Box<Inputs>,
        batches: &[Batch],
        lr: f64,
        weight: f64,
    ) -> Result<Box<Recorded>, Failure> {
        let (device, before) = (self.replica.inner_device(), self.addresses()?);
        let feed = inputs.feed().0.clone();
        let recorded = graph::record(&device, || {
            feed.take_inputs();
            let (outputs, _) = self.run(&mut inputs, batches, lr, weight);
            feed.keep_results(&outputs.tensors(), &inputs.rates.loss);
        });
        let (graph, ()) =
            recorded.map_err(|error| Failure::run(format!("the step cannot be recorded: {error}"), HINT))?;
        let addresses = self.addresses()?;
        if addresses != before {
            return Err(Failure::run("the recorded step does not update the training state in place", HINT));
        }
        tracing::info!("the step is recorded as a CUDA graph");
        Ok(Box::new(Recorded { inputs, graph, addresses, check: false }))
    }

    /// Queues a step: forward and backward of each batch, then the optimizer. Also returns whether dropout was drawn on the CPU.
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

    /// Returns the addresses of the training state in the GPU's memory.
    fn addresses(&self) -> Result<Vec<[u64; 2]>, Failure> {
        let mut tensors = Vec::new();
        state::visit(self.replica.network(), |_, kind, value| {
            if kind != StateKind::Frozen {
                tensors.push(value);
            }
        });
        let average = self.ema.iter().flat_map(|ema| ema.tensors().iter());
        let all = tensors.iter().chain(self.optimizer.tensors()).chain(average);
        let found = all.map(graph::address).chain(graph::bf16_copy_addresses().into_iter().map(Some));
        found
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| Failure::run("a part of the training state is not on the GPU", HINT))
    }
}
