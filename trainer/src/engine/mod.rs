//! The engine of a run: epochs of steps, evaluation, checkpoints. The engine does not know which strategy takes the steps.

mod best;
pub mod checkpoint;
mod epoch;
mod evaluation;
mod lengths;
mod replaced;
mod time_limit;
mod tuning_report;

use std::time::Instant;

use data::loader::Loader;

use self::checkpoint::{CheckpointFolder, LinkUpdate};
use self::epoch::EpochEnd;
pub use self::evaluation::eval_record;
pub use self::lengths::RunLength;
pub use self::replaced::ReplacedImages;
use crate::config::{CheckpointConfig, RunPlan};
use crate::console;
use crate::device::KernelCompileReporter;
use crate::failure::Failure;
use crate::optim::{Schedule, lr_scale_factor};
use crate::report::{EpochRecord, Reporter};
use crate::signals::{StopFlag, StopReason};
use crate::snapshot::{Evaluated, PartialEpoch, RunProgress};
use crate::strategy::{EvalCounts, Evaluation, Strategy, divergence_failure, percent};
use crate::timeline::Timeline;

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub enum RunOutcome {
    /// All epochs or steps are done. Holds the last evaluation.
    Finished(EvalCounts),
    /// Early stopping (`train.patience`) ended the run.
    StoppedEarly {
        /// The last evaluation.
        counts: EvalCounts,
        /// The last epoch.
        epoch: usize,
        /// The best epoch.
        best: usize,
    },
    /// `train.max_time_s` is over. The run has evaluated and saved a checkpoint.
    OutOfTime {
        /// The evaluation.
        counts: EvalCounts,
        /// Optimizer steps taken.
        step: u64,
    },
    /// A signal asked for a stop. The run has saved a checkpoint.
    Interrupted {
        /// The signal's number.
        signal: i32,
        /// Optimizer steps taken.
        step: u64,
    },
}

/// The loaders of a run's splits.
pub struct Loaders {
    /// Training images.
    pub train: Loader,
    /// Images of the evaluations during the run: the validation split, or the test split of a data set without one.
    pub eval: Loader,
    /// The test split, evaluated once after training. None if `eval` is the test split.
    pub test: Option<Loader>,
}

/// The end of a run.
pub struct RunResult {
    /// How the run ended.
    pub outcome: RunOutcome,
    /// The evaluation of [`Loaders::test`] and the epoch of the evaluated weights. None for an interrupted run.
    pub test: Option<Evaluated>,
    /// The counts of that evaluation.
    pub test_counts: Option<EvalCounts>,
    /// The run's progress.
    pub progress: RunProgress,
    /// Number of times that this rank replaced a damaged image with another image.
    pub replaced: u64,
}

/// A run in progress.
pub struct Engine<'a> {
    plan: &'a RunPlan,
    strategy: &'a mut dyn Strategy,
    loaders: Loaders,
    lengths: RunLength,
    schedule: Schedule,
    /// Set on rank 0 only, since one process writes the run folder.
    output: Option<RunOutput<'a>>,
    stop: StopFlag,
    progress: RunProgress,
    /// The step of the last checkpoint that this process has loaded or saved.
    saved_step: u64,
    timeline: Timeline,
    /// Kinds of work that this process has not done yet. The first time, a GPU compiles and tunes kernels.
    not_yet_compiled: Vec<WorkKind>,
    replaced: ReplacedImages,
    /// Whether autotuning is still running.
    tunes: bool,
}

/// The end of training in an epoch: all steps are done, or the run stops inside the epoch (`train.max_steps`, `train.max_time_s`).
struct TrainedEpoch<'a> {
    /// The evaluation after the epoch's last step, if one was due.
    counts: Option<&'a EvalCounts>,
    /// Seconds of the evaluation.
    eval_seconds: f64,
    /// Whether the run ends here. Then a checkpoint is saved, even if none is due.
    is_last: bool,
}

/// Work that compiles and tunes kernels when a process does it for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WorkKind {
    Step,
    Evaluation,
}

