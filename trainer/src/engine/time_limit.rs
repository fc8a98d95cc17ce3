//! `train.max_time_s`: the end of a run by its time.

use std::time::Instant;

use super::{Engine, RunOutcome, eval_record};
use crate::failure::Failure;
use crate::signals::TIME_IS_UP;
use crate::strategy::Evaluation;

impl Engine<'_> {
    /// Returns the signal that this rank has received, or [`TIME_IS_UP`] if `train.max_time_s` is over.
    pub(super) fn asked_to_stop(&self) -> Option<i32> {
        let limit = self.plan.train.max_time_s;
        let up = limit > 0 && self.progress.elapsed_s >= limit as f64;
        self.stop.signal().or(up.then_some(TIME_IS_UP))
    }

    /// Evaluates the current weights, and saves a checkpoint from which the run can continue.
    pub(super) fn out_of_time(&mut self) -> Result<RunOutcome, Failure> {
        let start = Instant::now();
        let counts = match self.evaluate()? {
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

    /// Returns whether `train.max_time_s` is over after `seconds` more on any rank. The ranks' clocks differ.
    pub(super) fn any_rank_is_out_of_time(&self, seconds: f64) -> Result<bool, Failure> {
        let limit = self.plan.train.max_time_s;
        if limit == 0 {
            return Ok(false);
        }
        let own = self.progress.elapsed_s + seconds >= limit as f64;
        Ok(self.strategy.all_gather(&[u8::from(own)])?.iter().any(|rank| rank == &[1]))
    }
}
