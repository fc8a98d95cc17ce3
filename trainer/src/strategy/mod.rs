//! One optimizer step and one evaluation, on one or several devices.
//!
//! [`single`] trains on one device. [`dp`] trains on several devices of one process (`torch.nn.DataParallel`), [`ddp`] in
//! several processes (`DistributedDataParallel`). Files of the same name do the same work: `mod.rs` has the strategy,
//! `step.rs` the training step, `replicate.rs` copies state to the other replicas, `statistics.rs` has synchronised batch
//! norm. The code that all three strategies share is in this folder: [`Learner`] owns the network and its optimizer, [`Replica`]
//! runs the network.
//!
//! The engine uses the [`Strategy`] trait and does not know which strategy runs. Strategies neither count epochs nor write
//! files. They only return the progress of a loaded checkpoint ([`RunProgress`]), and use a batch's epoch as a seed of dropout.
//! Only [`ddp`] prints, on standard error: how GPUs sum gradients, warnings about unused parameters, and a note about autotuning.

pub mod ddp;
mod device_batch;
mod device_dataset;
pub mod dp;
mod eval_counts;
mod graph;
mod graph_capture;
mod graph_inputs;
mod learner;
mod multi_label;
mod replica;
pub mod single;
mod threads;
mod tuning;

pub use device_dataset::{DeviceDataset, DeviceDatasets};
pub use eval_counts::{EvalCounts, Logits, percent};
pub use graph::StepGraph;
pub use learner::{Learner, RESUME_MISMATCH_HINT};
pub use multi_label::Scores;
pub use replica::{ForwardOutput, Replica};
pub use tuning::{StepSettings, Trial, TuningReport};

use data::{DataError, loader::Batch};

use crate::{
    failure::Failure,
    signals::{StopFlag, StopReason},
    snapshot::{RunProgress, Snapshot},
    timeline::Timeline,
};

/// The batches of a loader. An item is an error if an image of the batch cannot be decoded.
pub type Batches<'a> = dyn Iterator<Item = Result<Batch, DataError>> + 'a;

/// The result of one optimizer step.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepOutcome {
    /// Sum of the samples' losses (label smoothing, mixing and class weights included).
    pub loss_sum: f64,
    /// Sum of the samples' weights, over all ranks. Without class weights this is the number of samples.
    pub weight: f64,
    /// Samples whose largest logit is that of their label. Multi-label: samples whose classes are all predicted correctly.
    pub correct: u64,
    /// Samples in the step, over all ranks.
    pub samples: u64,
    /// Norm of all gradients before clipping, if clipping is on.
    pub grad_norm: Option<f64>,
    /// The reason why this rank or another rank must stop. Every rank has the same value after the same step.
    pub stop: Option<StopReason>,
    /// The step's time by part.
    pub seconds: StepSeconds,
    /// Mean time of a step in seconds, if the step was launched together with other steps (CUDA graph).
    pub mean_graph_step_s: Option<f64>,
    /// Bytes that devices sent to other devices in the step (gradients, parameters, inputs, outputs), summed over devices.
    pub bytes_moved: u64,
}

impl StepOutcome {
    /// Starts a step over `batches`. `stop` is this rank's reason to stop.
    fn start(batches: &[Batch], stop: Option<StopReason>) -> Self {
        let weight = batches.iter().map(|batch| batch.global_weight).sum();
        Self { stop, weight, ..Self::default() }
    }

    /// Returns the weighted mean loss of the step's samples, or 0 if all samples have the weight 0.
    pub fn loss(&self) -> f64 {
        if self.weight > 0.0 { self.loss_sum / self.weight } else { 0.0 }
    }

    /// Checks the loss before the weights change. If several ranks share a step, `loss_sum` is already the sum over ranks, so all
    /// ranks refuse the same step.
    ///
    /// # Errors
    /// The loss is not finite.
    fn check_finite(&self, lr: f64) -> Result<(), Failure> {
        if self.loss_sum.is_finite() {
            return Ok(());
        }
        Err(divergence_failure(format!("the training loss is {} (learning rate {lr})", self.loss_sum)))
    }
}

/// Returns the failure of a run whose numbers are no longer finite.
pub fn divergence_failure(cause: String) -> Failure {
    let failure = Failure::run(
        cause,
        "training diverged: lower optimizer.lr, lengthen the warm-up, or set train.grad_clip; --resume continues from the newest \
         checkpoint, if there is one: delete it if it has diverged too",
    );
    // A restart would take the same steps.
    Failure { is_permanent: true, ..failure }
}

/// The parts of a step's time, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepSeconds {
    /// Host to device, forward, loss.
    pub forward: f64,
    /// Backward.
    pub backward: f64,
    /// Waiting for other ranks and reducing, outside of the other parts.
    pub communication: f64,
    /// Reducing while backward runs; on a GPU, only the time to enqueue the reductions. This time is included in `backward`.
    pub communication_hidden: f64,
    /// Clipping, optimizer, weight average.
    pub optimizer: f64,
}

/// The result of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub enum Evaluation {
    /// Every sample of every rank was counted.
    Done(EvalCounts),
    /// A signal asked this rank or another rank to stop. Every rank has the same value.
    Stopped(i32),
}