/// The outputs of a run, which only rank 0 has: the run folder and the screen.
pub struct RunOutput<'a> {
    /// Metrics, curves, screen.
    pub reporter: &'a mut Reporter,
    /// Checkpoints.
    pub checkpoints: CheckpointFolder,
}

impl<'a> Engine<'a> {
    /// Makes a run that continues from `progress`, which is [`RunProgress::start`] or a checkpoint's progress.
    pub fn new(
        plan: &'a RunPlan,
        strategy: &'a mut dyn Strategy,
        loaders: Loaders,
        output: Option<RunOutput<'a>>,
        stop: StopFlag,
        mut progress: RunProgress,
    ) -> Self {
        let lengths = RunLength::new(plan, &loaders.train);
        progress.steps_per_epoch = Some(lengths.steps_per_epoch);
        progress.batches_per_epoch = Some(lengths.batches_per_epoch);
        progress.images = Some(lengths.images);
        progress.global_batch = Some(lengths.global_batch);
        progress.best_by = Some(plan.best_by().to_string());
        // Only rank 0 has checkpoints, so only rank 0 compares this checksum. A run that continues has it already.
        progress.eval_crc = output.is_some().then(|| progress.eval_crc.unwrap_or_else(|| loaders.eval.eval_checksum()));
        // `schedule.min_lr` is not scaled.
        let base_lr = plan.optimizer.lr * lr_scale_factor(plan, strategy.device_count());
        let schedule = Schedule::new(&plan.schedule, base_lr, lengths.schedule_steps, lengths.steps_per_epoch);
        let (timeline, saved_step) = (Timeline::off(), progress.step);
        let (not_yet_compiled, replaced) = (vec![WorkKind::Step, WorkKind::Evaluation], ReplacedImages::default());
        let tunes = !plan.parallel.autotune.is_empty();
        Self {
            plan,
            strategy,
            loaders,
            lengths,
            schedule,
            output,
            stop,
            progress,
            saved_step,
            timeline,
            not_yet_compiled,
            replaced,
            tunes,
        }
    }

    /// Returns a guard that prints a report while the first step or the first evaluation compiles and tunes kernels. Returns `None`
    /// for later steps and evaluations, on ranks other than 0, and if a timeline is on: cubecl allows only one observer of kernels,
    /// and without `CUDA_LAUNCH_BLOCKING=1` the timeline is this observer.
    fn report_kernel_compiles(&mut self, kind: WorkKind) -> Option<KernelCompileReporter> {
        let first = self.not_yet_compiled.contains(&kind);
        self.not_yet_compiled.retain(|other| *other != kind);
        let what = match kind {
            WorkKind::Step => "first step",
            WorkKind::Evaluation => "first evaluation",
        };
        let device = self.strategy.learner().replica.inner_device();
        (first && self.output.is_some() && !self.timeline.is_on())
            .then(|| KernelCompileReporter::start(&device, what))
            .flatten()
    }

    /// Records spans of the steps and of the waits for data on `timeline`. The strategy records its own spans
    /// ([`Strategy::set_timeline`]).
    pub fn with_timeline(mut self, timeline: &Timeline) -> Self {
        self.timeline = timeline.clone();
        self
    }

    /// Trains to the end or to the first signal. A run that reaches its end evaluates the test split once, if the evaluations
    /// before used a validation split.
    ///
    /// # Errors
    /// A loss that is not finite, a batch that cannot be read, a file that cannot be written.
    pub fn run(mut self) -> Result<RunResult, Failure> {
        let mut outcome = self.train_to_the_end()?;
        if !matches!(outcome, RunOutcome::Interrupted { .. }) {
            self.note_unfinished_tuning()?;
        }
        let (mut test, mut test_counts) = (None, None);
        if let (false, Some(loader)) = (matches!(outcome, RunOutcome::Interrupted { .. }), self.loaders.test.take()) {
            match self.evaluate_test_split(loader)? {
                (epoch, Evaluation::Done(counts)) => {
                    test = Some(Evaluated { epoch, eval: eval_record(&counts) });
                    test_counts = Some(counts);
                }
                // The last checkpoint is complete, so a resumed run only evaluates again.
                (_, Evaluation::Stopped(signal)) => {
                    outcome = RunOutcome::Interrupted { signal, step: self.progress.step };
                }
            }
        }
        Ok(RunResult { outcome, test, test_counts, progress: self.progress, replaced: self.replaced.count() })
    }

