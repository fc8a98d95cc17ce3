//! `train.max_time_s`: the end of a run by its time.

use std::time::Instant;

use super::{Engine, RunOutcome, TrainedEpoch, eval_record};
use crate::failure::Failure;
use crate::signals::StopReason;
use crate::strategy::Evaluation;

impl Engine<'_> {
    /// Returns the reason why this rank should stop: a signal that it has received, or the end of `train.max_time_s`.
    pub(super) fn stop_reason(&self) -> Option<StopReason> {
        let signal = self.stop.signal().map(StopReason::Signal);
        signal.or(self.time_is_up_on_rank_0(0.0).then_some(StopReason::TimeLimit))
    }

    /// On rank 0, returns whether `train.max_time_s` is over after `seconds` more. On the other ranks, returns `false`. Only rank 0
    /// decides, because the checkpoint stores rank 0's time. The other ranks would also count the time in which rank 0 writes a
    /// checkpoint as a part of their next step.
    fn time_is_up_on_rank_0(&self, seconds: f64) -> bool {
        let limit = self.plan.train.max_time_s;
        limit > 0 && self.strategy.rank() == 0 && self.progress.elapsed_s + seconds >= limit as f64
    }

    /// Evaluates the current weights, and saves a checkpoint from which the run can continue.
    pub(super) fn stop_at_time_limit(&mut self) -> Result<RunOutcome, Failure> {
        let start = Instant::now();
        let counts = match self.evaluate_or_save()? {
            Evaluation::Done(counts) => counts,
            Evaluation::Stopped(signal) => return self.interrupted(signal),
        };
        let step = self.progress.step;
        if self.progress.batch > 0 {
            let eval_seconds = start.elapsed().as_secs_f64();
            self.finish_epoch(TrainedEpoch { counts: Some(&counts), eval_seconds, is_last: true })?;
            if self.progress.epoch > self.lengths.epochs || step >= self.lengths.last_step {
                return Ok(RunOutcome::Finished(counts));
            }
        } else {
            // The weights are those of the last epoch's end, and the epoch's line is already in `summary.csv`.
            self.progress.elapsed_s += start.elapsed().as_secs_f64();
            let is_best = self.record_evaluation(self.progress.epoch.saturating_sub(1), eval_record(&counts));
            self.save_evaluated(&format!("step-{step}"), is_best)?;
        }
        Ok(RunOutcome::OutOfTime { counts, step })
    }

    /// Returns on all ranks whether `train.max_time_s` is over after `seconds` more. All ranks call this method together.
    pub(super) fn agree_time_is_up(&self, seconds: f64) -> Result<bool, Failure> {
        if self.plan.train.max_time_s == 0 {
            return Ok(false);
        }
        Ok(self.strategy.all_gather(&[u8::from(self.time_is_up_on_rank_0(seconds))])?[0] == [1])
    }
}
