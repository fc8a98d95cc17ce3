//! `torch.nn.parallel.DistributedDataParallel`: one process per device. Each rank takes its share of every batch, and
//! gradients are summed across ranks in buckets while backward runs.
//!
//! Every rank divides its loss by the number of samples of the whole step (or by the sum of their weights). So the sum of the
//! ranks' gradients is the gradient of the mean over all samples, even if ranks have different numbers of samples. The order of
//! summation is fixed. So all ranks have the same bits, take the same optimizer step, and stay equal without exchanging
//! parameters again.
//!
//! `buckets.rs` and `reducer.rs` are PyTorch's `c10d::Reducer` (`torch/csrc/distributed/c10d/reducer.cpp`), with its names.
//! The differences:
//!
//! - **Buckets are assigned once, before the first reduction.** PyTorch starts with reverse registration order and rebuilds
//!   the buckets after the first step. Here the first step's gradients wait until backward is over. Then the order in which
//!   gradients became ready on rank 0 decides the buckets of the whole run. The reason: in a ring, the order of summation of an
//!   element depends on its position in the bucket, and a resumed run must add up in the same order as an uninterrupted run.
//!   (`parallel.overlap = false` keeps reverse registration order and launches the buckets after backward.)
//! - **Hooks take the gradients out of autograd.** A hook on each use of a parameter (`models/src/hook.rs`) moves the gradient
//!   into its bucket; there is no `parameter.grad`, and `Reducer::finalize_backward` returns views of the reduced
//!   buckets (`gradient_as_bucket_view=True`).
//! - **Unused parameters need no search of the graph.** If this rank did not use a parameter, the parameter's bucket gets zeros
//!   after backward. A parameter that no rank used has no gradient in the optimizer, and a warning names it
//!   (`find_unused_parameters=True`).
//! - **A thread reduces the buckets**, one after the other, where PyTorch has asynchronous `Work`. On GPUs gradients stay on the
//!   device. Inside one machine the backward pass itself starts each reduction on a second stream, and the step is captured as a
//!   CUDA graph (`graph.rs`). With NCCL, and with ranks that share a GPU, the thread enqueues each reduction after the bucket's
//!   gradients and before the optimizer (`gpus.rs`). With synchronised batch norm, buckets and statistics use the same stream of
//!   each GPU, in the same order on all ranks. Two streams could deadlock: both have launches that wait for other ranks, and the
//!   driver may run the two in a different order on each rank.
//! - **Sums, not means**: the weights of the samples are in the loss.
//!
//! Batch norm (`parallel.batch_norm`):
//!
//! - `local` normalises by the rank's own share and keeps the rank's own running statistics. Evaluation and checkpoints use rank
//!   0's running statistics.
//! - `broadcast` copies rank 0's running statistics to all ranks before each evaluation. (PyTorch copies them before each forward
//!   pass. Training does not read running statistics, so the results are the same.)
//! - `reduce` averages the running statistics over the ranks before each evaluation (timm's `--dist-bn reduce`).
//! - `sync` normalises by the whole batch, forward and backward (`torch.nn.SyncBatchNorm`). The statistics have the same bits on
//!   every rank.

mod autotune;
mod bucket_arrays;
mod buckets;
#[cfg(feature = "cuda")]
mod gpus;
mod graph;
mod reducer;
mod replicate;
mod statistics;
mod step;
#[cfg(test)]
mod tests;
mod verify;

use std::{sync::Arc, time::Instant};

use burn::tensor::Device;
use data::loader::Batch;
use models::{Network, state};
use rayon::{ThreadPool, ThreadPoolBuilder};

pub use self::verify::{check_same_job, succeed_together};
use self::{
    autotune::{Autotuner, SearchDecision},
    reducer::{DeviceReduction, Reducer, ReducerOptions},
    statistics::StatisticsGroup,
    verify::{RunningStatistics, UnusedParameterWarning},
};
use super::{Batches, EvalCounts, Evaluation, Learner, Scores, StepOutcome, StepSettings, Strategy, TuningReport};
use crate::{
    config::{BatchNormPolicy, Devices, RunPlan, Tta, Tunable},
    console,
    failure::Failure,
    signals::{StopFlag, StopReason},
    snapshot::{RunProgress, Snapshot},
};
use comm::{Communicator, ReduceOp};
use launch::WorkerStatus;

const MIB: f64 = 1024.0 * 1024.0;

