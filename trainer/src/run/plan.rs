//! Reads flags and TOML into a checked plan, and derives the data set and the loaders from the plan.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use comm::Communicator;
use data::{
    DataError, ImageShape, SplitOptions, Splits,
    augment::Augment,
    formats::{self, DecodeTime, LoadRequest},
    loader::{self, LoaderConfig, SmallImages},
};

use super::{class_weights, shared_images};
use crate::cli::TrainArgs;
use crate::config::{
    self, BatchScope, ConfigError, ConfigSource, DatasetFacts, Decode, Devices, Mode, OnError, Overrides, Registry,
    RunPlan, SetBy, TrainConfig, small_image_epoch,
};
use crate::console;
use crate::failure::Failure;
use crate::files::FileError;
use crate::report::{RunFolder, Section};
use crate::strategy::Strategy;

/// Number of batches that the loader prepares in advance.
const PREFETCH: usize = 4;

/// A run to start or to continue.
pub(super) struct PlannedRun {
    /// The checked plan.
    pub plan: RunPlan,
    /// The folder of the run to continue.
    pub resumed: Option<RunFolder>,
}

/// The access of this process to the folder of the run to continue. The text is the job's address, in a job on several nodes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Access<'a> {
    /// Reads the plan only.
    Read,
    /// Writes the folder, so locks it now.
    Write(Option<&'a str>),
    /// This process, or another process of this job, locks the folder later. Now only checks that no other program writes it.
    Check(Option<&'a str>),
    /// Writes this folder, which this process's launcher has locked.
    Given(&'a Path),
}

impl Access<'_> {
    /// Opens the run that `--resume` names, or the newest run that no other program writes.
    fn open(self, named: Option<&Path>, run_dir: &Path) -> Result<RunFolder, FileError> {
        let claim = |folder: &mut RunFolder| match self {
            Self::Read | Self::Given(_) => Ok(()),
            Self::Write(job) => folder.lock(job),
            Self::Check(job) => folder.check_free(job),
        };
        match (self, named) {
            (Self::Given(path), _) => RunFolder::open(path),
            // Do not check the lock here: node 0 of this job may be taking it just now. The check follows when all nodes have
            // joined.
            (Self::Check(Some(_)), Some(path)) => RunFolder::open(path),
            (_, Some(path)) => {
                let mut folder = RunFolder::open(path)?;
                claim(&mut folder).map(|()| folder)
            }
            // A node other than node 0 may have its own folder only.
            (Self::Check(Some(_)), None) => RunFolder::newest_that(run_dir, true, claim),
            (_, None) => RunFolder::newest_that(run_dir, false, claim),
        }
    }
}

/// The text of the plan: the file of `--config`, or the `config.toml` of the run to continue. It is read once, since it may be a pipe.
pub(super) struct PlanSource<'a> {
    arguments: &'a TrainArgs,
    text: Result<ConfigSource, ConfigError>,
    resumed: Option<RunFolder>,
}

impl<'a> PlanSource<'a> {
    /// Finds and reads the file. A file that cannot be read is an error of [`Self::read`].
    ///
    /// # Errors
    /// No flag names a file, or the run to continue cannot be opened, or another program writes it.
    pub(super) fn find(arguments: &'a TrainArgs, access: Access<'_>) -> Result<Self, Failure> {
        let Some(run) = &arguments.resume else {
            let path = match access {
                // The launcher has written the plan there. The user may have changed the file of --config since, and a worker that is
                // started again must not train something else.
                Access::Given(folder) => RunFolder::open(folder)?.config(),
                _ => arguments.config.clone().ok_or_else(|| {
                    Failure::usage("nothing says what to train", "name a TOML file: --config configs/quickstart.toml")
                })?,
            };
            return Ok(Self { arguments, text: ConfigSource::read(&path), resumed: None });
        };
        let opened = access.open(run.as_deref(), &arguments.run_dir);
        let folder = opened.map_err(|error| Failure::usage(&error, &error.hint))?;
        Ok(Self { arguments, text: ConfigSource::read(&folder.config()), resumed: Some(folder) })
    }

