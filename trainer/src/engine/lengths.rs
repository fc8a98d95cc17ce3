//! The lengths of a run in epochs, steps and batches.

use data::loader::Loader;

use crate::config::{RunPlan, ScheduleKind};
use crate::failure::Failure;
use crate::snapshot::RunProgress;
use crate::text::counted;

/// The number of steps of a run and of its epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunLength {
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

impl RunLength {
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
        let (images, global_batch) = (loader.dataset_len(), loader.global_batch());
        Self { images, global_batch, batches_per_epoch, steps_per_epoch, epochs, schedule_steps, last_step }
    }

    /// Returns a note if the warm-up is as long as the run, or longer. The learning rate then does not reach its highest value.
    pub fn long_warmup_note(&self, plan: &RunPlan) -> Option<String> {
        let steps = (plan.schedule.warmup_epochs * self.steps_per_epoch as f64).round() as u64;
        let is_long = plan.schedule.kind != ScheduleKind::OneCycle
            && steps > 0
            && steps >= self.schedule_steps.min(self.last_step);
        let run = counted(self.schedule_steps.min(self.last_step), "step");
        is_long.then(|| {
            format!("the warm-up takes {} and the run has {run}: schedule.warmup_epochs", counted(steps, "step"))
        })
    }

    /// Checks that a resumed run has as many steps per epoch as before, because the schedule and the end of the run are counted in
    /// steps. If the run continues inside an epoch, its position is counted in batches, so the numbers of images and the batch size
    /// must be the same too.
    ///
    /// # Errors
    /// The batch size, the accumulation, the number of images or, with batches per worker, the number of workers has changed.
    pub fn check(&self, progress: &RunProgress) -> Result<(), Failure> {
        let inside = |count: Option<usize>| count.filter(|_| progress.batch > 0).map(|count| count as u64);
        for (what, before, now, unit) in [
            ("an epoch", progress.steps_per_epoch, self.steps_per_epoch, "steps"),
            ("an epoch", inside(progress.batches_per_epoch), self.batches_per_epoch as u64, "batches"),
            ("an epoch", inside(progress.images), self.images as u64, "images"),
            ("a batch", inside(progress.global_batch), self.global_batch as u64, "images"),
        ] {
            let Some(before) = before.filter(|before| *before != now) else {
                continue;
            };
            return Err(Failure::usage(
                format!("{what} of this run had {before} {unit}, and has {now} now"),
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
    fn a_resumed_run_must_keep_its_steps_per_epoch_and_inside_an_epoch_its_batches() {
        let lengths = RunLength {
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
        let of_images = |[images, global_batch]: [usize; 2], batch| RunProgress {
            images: Some(images),
            global_batch: Some(global_batch),
            ..progress(Some(10), Some(20), batch)
        };
        assert_eq!(error(of_images([80, 4], 4)), Ok(()));
        assert_eq!(error(of_images([79, 4], 0)), Ok(()), "between two epochs");
        let expected = |text: &str| Err(text.to_owned());
        assert_eq!(error(of_images([79, 4], 4)), expected("an epoch of this run had 79 images, and has 80 now"));
        assert_eq!(error(of_images([80, 5], 4)), expected("a batch of this run had 5 images, and has 4 now"));
        let complete = RunProgress { epoch: 4, ..progress(Some(9), Some(20), 0) };
        assert_eq!(
            error(complete),
            expected("an epoch of this run had 9 steps, and has 10 now"),
            "its summary is written again"
        );
    }
}
