//! Estimates the remaining time from the times that steps and epochs report. This module reads no clock, so that tests control
//! the time.

use crate::report::{EpochRecord, StepRecord};

/// Weight of the newest step in the mean step time after the first steps: about the last hundred steps count.
const NEWEST: f64 = 0.02;
/// The longest time of a step, as a multiple of the mean step time.
const MOST: f64 = 5.0;

/// Time per step and per epoch so far.
#[derive(Debug, Clone)]
pub struct Pace {
    epochs: usize,
    steps_per_epoch: usize,
    /// See [`Self::new`].
    pixel_shares: Vec<f64>,
    /// Mean seconds of a step with whole images. The time of a step with small images is proportional to their pixels.
    step: f64,
    steps: u64,
    /// Mean seconds of an epoch outside its steps: evaluation.
    outside_steps: f64,
    epochs_seen: u64,
}

impl Pace {
    /// Creates the estimate for a run of `epochs` epochs. `pixel_shares` has, for each of the first epochs, the number of pixels
    /// of an image divided by that of a whole image (progressive resizing). Images of later epochs are whole.
    pub fn new(epochs: usize, steps_per_epoch: usize, pixel_shares: Vec<f64>) -> Self {
        Self { epochs, steps_per_epoch, pixel_shares, step: 0.0, steps: 0, outside_steps: 0.0, epochs_seen: 0 }
    }

    /// Returns the pixels of an image in `epoch` (from 1), as a part of those of a whole image.
    fn share(&self, epoch: usize) -> f64 {
        self.pixel_shares.get(epoch.saturating_sub(1)).copied().unwrap_or(1.0)
    }

    /// Counts a step.
    pub fn step(&mut self, record: &StepRecord) {
        let seconds = record.step_ms / 1000.0;
        if !seconds.is_finite() {
            return;
        }
        self.steps += 1;
        // The first step allocates and tunes, so the second step replaces the first one in the mean.
        let weight = NEWEST.max(1.0 / self.steps.saturating_sub(1).max(1) as f64);
        let seconds = seconds / self.share(record.epoch);
        // The process may pause for hours (SIGSTOP, a suspended machine). Such a pause counts as one slow step.
        let most = if self.steps > 2 { MOST * self.step } else { f64::INFINITY };
        self.step += (seconds.min(most) - self.step) * weight;
    }

    /// Counts a finished epoch.
    pub fn epoch(&mut self, record: &EpochRecord) {
        // `seconds` also has the steps of earlier sessions, so it does not tell the time outside the steps.
        if record.eval_seconds.is_finite() {
            self.epochs_seen += 1;
            self.outside_steps += (record.eval_seconds - self.outside_steps) / self.epochs_seen as f64;
        }
    }

    /// Returns the seconds left in the steps of `epoch` (from 1) after `done` steps; `None` before the first step.
    pub fn left_in_epoch(&self, epoch: usize, done: usize) -> Option<f64> {
        (self.steps > 0).then(|| self.step * self.share(epoch) * self.steps_per_epoch.saturating_sub(done) as f64)
    }

    /// Returns the seconds left in the run after `done` steps of `epoch` (from 1); `None` before the first step. The time
    /// of an evaluation is known from the second epoch on.
    pub fn left_in_run(&self, epoch: usize, done: usize) -> Option<f64> {
        let later = self.epochs.saturating_sub(epoch) as f64;
        let saved: f64 = self.pixel_shares.iter().skip(epoch).map(|share| 1.0 - share).sum();
        let steps = self.step * self.steps_per_epoch as f64 * (later - saved);
        self.left_in_epoch(epoch, done).map(|now| now + self.outside_steps + steps + later * self.outside_steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_evaluations_are_counted_apart() {
        let mut pace = Pace::new(3, 4, Vec::new());
        assert_eq!(pace.left_in_run(1, 0), None);
        let step = StepRecord { step_ms: 2000.0, ..StepRecord::default() };
        (0..4).for_each(|_| pace.step(&step));
        assert_eq!(pace.left_in_epoch(1, 1), Some(6.0));
        assert_eq!(pace.left_in_run(1, 3), Some(2.0 + 16.0));
        pace.epoch(&EpochRecord { seconds: 11.0, eval_seconds: 3.0, ..EpochRecord::default() });
        assert_eq!(pace.left_in_run(2, 0), Some(8.0 + 3.0 + 8.0 + 3.0));
        assert_eq!(pace.left_in_run(3, 4), Some(3.0));
    }

    /// The epoch's seconds include the steps before the resume.
    #[test]
    fn the_steps_before_a_resume_are_no_evaluation() {
        let mut pace = Pace::new(3, 4, Vec::new());
        pace.step(&StepRecord { step_ms: 2000.0, ..StepRecord::default() });
        pace.epoch(&EpochRecord { seconds: 9000.0, eval_seconds: 3.0, ..EpochRecord::default() });
        assert_eq!(pace.left_in_run(2, 0), Some(8.0 + 3.0 + 8.0 + 3.0));
    }

    #[test]
    fn a_slow_first_step_is_forgotten() {
        let mut pace = Pace::new(1, 1000, Vec::new());
        pace.step(&StepRecord { step_ms: 60_000.0, ..StepRecord::default() });
        assert_eq!(pace.left_in_epoch(1, 999), Some(60.0));
        pace.step(&StepRecord { step_ms: 125.0, ..StepRecord::default() });
        assert_eq!(pace.left_in_epoch(1, 998), Some(0.25));
    }

    #[test]
    fn a_pause_is_one_slow_step() {
        let mut pace = Pace::new(1, 1000, Vec::new());
        let step = |seconds: f64| StepRecord { step_ms: seconds * 1000.0, ..StepRecord::default() };
        (0..100).for_each(|_| pace.step(&step(1.0)));
        pace.step(&step(3600.0));
        assert!((pace.left_in_epoch(1, 900).unwrap() - 108.0).abs() < 1e-9);
        (0..1000).for_each(|_| pace.step(&step(100.0)));
        assert!((pace.left_in_epoch(1, 900).unwrap() - 1e4).abs() < 1.0, "steps may become slower");
    }

    #[test]
    fn the_time_of_a_step_is_proportional_to_its_pixels() {
        let mut pace = Pace::new(3, 4, vec![0.25, 0.5]);
        let step = |epoch, step_ms| StepRecord { epoch, step_ms, ..StepRecord::default() };
        pace.step(&step(1, 1000.0));
        assert_eq!(pace.left_in_epoch(1, 1), Some(3.0));
        assert_eq!(pace.left_in_run(1, 1), Some(3.0 + 8.0 + 16.0));
        pace.step(&step(1, 1000.0));
        pace.step(&step(2, 2000.0));
        assert_eq!(pace.left_in_run(2, 1), Some(6.0 + 16.0));
        assert_eq!(pace.left_in_run(3, 0), Some(16.0));
    }
}
