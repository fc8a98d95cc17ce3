//! Captures a step as a CUDA graph: the step's work on the device, for one process and for several.

use burn::tensor::Tensor;
use data::loader::Batch;
use models::{Context, StateKind, state};
use ops::graph::{self, Graph};

use super::graph::{GRAPH_HINT, GraphPhase, StepSignature, gpu_failure};
use super::graph_inputs::{StepInputs, StepOutputs};
use super::{Learner, Replica, StepOutcome, device_batch::DeviceBatch};
use crate::{
    failure::Failure,
    optim::{FlatGradients, clip_on_device},
};

/// A captured step.
#[derive(Debug)]
pub(super) struct CapturedStep {
    pub(super) inputs: Box<StepInputs>,
    pub(super) graph: Graph,
    /// Identifiers of the memory of the training state when the step was captured.
    pub(super) memory_ids: Vec<[u64; 2]>,
    /// Whether a step without the graph has run after the capture. Then the next step must compare the identifiers.
    pub(super) compare_memory_ids: bool,
}

/// A step to run: its batches on this rank, its learning rate, and the number by which its loss is divided.
#[derive(Clone, Copy)]
pub(super) struct StepRequest<'a> {
    pub(super) batches: &'a [Batch],
    pub(super) lr: f64,
    /// The sum of the samples' weights over all batches and ranks. Without class weights, the number of samples.
    pub(super) weight: f64,
}

/// The results of the forward passes of a step, on the device.
#[derive(Default)]
pub(super) struct ForwardResults {
    /// The logits of each batch, row-major `[B * classes]`.
    pub(super) logits: Vec<Tensor<1>>,
    /// The loss of all batches of this rank, `[1]`.
    pub(super) loss: Option<Tensor<1>>,
    /// Whether the network has used data of the host, such as dropout masks.
    pub(super) host_data: bool,
}

/// The results of a step's forward and backward passes, on the device.
pub(super) struct ForwardBackwardResults {
    /// The logits of each batch, row-major `[B * classes]`.
    pub(super) logits: Vec<Tensor<1>>,
    /// The loss of all batches of all ranks, `[1]`.
    pub(super) loss: Tensor<1>,
    /// The gradients, summed over all ranks.
    pub(super) gradients: FlatGradients,
    /// Whether the network has used data of the host, such as dropout masks.
    pub(super) host_data: bool,
}

/// The parts of a step that differ between one process and several ranks. All ranks call these methods together, in one order.
pub(super) trait GraphStepParts {
    /// Queues the forward and backward passes of a step.
    ///
    /// # Errors
    /// A rank is gone.
    fn forward_backward(
        &mut self,
        learner: &Learner,
        inputs: &StepInputs,
        step: StepRequest<'_>,
    ) -> Result<ForwardBackwardResults, Failure> {
        let StepRequest { batches, weight, .. } = step;
        let replica = &learner.replica;
        let mut forwards = ForwardResults::default();
        for (index, (on_device, batch)) in inputs.batches.iter().zip(batches).enumerate() {
            let last = index + 1 == batches.len();
            let cx = self.context(last);
            let cx = replica.autocast(cx).with_dropout(replica.dropout_keys(batch));
            let (loss, logits) = on_device.forward(replica, &cx, weight);
            forwards.host_data |= cx.uses_host_data();
            forwards.logits.push(flat(logits));
            let of_batch = loss.clone().inner();
            let sum = forwards.loss.take().map_or(of_batch.clone(), |sum| sum + of_batch);
            forwards.loss = Some(sum.clone());
            self.backward(replica, loss, last.then_some(sum))?;
        }
        self.finalize_backward(replica, forwards)
    }

    /// Returns the context of the next forward pass. `last`: whether it is the last one of the step.
    fn context(&mut self, last: bool) -> Context;

    /// Queues the backward pass of a batch's loss. `sum` is the loss of all batches of this rank, after the last one.
    ///
    /// # Errors
    /// A rank is gone.
    fn backward(&mut self, replica: &Replica, loss: Tensor<1>, sum: Option<Tensor<1>>) -> Result<(), Failure>;