    /// Returns the devices of the run on this machine, from the flags or else from the file. A resumed run keeps its devices. A
    /// mistake in the file is reported later, by [`PlanSource::read`].
    pub(super) fn devices(&self) -> Option<Devices> {
        let flags = devices_of_flags(self.arguments);
        let Ok(plan) = self.resolve(&overrides(self.arguments)) else { return flags };
        let one = plan.parallel.mode == Mode::Single && plan.set_by("parallel", "mode") == SetBy::Flag;
        match plan.parallel.devices {
            // `--resume RUN --mode single` for a run that had several devices.
            Some(devices) if one && flags.is_none() => Some(devices.with_count(1)),
            devices => devices,
        }
    }

    /// Reads the plan. `several` is set if the run has several workers. They are processes (DDP), unless a flag or the file
    /// selects mode DP, in which they are the devices of one process.
    ///
    /// # Errors
    /// Every mistake in the file and the flags, with its location.
    pub(super) fn read(self, several: bool) -> Result<PlannedRun, Failure> {
        let mut overrides = overrides(self.arguments);
        let dp = |overrides: &Overrides| self.resolve(overrides).is_ok_and(|p| p.parallel.mode == Mode::Dp);
        if several && overrides.mode.is_none() && !dp(&overrides) {
            overrides.mode = Some(Mode::Ddp.to_string());
        }
        let mut plan = with_notes(self.resolve(&overrides)?);
        plan.parallel.devices = self.devices();
        if let (Some(folder), Some(path)) = (&self.resumed, &self.arguments.config) {
            same_plan(path, &overrides, folder, &plan)?;
        }
        Ok(PlannedRun { plan, resumed: self.resumed })
    }

    fn resolve(&self, overrides: &Overrides) -> Result<RunPlan, Failure> {
        let source = self.text.as_ref().map_err(|error| config::ConfigErrors::from(error.clone()))?;
        resolve(source, overrides)
    }
}

/// Checks that `--config` and the resumed run have equal settings. The run's own config.toml may have additional keys: the
/// values that the data set determines, the mode and the devices.
fn same_plan(path: &Path, overrides: &Overrides, folder: &RunFolder, run: &RunPlan) -> Result<(), Failure> {
    let mut asked = read(path, overrides)?;
    if asked.set_by("parallel", "mode") == SetBy::Default {
        asked.parallel.mode = run.parallel.mode;
    }
    if asked.set_by("parallel", "devices") == SetBy::Default {
        asked.parallel.devices = run.parallel.devices;
    }
    let Some((asked, run)) = asked.first_difference(run) else { return Ok(()) };
    let run = run.map_or_else(|| "it has no such key".to_owned(), |setting| format!("`{setting}`"));
    Err(Failure::usage(
        format!("{}: `{asked}` is not what {} was started with: {run}", path.display(), folder.path().display()),
        "leave --config out to continue the run as it is, or give --set to change a value on purpose",
    ))
}

/// Returns the devices of `--cpus` or `--gpus`.
pub(super) fn devices_of_flags(arguments: &TrainArgs) -> Option<Devices> {
    arguments.gpus.map(Devices::Gpus).or(arguments.cpus.map(Devices::Cpus))
}

/// Returns the settings from flags, which override the TOML file.
fn overrides(arguments: &TrainArgs) -> Overrides {
    Overrides {
        mode: arguments.mode.clone(),
        backend: arguments.backend.clone(),
        devices: devices_of_flags(arguments),
        set: arguments.set.clone(),
        epochs: arguments.epochs,
        seed: arguments.seed,
        data_dir: arguments.data_dir.clone(),
        autotune: arguments.autotune,
    }
}

/// Reads and checks a TOML file, and prints its notes.
///
/// # Errors
/// Every mistake in the file, with its location.
pub(crate) fn load(path: &Path, overrides: &Overrides) -> Result<RunPlan, Failure> {
    Ok(with_notes(read(path, overrides)?))
}

/// Prints the notes of a plan.
fn with_notes(plan: RunPlan) -> RunPlan {
    for note in plan.notes() {
        console::eprint(format_args!("note: {note}"));
    }
    plan
}

/// Does the work of [`load`] without printing notes.
fn read(path: &Path, overrides: &Overrides) -> Result<RunPlan, Failure> {
    resolve(&ConfigSource::read(path).map_err(config::ConfigErrors::from)?, overrides)
}