impl Evaluation {
    /// Returns `counts`, unless a signal has stopped the evaluation.
    fn of_one_process(counts: EvalCounts, stop: &StopFlag) -> Self {
        stop.signal().map_or(Self::Done(counts), Self::Stopped)
    }
}

/// Trains and evaluates one network. The default methods are for one process.
pub trait Strategy {
    /// Returns this process's network with its optimizer.
    fn learner(&self) -> &Learner;

    /// Returns this process's network with its optimizer, for changes.
    fn learner_mut(&mut self) -> &mut Learner;

    /// Returns this process's rank, which selects its share of the data.
    fn rank(&self) -> usize {
        0
    }

    /// Returns the world size: the number of ranks that share each batch.
    fn world_size(&self) -> usize {
        1
    }

    /// Returns the number of devices that share each batch: the number of ranks, or in mode `dp` of this process's devices.
    fn device_count(&self) -> usize {
        self.world_size()
    }

    /// Returns the memory of each device of this process in bytes. For a GPU, these are the bytes that the allocator has reserved
    /// ([`crate::device::reserved_bytes`]). For a CPU device of mode `dp`, these are the bytes of the tensors that the strategy
    /// counts. With one CPU device, the list is empty.
    fn device_bytes(&self) -> Vec<u64> {
        self.learner().replica.reserved_bytes().into_iter().collect()
    }

    /// Records this strategy's spans on `timeline` from now on.
    fn set_timeline(&mut self, timeline: &Timeline) {
        self.learner_mut().replica.timeline = timeline.clone();
    }

    /// Takes the run's data sets, which are in device memory. From now on the loader may leave out a batch's pixels.
    ///
    /// # Errors
    /// This strategy needs pixels from the loader.
    fn set_device_datasets(&mut self, datasets: DeviceDatasets) -> Result<(), Failure> {
        self.learner_mut().replica.datasets = Some(datasets);
        Ok(())
    }

    /// Returns every rank's `bytes` in rank order, on every rank (`torch.distributed.all_gather_object`). All ranks call this
    /// method together.
    ///
    /// # Errors
    /// A rank does not answer.
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        Ok(vec![bytes.to_vec()])
    }

    /// Takes one optimizer step with learning rate `lr` over `batches`, at least one. Gradients of several batches are
    /// accumulated, weighted by samples. `stop` is this rank's reason to stop. [`StepOutcome::stop`] is the reason of any rank.
    ///
    /// # Errors
    /// The loss is not finite: then the step does not change the weights. Or a rank does not answer.
    fn train_step(&mut self, batches: Vec<Batch>, lr: f64, stop: Option<StopReason>) -> Result<StepOutcome, Failure>;

    /// Takes a step as [`Strategy::train_step`] does, but may return before the device has finished. If the result is `None`, the
    /// device may still run the step, and [`Strategy::finish_step`] returns the outcome later. At most [`Strategy::max_queued`]
    /// steps may be queued before this call.
    ///
    /// # Errors
    /// As [`Strategy::train_step`].
    fn queue_step(
        &mut self,
        batches: Vec<Batch>,
        lr: f64,
        stop: Option<StopReason>,
    ) -> Result<Option<StepOutcome>, Failure> {
        self.train_step(batches, lr, stop).map(Some)
    }

    /// Returns the number of steps that may be queued before the caller must wait for the oldest step.
    fn max_queued(&self) -> usize {
        1
    }

    /// Waits for the oldest step that [`Strategy::queue_step`] has queued. Returns `None` if no step is queued.
    ///
    /// # Errors
    /// As [`Strategy::train_step`], of that step.
    fn finish_step(&mut self) -> Result<Option<StepOutcome>, Failure> {
        Ok(None)
    }

    /// Returns the result of autotuning, once, after the step that has ended the search. All ranks return it after the same step.
    fn take_tuning_report(&mut self) -> Option<TuningReport> {
        None
    }

    /// Returns the note that steps are not launched as a CUDA graph, and why. Returns each note once.
    fn take_note(&mut self) -> Option<String> {
        self.learner_mut().graph.take_note()
    }

    /// Evaluates all `batches`, or until `stop`. Uses the averaged weights if the weight average is on, otherwise the weights.
    ///
    /// # Errors
    /// A batch is an error, or a rank or a device does not answer.
    fn evaluate(&mut self, batches: &mut Batches<'_>, stop: &StopFlag) -> Result<Evaluation, Failure>;

    /// Copies the weights, the optimizer state and the weight average to the host (`state_dict`).
    fn snapshot(&self) -> Snapshot {
        self.learner().snapshot()
    }

    /// Loads rank 0's checkpoint on every rank, and returns the run's progress. Without a checkpoint, returns the start of a run.
    /// Ranks other than 0 pass `None`.
    ///
    /// # Errors
    /// The checkpoint does not fit the network or the optimizer. The error names the tensors that are missing, unexpected or of
    /// another shape.
    fn load_checkpoint(&mut self, checkpoint: Option<(Snapshot, RunProgress)>) -> Result<RunProgress, Failure> {
        let Some((snapshot, progress)) = checkpoint else { return Ok(RunProgress::start()) };
        self.learner_mut().restore(snapshot)?;
        Ok(progress)
    }
}
