//! The lengths of a run in epochs, steps and batches.

use crate::config::RunPlan;

/// The number of steps of a run and of its epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// Loader batches in an epoch.
    pub batches_per_epoch: usize,
    /// Optimizer steps in an epoch.
    pub steps_per_epoch: u64,
    /// Epochs of the run.
    pub epochs: usize,
    /// Optimizer steps of the schedule: all epochs, or `max_steps` if the plan sets only the number of steps.
    pub schedule_steps: u64,
    /// The step at which the run ends.
    pub last_step: u64,
}

impl Lengths {
    /// Computes the lengths from the plan and the loader's number of batches.
    pub fn new(plan: &RunPlan, batches_per_epoch: usize) -> Self {
        let steps_per_epoch = batches_per_epoch.div_ceil(plan.train.accumulate).max(1) as u64;
        let limit = plan.train.max_steps as u64;
        let epochs = match plan.train.epochs {
            0 => limit.div_ceil(steps_per_epoch) as usize,
            epochs => epochs,
        };
        let all = epochs as u64 * steps_per_epoch;
        let schedule_steps = if plan.train.epochs == 0 { limit } else { all };
        let last_step = if limit == 0 { all } else { all.min(limit) };
        Self { batches_per_epoch, steps_per_epoch, epochs, schedule_steps, last_step }
    }
}