/// The strategy of one rank among several processes.
pub struct Ddp {
    learner: Learner,
    batch_norm: BatchNormPolicy,
    tta: Tta,
    statistics: Option<Arc<StatisticsGroup>>,
    /// Declared before `comm`, so that the reducer's thread ends first.
    reducer: Reducer,
    options: ReducerOptions,
    /// Set if gradients are reduced on their device.
    reduction: Option<DeviceReduction>,
    /// Whether the run is on GPUs. Then no thread pool is used: each thread has its own stream, so one thread must queue all work.
    on_gpu: bool,
    /// The threads of `parallel.threads`, on the CPU.
    threads: Option<ThreadPool>,
    /// Set during autotuning.
    tuner: Option<Autotuner>,
    /// The result, until the engine takes it.
    tuning_report: Option<TuningReport>,
    unused: UnusedParameterWarning,
    check_sync_every: u64,
    comm: Communicator,
    status: WorkerStatus,
    steps: u64,
}

impl Ddp {
    /// Takes a new network on `device` (an autodiff device) with `classes` outputs, and the connection to the other ranks.
    /// Afterwards all ranks hold rank 0's parameters.
    ///
    /// # Errors
    /// A rank has another model (the error names the first different tensor), or has ended.
    pub fn new(
        network: Network,
        device: Device,
        classes: usize,
        plan: &RunPlan,
        comm: Communicator,
        status: WorkerStatus,
    ) -> Result<Self, Failure> {
        verify::check_same_model(&network, &comm)?;
        let network = replicate::sync_module_states(network, &comm)?;
        let mut learner = Learner::new(network, device, classes, plan);
        let parallel = &plan.parallel;
        #[cfg(feature = "cuda")]
        let reduction = gpus::connect(&learner.replica.inner_device(), &learner.replica.parameters, plan, &comm)?;
        #[cfg(not(feature = "cuda"))]
        let reduction: Option<DeviceReduction> = None;
        learner.graph = graph::step_graph(plan, &learner.replica.inner_device(), reduction.as_ref());
        let parameters = &learner.replica.parameters;
        let collectives = reduction.as_ref().map(|one| Arc::clone(&one.collectives));
        let settings = StepSettings::of(plan);
        let options = ReducerOptions {
            first_bucket_bytes: mib_to_bytes(settings.first_bucket_mb),
            bucket_bytes_cap: mib_to_bytes(settings.bucket_mb),
            overlap: parallel.overlap,
            in_order: collectives.is_some() && parallel.batch_norm == BatchNormPolicy::Sync,
            compression: parallel.compression,
        };
        let reducer = Reducer::new(parameters, &comm, &status, options, reduction.clone(), None)?;
        let on_gpu = matches!(parallel.devices, Some(Devices::Gpus(_)));
        let threads = if on_gpu { None } else { build_thread_pool(settings.threads)? };
        let tuner = build_tuner(plan, on_gpu, reduction.is_some(), &comm)?;
        let statistics = match parallel.batch_norm {
            BatchNormPolicy::Sync => {
                tracing::debug!("creating a second process group for synchronised batch norm");
                Some(Arc::new(StatisticsGroup::new(comm.duplicate()?, collectives)))
            }
            _ => None,
        };
        Ok(Self {
            learner,
            batch_norm: parallel.batch_norm,
            tta: plan.train.tta,
            statistics,
            reducer,
            options,
            reduction,
            on_gpu,
            threads,
            tuner,
            tuning_report: None,
            unused: UnusedParameterWarning::default(),
            check_sync_every: parallel.check_sync_every as u64,
            comm,
            status,
            steps: 0,
        })
    }

    fn check_statistics(&self) -> Result<(), Failure> {
        self.statistics.as_ref().map_or(Ok(()), |statistics| Ok(statistics.check()?))
    }

    /// Returns the learner, and the parts with which this rank captures and counts its steps.
    fn graph_parts(&mut self) -> (&mut Learner, graph::DdpGraphStep<'_>) {
        let Self { learner, reducer, statistics, unused, comm, steps, .. } = self;
        (learner, graph::DdpGraphStep { reducer, statistics: statistics.as_ref(), unused, comm, step: *steps })
    }

    /// Returns whether the ranks must compare their states after the last queued step (`parallel.check_sync_every`).
    fn sync_is_due(&self) -> bool {
        self.check_sync_every > 0 && self.steps.is_multiple_of(self.check_sync_every)
    }

    /// Checks every `parallel.check_sync_every` steps that all ranks hold the same bits.
    fn check_sync(&self) -> Result<(), Failure> {
        if !self.sync_is_due() {
            return Ok(());
        }
        self.status.set_status(format_args!("comparing parameters after {} steps", self.steps));
        let statistics = match self.batch_norm {
            BatchNormPolicy::Sync => RunningStatistics::EqualOnAllRanks,
            _ => RunningStatistics::PerRank,
        };
        verify::check_in_sync(&self.learner.snapshot(), statistics, &self.comm)
    }