    /// Adds the gradients of all batches and ranks.
    ///
    /// # Errors
    /// A rank is gone.
    fn finalize_backward(
        &mut self,
        replica: &Replica,
        forwards: ForwardResults,
    ) -> Result<ForwardBackwardResults, Failure>;

    /// Returns whether `own` is true on any rank.
    ///
    /// # Errors
    /// A rank is gone.
    fn any_rank(&self, own: bool) -> Result<bool, Failure>;

    /// Returns the smallest `own` of all ranks.
    ///
    /// # Errors
    /// A rank is gone.
    fn min_over_ranks(&self, own: usize) -> Result<usize, Failure>;

    /// Checks that no rank was missing in the work that the device has done.
    ///
    /// # Errors
    /// Names the rank that is missing or has ended.
    fn check(&self) -> Result<(), Failure>;

    /// Sums the counts of steps over ranks.
    ///
    /// # Errors
    /// A rank is gone.
    fn sum_outcomes(&mut self, outcomes: &mut [&mut StepOutcome]) -> Result<(), Failure>;
}

/// The parts of a step of a run with one process.
#[derive(Default)]
pub(super) struct SingleGraphStep {
    /// The sum of the gradients of the step's batches so far.
    gradients: FlatGradients,
}

impl GraphStepParts for SingleGraphStep {
    fn context(&mut self, _last: bool) -> Context {
        Context::train()
    }

    fn backward(&mut self, replica: &Replica, loss: Tensor<1>, _sum: Option<Tensor<1>>) -> Result<(), Failure> {
        self.gradients.accumulate(FlatGradients::from_backward(ops::backward(loss), replica.network()));
        Ok(())
    }

    fn finalize_backward(
        &mut self,
        _replica: &Replica,
        forwards: ForwardResults,
    ) -> Result<ForwardBackwardResults, Failure> {
        let ForwardResults { logits, loss, host_data } = forwards;
        let loss = loss.expect("a step has at least one batch");
        Ok(ForwardBackwardResults { logits, loss, gradients: std::mem::take(&mut self.gradients), host_data })
    }

    fn any_rank(&self, own: bool) -> Result<bool, Failure> {
        Ok(own)
    }

    fn min_over_ranks(&self, own: usize) -> Result<usize, Failure> {
        Ok(own)
    }

    fn check(&self) -> Result<(), Failure> {
        Ok(())
    }

    fn sum_outcomes(&mut self, _outcomes: &mut [&mut StepOutcome]) -> Result<(), Failure> {
        Ok(())
    }
}

/// Flattens logits `[B, classes]`.
fn flat(logits: Tensor<2>) -> Tensor<1> {
    let [images, classes] = logits.dims();
    logits.reshape([images * classes])
}

impl Learner {
    /// Runs a step kernel by kernel, on inputs in fixed memory, and makes the feed.
    pub(super) fn warm_up(
        &mut self,
        parts: &mut dyn GraphStepParts,
        signature: StepSignature,
        step: StepRequest<'_>,
    ) -> Result<(), Failure> {
        let device = self.replica.inner_device();
        graph::prepare(&device).map_err(|error| gpu_failure("no step can be captured", error))?;
        let on_device = step.batches.iter().map(|batch| DeviceBatch::new(&self.replica, batch)).collect();
        let mut inputs = StepInputs::new(on_device, &device);
        let before = self.memory_ids()?;
        let (outputs, host_data) = self.run(parts, &mut inputs, step)?;
        // Write the inputs of this step, although `run` has used them already: from here on the feed counts steps.
        let words = inputs.words(self, step.batches, step.lr);
        let steps = parts.min_over_ranks(StepInputs::max_feed_steps(words.len()))?;
        inputs.make_feed(&outputs, steps).write(words);
        self.keep_results(&inputs, &outputs);
        let moved = parts.any_rank(host_data || self.memory_ids()? != before)?;
        let graph = &mut self.graph;
        graph.phase = GraphPhase::WarmedUpOnce(signature.clone(), Box::new(inputs));
        if moved {
            graph.reset(&device);
            graph.restart_after_move(signature);
        }
        if host_data {
            graph.disable("the network uses data of the host, such as dropout masks");
        }
        Ok(())
    }

