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

#[cfg(test)]
mod tests {
    use super::super::tests::numbers;
    use super::*;

    // Golden values: `torch.optim.lr_scheduler` in float64.
    fn schedules() -> serde_json::Value {
        serde_json::from_str(include_str!("../../tests/reference/lr_schedules.json")).expect("golden file")
    }

    fn check_schedule(key: &str, config: &ScheduleConfig, steps_per_epoch: u64) {
        let golden = schedules();
        let base = golden["base_lr"].as_f64().expect("base_lr");
        let steps = golden["steps"].as_u64().expect("steps");
        let schedule = Schedule::new(config, base, steps, steps_per_epoch);
        for (step, expected) in numbers(&golden[key]).into_iter().enumerate() {
            let lr = schedule.lr(step as u64);
            assert!((lr - expected).abs() < 1e-6, "{key} step {step}: {lr} against {expected}");
        }
    }

    fn schedule(kind: ScheduleKind) -> ScheduleConfig {
        ScheduleConfig { kind, warmup_epochs: 0.0, ..ScheduleConfig::default() }
    }

    fn one_cycle() -> ScheduleConfig {
        let kind = ScheduleKind::OneCycle;
        ScheduleConfig { pct_start: 0.2, div: 5.0, final_div: 1e4, anneal: Anneal::Linear, ..schedule(kind) }
    }

    fn multi_step(milestones: [f64; 2]) -> ScheduleConfig {
        ScheduleConfig { milestones: milestones.to_vec(), gamma: 0.1, ..schedule(ScheduleKind::MultiStep) }
    }

    #[test]
    fn schedules_equal_pytorch() {
        check_schedule("cosine_T_max=steps", &schedule(ScheduleKind::Cosine), 20);
        check_schedule("one_cycle_linear_pct_0.2_div_5_final_div_1e4", &one_cycle(), 20);
        let fractions = multi_step([0.5, 0.75]);
        check_schedule("multistep_milestones_half_and_three_quarters_gamma_0.1", &fractions, 20);
        let epochs = multi_step([5.0, 7.5]);
        check_schedule("multistep_milestones_half_and_three_quarters_gamma_0.1", &epochs, 2);
        let warmup = ScheduleConfig { warmup_epochs: 2.5, warmup_start: 0.2, ..schedule(ScheduleKind::Cosine) };
        check_schedule("linear_warmup_5_from_0.2_then_cosine", &warmup, 2);
    }

    #[test]
    fn cosine_annealing_to_a_learning_rate_equals_pytorch() {
        // torch.optim.lr_scheduler.CosineAnnealingLR(SGD(lr=0.1), T_max=6, eta_min=0.02).
        let expected = [0.1, 0.0946410161514, 0.08, 0.06, 0.04, 0.0253589838486, 0.02];
        let config = ScheduleConfig { min_lr: 0.02, ..schedule(ScheduleKind::Cosine) };
        let schedule = Schedule::new(&config, 0.1, 6, 1);
        for (step, expected) in expected.into_iter().enumerate() {
            let lr = schedule.lr(step as u64);
            assert!((lr - expected).abs() < 1e-9, "step {step}: {lr} against {expected}");
        }
    }

    #[test]
    fn one_cycle_with_cosine_annealing_equals_pytorch() {
        // torch.optim.lr_scheduler.OneCycleLR(max_lr=0.1, total_steps=10, pct_start=0.3, anneal_strategy="cos"), else the defaults.
        let usual = [
            0.004,
            0.052,
            0.1,
            0.0950484632,
            0.0811745654,
            0.0611262022,
            0.0388741978,
            0.0188258346,
            0.0049519368,
            4e-07,
        ];
        // With total_steps=8, pct_start=0.05 the rise is shorter than a step.
        let without_rise =
            [0.0984700194, 0.0894570676, 0.0737974745, 0.0541291508, 0.0337652915, 0.0161362569, 0.0042117168, 4e-07];
        for (pct_start, expected) in [(0.3, &usual[..]), (0.05, &without_rise[..])] {
            let config = ScheduleConfig { kind: ScheduleKind::OneCycle, pct_start, ..ScheduleConfig::default() };
            let schedule = Schedule::new(&config, 0.1, expected.len() as u64, 1);
            for (step, expected) in expected.iter().enumerate() {
                let lr = schedule.lr(step as u64);
                assert!((lr - expected).abs() < 1e-6, "{pct_start}, step {step}: {lr} against {expected}");
            }
        }
    }

    #[test]
    fn schedules_stay_finite_at_their_edges() {
        let [constant, cosine] = [ScheduleKind::Constant, ScheduleKind::Cosine].map(schedule);
        for config in [constant, cosine, multi_step([0.5, 0.75]), one_cycle()] {
            for total in [0, 1, 2, 3] {
                let schedule = Schedule::new(&config, 0.1, total, 1);
                for step in 0..5 {
                    let lr = schedule.lr(step);
                    assert!((0.0..=0.1 + 1e-12).contains(&lr), "{config:?} of {total} steps at {step}: {lr}");
                }
            }
        }
    }
}
