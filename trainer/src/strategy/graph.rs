//! The step of one GPU, captured as a CUDA graph: one launch for the whole step (`torch.cuda.graph`).
//!
//! Steps with equal batch sizes have the same signature ([`StepSignature`]). The consecutive steps of one signature:
//!
//! ```text
//! 1st              launched kernel by kernel: compiles kernels, makes the optimizer's state
//! 2nd (warm-up)    launched kernel by kernel, on inputs in fixed memory: allocates the inputs, and memory for the step
//! 3rd (warm-up)    launched kernel by kernel, exactly as captured: allocates the rest of the memory
//! 4th              captured, which may not allocate, then launched as a graph
//! 5th and later    collected, then launched as graphs, several at once
//! other signature  launched kernel by kernel: an epoch's last batch, if it is smaller
//! ```
//!
//! In bf16 the 2nd step also makes the optimizer's bf16 copies of the weights, in new memory. So the training state has moved, the
//! warm-up begins again with the 3rd step, and the 5th step is captured.
//!
//! A graph runs the same kernels on the same memory with the same arguments. So the graph's first kernel copies inputs and
//! learning rates to fixed tensors. Weights, statistics, optimizer state and weight average are updated in place, and the code
//! checks this. The kernels of the step and their arguments are the same as without a graph, so the bits are the same.
//!
//! The CPU writes the inputs of several steps at once, and reads their results at once ([`ops::graph::Feed`]). So most steps
//! are one launch without a copy. The CPU does not wait for these steps: it first prepares and launches the next steps, so the
//! GPU always has work. Therefore the CPU learns late that a loss is not finite. In this case the optimizer's kernels
//! themselves do not change weights and state, neither in this step nor in the steps after it.
//!
//! With several processes, each rank captures its own step, with the sums of gradients in it. All ranks capture and launch the same
//! steps: the ranks take each decision that depends on a rank's memory together ([`GraphStepParts`]).

use std::collections::VecDeque;
use std::fmt::Display;
use std::time::Instant;

use burn::tensor::Device;
use data::loader::Batch;
use ops::graph::{self, PendingRead};

use super::graph_capture::{CapturedStep, GraphStepParts, StepRequest};
use super::graph_inputs::StepInputs;
use super::{Learner, StepOutcome};
use crate::{
    config::{ClassWeights, OptimizerConfig, OptimizerKind, RunPlan},
    device::launches_block,
    failure::Failure,
};

/// The sizes of one batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BatchSignature {
    /// Images on this rank.
    pub(super) images: usize,
    /// Images on all ranks.
    pub(super) global_images: usize,
    /// Bits of the sum of the samples' weights on all ranks.
    pub(super) global_weight: u64,
    /// Height and width of the images.
    pub(super) image_size: [usize; 2],
}

impl BatchSignature {
    fn of(batch: &Batch) -> Self {
        Self {
            images: batch.len(),
            global_images: batch.global_len,
            global_weight: batch.global_weight.to_bits(),
            image_size: [batch.shape.height, batch.shape.width],
        }
    }
}

/// One entry per batch. A graph can run steps with equal signatures only. If two steps have equal signatures on one rank, they have
/// equal signatures on every rank.
pub(super) type StepSignature = Vec<BatchSignature>;

/// Returns true if the images of two steps have the same size. The size changes between epochs only, when no step is queued.
fn same_image_size(one: &StepSignature, other: &StepSignature) -> bool {
    one.first().map(|batch| batch.image_size) == other.first().map(|batch| batch.image_size)
}

/// Steps whose inputs wait for the next launch.
#[derive(Debug, Default)]
struct UnlaunchedSteps {
    /// The bits of the steps' inputs.
    words: Vec<u32>,
    steps: usize,
}

/// The graph of a learner's step.
#[derive(Debug, Default)]
pub struct StepGraph {
    pub(super) phase: GraphPhase,
    /// How often a step has moved the training state to other memory.
    moves: usize,
    /// Steps whose outcome is not known yet, the oldest first.
    queued: VecDeque<QueuedGraphStep>,
    /// The pending results of launched steps, each with the number of these steps.
    pub(super) pending_reads: VecDeque<(PendingRead, usize)>,
    unlaunched: UnlaunchedSteps,
    /// When results were last read.
    last_read: Option<Instant>,
    /// The note why steps are not captured, until the note is taken.
    note: Option<String>,
}

