//! One epoch, top to bottom: fetch, forward, backward, all-reduce, step.

use std::time::Instant;

use super::Engine;
use crate::device;
use crate::failure::Failure;
use crate::report::StepRecord;
use crate::snapshot::PartialEpoch;
use crate::strategy::{StepOutcome, percent};
use crate::timeline::Track;

/// The reason why an epoch's loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EpochEnd {
    /// All batches of the epoch were used, or the run's last step was taken.
    Complete,
    /// A signal asked for a stop, or the time is up.
    Interrupted(i32),
}

/// Trains from `progress.batch` to the end of `progress.epoch`.
///
/// # Errors
/// An image cannot be decoded, the step fails, or a file cannot be written; a failed step is named with its epoch and number.
pub(super) fn train_epoch(engine: &mut Engine<'_>) -> Result<EpochEnd, Failure> {
    let epoch = engine.progress.epoch;
    let mut batches = engine.loaders.train.epoch(epoch, engine.progress.batch);
    while engine.progress.step < engine.lengths.last_step {
        let start = Instant::now();
        let fetched = batches.by_ref().take(engine.plan.train.accumulate).collect::<Result<Vec<_>, _>>()?;
        if fetched.is_empty() {
            break;
        }
        let count = fetched.len();
        engine.replaced.add(&fetched);
        let fetched_at = Instant::now();

        // Forward → backward → all-reduce → optimizer, on all devices of the strategy (`strategy/*/step.rs`).
        let (step, lr) = (engine.progress.step, engine.lr(engine.progress.step));
        let outcome = {
            let _reports = engine.warm_up(0);
            engine.strategy.train_step(fetched, lr, engine.asked_to_stop()).map_err(|mut failure| {
                failure.message = format!("epoch {epoch}, step {step}: {}", failure.message);
                failure
            })?
        };

        // Only timing, logging and saving from here on.
        let end = Instant::now();
        engine.timeline.span(Track::Step, "data", start, fetched_at, &[]);
        engine.timeline.span(Track::Step, format!("step {step}"), start, end, &[("epoch", epoch)]);
        let seconds = (end - start).as_secs_f64();
        let parts = outcome.seconds;
        engine.progress.step += 1;
        engine.progress.batch += count;
        engine.progress.elapsed_s += seconds;
        engine.progress.partial.add(&outcome, seconds);
        let record = StepRecord {
            epoch,
            step,
            loss: outcome.loss(),
            lr,
            images_per_s: outcome.samples as f64 / seconds,
            top1: percent(outcome.correct, outcome.samples),
            grad_norm: outcome.grad_norm,
            data_ms: (fetched_at - start).as_secs_f64() * 1e3,
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
        if let Some(files) = &mut engine.files {
            files.reporter.step(&record)?;
        }
        if let (Some(note), Some(files)) = (engine.strategy.take_note(), &mut engine.files) {
            files.reporter.say(&note)?;
        }
        engine.report_tuning()?;
        let every = engine.plan.checkpoint.every_steps as u64;
        let at_epoch_end = engine.progress.batch >= engine.lengths.batches_per_epoch;
        if every > 0 && engine.progress.step.is_multiple_of(every) && !at_epoch_end {
            engine.save(&format!("step-{}", engine.progress.step), false)?;
        }
        if let Some(signal) = outcome.stop {
            return Ok(EpochEnd::Interrupted(signal));
        }
    }
    Ok(EpochEnd::Complete)
}

impl PartialEpoch {
    /// Returns the mean loss, weighted as the samples were.
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