    fn train_to_the_end(&mut self) -> Result<RunOutcome, Failure> {
        if let Some(outcome) = self.finish_complete_run()? {
            return Ok(outcome);
        }
        loop {
            let epoch = self.progress.epoch;
            let end = epoch::train_epoch(self)?;
            match end {
                EpochEnd::Stopped(StopReason::TimeLimit) => return self.stop_at_time_limit(),
                EpochEnd::Stopped(StopReason::Signal(signal)) => return self.interrupted(signal),
                EpochEnd::Complete => {}
            }
            let mut done = epoch >= self.lengths.epochs || self.progress.step >= self.lengths.last_step;
            let start = Instant::now();
            let mut counts = None;
            if done || epoch.is_multiple_of(self.plan.train.eval_every) {
                counts = match self.evaluate_or_save()? {
                    Evaluation::Done(counts) => Some(counts),
                    // The checkpoint is saved at the epoch's end, so a resumed run evaluates again.
                    Evaluation::Stopped(signal) => return self.interrupted(signal),
                };
            }
            // All ranks have the same counts, so all ranks make the same decision.
            let early_stop = counts.as_ref().filter(|_| !done).and_then(|counts| self.early_stop(counts));
            done |= early_stop.is_some();
            let time_is_up = !done && self.agree_time_is_up(start.elapsed().as_secs_f64())?;
            if time_is_up && counts.is_none() {
                counts = match self.evaluate_or_save()? {
                    Evaluation::Done(counts) => Some(counts),
                    Evaluation::Stopped(signal) => return self.interrupted(signal),
                };
            }
            self.finish_epoch(TrainedEpoch {
                counts: counts.as_ref(),
                eval_seconds: start.elapsed().as_secs_f64(),
                is_last: done || time_is_up,
            })?;
            match (counts, early_stop) {
                (Some(counts), Some(best)) => return Ok(RunOutcome::StoppedEarly { counts, epoch, best }),
                (Some(counts), None) if done => return Ok(RunOutcome::Finished(counts)),
                (Some(counts), None) if time_is_up => {
                    return Ok(RunOutcome::OutOfTime { counts, step: self.progress.step });
                }
                _ => {}
            }
        }
    }

    /// Handles a run that was resumed after its end: all steps were done, it had stopped early, or its time was over. Evaluates
    /// once more and returns the outcome. Returns `None` if steps are left, or if `train.max_steps` has ended the run inside an
    /// epoch: the epoch's loop then ends without a step.
    fn finish_complete_run(&mut self) -> Result<Option<RunOutcome>, Failure> {
        let all_steps_done = self.progress.step >= self.lengths.last_step;
        let finished = self.progress.epoch > self.lengths.epochs || (all_steps_done && self.progress.batch == 0);
        let early_stop = self.had_stopped_early().filter(|_| !finished);
        if finished || early_stop.is_some() {
            self.note_complete_run(early_stop);
            let evaluation = self.evaluate()?;
            if let Evaluation::Done(counts) = &evaluation {
                self.record_evaluation_again(eval_record(counts))?;
            }
            return Ok(Some(match (evaluation, early_stop) {
                (Evaluation::Done(counts), None) => RunOutcome::Finished(counts),
                (Evaluation::Done(counts), Some([epoch, best])) => RunOutcome::StoppedEarly { counts, epoch, best },
                (Evaluation::Stopped(signal), _) => RunOutcome::Interrupted { signal, step: self.progress.step },
            }));
        }
        if all_steps_done {
            self.note_complete_run(None);
        }
        let limit = self.plan.train.max_time_s;
        if limit > 0 && self.progress.elapsed_s >= limit as f64 {
            return self.stop_at_time_limit().map(Some);
        }
        Ok(None)
    }

