//! Checks `train.image_sizes` and `train.image_milestones`.

use super::check;
use super::plan::RunPlan;
use super::reader::Reader;
use super::sections::TrainConfig;

/// Returns the last epoch with small images, or 0 if no epoch has them. A milestone below 1 is a fraction of the run, and the run's
/// last epoch then always has whole images. A milestone above 1 is an epoch.
pub fn small_image_epoch(milestone: f64, epochs: usize) -> usize {
    match milestone < 1.0 {
        true => ((milestone * epochs as f64).round() as usize).min(epochs.saturating_sub(1)),
        false => milestone.round() as usize,
    }
}

/// Checks the image sizes of the first epochs.
pub(super) fn check(plan: &RunPlan, reader: &mut Reader) {
    if reader.is_broken("train", "image_sizes") || reader.is_broken("train", "image_milestones") {
        return;
    }
    let TrainConfig { image_sizes, image_milestones, epochs, .. } = &plan.train;
    if image_sizes.len() != image_milestones.len() {
        let (sizes, milestones) = (image_sizes.len(), image_milestones.len());
        let cause = format!("expected as many milestones as sizes ({sizes}), found {milestones}");
        let hint = "image_sizes = [16, 24] with image_milestones = [0.3, 0.6]: sides of 16 pixels until 30 % of the epochs, of 24 \
                    until 60 %, then whole images";
        return reader.reject("train.image_milestones", cause, hint);
    }
    if let Some(pair) = image_sizes.windows(2).find(|pair| pair[0] >= pair[1]) {
        let cause = format!("expected rising sizes, found {} before {}", pair[0], pair[1]);
        reader.reject("train.image_sizes", cause, "sort them in ascending order, without duplicates");
    }
    if image_sizes.is_empty() {
        return;
    }
    check::milestones("train.image_milestones", image_milestones, reader);
    let late = |milestone: &&f64| *epochs > 0 && **milestone > 1.0 && **milestone >= *epochs as f64;
    if let Some(late) = image_milestones.iter().find(late) {
        reader.notes.push(format!(
            "`train.image_milestones`: no epoch after {late} in {epochs} epochs, so none has whole images"
        ));
    }
    let mut before = 0;
    for (milestone, size) in image_milestones.iter().zip(image_sizes).filter(|_| *epochs > 0) {
        let last = small_image_epoch(*milestone, *epochs);
        if last == before {
            reader.notes.push(format!(
                "`train.image_milestones`: no epoch of {epochs} ends at {milestone}, so none has images of {size} pixels"
            ));
        }
        before = last;
    }
    if !plan.parallel.autotune.is_empty() {
        let cause = "tuning compares the times of steps, and the first epochs' images are smaller";
        reader.reject(
            "parallel.autotune",
            cause,
            "tune a run without `image_sizes`, and copy the settings that it prints",
        );
    }
    if *epochs == 0 && image_milestones[0] < 1.0 {
        let cause = "fractions of a run that has no length in epochs";
        reader.reject("train.image_milestones", cause, "give epochs, such as [5, 10], or set train.epochs");
    }
}
