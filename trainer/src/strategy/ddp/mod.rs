//! A process a device: each rank takes its share of every batch, gradients are summed across ranks in buckets.
//!
//! Every rank weights its loss by the samples of the whole step, so that the sum over ranks is the gradient of the mean
//! over all samples whatever the ranks' shares are. The sum is in a fixed order: all ranks hold the same bits, take the same
//! optimizer step and stay equal without exchanging parameters again.
//!
//! Batch norm (`parallel.batch_norm`): `local` normalises by the rank's own share and keeps the rank's own running
//! statistics; evaluation and checkpoints use rank 0's. `broadcast` copies rank 0's to all ranks before each evaluation
//! (PyTorch copies them before each forward pass; training does not read them, so the results are the same). `reduce`
//! averages them over the ranks there (timm's `--dist-bn reduce`). `sync` normalises by the whole batch, forward and
//! backward (`torch.nn.SyncBatchNorm`): statistics are the same bits on every rank.
//!
//! While backward runs, gradients land in buckets (`collector.rs`), and a thread reduces each full one (`reducer.rs`). On GPUs
//! they stay there: the thread enqueues a reduction behind the bucket's gradients and in front of the optimizer (`gpus.rs`).

pub mod arrays;
mod buckets;
mod collector;
#[cfg(feature = "cuda")]
mod gpus;
mod reducer;
mod replicate;
mod statistics;
mod step;
#[cfg(test)]
mod tests;
mod unused;
mod verify;

use std::sync::Arc;

use burn::tensor::Device;
use data::loader::Batch;
use models::Network;

pub use self::verify::same_job;
use self::{
    reducer::{Options, Reducer},
    statistics::SharedStatistics,
    unused::Unused,
};
use super::{Evaluation, Learner, ResidentSets, Snapshot, StepOutcome, Strategy, Tally};
use crate::{
    config::{BatchNormPolicy, RunPlan},
    engine::checkpoint::Progress,
    failure::Failure,
    report::Timeline,
    signals::Stop,
};
use comm::{Communicator, ReduceOp};
use launch::WorkerStatus;

const MIB: f64 = 1024.0 * 1024.0;

/// The strategy of one rank among several processes.
pub struct Ddp {
    learner: Learner,
    batch_norm: BatchNormPolicy,
    statistics: Option<Arc<SharedStatistics>>,
    /// Before `comm`: its thread has to end first.
    reducer: Reducer,
    unused: Unused,
    check_sync_every: u64,
    comm: Communicator,
    status: WorkerStatus,
    steps: u64,
}

impl Ddp {
    /// Takes a freshly built network and the connection to the other ranks; afterwards all ranks hold rank 0's parameters.
    ///
    /// # Errors
    /// A rank has another model (the first tensor to differ is named), or is gone.
    pub fn new(
        network: Network,
        device: Device,
        classes: usize,
        plan: &RunPlan,
        comm: Communicator,
        status: WorkerStatus,
    ) -> Result<Self, Failure> {
        verify::same_model(&network, &comm)?;
        let network = replicate::broadcast_state(network, &comm)?;
        let learner = Learner::new(network, device, classes, plan);
        let bytes = |mib: f64| (mib * MIB) as usize;
        let parallel = &plan.parallel;
        let options = Options {
            first: bytes(parallel.first_bucket_mb),
            limit: bytes(parallel.bucket_mb),
            overlap: parallel.overlap,
            compression: parallel.compression,
        };
        let parameters = &learner.replica.parameters;
        #[cfg(feature = "cuda")]
        let on_device = gpus::meet(&learner.replica.inner_device(), parameters, plan, &comm)?;
        #[cfg(not(feature = "cuda"))]
        let on_device = None;
        let reducer = Reducer::new(parameters, &comm, &status, options, on_device)?;
        let statistics = match parallel.batch_norm {
            BatchNormPolicy::Sync => Some(Arc::new(SharedStatistics::new(comm.duplicate()?))),
            _ => None,
        };
        Ok(Self {
            learner,
            batch_norm: parallel.batch_norm,
            statistics,
            reducer,
            unused: Unused::default(),
            check_sync_every: parallel.check_sync_every as u64,
            comm,
            status,
            steps: 0,
        })
    }

