//! From flags and registries to a checked plan, and from the plan to what the parts take.

use std::path::Path;

use data::{
    Splits,
    augment::{Augment, Fill},
    formats,
    loader::LoaderConfig,
};

use crate::cli::TrainArgs;
use crate::config::{self, Augmentation, BatchScope, DatasetFacts, Mode, Overrides, Registry, RunPlan};
use crate::failure::Failure;
use crate::report::Section;
use crate::strategy::Strategy;

/// Batches that the loader keeps ready.
const PREFETCH: usize = 4;

/// Reads and checks a TOML file as the flags change it; `gpu` where the run is on GPUs. Several workers are processes (DDP)
/// unless flag or file say that they are devices of one process (DP).
///
/// # Errors
/// Every mistake in it, with its place.
pub(super) fn plan(path: &Path, arguments: &TrainArgs, several: bool, gpu: bool) -> Result<RunPlan, Failure> {
    let mut overrides = overrides(arguments);
    let dp = |overrides: &Overrides| read(path, overrides, gpu).is_ok_and(|plan| plan.parallel.mode == Mode::Dp);
    if several && overrides.mode.is_none() && !dp(&overrides) {
        overrides.mode = Some(Mode::Ddp.to_string());
    }
    load(path, &overrides, gpu)
}

/// The flags that override the TOML.
fn overrides(arguments: &TrainArgs) -> Overrides {
    Overrides {
        mode: arguments.mode.clone(),
        backend: arguments.backend.clone(),
        set: arguments.set.clone(),
        epochs: arguments.epochs,
        seed: arguments.seed,
        data_dir: arguments.data_dir.clone(),
    }
}

/// Reads and checks a TOML file; `gpu` where what only GPUs do is no mistake.
///
/// # Errors
/// Every mistake in it, with its place.
pub(super) fn load(path: &Path, overrides: &Overrides, gpu: bool) -> Result<RunPlan, Failure> {
    let plan = read(path, overrides, gpu)?;
    for note in plan.notes() {
        eprintln!("note: {note}");
    }
    Ok(plan)
}

/// [`load`] without its notes.
fn read(path: &Path, overrides: &Overrides, gpu: bool) -> Result<RunPlan, Failure> {
    let models: Vec<_> = models::entries().iter().map(|entry| entry.name).collect();
    let datasets: Vec<_> = formats::dataset_names().collect();
    let registry = Registry { models: &models, dataset_names: &datasets, datasets: &known_facts, gpu };
    Ok(config::load(path, overrides, &registry)?)
}

/// What is known of a data set before its files are read; nothing of an image folder.
pub(super) fn known_facts(name: &str) -> Option<DatasetFacts> {
    let info = formats::metadata(name)?;
    Some(DatasetFacts {
        channels: info.channels?,
        height: info.height?,
        width: info.width?,
        classes: info.classes?,
        mean: info.default_mean.to_vec(),
        std: info.default_std.to_vec(),
    })
}

/// What the files turned out to hold.
pub(super) fn dataset_facts(name: &str, splits: &Splits) -> DatasetFacts {
    let (mean, std) =
        formats::metadata(name).map(|info| (info.default_mean.to_vec(), info.default_std.to_vec())).unwrap_or_default();
    let shape = splits.train.shape;
    let (channels, height, width) = (shape.channels, shape.height, shape.width);
    DatasetFacts { channels, height, width, classes: splits.train.classes.len(), mean, std }
}

/// The plan's sections for the start-up screen.
pub(super) fn sections(plan: &RunPlan) -> Vec<Section> {
    let mut sections = Vec::new();
    for (title, settings) in plan.table() {
        let mut section = Section::new(title);
        for (key, value) in settings {
            section = section.row(key, value);
        }
        sections.push(section);
    }
    sections
}

/// The loader of the training set; `pixels` unless the device has them.
///
/// # Errors
/// The plan was not checked against its data set.
pub(super) fn train_loader(plan: &RunPlan, strategy: &dyn Strategy, pixels: bool) -> Result<LoaderConfig, Failure> {
    let train = &plan.train;
    let mut augment: Vec<_> = plan.data.augment.iter().map(augmentation).collect();
    if train.cutout > 0 {
        augment.push(Augment::Cutout { size: train.cutout });
    }
    let on = |alpha: f64| (alpha > 0.0).then_some(alpha);
    let global_batch = match train.batch_scope {
        BatchScope::Global => train.batch_size,
        BatchScope::PerWorker => train.batch_size * strategy.devices(),
    };
    Ok(LoaderConfig {
        global_batch,
        shuffle: true,
        drop_last: train.drop_last,
        augment,
        mixup: on(train.mixup),
        cutmix: on(train.cutmix),
        ..common(plan, strategy, pixels)?
    })
}

/// Configures the loader of an evaluated split: every sample once, without augmentation; `pixels` unless the device has them.
///
/// # Errors
/// The plan was not checked against its data set.
pub(super) fn eval_loader(plan: &RunPlan, strategy: &dyn Strategy, pixels: bool) -> Result<LoaderConfig, Failure> {
    Ok(LoaderConfig {
        global_batch: plan.train.batch_size.max(256),
        shuffle: false,
        exact: true,
        ..common(plan, strategy, pixels)?
    })
}

fn common(plan: &RunPlan, strategy: &dyn Strategy, pixels: bool) -> Result<LoaderConfig, Failure> {
    let unchecked = || Failure::run("the data set's mean and deviation are not known", "please report this");
    Ok(LoaderConfig {
        rank: strategy.rank(),
        world: strategy.world(),
        seed: plan.train.seed,
        mean: plan.data.mean.clone().ok_or_else(unchecked)?,
        std: plan.data.std.clone().ok_or_else(unchecked)?,
        workers: plan.data.workers,
        prefetch: PREFETCH,
        pixels,
        ..LoaderConfig::default()
    })
}

fn augmentation(augmentation: &Augmentation) -> Augment {
    match *augmentation {
        Augmentation::Crop { padding } => Augment::Crop { padding, fill: Fill::Zero },
        Augmentation::ReflectCrop { padding } => Augment::Crop { padding, fill: Fill::Reflect },
        Augmentation::Flip => Augment::Flip,
        Augmentation::AlternatingFlip => Augment::AlternatingFlip,
    }
}
