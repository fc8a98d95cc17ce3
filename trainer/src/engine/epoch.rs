//! One epoch, top to bottom: fetch, forward, backward, all-reduce, step.

use std::collections::VecDeque;
use std::time::Instant;

use super::{Engine, WorkKind};
use crate::device;
use crate::failure::Failure;
use crate::report::StepRecord;
use crate::signals::StopReason;
use crate::snapshot::PartialEpoch;
use crate::strategy::{StepOutcome, percent};
use crate::timeline::Track;

/// The reason why an epoch's loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EpochEnd {
    /// All batches of the epoch were used, or the run's last step was taken.
    Complete,
    /// The run must stop before the epoch's last batch.
    Stopped(StopReason),
}

/// A step that was queued and is not reported yet.
struct QueuedStep {
    step: u64,
    lr: f64,
    /// Number of loader batches in the step: `train.accumulate`, or fewer at the end of an epoch.
    batches: usize,
    /// When the loop began to wait for the step's batches.
    start: Instant,
    /// When the batches had arrived.
    fetched: Instant,
}

/// Trains from `progress.batch` to the end of `progress.epoch`.
///
/// # Errors
/// An image cannot be decoded, a step fails, or a file cannot be written. The error of a failed step names the epoch and the step.
pub(super) fn train_epoch(engine: &mut Engine<'_>) -> Result<EpochEnd, Failure> {
    let mut batches = engine.loaders.train.epoch(engine.progress.epoch, engine.progress.batch);
    let every = engine.plan.checkpoint.every_steps as u64;
    // The CPU prepares the next steps while the device runs the queued ones.
    let mut queue = VecDeque::new();
    let (mut reported, mut stop) = (Instant::now(), None);
    loop {
        let (start, step) = (Instant::now(), engine.progress.step + queue.len() as u64);
        let wanted = if step < engine.lengths.last_step && stop.is_none() { engine.plan.train.accumulate } else { 0 };
        let fetched = match batches.by_ref().take(wanted).collect::<Result<Vec<_>, _>>() {
            Ok(fetched) => fetched,
            Err(error) => {
                save_completed_steps(engine, &queue, &mut reported)?;
                return Err(error.into());
            }
        };
        if fetched.is_empty() {
            break;
        }
        engine.replaced.add(&fetched);
        let lr = engine.schedule.lr(step);
        let queued_step = QueuedStep { step, lr, batches: fetched.len(), start, fetched: Instant::now() };

        // Forward → backward → all-reduce → optimizer, on all devices of the strategy (`strategy/*/step.rs`).
        let stop_seen = engine.stop_reason();
        let outcome = {
            let _reports = engine.report_kernel_compiles(WorkKind::Step);
            engine.strategy.queue_step(fetched, lr, stop_seen).map_err(|failure| at_step(engine, step, failure))?
        };
        queue.push_back(queued_step);

        // Before a checkpoint or a stop, wait for all queued steps and report them. Several ranks stop together, after the step
        // whose outcome has the reason.
        let due = every > 0 && (step + 1).is_multiple_of(every);
        let waits = outcome.is_some() || due || (stop_seen.is_some() && engine.strategy.world_size() == 1);
        let may_stay_queued = if waits { 0 } else { engine.strategy.max_queued() };
        for queued in queue.drain(..queue.len().saturating_sub(may_stay_queued)).collect::<Vec<_>>() {
            let is_last = queued.step == step;
            stop = stop.or(match &outcome {
                Some(outcome) if is_last => complete_step(engine, &queued, outcome, &mut reported)?,
                _ => wait_and_complete(engine, &queued, &mut reported)?,
            });
        }
        if due && engine.progress.batch < engine.lengths.batches_per_epoch {
            engine.save_at_step()?;
        }
    }
    for queued in queue {
        stop = stop.or(wait_and_complete(engine, &queued, &mut reported)?);
    }
    Ok(stop.map_or(EpochEnd::Complete, EpochEnd::Stopped))
}

