//! Learning-rate schedules, one value per optimizer step.
//!
//! Source: `torch.optim.lr_scheduler` (CosineAnnealingLR, OneCycleLR, MultiStepLR, LinearLR + SequentialLR). PyTorch computed
//! the golden values of the tests.

use std::f64::consts::PI;

use crate::config::{Anneal, MultiStep, OneCycle, Schedule as Plan, Warmup};

/// The learning rate as a pure function of the optimizer step, so that a resumed run needs no schedule state.
#[derive(Debug, Clone)]
pub struct Schedule {
    plan: Plan,
    base_lr: f64,
    total_steps: u64,
    steps_per_epoch: u64,
}

impl Schedule {
    /// Makes a schedule over `total_steps` optimizer steps with the largest learning rate `base_lr`.
    pub fn new(plan: &Plan, base_lr: f64, total_steps: u64, steps_per_epoch: u64) -> Self {
        Self { plan: plan.clone(), base_lr, total_steps, steps_per_epoch }
    }

    /// Returns the learning rate of optimizer step `step`, counted from 0.
    pub fn lr(&self, step: u64) -> f64 {
        let warmup = match &self.plan {
            Plan::OneCycle(cycle) => return self.one_cycle(cycle, step),
            Plan::Constant(warmup) | Plan::Cosine(warmup) | Plan::MultiStep(MultiStep { warmup, .. }) => warmup,
        };
        let warmup_steps = self.warmup_steps(warmup);
        if step < warmup_steps {
            // LinearLR: from warmup.start * lr to lr.
            return self.base_lr * (warmup.start + (1.0 - warmup.start) * step as f64 / warmup_steps as f64);
        }
        match &self.plan {
            Plan::Constant(_) | Plan::OneCycle(_) => self.base_lr,
            Plan::Cosine(_) => self.cosine(step - warmup_steps, self.total_steps.saturating_sub(warmup_steps)),
            Plan::MultiStep(multi) => self.multi_step(multi, step),
        }
    }

    fn warmup_steps(&self, warmup: &Warmup) -> u64 {
        (warmup.epochs * self.steps_per_epoch as f64).round() as u64
    }

    /// CosineAnnealingLR to zero over the `span` steps after the warm-up.
    fn cosine(&self, step: u64, span: u64) -> f64 {
        let fraction = (step as f64 / span.max(1) as f64).min(1.0);
        self.base_lr * (1.0 + (PI * fraction).cos()) / 2.0
    }

    /// MultiStepLR. A milestone up to 1 is a fraction of the run; above 1 it is an epoch.
    fn multi_step(&self, multi: &MultiStep, step: u64) -> f64 {
        let passed = multi.milestones.iter().filter(|&&milestone| {
            let unit = if milestone <= 1.0 { self.total_steps } else { self.steps_per_epoch };
            step >= (milestone * unit as f64).round() as u64
        });
        self.base_lr * multi.gamma.powi(passed.count() as i32)
    }

    /// OneCycleLR: up from lr/div to lr over the first `pct_start` of the run, then down to lr/div/final_div. The phases end at
    /// `pct_start * total - 1` and `total - 1`, as in PyTorch.
    fn one_cycle(&self, cycle: &OneCycle, step: u64) -> f64 {
        let (low, peak) = (self.base_lr / cycle.div, self.base_lr);
        let end = low / cycle.final_div;
        let last = self.total_steps.saturating_sub(1) as f64;
        let top = (cycle.pct_start * self.total_steps as f64 - 1.0).max(0.0);
        let step = (step as f64).min(last);
        let (from, to, fraction) = if step <= top && top > 0.0 {
            (low, peak, step / top)
        } else if last > top {
            (peak, end, (step - top) / (last - top))
        } else {
            (peak, end, 1.0)
        };
        match cycle.anneal {
            Anneal::Linear => from + (to - from) * fraction,
            Anneal::Cos => to + (from - to) / 2.0 * (1.0 + (PI * fraction).cos()),
        }
    }
}
