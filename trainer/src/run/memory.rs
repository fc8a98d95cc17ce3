//! Compares the memory that images need on the CPU with the memory of this machine. Without this check, a failed allocation or
//! the kernel's out-of-memory killer would end the process without a hint.

use models::Spec;

use super::run_data::prefetched_batches;
use crate::config::TrainConfig;
use crate::text::counted;

/// Hint for a refusal.
pub(crate) const HINT: &str = "use a smaller image_size, or a smaller batch_size with train.accumulate";

/// Pixels of an image from which memory is checked. Smaller images are skipped, because the estimate takes tenths of a second.
const MIN_CHECKED_PIXELS: usize = 128 * 128;
/// Pixels of a step from which memory is checked, also for smaller images.
const MIN_CHECKED_STEP_PIXELS: usize = 2048 * 2048;

/// Returns the number of images of a loader's batch that one of `processes` processes has. In mode dp, one process has the images
/// of all `devices`.
pub(super) fn images_of_process(train: &TrainConfig, devices: usize, processes: usize) -> usize {
    train.global_batch(devices).div_ceil(processes)
}

/// The use of the memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MemoryUse {
    /// Forward and backward of `batch` images, for each of the `accumulate` batches of a step.
    Training { batch: usize, accumulate: usize, bytes_per_element: usize },
    /// Evaluation. Counts one image, since an evaluation needs at least one.
    Evaluation,
}

/// Returns the reason why this machine has not enough memory for `model` and images of the size in `spec`, or `None` if the
/// memory may be enough.
pub(crate) fn refusal(model: &str, spec: &Spec, memory_use: MemoryUse) -> Option<String> {
    let [height, width] = spec.image_size;
    let images = match memory_use {
        MemoryUse::Training { batch, accumulate, .. } => batch * accumulate,
        MemoryUse::Evaluation => 1,
    };
    if height * width < MIN_CHECKED_PIXELS && images * height * width < MIN_CHECKED_STEP_PIXELS {
        return None;
    }
    let memory = data::total_memory()? as f64;
    let [parameters, activations] = models::estimate_size(model, spec).ok()?;
    let pixels = (spec.in_channels * height * width) as f64;
    let (needed, what) = match memory_use {
        // As in `models::Cost::step_bytes`: weights, gradients and momentum, and what the backward pass needs. The other batches of
        // the step and those that the loader prepares have their pixels in f32.
        MemoryUse::Training { batch, accumulate, bytes_per_element } => {
            let images = counted(batch as u64, "image");
            let others = accumulate - 1 + prefetched_batches(accumulate);
            let needed = 12.0 * parameters
                + batch as f64
                    * (bytes_per_element as f64 * (activations + pixels)
                        + size_of::<f32>() as f64 * others as f64 * pixels);
            match accumulate {
                1 => (needed, format!("a training batch of {images}")),
                _ => (needed, format!("a training step of {accumulate} batches of {images}")),
            }
        }
        MemoryUse::Evaluation => (4.0 * (parameters + pixels), "an evaluation".to_owned()),
    };
    let gib = |bytes: f64| format!("{:.1} GiB", bytes / (1u64 << 30) as f64);
    (needed > memory).then(|| {
        format!(
            "{what} of {}x{height}x{width} pixels needs at least {} of memory, this machine has {}",
            spec.in_channels,
            gib(needed),
            gib(memory)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BatchScope;

    #[test]
    fn a_process_of_mode_dp_has_the_images_of_all_devices() {
        let mut train = TrainConfig { batch_size: 8, batch_scope: BatchScope::PerWorker, ..TrainConfig::default() };
        let counts = |train: &TrainConfig| {
            let [single, dp, ddp] = [[1, 1], [4, 1], [4, 4]];
            [single, dp, ddp].map(|[devices, processes]| images_of_process(train, devices, processes))
        };
        assert_eq!(counts(&train), [8, 32, 8]);
        train.batch_scope = BatchScope::Global;
        assert_eq!(counts(&train), [8, 8, 2]);
    }

    #[test]
    fn the_batches_of_a_step_and_those_of_the_next_one_count() {
        assert_eq!([1, 4, 9].map(prefetched_batches), [4, 4, 9]);
        let spec = Spec { num_classes: 10, in_channels: 1, image_size: [128, 128] };
        let refused =
            |accumulate| refusal("resnet18", &spec, MemoryUse::Training { batch: 1, accumulate, bytes_per_element: 4 });
        assert_eq!(refused(1), None);
        // The pixels of a step take 5/8 of the memory, so those of two steps are too many; then 3/8.
        let memory = data::total_memory().unwrap() as usize;
        let accumulate = memory / (128 * 128 * 4);
        let cause = refused(accumulate * 5 / 8).unwrap();
        let said = format!("a training step of {} batches of 1 image of 1x128x128 pixels needs", accumulate * 5 / 8);
        assert!(cause.starts_with(&said), "{cause}");
        assert_eq!(refused(accumulate * 3 / 8), None);
    }
}