    /// Saves a checkpoint because of another failure. The caller reports that failure, so an error here is only a warning.
    fn save_or_warn(&mut self) {
        if let Err(failure) = self.save_at_step() {
            console::eprint(format_args!("warning: no checkpoint was saved: {failure}"));
        }
    }

    /// Reports the epoch, advances the progress to the next epoch, and saves a checkpoint if one is due.
    fn finish_epoch(&mut self, trained: TrainedEpoch<'_>) -> Result<(), Failure> {
        let TrainedEpoch { counts, eval_seconds, is_last } = trained;
        let epoch = self.progress.epoch;
        let partial = self.progress.partial;
        self.progress.elapsed_s += eval_seconds;
        let eval = counts.map(eval_record);
        let is_best = eval.is_some_and(|eval| self.record_evaluation(epoch, eval));
        // Report before saving the checkpoint: a run that is killed between the two resumes before the epoch's end, and writes
        // the line again.
        let record = EpochRecord {
            epoch,
            train_loss: partial.loss(),
            train_top1: percent(partial.correct, partial.samples),
            eval,
            is_best,
            lr: self.schedule.lr(self.progress.step.saturating_sub(1)),
            images_per_s: partial.samples as f64 / partial.seconds,
            seconds: partial.seconds + eval_seconds,
            eval_seconds,
        };
        tracing::info!(epoch, loss = record.train_loss, seconds = record.seconds, "epoch done");
        if let Some(output) = &mut self.output {
            output.reporter.epoch(&record)?;
        }

        // If train.max_steps or train.max_time_s has ended the run inside an epoch, the progress stays inside the epoch, and a resumed
        // run continues there.
        if self.progress.batch >= self.lengths.batches_per_epoch {
            self.progress.epoch = epoch + 1;
            (self.progress.batch, self.progress.partial) = (0, PartialEpoch::default());
        }
        let CheckpointConfig { every, every_steps, .. } = self.plan.checkpoint;
        let due = (every > 0 && epoch.is_multiple_of(every))
            || (every_steps > 0 && self.progress.step.is_multiple_of(every_steps as u64));
        if is_last || due || (is_best && self.plan.checkpoint.keep_best) {
            self.save_evaluated(&self.checkpoint_name(), is_best)?;
        }
        Ok(())
    }

    /// Returns the name of a checkpoint after an evaluation. Inside an epoch, the checkpoint has the step's name. The epoch's name is
    /// for the checkpoint of the epoch's end: `best` may point to the earlier checkpoint, which the later one must not replace.
    fn checkpoint_name(&self) -> String {
        match self.progress.batch {
            0 => format!("epoch-{}", self.progress.epoch - 1),
            _ => format!("step-{}", self.progress.step),
        }
    }

    fn interrupted(&mut self, signal: i32) -> Result<RunOutcome, Failure> {
        self.save_at_step()?;
        Ok(RunOutcome::Interrupted { signal, step: self.progress.step })
    }

    /// Saves a checkpoint that is named after the current step. `best` does not point to it.
    fn save_at_step(&mut self) -> Result<(), Failure> {
        self.save(&format!("step-{}", self.progress.step), LinkUpdate::Last)
    }

    /// Saves a checkpoint, after all earlier reports are on disk.
    fn save(&mut self, name: &str, links: LinkUpdate) -> Result<(), Failure> {
        if let Some(RunOutput { reporter, checkpoints }) = &mut self.output {
            reporter.flush()?;
            let start = Instant::now();
            let snapshot = self.strategy.snapshot();
            if let Some(tensor) = snapshot.not_finite() {
                return Err(divergence_failure(format!(
                    "after step {}: {tensor} has a value that is not finite",
                    self.progress.step
                )));
            }
            checkpoints.save(name, snapshot, &self.progress, links)?;
            self.saved_step = self.progress.step;
            let seconds = start.elapsed().as_secs_f64();
            self.progress.elapsed_s += seconds;
            tracing::debug!(name, ?links, seconds, "saved a checkpoint");
        }
        Ok(())
    }
}