    /// Records a step that took `seconds` on this rank. At the end of a sample, the ranks exchange their medians and switch to
    /// the next settings.
    fn tune(&mut self, seconds: f64) -> Result<(), Failure> {
        let Some(tuner) = &mut self.tuner else { return Ok(()) };
        let Some(own) = tuner.record(seconds) else { return Ok(()) };
        self.status.set_status(format_args!("autotuning after {} steps", self.steps));
        let mut medians = vec![0.0; self.comm.world_size()];
        self.comm.all_gather(&[own], &mut medians)?;
        let slowest = medians.into_iter().fold(0.0, f64::max);
        let Some((order, lengths)) = self.reducer.layout() else { return Ok(()) };
        match tuner.next(slowest, &order, lengths) {
            SearchDecision::Try(settings) => self.apply(&settings, &order),
            SearchDecision::Done(report) => {
                tracing::info!(step = self.steps, chosen = ?report.chosen, "autotuned");
                self.apply(&report.chosen, &order)?;
                (self.tuner, self.tuning_report) = (None, Some(report));
                Ok(())
            }
        }
    }

    /// Uses other settings for the next steps.
    fn apply(&mut self, settings: &StepSettings, order: &[usize]) -> Result<(), Failure> {
        tracing::debug!(step = self.steps, ?settings, "autotune");
        self.options.first_bucket_bytes = mib_to_bytes(settings.first_bucket_mb);
        self.options.bucket_bytes_cap = mib_to_bytes(settings.bucket_mb);
        self.options.compression = settings.compression;
        let parameters = &self.learner.replica.parameters;
        let reduction = self.reduction.clone();
        self.reducer = Reducer::new(parameters, &self.comm, &self.status, self.options, reduction, Some(order))?;
        if !self.on_gpu {
            self.threads = build_thread_pool(settings.threads)?;
        }
        Ok(())
    }

    /// Sums the counts over all ranks. If any rank has received a signal, every rank returns [`Evaluation::Stopped`].
    fn reduce_counts(&self, mut counts: EvalCounts, stop: &StopFlag) -> Result<Evaluation, Failure> {
        let mut signal = [i64::from(stop.signal().unwrap_or(0))];
        self.comm.all_reduce(&mut signal, ReduceOp::Max)?;
        let mut sums: Vec<i64> = [counts.samples, counts.top1, counts.top5].map(|count| count as i64).to_vec();
        // All ranks have the same `train.tta`; a rank without samples has counted nothing.
        sums.push(counts.tta_top1.unwrap_or(0) as i64);
        sums.extend(counts.confusion.iter().map(|&count| count as i64));
        self.comm.all_reduce(&mut sums, ReduceOp::Sum)?;
        let mut loss = [counts.loss_sum];
        self.comm.all_reduce(&mut loss, ReduceOp::Sum)?;
        let gathered = counts.scores.as_ref().map(|scores| self.gather_scores(scores)).transpose()?;
        if signal[0] != 0 {
            return Ok(Evaluation::Stopped(signal[0] as i32));
        }
        let sum = |index: usize| sums[index] as u64;
        (counts.samples, counts.top1, counts.top5, counts.loss_sum) = (sum(0), sum(1), sum(2), loss[0]);
        counts.tta_top1 = (self.tta != Tta::None).then(|| sum(3));
        counts.confusion = sums[4..].iter().map(|&count| count as u64).collect();
        counts.scores = gathered;
        Ok(Evaluation::Done(counts))
    }

    /// Returns the scores of all ranks, in rank order, on every rank. Average precision needs the scores of all images at once.
    fn gather_scores(&self, own: &Scores) -> Result<Scores, Failure> {
        let mut all = own.without_images();
        for bytes in self.all_gather(&own.to_bytes())? {
            all.append(&bytes);
        }
        Ok(all)
    }
}

fn mib_to_bytes(mib: f64) -> usize {
    (mib * MIB) as usize
}

/// Starts the thread pool of `parallel.threads`. With `None`, the process's default pool is used.
fn build_thread_pool(threads: Option<usize>) -> Result<Option<ThreadPool>, Failure> {
    let Some(threads) = threads else { return Ok(None) };
    let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(|thread| format!("step-{thread}")).build();
    pool.map(Some).map_err(|error| Failure::run(format!("parallel.threads = {threads}: {error}"), "see `ulimit -u`"))
}