    fn check_statistics(&self) -> Result<(), Failure> {
        self.statistics.as_ref().map_or(Ok(()), |statistics| Ok(statistics.check()?))
    }

    /// Every `parallel.check_sync_every` steps: makes sure that all ranks hold the same bits.
    fn check_sync(&self) -> Result<(), Failure> {
        if self.check_sync_every == 0 || !self.steps.is_multiple_of(self.check_sync_every) {
            return Ok(());
        }
        self.status.set_status(format_args!("comparing parameters after {} steps", self.steps));
        verify::in_sync(&self.learner.snapshot(), self.batch_norm == BatchNormPolicy::Sync, &self.comm)
    }
}

impl Strategy for Ddp {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn world(&self) -> usize {
        self.comm.world()
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

    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        let gathered = self.comm.all_gather_v(bytes)?;
        let mut rest = gathered.data.as_slice();
        let part = |count: usize| rest.split_off(..count).unwrap_or_default().to_vec();
        Ok(gathered.counts.into_iter().map(part).collect())
    }

    fn train_step(&mut self, batches: Vec<Batch>, lr: f64, stop: Option<i32>) -> Result<StepOutcome, Failure> {
        step::train_step(self, batches, lr, stop)
    }

    fn evaluate(&mut self, batches: &mut dyn Iterator<Item = Batch>, stop: &Stop) -> Result<Evaluation, Failure> {
        self.status.set_status(format_args!("evaluating after {} steps", self.steps));
        let Self { learner, comm, .. } = self;
        let comm = &*comm;
        if matches!(self.batch_norm, BatchNormPolicy::Broadcast | BatchNormPolicy::Reduce) {
            learner.replica.try_change(|network| replicate::share_buffers(network, self.batch_norm, comm))?;
        }
        // whatever a rank's own statistics are, one network is evaluated: rank 0's
        let network = replicate::share_buffers(learner.evaluated_network(), BatchNormPolicy::Broadcast, comm)?;
        let tally = learner.replica.evaluate(&network, batches, stop);
        self.reduce_tally(tally, stop)
    }

    fn snapshot(&self) -> Snapshot {
        self.learner.snapshot()
    }

    fn start_from(&mut self, checkpoint: Option<(Snapshot, Progress)>) -> Result<Progress, Failure> {
        self.status.set_status(format_args!("sharing the checkpoint"));
        let Some((snapshot, progress)) = replicate::share_checkpoint(checkpoint, &self.comm)? else {
            return Ok(Progress::start());
        };
        self.learner.restore(snapshot)?;
        self.steps = progress.step;
        verify::in_sync(&self.learner.snapshot(), false, &self.comm)?;
        Ok(progress)
    }
}

impl Ddp {
    /// Adds up all ranks' counts; a stop that any rank has seen is every rank's.
    fn reduce_tally(&self, mut tally: Tally, stop: &Stop) -> Result<Evaluation, Failure> {
        let mut signal = [i64::from(stop.signal().unwrap_or(0))];
        self.comm.all_reduce(&mut signal, ReduceOp::Max)?;
        let mut counts: Vec<i64> = [tally.samples, tally.top1, tally.top5].map(|count| count as i64).to_vec();
        counts.extend(tally.confusion.iter().map(|&count| count as i64));
        self.comm.all_reduce(&mut counts, ReduceOp::Sum)?;
        let mut loss = [tally.loss_sum];
        self.comm.all_reduce(&mut loss, ReduceOp::Sum)?;
        if signal[0] != 0 {
            return Ok(Evaluation::Stopped(signal[0] as i32));
        }
        let count = |index: usize| counts[index] as u64;
        (tally.samples, tally.top1, tally.top5, tally.loss_sum) = (count(0), count(1), count(2), loss[0]);
        tally.confusion = counts[3..].iter().map(|&count| count as u64).collect();
        Ok(Evaluation::Done(tally))
    }
}