#[derive(Debug, Default)]
pub(super) enum GraphPhase {
    /// Steps are not captured.
    #[default]
    Off,
    /// Waits for two consecutive steps of one signature. Holds the signature of the last step.
    Waiting(Option<StepSignature>),
    /// One step of this signature has run on these inputs. The next step of this signature is the second warm-up step.
    WarmedUpOnce(StepSignature, Box<StepInputs>),
    /// Two steps of this signature have run on these inputs. The next step of this signature will be captured.
    WarmedUpTwice(StepSignature, Box<StepInputs>),
    /// Steps of this signature are launched as a graph.
    Captured(StepSignature, Box<CapturedStep>),
}

/// A step whose outcome is not known.
#[derive(Debug)]
struct QueuedGraphStep {
    /// Whether the results are read and counted.
    counted: bool,
    /// The targets, row-major `[B, classes]`, and the labels `[B]` of each batch.
    expected: Vec<(Vec<f32>, Vec<i32>)>,
    outcome: StepOutcome,
    lr: f64,
    start: Instant,
}

/// If the state has moved to other memory this many times, no further step is captured.
const MAX_MOVES: usize = 5;

impl StepGraph {
    /// Prepares to capture steps on `device`, if the device is a GPU that supports graphs and the plan allows graphs.
    pub fn new(plan: &RunPlan, device: &Device) -> Self {
        // With CUDA_LAUNCH_BLOCKING each launch waits for its kernel: an error then names its kernel, which a graph would hide.
        if plan.train.graph == Some(false) || launches_block() || !graph::can_capture(device) {
            return Self::default();
        }
        let OptimizerConfig { kind, momentum, .. } = plan.optimizer;
        let reason = if plan.is_multi_label() {
            Some("the loss of multi-label images copies targets from the host")
        } else if plan.train.class_weights != ClassWeights::None {
            Some("with train.class_weights the divisor of the loss changes in each step")
        } else if kind == OptimizerKind::Sgd && momentum == 0.0 {
            Some("SGD without momentum allocates new weights in each step")
        } else if kind == OptimizerKind::Muon {
            Some("Muon allocates new momentum tensors in each step")
        } else {
            None
        };
        Self { phase: GraphPhase::Waiting(None), ..Self::default() }.disable_if(reason)
    }

    /// If there is a `reason`, captures no steps. The note names the reason.
    pub fn disable_if(mut self, reason: Option<&str>) -> Self {
        if let Some(reason) = reason
            && !matches!(self.phase, GraphPhase::Off)
        {
            self.disable(reason);
        }
        self
    }

    /// Returns whether the outcomes of all steps are known.
    pub fn is_idle(&self) -> bool {
        self.queued.is_empty()
    }

    /// Starts again, since the state has moved to other memory.
    pub(super) fn restart_after_move(&mut self, signature: StepSignature) {
        self.phase = GraphPhase::Waiting(Some(signature));
        self.moves += 1;
        if self.moves >= MAX_MOVES {
            self.disable("the training state is in other memory after each step; please report this");
        }
    }

    /// Captures no steps from now on, and notes the reason.
    pub(super) fn disable(&mut self, reason: &str) {
        self.phase = GraphPhase::Off;
        self.note = Some(format!("note: the step is launched kernel by kernel, not as a CUDA graph: {reason}"));
    }

    /// Returns why steps are not captured, once.
    pub fn take_note(&mut self) -> Option<String> {
        self.note.take()
    }

    /// Restarts a warm-up that has begun. Call this before an evaluation on `device`. A capture may use only memory that the
    /// warm-up has allocated. An evaluation, whose batch may be larger, makes cubecl free this memory.
    pub fn restart_warm_up(&mut self, device: &Device) {
        if let GraphPhase::WarmedUpOnce(..) | GraphPhase::WarmedUpTwice(..) = self.phase {
            self.reset(device);
        }
    }

    /// Drops the graph, or ends its warm-up, on `device`. The warm-up for a new graph begins with the next steps.
    pub fn reset(&mut self, device: &Device) {
        if let GraphPhase::WarmedUpOnce(..) | GraphPhase::WarmedUpTwice(..) = self.phase {
            graph::cancel(device);
        }
        if !matches!(self.phase, GraphPhase::Off) {
            self.phase = GraphPhase::Waiting(None);
        }
    }
}

