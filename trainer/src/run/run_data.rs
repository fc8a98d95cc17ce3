//! The data set of a run and its loaders, from the plan.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use comm::Communicator;
use data::{
    DataError, ImageShape, SplitOptions, Splits,
    augment::Augment,
    formats::{self, LoadRequest},
    loader::{self, LoaderConfig, ResizeStage},
};

use super::{class_weights, decode_policy, shared_images};
use crate::cli::{DataDir, NamedBy};
use crate::config::{DatasetFacts, Decode, OnError, RunPlan, TrainConfig, small_image_epoch};
use crate::failure::Failure;
use crate::strategy::{Strategy, ddp};

/// Number of batches that the loader prepares in advance, at least.
const PREFETCH: usize = 4;

/// Returns the number of batches that the training loader prepares in advance. A step takes `accumulate` batches at once, so as
/// many are prepared while the step before computes.
pub(super) fn prefetched_batches(accumulate: usize) -> usize {
    accumulate.max(PREFETCH)
}

/// How much of the images a process needs.
#[derive(Clone, Copy)]
pub(super) enum PixelAccess<'a> {
    /// All pixels, since the process trains alone.
    Own,
    /// All pixels, shared by the ranks of the communicator. All ranks read the same plan.
    Shared(&'a Communicator),
    /// No pixels: the launcher only checks the plan and the labels, and reports mistakes.
    None,
}

/// Reads the data set of the plan and checks the plan against the data set.
///
/// # Errors
/// A file is missing or damaged, or the plan does not fit the images.
pub(super) fn read_data(plan: &mut RunPlan, pixels: PixelAccess<'_>) -> Result<Splits, Failure> {
    let start = Instant::now();
    let comm = match pixels {
        PixelAccess::Shared(comm) if comm.world_size() > 1 => Some(comm),
        _ => None,
    };
    let decode = match comm {
        Some(comm) => decode_policy::agreed(plan, comm)?,
        None => decode_policy::of_this_machine(plan),
    };
    let mut splits = formats::load(&LoadRequest {
        name: plan.data.name.clone(),
        dir: Some(plan.data.dir.clone().unwrap_or_else(cache_folder)),
        image_size: plan.data.image_size,
        resize: plan.data.resize,
        decode,
        limit_train: limit(plan.data.limit_train),
        limit_test: limit(plan.data.limit_test),
        split: SplitOptions { fraction: plan.data.fraction, ..validation_options(plan) },
        label_delim: plan.data.label_delim,
        defer_decoding: comm.is_some() || matches!(pixels, PixelAccess::None),
        defer_missing: plan.data.on_error == Some(OnError::Skip),
        only_for_evaluation: false,
    })
    .map_err(|error| with_plan_location(plan, error))?;
    if known_facts(&plan.data.name).is_none() {
        // Record the setting in the plan: all ranks compare it, and a resumed run keeps it.
        let in_each_epoch = splits.train.encoded.as_ref().is_some_and(|encoded| !encoded.is_decoding_deferred());
        plan.data.decode = Some(if in_each_epoch { Decode::Epoch } else { Decode::Memory });
    }
    let (train, test, seconds) = (splits.train.len(), splits.test.len(), start.elapsed().as_secs_f64());
    tracing::info!(name = plan.data.name, train, test, seconds, "read the data set");
    plan.check_against(&dataset_facts(&plan.data.name, &splits))?;
    class_weights::of_loss(plan, &splits.train)?;
    class_weights::of_positives(plan, &splits.train)?;
    class_weights::of_sampler(plan, &splits.train)?;
    if let Some(comm) = comm {
        // Compare now: ranks with different images would fail later, in a mismatch of collectives that hides the cause.
        ddp::check_same_job(&data_facts(plan, &splits), comm)?;
        shared_images::decode(&mut splits, comm)?;
    }
    Ok(splits)
}

/// Returns the facts that decide how the ranks decode images: the settings of `[data]` and the sizes of the splits.
fn data_facts(plan: &RunPlan, splits: &Splits) -> Vec<String> {
    let settings = plan.settings().into_iter().filter(|setting| setting.section == "data" && setting.key != "dir");
    let sizes = splits.iter().map(|(name, set)| format!("{name} set = {} images {}", set.len(), set.shape));
    settings.map(|setting| setting.to_string()).chain(sizes).collect()
}

/// Returns the loader's handling of damaged images.
pub(crate) fn on_error(plan: &RunPlan) -> loader::OnError {
    match plan.data.on_error {
        Some(OnError::Skip) => loader::OnError::Replace,
        Some(OnError::Error) | None => loader::OnError::Fail,
    }
}

/// Returns the validation split of a plan.
pub(crate) fn validation_options(plan: &RunPlan) -> SplitOptions {
    SplitOptions { validation: plan.data.validation, fraction: None, seed: plan.train.seed }
}

/// Adds the location in the plan to an error of the data set or of its loader whose `place` is a key of the plan, or whose file is
/// the data folder.
pub(super) fn with_plan_location(plan: &RunPlan, error: DataError) -> Failure {
    let key = match error.place.as_str() {
        key @ ("validation" | "fraction" | "limit_train") => format!("data.{key}"),
        key @ ("image_sizes" | "mixup" | "cutmix" | "class_weights") => format!("train.{key}"),
        _ => return with_folder_origin(plan, error),
    };
    plan.error_at(&[&key], format!("`{key}`: {}", error.cause), error.hint).into()
}