/// Checks the text of a plan.
fn resolve(source: &ConfigSource, overrides: &Overrides) -> Result<RunPlan, Failure> {
    let models: Vec<_> = models::entries().iter().map(|entry| entry.name).collect();
    let datasets: Vec<_> = formats::dataset_names().collect();
    let registry = Registry { models: &models, dataset_names: &datasets, datasets: &known_facts };
    Ok(config::resolve(source, overrides, &registry)?)
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
    let decode = decode_time(plan);
    let comm = match pixels {
        PixelAccess::Shared(comm) if comm.world() > 1 => Some(comm),
        _ => None,
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
        share: comm.is_some() || matches!(pixels, PixelAccess::None),
        evaluates: false,
    })
    .map_err(|error| blame_key(plan, error))?;
    if let Some(comm) = comm {
        shared_images::decode(&mut splits, comm)?;
    }
    if known_facts(&plan.data.name).is_none() {
        // Record the setting in the plan: all ranks compare it, and a resumed run keeps it.
        let in_each_epoch = splits.train.encoded.as_ref().is_some_and(|encoded| !encoded.is_decoded_once());
        plan.data.decode = Some(if in_each_epoch { Decode::Epoch } else { Decode::Memory });
    }
    let (train, test, seconds) = (splits.train.len(), splits.test.len(), start.elapsed().as_secs_f64());
    tracing::info!(name = plan.data.name, train, test, seconds, "read the data set");
    plan.check_against(&dataset_facts(&plan.data.name, &splits))?;
    class_weights::of_loss(plan, &splits.train)?;
    class_weights::of_positives(plan, &splits.train)?;
    class_weights::of_sampler(plan, &splits.train)?;
    Ok(splits)
}

/// Decides when the images are decoded: once into memory, or in every epoch.
fn decode_time(plan: &RunPlan) -> DecodeTime {
    let data = &plan.data;
    let crops = data.augment.iter().any(|step| matches!(step, Augment::RandomResizedCrop { .. }));
    match data.decode {
        Some(Decode::Memory) => DecodeTime::Memory,
        Some(Decode::Epoch) => DecodeTime::Epoch,
        // These settings need the files in every epoch.
        None if crops || data.on_error == Some(OnError::Skip) => DecodeTime::Epoch,
        // The size decides. The processes of a machine share the images, so their number does not matter.
        None => DecodeTime::by_memory(),
    }
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

/// Adds the location in the plan to an error of the data set or of its loader whose `place` is a key of the plan.
pub(super) fn blame_key(plan: &RunPlan, error: DataError) -> Failure {
    let key = match error.place.as_str() {
        key @ ("validation" | "fraction" | "limit_train") => format!("data.{key}"),
        key @ ("image_sizes" | "mixup" | "cutmix" | "class_weights") => format!("train.{key}"),
        _ => return error.into(),
    };
    plan.mistake(&[&key], format!("`{key}`: {}", error.cause), error.hint).into()
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

/// Returns the facts about a data set from its files.
pub(crate) fn dataset_facts(name: &str, splits: &Splits) -> DatasetFacts {
    let (mean, std) =
        formats::metadata(name).map(|info| (info.default_mean.to_vec(), info.default_std.to_vec())).unwrap_or_default();
    let shape = splits.train.shape;
    let (channels, height, width) = (shape.channels, shape.height, shape.width);
    DatasetFacts { channels, height, width, classes: splits.train.classes.len(), mean, std }
}

/// Returns the plan's sections of the start-up table.
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
        global_batch: global_batch(plan, strategy),
        shuffle: true,
        drop_last: train.drop_last,
        augment,
        mixup: on(train.mixup),
        cutmix: on(train.cutmix),
        small_images: small_images(plan),
        ..common_loader_config(plan, strategy, pixels)?
    })
}

/// Returns the number of images of a step on all devices.
fn global_batch(plan: &RunPlan, strategy: &dyn Strategy) -> usize {
    match plan.train.batch_scope {
        BatchScope::Global => plan.train.batch_size,
        BatchScope::PerWorker => plan.train.batch_size * strategy.devices(),
    }
}

/// Returns the sizes of the first epochs' images.
pub(super) fn small_images(plan: &RunPlan) -> Vec<SmallImages> {
    let TrainConfig { image_sizes, image_milestones, epochs, .. } = &plan.train;
    let pairs = image_sizes.iter().zip(image_milestones);
    pairs.map(|(&side, &milestone)| SmallImages { last_epoch: small_image_epoch(milestone, *epochs), side }).collect()
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
        global_batch: global_batch(plan, strategy).max(images),
        shuffle: false,
        exact: true,
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
        world: strategy.world(),
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