/// Queues a step: as a warm-up, as the capture, or as a launch of the graph. If the step is queued, returns `None`, and
/// [`finish_step`] returns the step's outcome later. Otherwise returns the batches, and the caller must run the step kernel by
/// kernel.
///
/// # Errors
/// The step cannot be captured or launched.
pub(super) fn queue_step(
    learner: &mut Learner,
    parts: &mut dyn GraphStepParts,
    batches: Vec<Batch>,
    lr: f64,
    outcome: StepOutcome,
) -> Result<Option<Vec<Batch>>, Failure> {
    let signature = batches.iter().map(BatchSignature::of).collect();
    // A timeline shows the launches of a step, which a graph hides.
    if learner.replica.timeline.is_on() {
        return learner.drain_before_eager_step(parts, batches, lr, outcome);
    }
    let start = Instant::now();
    let step = StepRequest { batches: &batches, lr, weight: outcome.weight };
    match std::mem::take(&mut learner.graph.phase) {
        GraphPhase::Off => return learner.drain_before_eager_step(parts, batches, lr, outcome),
        GraphPhase::Waiting(Some(before)) if before == signature => {
            learner.warm_up(parts, signature, step)?;
        }
        GraphPhase::WarmedUpOnce(prepared, inputs) if prepared == signature => {
            learner.warm_up_again(parts, signature, inputs, step)?;
        }
        GraphPhase::WarmedUpTwice(warmed_up, inputs) if warmed_up == signature => {
            let words = inputs.words(learner, &batches, lr);
            let captured = learner.capture(parts, inputs, step)?;
            learner.graph.phase = GraphPhase::Captured(signature, captured);
            learner.graph.unlaunched = UnlaunchedSteps { words, steps: 1 };
        }
        GraphPhase::Captured(of_graph, mut captured) if of_graph == signature => {
            // A step without the graph has run. If another tensor shared the state's memory, that step has moved the state.
            if std::mem::take(&mut captured.compare_memory_ids)
                && parts.any_rank(learner.memory_ids()? != captured.memory_ids)?
            {
                learner.graph.restart_after_move(signature);
                return Ok(Some(batches));
            }
            let words = captured.inputs.words(learner, &batches, lr);
            learner.optimizer.count_step();
            learner.graph.phase = GraphPhase::Captured(of_graph, captured);
            learner.graph.unlaunched.words.extend(words);
            learner.graph.unlaunched.steps += 1;
        }
        GraphPhase::Captured(of_graph, mut captured) if same_image_size(&of_graph, &signature) => {
            captured.compare_memory_ids = true;
            learner.graph.phase = GraphPhase::Captured(of_graph, captured);
            return learner.drain_before_eager_step(parts, batches, lr, outcome);
        }
        other => {
            learner.graph.phase = other;
            learner.graph.reset(&learner.replica.inner_device());
            learner.graph.phase = GraphPhase::Waiting(Some(signature));
            return learner.drain_before_eager_step(parts, batches, lr, outcome);
        }
    }
    let expected = batches.into_iter().map(|batch| (learner.replica.targets(&batch), batch.labels)).collect();
    learner.graph.queued.push_back(QueuedGraphStep { counted: false, expected, outcome, lr, start });
    if learner.graph.unlaunched.steps >= learner.graph.steps_at_once() {
        learner.graph.launch()?;
    }
    let queued = learner.graph.queued.back_mut().expect("the step was just queued");
    queued.outcome.seconds.forward += start.elapsed().as_secs_f64();
    Ok(None)
}

/// Waits for the oldest queued step, and returns its outcome. Returns `None` if no step is queued.
///
/// # Errors
/// The loss is not finite: then the step has not changed the weights. Or the GPU has failed.
pub(super) fn finish_step(
    learner: &mut Learner,
    parts: &mut dyn GraphStepParts,
) -> Result<Option<StepOutcome>, Failure> {
    let start = Instant::now();
    if learner.graph.queued.front().is_some_and(|queued| !queued.counted) {
        learner.read_oldest(parts)?;
    }
    let Some(QueuedGraphStep { mut outcome, lr, .. }) = learner.graph.queued.pop_front() else { return Ok(None) };
    outcome.seconds.backward += start.elapsed().as_secs_f64();
    outcome.check_finite(lr)?;
    Ok(Some(outcome))
}