/// Adds to an error about the data folder, or about a missing file in it, who named the folder.
fn with_folder_origin(plan: &RunPlan, mut error: DataError) -> Failure {
    match &plan.data.dir {
        Some(dir) if !error.is_transient && error.place.is_empty() && is_of_folder(&error, dir) => {
            if dir.is_relative() {
                error.hint += "; the folder is relative to the current directory";
            }
            plan.error_at(&["data.dir"], error.to_string(), error.hint).into()
        }
        None if error.file == cache_folder() => {
            error.hint += "; this is the default folder, since nothing names one";
            error.into()
        }
        _ => error.into(),
    }
}

/// Adds to an error about the data folder that the variable `TRAINER_DATA_DIR` named it, for commands without a plan.
pub(crate) fn name_variable(mut error: DataError, dir: &Option<DataDir>) -> DataError {
    if let Some(dir @ DataDir { path, by: NamedBy::Variable }) = dir
        && is_of_folder(&error, path)
    {
        error.hint += &format!("; the variable {dir} names this folder");
    }
    error
}

/// Returns whether an error is about the data folder, or about a missing file in it.
fn is_of_folder(error: &DataError, dir: &Path) -> bool {
    error.file == dir || (error.file.starts_with(dir) && !error.file.exists())
}

/// Converts a number of images to a limit; 0 means no limit.
fn limit(count: usize) -> Option<usize> {
    (count > 0).then_some(count)
}

/// Returns the default folder of data sets: `$XDG_CACHE_HOME/trainer` or `~/.cache/trainer`.
pub(crate) fn cache_folder() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    cache.or_else(home).unwrap_or_else(std::env::temp_dir).join("trainer")
}

/// Returns the facts about a data set that are known before its files are read; `None` for an image folder.
pub(super) fn known_facts(name: &str) -> Option<DatasetFacts> {
    let info = formats::dataset_info(name)?;
    Some(DatasetFacts {
        channels: info.channels?,
        height: info.height?,
        width: info.width?,
        classes: info.classes?,
        mean: info.default_mean.to_vec(),
        std: info.default_std.to_vec(),
    })
}

/// Returns the facts about a data set from its files.
pub(crate) fn dataset_facts(name: &str, splits: &Splits) -> DatasetFacts {
    let (mean, std) = formats::dataset_info(name)
        .map(|info| (info.default_mean.to_vec(), info.default_std.to_vec()))
        .unwrap_or_default();
    let shape = splits.train.shape;
    let (channels, height, width) = (shape.channels, shape.height, shape.width);
    DatasetFacts { channels, height, width, classes: splits.train.classes.len(), mean, std }
}

/// Configures the loader of the training set. With `pixels` the loader decodes and augments images, otherwise the device does.
///
/// # Errors
/// The plan was not checked against its data set.
pub(super) fn train_loader(plan: &RunPlan, strategy: &dyn Strategy, pixels: bool) -> Result<LoaderConfig, Failure> {
    let train = &plan.train;
    let mut augment = plan.data.augment.clone();
    if train.cutout > 0 {
        augment.push(Augment::Cutout { size: train.cutout });
    }
    let on = |alpha: f64| (alpha > 0.0).then_some(alpha);
    Ok(LoaderConfig {
        global_batch: plan.train.global_batch(strategy.device_count()),
        shuffle: true,
        drop_last: train.drop_last,
        augment,
        mixup: on(train.mixup),
        cutmix: on(train.cutmix),
        resize_stages: resize_stages(plan),
        prefetch: prefetched_batches(train.accumulate),
        ..common_loader_config(plan, strategy, pixels)?
    })
}

/// Returns the stages of progressive resizing: the sizes of the first epochs' images.
pub(super) fn resize_stages(plan: &RunPlan) -> Vec<ResizeStage> {
    let TrainConfig { image_sizes, image_milestones, epochs, .. } = &plan.train;
    let pairs = image_sizes.iter().zip(image_milestones);
    pairs.map(|(&side, &milestone)| ResizeStage { last_epoch: small_image_epoch(milestone, *epochs), side }).collect()
}

/// Configures the loader of an evaluated split: every sample once, without augmentation. `pixels` as in [`train_loader`].
///
/// # Errors
/// The plan was not checked against its data set.
pub(super) fn eval_loader(
    plan: &RunPlan,
    strategy: &dyn Strategy,
    shape: ImageShape,
    pixels: bool,
) -> Result<LoaderConfig, Failure> {
    // At most 256 images, and at most as many pixels as 256 images of 64x64 have.
    let pixels_of_one = (shape.height * shape.width).max(1);
    let images = (256 * 64 * 64 / pixels_of_one).clamp(1, 256);
    Ok(LoaderConfig {
        global_batch: plan.train.global_batch(strategy.device_count()).max(images),
        shuffle: false,
        evaluation: true,
        ..common_loader_config(plan, strategy, pixels)?
    })
}

/// Returns mean and standard deviation of each channel.
///
/// # Errors
/// The plan was not checked against its data set.
pub(crate) fn normalisation(plan: &RunPlan) -> Result<(Vec<f32>, Vec<f32>), Failure> {
    let unchecked = || Failure::run("the data set's mean and deviation are not known", "please report this");
    Ok((plan.data.mean.clone().ok_or_else(unchecked)?, plan.data.std.clone().ok_or_else(unchecked)?))
}

fn common_loader_config(plan: &RunPlan, strategy: &dyn Strategy, pixels: bool) -> Result<LoaderConfig, Failure> {
    let (mean, std) = normalisation(plan)?;
    Ok(LoaderConfig {
        rank: strategy.rank(),
        world_size: strategy.world_size(),
        seed: plan.train.seed,
        mean,
        std,
        workers: plan.data.workers,
        prefetch: PREFETCH,
        pixels,
        on_error: on_error(plan),
        ..LoaderConfig::default()
    })
}