/// Starts the search of `parallel.autotune`, if autotuning is on. With `summed_on_gpu` the wire format is fixed, since the memory
/// that the GPUs share was allocated for one format.
fn build_tuner(
    plan: &RunPlan,
    on_gpu: bool,
    summed_on_gpu: bool,
    comm: &Communicator,
) -> Result<Option<Autotuner>, Failure> {
    if plan.parallel.autotune.is_empty() {
        return Ok(None);
    }
    let is_fixed = |tunable: &Tunable| match tunable {
        Tunable::BucketMb | Tunable::FirstBucketMb => false,
        Tunable::Threads => on_gpu,
        Tunable::Fp16 | Tunable::Bf16 => summed_on_gpu,
    };
    let (fixed, allowed): (Vec<_>, Vec<_>) = plan.parallel.autotune.iter().copied().partition(is_fixed);
    if let (false, 0) = (fixed.is_empty(), comm.rank()) {
        let words: Vec<_> = fixed.iter().map(ToString::to_string).collect();
        console::eprint(format_args!("note: autotune leaves out what is fixed on GPUs: {}", words.join(", ")));
    }
    // Hosts may have different numbers of cores, and all ranks must search the same candidates.
    let mut share = [rayon::current_num_threads() as i64];
    comm.all_reduce(&mut share, ReduceOp::Min)?;
    Ok(Some(Autotuner::new(allowed, StepSettings::of(plan), share[0] as usize)))
}

impl Strategy for Ddp {
    fn learner(&self) -> &Learner {
        &self.learner
    }

    fn learner_mut(&mut self) -> &mut Learner {
        &mut self.learner
    }

    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        Ok(self.comm.all_gather_v(bytes)?.parts().map(<[u8]>::to_vec).collect())
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
        let start = Instant::now();
        let outcome = step::queue_step(self, batches, lr, stop)?;
        if outcome.is_some() {
            self.tune(start.elapsed().as_secs_f64())?;
        }
        Ok(outcome)
    }

    fn max_queued(&self) -> usize {
        // The ranks compare their states after this step and not after a later one.
        if self.sync_is_due() { 0 } else { self.learner.graph.max_queued() }
    }

    fn finish_step(&mut self) -> Result<Option<StepOutcome>, Failure> {
        self.status.set_status(format_args!("waiting for the GPU, {} steps are launched", self.steps));
        let (learner, mut parts) = self.graph_parts();
        let Some(outcome) = super::graph::finish_step(learner, &mut parts)? else { return Ok(None) };
        if self.learner.graph.is_idle() {
            self.check_sync()?;
        }
        Ok(Some(outcome))
    }

    fn take_tuning_report(&mut self) -> Option<TuningReport> {
        self.tuning_report.take()
    }

    fn evaluate(&mut self, batches: &mut Batches<'_>, stop: &StopFlag) -> Result<Evaluation, Failure> {
        self.status.set_status(format_args!("evaluating after {} steps", self.steps));
        let Self { learner, comm, .. } = self;
        let comm = &*comm;
        // All ranks are in the same phase of the warm-up, so all ranks restart it without a message.
        learner.graph.restart_warm_up(&learner.replica.inner_device());
        if matches!(self.batch_norm, BatchNormPolicy::Broadcast | BatchNormPolicy::Reduce) {
            learner.replica.try_change(|network| replicate::sync_buffers(network, self.batch_norm, comm))?;
        }
        if let (BatchNormPolicy::Reduce, true) = (self.batch_norm, learner.ema.is_some()) {
            // The averaged network has its own running statistics.
            let averaged = replicate::sync_buffers(learner.evaluated_network(), self.batch_norm, comm)?;
            let device = learner.replica.inner_device();
            if let Some(ema) = &mut learner.ema {
                ema.load(&state::state_dict(&averaged), learner.replica.network(), &device);
            }
        }
        // Ranks may have different running statistics. Evaluate rank 0's network on all ranks.
        let network = replicate::sync_buffers(learner.evaluated_network(), BatchNormPolicy::Broadcast, comm)?;
        let counts = learner.replica.evaluate(&network, batches, stop).map_err(Failure::from);
        // A rank that cannot read an image waits here for the other ranks. If it ended instead, the launcher would end the job a
        // few seconds later. Rank 0 could still be evaluating then, and no checkpoint would be saved.
        let counts = verify::succeed_together(counts, comm)?;
        self.reduce_counts(counts, stop)
    }

    fn load_checkpoint(&mut self, checkpoint: Option<(Snapshot, RunProgress)>) -> Result<RunProgress, Failure> {
        self.status.set_status(format_args!("broadcasting the checkpoint"));
        let Some((snapshot, progress)) = replicate::broadcast_checkpoint(checkpoint, &self.comm)? else {
            return Ok(RunProgress::start());
        };
        self.learner.restore(snapshot)?;
        self.steps = progress.step;
        verify::check_in_sync(&self.learner.snapshot(), RunningStatistics::PerRank, &self.comm)?;
        Ok(progress)
    }
}