impl Learner {
    /// Waits for all queued steps before a step that is launched kernel by kernel, and returns the batches of this step. If the
    /// loss of a queued step is not finite, queues this step without running it, and returns `None`: this step must not change the
    /// weights, and the error must name the earlier step. All ranks decide the same, because losses are summed over ranks.
    fn drain_before_eager_step(
        &mut self,
        parts: &mut dyn GraphStepParts,
        batches: Vec<Batch>,
        lr: f64,
        mut outcome: StepOutcome,
    ) -> Result<Option<Vec<Batch>>, Failure> {
        self.graph.launch()?;
        while self.graph.queued.iter().any(|queued| !queued.counted) {
            self.read_oldest(parts)?;
        }
        if self.graph.queued.iter().all(|queued| queued.outcome.loss_sum.is_finite()) {
            return Ok(Some(batches));
        }
        outcome.loss_sum = f64::NAN;
        let start = Instant::now();
        self.graph.queued.push_back(QueuedGraphStep { counted: true, expected: Vec::new(), outcome, lr, start });
        Ok(None)
    }

    /// Waits for the results of the oldest queued step, and of the steps that were launched with it. Adds loss and counts to the
    /// outcomes of these steps, summed over all ranks.
    fn read_oldest(&mut self, parts: &mut dyn GraphStepParts) -> Result<(), Failure> {
        let graph = &mut self.graph;
        if graph.pending_reads.is_empty() {
            graph.launch()?;
        }
        let (reading, count) = graph.pending_reads.pop_front().expect("queued steps are launched");
        let results = reading.wait();
        // If a rank is missing, the results are wrong, and the GPU's error may be a consequence.
        parts.check()?;
        let results = results.map_err(|error| gpu_failure("a step on the GPU failed", error))?;
        // The steps have run one after the other, so each step's time is the mean.
        let mut group: Vec<_> = graph.queued.iter_mut().filter(|queued| !queued.counted).take(count).collect();
        let (end, first) = (Instant::now(), group[0].start);
        let seconds = (end - graph.last_read.map_or(first, |read| read.max(first))).as_secs_f64() / count as f64;
        graph.last_read = Some(end);
        for (queued, results) in group.iter_mut().zip(results.chunks_exact(results.len() / count)) {
            let QueuedGraphStep { counted, expected, outcome, .. } = &mut **queued;
            let mut left = results;
            for (targets, labels) in expected {
                let logits;
                (logits, left) = left.split_at(targets.len());
                self.replica.count(logits, targets, labels, outcome);
            }
            outcome.grad_norm = left.first().map(|norm| f64::from(*norm));
            outcome.mean_graph_step_s = Some(seconds);
            *counted = true;
        }
        let mut outcomes: Vec<_> = group.into_iter().map(|queued| &mut queued.outcome).collect();
        parts.sum_outcomes(&mut outcomes)
    }
}

impl StepGraph {
    /// Returns the number of steps that may be queued before the caller must wait for the oldest step. It allows two groups of
    /// steps, so the GPU runs one group while the CPU prepares the next one.
    pub fn max_queued(&self) -> usize {
        2 * self.steps_at_once() - 1
    }

    fn steps_at_once(&self) -> usize {
        match &self.phase {
            GraphPhase::Captured(_, captured) => captured.inputs.feed_steps(),
            _ => 1,
        }
    }

    /// Launches the collected steps.
    fn launch(&mut self) -> Result<(), Failure> {
        let UnlaunchedSteps { words, steps: count } = std::mem::take(&mut self.unlaunched);
        if count == 0 {
            return Ok(());
        }
        let GraphPhase::Captured(_, captured) = &self.phase else { unreachable!("steps wait for a graph") };
        let feed = captured.inputs.feed();
        feed.write(words);
        for _ in 0..count {
            let launched = captured.graph.launch();
            launched.map_err(|error| gpu_failure("the step's graph cannot be launched", error))?;
        }
        self.pending_reads.push_back((feed.read(count), count));
        Ok(())
    }
}

pub(super) const GRAPH_HINT: &str = "set train.graph = false, and please report this";

/// Returns the failure for an error of the GPU in a step of a graph. If the memory is full or a kernel has failed, the hint does
/// not blame the graph.
pub(super) fn gpu_failure(what: &str, error: impl Display) -> Failure {
    let text = error.to_string();
    Failure::of_panic(&text).unwrap_or_else(|| Failure::run(format!("{what}: {text}"), GRAPH_HINT))
}