    /// Runs a step kernel by kernel, with the same calls as [`Self::capture`]. The feed took memory that the previous step had used
    /// for other tensors. So this step may allocate more memory. A capture may not allocate, so this step must run before it.
    pub(super) fn warm_up_again(
        &mut self,
        parts: &mut dyn GraphStepParts,
        signature: StepSignature,
        mut inputs: Box<StepInputs>,
        step: StepRequest<'_>,
    ) -> Result<(), Failure> {
        let before = self.memory_ids()?;
        let feed = inputs.feed().clone();
        feed.write(inputs.words(self, step.batches, step.lr));
        feed.take_inputs();
        let (outputs, _) = self.run(parts, &mut inputs, step)?;
        self.keep_results(&inputs, &outputs);
        let moved = parts.any_rank(self.memory_ids()? != before)?;
        self.graph.phase = GraphPhase::WarmedUpTwice(signature.clone(), inputs);
        if moved {
            self.graph.reset(&self.replica.inner_device());
            self.graph.restart_after_move(signature);
        }
        Ok(())
    }

    /// Queues the copies of a step's results, behind a step that was launched kernel by kernel.
    fn keep_results(&mut self, inputs: &StepInputs, outputs: &StepOutputs) {
        let feed = inputs.feed();
        feed.keep_results(&outputs.tensors(), &inputs.rates.loss);
        self.graph.pending_reads.push_back((feed.read(1), 1));
    }

    /// Captures a step. Its kernels do not run.
    pub(super) fn capture(
        &mut self,
        parts: &mut dyn GraphStepParts,
        mut inputs: Box<StepInputs>,
        step: StepRequest<'_>,
    ) -> Result<Box<CapturedStep>, Failure> {
        let (device, before) = (self.replica.inner_device(), self.memory_ids()?);
        let feed = inputs.feed().clone();
        let mut failed = None;
        let captured = graph::capture(&device, || {
            feed.take_inputs();
            match self.run(parts, &mut inputs, step) {
                Ok((outputs, _)) => feed.keep_results(&outputs.tensors(), &inputs.rates.loss),
                Err(failure) => failed = Some(failure),
            }
        });
        if let Some(failure) = failed {
            return Err(failure);
        }
        let (graph, ()) = captured.map_err(|error| gpu_failure("the step cannot be captured", error))?;
        let memory_ids = self.memory_ids()?;
        if memory_ids != before {
            return Err(Failure::run("the captured step does not update the training state in place", GRAPH_HINT));
        }
        tracing::info!("the step is captured as a CUDA graph");
        Ok(Box::new(CapturedStep { inputs, graph, memory_ids, compare_memory_ids: false }))
    }

    /// Queues a step: the passes, then the optimizer. Also returns whether the network has used data of the host
    /// (`Context::note_host_data`).
    fn run(
        &mut self,
        parts: &mut dyn GraphStepParts,
        inputs: &mut StepInputs,
        step: StepRequest<'_>,
    ) -> Result<(StepOutputs, bool), Failure> {
        let ForwardBackwardResults { logits, loss, mut gradients, host_data } =
            parts.forward_backward(self, inputs, step)?;
        let grad_norm = (self.grad_clip > 0.0).then(|| clip_on_device(&mut gradients, self.grad_clip)).flatten();
        inputs.rates.loss = loss;
        self.replica.change(|network| self.optimizer.step_with(network, gradients, step.lr, Some(&mut inputs.rates)));
        if let Some(ema) = &mut self.ema {
            ema.update(self.replica.network());
        }
        Ok((StepOutputs { logits, grad_norm }, host_data))
    }

    /// Returns identifiers of the memory that holds the training state on the GPU.
    pub(super) fn memory_ids(&self) -> Result<Vec<[u64; 2]>, Failure> {
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
            .ok_or_else(|| Failure::run("a part of the training state is not on the GPU", GRAPH_HINT))
    }
}
