//! The lengths of a run in epochs, steps and batches.

use data::loader::Loader;

use crate::config::{RunPlan, ScheduleKind};
use crate::failure::Failure;
use crate::snapshot::RunProgress;

/// The number of steps of a run and of its epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// Training images.
    pub images: usize,
    /// Images of a batch over all ranks.
    pub global_batch: usize,
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
    /// Computes the lengths from the plan and the loader of the training images.
    pub fn new(plan: &RunPlan, loader: &Loader) -> Self {
        let batches_per_epoch = loader.batches_per_epoch();
        let steps_per_epoch = batches_per_epoch.div_ceil(plan.train.accumulate).max(1) as u64;
        let limit = plan.train.max_steps as u64;
        let epochs = match plan.train.epochs {
            0 => limit.div_ceil(steps_per_epoch) as usize,
            epochs => epochs,
        };
        let all = epochs as u64 * steps_per_epoch;
        let schedule_steps = if plan.train.epochs == 0 { limit } else { all };
        let last_step = if limit == 0 { all } else { all.min(limit) };
        let (images, global_batch) = (loader.images(), loader.global_batch());
        Self { images, global_batch, batches_per_epoch, steps_per_epoch, epochs, schedule_steps, last_step }
    }

    /// Checks that the warm-up ends before the schedule does. The configuration has checked it for a run whose length is in epochs.
    ///
    /// # Errors
    /// The warm-up is as long as the schedule, or longer.
    pub fn check_warmup(&self, plan: &RunPlan) -> Result<(), Failure> {
        let warmup = plan.schedule.warmup_epochs;
        if plan.schedule.kind == ScheduleKind::OneCycle || warmup == 0.0 {
            return Ok(());
        }
        let steps = (warmup * self.steps_per_epoch as f64).round() as u64;
        if steps < self.schedule_steps {
            return Ok(());
        }
        let cause =
            format!("{warmup} epochs of warm-up are {steps} steps, and the run has {} steps", self.schedule_steps);
        let hint = "shorten the warm-up (0 = none) or train for more steps";
        Err(plan.mistake(&["schedule.warmup_epochs"], cause, hint).into())
    }

    /// Checks that a run that continues has the steps per epoch that it had. Its schedule and last step are counted in steps, so it
    /// would otherwise end early, or at another learning rate. Inside an epoch, its position is counted in batches, so it must have the
    /// images and batches that it had.
    ///
    /// # Errors
    /// The batch size, the accumulation, the number of images or, with batches per worker, the number of workers has changed.
    pub fn check(&self, progress: &RunProgress) -> Result<(), Failure> {
        let steps = (progress.steps_per_epoch, self.steps_per_epoch, "steps");
        let inside = progress.batches_per_epoch.filter(|_| progress.batch > 0);
        let batches = (inside.map(|batches| batches as u64), self.batches_per_epoch as u64, "batches");
        let [images, size] =
            progress.images_and_batch.filter(|_| progress.batch > 0).map_or([None; 2], |all| all.map(Some));
        let images = (images.map(|images| images as u64), self.images as u64, "images");
        let size = (size.map(|size| size as u64), self.global_batch as u64, "images in a batch");
        for (before, now, unit) in [steps, batches, images, size] {
            let Some(before) = before.filter(|before| *before != now && progress.epoch <= self.epochs) else {
                continue;
            };
            return Err(Failure::usage(
                format!("an epoch of this run had {before} {unit}, and has {now} now"),
                "continue with the batch size, accumulation and images that it had (with train.batch_scope = \"per_worker\" also \
                 with the number of workers), or start a new run from its weights: model.weights = \"RUN/checkpoints/last\"",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_continues_has_the_steps_and_inside_an_epoch_the_batches_that_it_had() {
        let lengths = Lengths {
            images: 80,
            global_batch: 4,
            batches_per_epoch: 20,
            steps_per_epoch: 10,
            epochs: 3,
            schedule_steps: 30,
            last_step: 30,
        };
        let progress = |steps, batches, batch| RunProgress {
            steps_per_epoch: steps,
            batches_per_epoch: batches,
            batch,
            ..RunProgress::start()
        };
        let error = |progress: RunProgress| lengths.check(&progress).map_err(|error| error.message);
        assert_eq!(error(progress(None, None, 4)), Ok(()));
        assert_eq!(error(progress(Some(10), Some(20), 4)), Ok(()));
        assert_eq!(error(progress(Some(10), Some(10), 0)), Ok(()), "between two epochs");
        let expected = Err("an epoch of this run had 10 batches, and has 20 now".to_owned());
        assert_eq!(error(progress(Some(10), Some(10), 4)), expected);
        assert_eq!(
            error(progress(Some(9), Some(20), 0)),
            Err("an epoch of this run had 9 steps, and has 10 now".to_owned())
        );
        let of_images = |all, batch| RunProgress { images_and_batch: Some(all), ..progress(Some(10), Some(20), batch) };
        assert_eq!(error(of_images([80, 4], 4)), Ok(()));
        assert_eq!(error(of_images([79, 4], 0)), Ok(()), "between two epochs");
        let expected = |what: &str| Err(format!("an epoch of this run had {what} now"));
        assert_eq!(error(of_images([79, 4], 4)), expected("79 images, and has 80"));
        assert_eq!(error(of_images([80, 5], 4)), expected("5 images in a batch, and has 4"));
        assert_eq!(error(RunProgress { epoch: 4, ..progress(Some(9), Some(20), 0) }), Ok(()), "the run is complete");
    }
}