/// Completes the queued steps and saves a checkpoint after an image could not be read, so that the steps since the last checkpoint
/// are not lost. With `checkpoint.every`, they may be steps of earlier epochs. Does nothing if there are several processes: the
/// other ranks may already be in the step whose images this rank could not read.
fn save_completed_steps(
    engine: &mut Engine<'_>,
    queue: &VecDeque<QueuedStep>,
    reported: &mut Instant,
) -> Result<(), Failure> {
    if engine.strategy.world_size() > 1 {
        return Ok(());
    }
    for queued in queue {
        wait_and_complete(engine, queued, reported)?;
    }
    if engine.progress.step > engine.saved_step {
        engine.save_or_warn();
    }
    Ok(())
}

/// Adds the epoch and the step to a failure's message.
fn at_step(engine: &Engine<'_>, step: u64, mut failure: Failure) -> Failure {
    failure.message = format!("epoch {}, step {step}: {}", engine.progress.epoch, failure.message);
    failure
}

/// Waits for the oldest queued step and completes it. Returns the reason why the run must stop, if there is one.
fn wait_and_complete(
    engine: &mut Engine<'_>,
    queued: &QueuedStep,
    reported: &mut Instant,
) -> Result<Option<StopReason>, Failure> {
    let outcome = engine.strategy.finish_step().map_err(|failure| at_step(engine, queued.step, failure))?;
    complete_step(engine, queued, &outcome.expect("the step was queued"), reported)
}

/// Advances the run's progress by one step and reports the step. Returns the reason why the run must stop, if there is one.
fn complete_step(
    engine: &mut Engine<'_>,
    queued: &QueuedStep,
    outcome: &StepOutcome,
    reported: &mut Instant,
) -> Result<Option<StopReason>, Failure> {
    let (epoch, &QueuedStep { step, lr, batches, start, fetched }) = (engine.progress.epoch, queued);
    let end = Instant::now();
    engine.timeline.span(Track::Step, "data", start, fetched, &[]);
    engine.timeline.span(Track::Step, format!("step {step}"), start, end, &[("epoch", epoch)]);
    // A step may have been queued while an earlier one ran, so its time starts at the earlier step's end.
    let seconds = outcome.mean_graph_step_s.unwrap_or_else(|| (end - start.max(*reported)).as_secs_f64());
    *reported = end;
    let parts = outcome.seconds;
    engine.progress.step += 1;
    engine.progress.batch += batches;
    engine.progress.elapsed_s += seconds;
    engine.progress.partial.add(outcome, seconds);
    let record = StepRecord {
        epoch,
        step,
        loss: outcome.loss(),
        lr,
        images_per_s: outcome.samples as f64 / seconds,
        top1: percent(outcome.correct, outcome.samples),
        grad_norm: outcome.grad_norm,
        data_ms: (fetched - start).as_secs_f64() * 1e3,
        forward_ms: parts.forward * 1e3,
        backward_ms: parts.backward * 1e3,
        communication_ms: parts.communication * 1e3,
        communication_hidden_ms: parts.communication_hidden * 1e3,
        optimizer_ms: parts.optimizer * 1e3,
        step_ms: seconds * 1e3,
        bytes_moved: outcome.bytes_moved,
        peak_bytes: device::peak_bytes(),
    };
    tracing::trace!(epoch, step, loss = record.loss, ms = record.step_ms, data_ms = record.data_ms, "step done");
    let note = engine.strategy.take_note();
    if let Some(output) = &mut engine.output {
        output.reporter.step(&record)?;
        if let Some(note) = note {
            output.reporter.say(&note)?;
        }
    }
    engine.report_tuning()?;
    Ok(outcome.stop)
}

impl PartialEpoch {
    /// Returns the mean loss, weighted by the samples' weights.
    pub(super) fn loss(&self) -> f64 {
        self.loss_sum / self.weight.unwrap_or(self.samples as f64)
    }

    /// Adds one step.
    fn add(&mut self, outcome: &StepOutcome, seconds: f64) {
        if self.weight.is_some() || outcome.weight != outcome.samples as f64 {
            self.weight = Some(self.weight.unwrap_or(self.samples as f64) + outcome.weight);
        }
        self.loss_sum += outcome.loss_sum;
        self.correct += outcome.correct;
        self.samples += outcome.samples;
        self.seconds += seconds;
    }
}
