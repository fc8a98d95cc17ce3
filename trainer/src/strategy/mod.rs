//! One optimizer step, and one evaluation, on however many devices.
//!
//! `single`, `dp` and `ddp` have the same files: their difference is a diff. The engine sees this trait only
//! and does not know which strategy runs.

pub mod ddp;
pub mod dp;
mod learner;
mod replica;
mod resident;
pub mod single;
mod tally;

pub use learner::Learner;
pub use replica::{Ahead, Replica};
pub use resident::{Resident, ResidentSets};
pub use tally::{Tally, percent};

use data::loader::Batch;

use crate::failure::Failure;
use crate::signals::Stop;
use crate::snapshot::{RunProgress, Snapshot};
use crate::timeline::Timeline;

/// What one optimizer step gave.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepOutcome {
    /// Sum of the samples' losses (label smoothing and mixing included).
    pub loss_sum: f64,
    /// Samples whose largest logit is at their own label.
    pub correct: u64,
    /// Samples in the step, over all ranks.
    pub samples: u64,
    /// Norm of all gradients before clipping, where clipping is on.
    pub grad_norm: Option<f64>,
    /// The signal that asks this rank or another one to stop: every rank sees the same answer after the same step.
    pub stop: Option<i32>,
    /// Where the step's time went.
    pub seconds: StepSeconds,
    /// Bytes that devices gave to other devices in the step (gradients, parameters, inputs, outputs), all devices together.
    pub bytes_moved: u64,
}

impl StepOutcome {
    /// Mean loss of the step's samples.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.samples as f64
    }
}

/// Where a step's time went, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepSeconds {
    /// Host to device, forward, loss.
    pub forward: f64,
    /// Backward.
    pub backward: f64,
    /// Waiting for other ranks and reducing: what the other parts do not cover.
    pub communication: f64,
    /// Reducing while backward runs; part of `backward`'s time.
    pub communication_hidden: f64,
    /// Clipping, optimizer, weight average.
    pub optimizer: f64,
}

/// How an evaluation ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Evaluation {
    /// Every sample of every rank was counted.
    Done(Tally),
    /// A signal asked this rank or another one to stop: the same answer on every rank.
    Stopped(i32),
}

/// How a step is taken.
pub trait Strategy {
    /// This process's place among the ranks: selects its shard of the data.
    fn rank(&self) -> usize;
    /// Number of ranks that share each batch.
    fn world(&self) -> usize;
    /// Number of devices that share each batch: the ranks, or the devices of this one process.
    fn devices(&self) -> usize {
        self.world()
    }

    /// Bytes that each device of this process is known to have held at once: GPUs tell ([`crate::device::held_bytes`]), and
    /// where several devices are the CPU, what they must have had is counted.
    fn device_bytes(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Records its spans there from now on.
    fn record(&mut self, timeline: &Timeline);

    /// Batches come without pixels from now on: they are made of these data sets, which are on the device.
    fn keep_resident(&mut self, sets: ResidentSets);

    /// Every rank's `bytes`, on every rank, in rank order; all ranks call it at the same time.
    ///
    /// # Errors
    /// A rank that does not answer.
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        Ok(vec![bytes.to_vec()])
    }

    /// One optimizer step over `batches` (more than one: gradients are accumulated, weighted by samples). `stop` is the
    /// signal that this rank has seen; the outcome tells what all ranks agree on.
    ///
    /// # Errors
    /// A loss that is not finite: the weights are left as they were before the step.
    fn train_step(&mut self, batches: Vec<Batch>, lr: f64, stop: Option<i32>) -> Result<StepOutcome, Failure>;

    /// Evaluates every batch with the averaged weights where there are any, else the present ones, unless `stop` says no.
    ///
    /// # Errors
    /// A rank that does not answer.
    fn evaluate(&mut self, batches: &mut dyn Iterator<Item = Batch>, stop: &Stop) -> Result<Evaluation, Failure>;

    /// State for a checkpoint.
    fn snapshot(&self) -> Snapshot;

    /// Takes rank 0's checkpoint, if there is one, on every rank; gives where the run stands. Other ranks pass `None`.
    ///
    /// # Errors
    /// Names the tensors that are missing, unexpected or misshapen.
    fn start_from(&mut self, checkpoint: Option<(Snapshot, RunProgress)>) -> Result<RunProgress, Failure>;
}

/// A step whose loss is not finite.
fn diverged(loss_sum: f64, lr: f64) -> Failure {
    Failure::run(
        format!("the training loss is {loss_sum} (learning rate {lr})"),
        "training diverged: lower optimizer.lr, lengthen the warm-up, or set train.grad_clip; the checkpoints written \
         before are untouched",
    )
}
