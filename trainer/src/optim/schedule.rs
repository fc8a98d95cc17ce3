//! Learning-rate schedules, one value per optimizer step.
//!
//! Source: `torch.optim.lr_scheduler` (CosineAnnealingLR, OneCycleLR, MultiStepLR, LinearLR + SequentialLR). PyTorch computed
//! the golden values of the tests.

use std::f64::consts::PI;

use crate::config::{Anneal, BatchScope, LrScale, RunPlan, ScheduleConfig, ScheduleKind};

/// The learning rate as a pure function of the optimizer step, so that a resumed run needs no schedule state.
#[derive(Debug, Clone)]
pub struct Schedule {
    config: ScheduleConfig,
    base_lr: f64,
    total_steps: u64,
    steps_per_epoch: u64,
}

impl Schedule {
    /// Makes a schedule over `total_steps` optimizer steps. `base_lr` is the highest learning rate.
    pub fn new(config: &ScheduleConfig, base_lr: f64, total_steps: u64, steps_per_epoch: u64) -> Self {
        Self { config: config.clone(), base_lr, total_steps, steps_per_epoch }
    }

    /// Returns the learning rate of optimizer step `step`, counted from 0.
    pub fn lr(&self, step: u64) -> f64 {
        // OneCycleLR has its own warm-up.
        let warmup_steps = match self.config.kind {
            ScheduleKind::OneCycle => 0,
            _ => (self.config.warmup_epochs * self.steps_per_epoch as f64).round() as u64,
        };
        if step < warmup_steps {
            // LinearLR: from warmup_start * lr to lr.
            let start = self.config.warmup_start;
            return self.base_lr * (start + (1.0 - start) * step as f64 / warmup_steps as f64);
        }
        match self.config.kind {
            ScheduleKind::Constant => self.base_lr,
            ScheduleKind::Cosine => self.cosine(step - warmup_steps, self.total_steps.saturating_sub(warmup_steps)),
            ScheduleKind::MultiStep => self.multi_step(step),
            ScheduleKind::OneCycle => self.one_cycle(step),
        }
    }

    /// CosineAnnealingLR to `min_lr` over the `span` steps after the warm-up.
    fn cosine(&self, step: u64, span: u64) -> f64 {
        let (fraction, end) = ((step as f64 / span.max(1) as f64).min(1.0), self.config.min_lr);
        end + (self.base_lr - end) * (1.0 + (PI * fraction).cos()) / 2.0
    }

    /// MultiStepLR. A milestone up to 1 is a fraction of the run; above 1 it is an epoch.
    fn multi_step(&self, step: u64) -> f64 {
        let passed = self.config.milestones.iter().filter(|&&milestone| {
            let unit = if milestone <= 1.0 { self.total_steps } else { self.steps_per_epoch };
            step >= (milestone * unit as f64).round() as u64
        });
        self.base_lr * self.config.gamma.powi(passed.count() as i32)
    }

    /// OneCycleLR with `cycle_momentum=False`: up from lr/div to lr over the first `pct_start` of the run, then down to
    /// lr/div/final_div. The phases end at `pct_start * total - 1` and `total - 1`, as in PyTorch.
    fn one_cycle(&self, step: u64) -> f64 {
        let ScheduleConfig { pct_start, div, final_div, anneal, .. } = self.config;
        let (low, peak) = (self.base_lr / div, self.base_lr);
        let end = low / final_div;
        let last = self.total_steps.saturating_sub(1) as f64;
        // Negative if the rise is shorter than a step: then the fall begins before the first step.
        let top = pct_start * self.total_steps as f64 - 1.0;
        let step = (step as f64).min(last);
        let (from, to, fraction) = if step <= top && top > 0.0 {
            (low, peak, step / top)
        } else if last > top {
            (peak, end, (step - top) / (last - top))
        } else {
            (peak, end, 1.0)
        };
        match anneal {
            Anneal::Linear => from + (to - from) * fraction,
            Anneal::Cos => to + (from - to) / 2.0 * (1.0 + (PI * fraction).cos()),
        }
    }
}

/// Returns the factor of `optimizer.lr_scale`: the linear scaling rule (Goyal et al. 2017), and its square root. The learning rate
/// grows with the global batch size, which grows with the number of `devices` only if `batch_size` is per worker.
pub fn lr_scale_factor(plan: &RunPlan, devices: usize) -> f64 {
    let growth = match plan.train.batch_scope {
        BatchScope::Global => 1.0,
        BatchScope::PerWorker => devices as f64,
    };
    match plan.optimizer.lr_scale {
        LrScale::None => 1.0,
        LrScale::Linear => growth,
        LrScale::Sqrt => growth.sqrt(),
    }
}
