//! `train.max_time_s`: the end of a run by its time.

use std::time::Instant;

use super::{Engine, RunOutcome, eval_record};
use crate::failure::Failure;
use crate::signals::StopReason;
use crate::strategy::Evaluation;

impl Engine<'_> {
    /// Returns the reason why this rank should stop: a signal that it has received, or the end of `train.max_time_s`.
    pub(super) fn stop_reason(&self) -> Option<StopReason> {
        let signal = self.stop.signal().map(StopReason::Signal);
        signal.or(self.time_is_up_on_rank_0(0.0).then_some(StopReason::TimeLimit))
    }

    /// Returns whether `train.max_time_s` is over on rank 0 after `seconds` more, and `false` on the other ranks. Only rank 0 decides,
    /// because the checkpoint stores rank 0's time. On the other ranks, the time that rank 0 takes to write a checkpoint is part of
    /// their next step.
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
            self.finish_epoch(Some(&counts), true, start.elapsed().as_secs_f64())?;
            if self.progress.epoch > self.lengths.epochs || step >= self.lengths.last_step {
                return Ok(RunOutcome::Finished(counts));
            }
        } else {
            // The weights are those of the last epoch's end, whose line is written.
            let is_best = self.record_evaluation(self.progress.epoch.saturating_sub(1), eval_record(&counts));
            self.save_evaluated(&format!("step-{step}"), is_best)?;
        }
        Ok(RunOutcome::OutOfTime { counts, step })
    }

    /// Returns on all ranks whether `train.max_time_s` is over after `seconds` more. Collective: all ranks call this method together.
    pub(super) fn agree_time_is_up(&self, seconds: f64) -> Result<bool, Failure> {
        if self.plan.train.max_time_s == 0 {
            return Ok(false);
        }
        Ok(self.strategy.all_gather(&[u8::from(self.time_is_up_on_rank_0(seconds))])?[0] == [1])
    }
}
