//! Reads flags and TOML into a checked plan.

use std::path::Path;

use comm::TransportKind;
use data::formats;
use models::BuildError;

use super::run_data::known_facts;
use crate::cli::TrainArgs;
use crate::config::{self, Backend, ConfigError, ConfigSource, Devices, Mode, Overrides, Registry, RunPlan, SetBy};
use crate::console;
use crate::failure::Failure;
use crate::files::{FileError, USAGE};
use crate::report::run_folder::SearchedNodes;
use crate::report::{RunFolder, Section};
use crate::strategy::StepSettings;

/// Hint for a build without the mpi backend.
const MPI_HINT: &str = "build with `cargo build --release --features mpi` (it needs an MPI library's headers and libclang), \
                        or use \"auto\", \"shm\" or \"tcp\"";

/// A run to start or to continue.
pub(super) struct PlannedRun {
    /// The checked plan.
    pub plan: RunPlan,
    /// The folder of the run to continue.
    pub resumed: Option<RunFolder>,
}

/// How this process may use the folder of the run to continue. `Option<&str>` is the address of a job on several nodes.
#[derive(Debug, Clone, Copy)]
pub(super) enum FolderAccess<'a> {
    /// Reads the plan only.
    Read,
    /// Writes the folder, so locks it now.
    Write(Option<&'a str>),
    /// This process, or another process of this job, locks the folder later. Now only checks that no other program writes it.
    Check(Option<&'a str>),
    /// Writes this folder, which this process's launcher has locked.
    LockedByLauncher(&'a Path),
}

impl FolderAccess<'_> {
    /// Opens the run that `--resume` names, or the newest run that no other program writes.
    fn open(self, named: Option<&Path>, run_dir: &Path) -> Result<RunFolder, FileError> {
        let claim = |folder: &mut RunFolder| match self {
            Self::Read | Self::LockedByLauncher(_) => Ok(()),
            Self::Write(job) => folder.lock(job),
            Self::Check(job) => folder.check_not_locked(job),
        };
        // A folder that is not a run folder is wrong input. A run folder that cannot be written has its own exit code.
        let open = |path| RunFolder::open(path).map_err(|error| FileError { code: USAGE, ..error });
        match (self, named) {
            (Self::LockedByLauncher(path), _) => open(path),
            // Do not check the lock here: node 0 of this job may be taking it just now. The check follows when all nodes have
            // joined.
            (Self::Check(Some(_)), Some(path)) => open(path),
            (_, Some(path)) => {
                let mut folder = open(path)?;
                claim(&mut folder).map(|()| folder)
            }
            // A node other than node 0 may have its own folder only.
            (Self::Check(Some(_)), None) => RunFolder::newest_usable(run_dir, SearchedNodes::All, claim),
            (_, None) => RunFolder::newest_usable(run_dir, SearchedNodes::Node0, claim),
        }
    }
}

/// The text of the plan: the file of `--config`, or the `config.toml` of the run to continue. The text is read once, since the file
/// may be a pipe.
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
    pub(super) fn find(arguments: &'a TrainArgs, access: FolderAccess<'_>) -> Result<Self, Failure> {
        let Some(run) = &arguments.resume else {
            let path = match access {
                // The launcher has written the plan there. The user may have changed the file of --config since, and a worker that
                // is started again must not train something else.
                FolderAccess::LockedByLauncher(folder) => RunFolder::open(folder)?.config(),
                _ => arguments.config.clone().ok_or_else(|| {
                    Failure::usage("nothing says what to train", "name a TOML file: --config configs/quickstart.toml")
                })?,
            };
            return Ok(Self { arguments, text: ConfigSource::read(&path), resumed: None });
        };
        let folder = access.open(run.as_deref(), &arguments.run_dir)?;
        Ok(Self { arguments, text: ConfigSource::read(&folder.config()), resumed: Some(folder) })
    }

    /// Makes the source of a new run from a file that was read before.
    pub(super) fn of_text(arguments: &'a TrainArgs, text: ConfigSource) -> Self {
        Self { arguments, text: Ok(text), resumed: None }
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

    /// Reads the plan. If the run `has_several_workers`, they are processes (DDP), unless a flag or the file selects mode DP, in
    /// which the workers are the devices of one process.
    ///
    /// # Errors
    /// Every mistake in the file and the flags, with its location.
    pub(super) fn read(self, has_several_workers: bool) -> Result<PlannedRun, Failure> {
        let mut overrides = overrides(self.arguments);
        let dp = |overrides: &Overrides| self.resolve(overrides).is_ok_and(|p| p.parallel.mode == Mode::Dp);
        if has_several_workers && overrides.mode.is_none() && !dp(&overrides) {
            overrides.mode = Some(Mode::Ddp.to_string());
        }
        let mut plan = self.resolve(&overrides)?;
        plan.parallel.devices = self.devices();
        if let (Some(folder), Some(path)) = (&self.resumed, &self.arguments.config) {
            check_same_plan(path, &overrides, folder, &plan)?;
        }
        check_backend(&plan)?;
        Ok(PlannedRun { plan, resumed: self.resumed })
    }

    fn resolve(&self, overrides: &Overrides) -> Result<RunPlan, Failure> {
        let source = self.text.as_ref().map_err(|error| config::ConfigErrors::from(error.clone()))?;
        resolve(source, overrides)
    }
}

/// Checks that this program was built with the backend that the processes use. Programs that only read a run need no backend.
fn check_backend(plan: &RunPlan) -> Result<(), Failure> {
    let backend = plan.parallel.backend;
    let not_built = |hint: &str| (format!("\"{backend}\" is not built in this version"), hint.to_owned());
    let missing = match backend {
        Backend::Auto | Backend::Tcp => None,
        Backend::Shm => TransportKind::Shm.built().err().map(|error| (error.message, error.hint)),
        Backend::Mpi => (!cfg!(feature = "mpi")).then(|| not_built(MPI_HINT)),
        Backend::Cuda | Backend::Nccl => {
            (!cfg!(feature = "cuda")).then(|| not_built("use \"auto\", \"shm\" or \"tcp\""))
        }
    };
    match missing {
        Some((cause, hint)) if plan.parallel.mode == Mode::Ddp => {
            Err(plan.error_at(&["parallel.backend"], format!("`parallel.backend`: {cause}"), hint).into())
        }
        _ => Ok(()),
    }
}

/// Checks that `--config` and the resumed run have equal settings. The run's own config.toml may have additional keys: the
/// values that the data set determines, the mode and the devices.
fn check_same_plan(path: &Path, overrides: &Overrides, folder: &RunFolder, run: &RunPlan) -> Result<(), Failure> {
    let mut asked = read(path, overrides)?;
    if asked.set_by("parallel", "mode") == SetBy::Default {
        asked.parallel.mode = run.parallel.mode;
    }
    if asked.set_by("parallel", "devices") == SetBy::Default {
        asked.parallel.devices = run.parallel.devices;
    }
    if folder.autotune().exists() {
        // The run has the settings that were tuned, and need not be tuned again.
        StepSettings::of(run).write_to(&mut asked);
        asked.parallel.autotune.clone_from(&run.parallel.autotune);
    }
    let Some((asked, run)) = asked.first_difference(run) else { return Ok(()) };
    let run = run.map_or_else(|| "it has no such key".to_owned(), |setting| format!("`{setting}`"));
    Err(Failure::usage(
        format!("{}: `{asked}` is not what {} was started with: {run}", path.display(), folder.path().display()),
        "leave --config out to continue the run as it is, or give --set to change a value on purpose",
    ))
}

/// Returns the error for a plan whose model cannot be built.
pub(crate) fn model_mistake(plan: &RunPlan, error: &BuildError) -> Failure {
    plan.error_at(&[error.key(), "model.name"], error.to_string(), error.hint()).into()
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
    let plan = read(path, overrides)?;
    print_notes(&plan);
    Ok(plan)
}

/// Prints the notes of a plan.
pub(crate) fn print_notes(plan: &RunPlan) {
    for note in plan.notes() {
        console::eprint(format_args!("note: {note}"));
    }
}

/// Prints a note about the keys of `[parallel]` that change nothing in a run of one process. Only the processes of mode `ddp`
/// exchange gradients.
pub(super) fn note_unused_parallel_keys(plan: &RunPlan) {
    let keys = unused_parallel_keys(plan);
    if let Some((last, others)) = keys.split_last() {
        let list = others.iter().map(|key| format!("`parallel.{key}`, ")).collect::<String>();
        let mode = plan.parallel.mode;
        let threads =
            if keys.contains(&"threads") { "; RAYON_NUM_THREADS=N sets the threads of a process" } else { "" };
        console::eprint(format_args!(
            "note: {list}`parallel.{last}`: no effect in mode {mode}, which is one process{threads}"
        ));
    }
}

/// Returns the keys of `[parallel]` that are set to another value than their default and that a run of one process does not use.
fn unused_parallel_keys(plan: &RunPlan) -> Vec<&'static str> {
    let used: &[&str] = match plan.parallel.mode {
        Mode::Ddp => return Vec::new(),
        Mode::Single => &["mode", "devices", "autotune"],
        Mode::Dp => &["mode", "devices", "autotune", "batch_norm"],
    };
    // The config.toml of a run has all keys.
    let defaults = RunPlan::default().settings();
    let settings = plan.settings().into_iter().filter(|one| one.section == "parallel" && !used.contains(&one.key));
    let is_default = |key: &str, value: &toml::Value| {
        defaults.iter().any(|other| other.section == "parallel" && other.key == key && other.value == *value)
    };
    settings.filter(|one| !is_default(one.key, &one.value)).map(|one| one.key).collect()
}

/// Does the work of [`load`] without printing notes.
fn read(path: &Path, overrides: &Overrides) -> Result<RunPlan, Failure> {
    resolve(&ConfigSource::read(path).map_err(config::ConfigErrors::from)?, overrides)
}

/// Checks the text of a plan.
fn resolve(source: &ConfigSource, overrides: &Overrides) -> Result<RunPlan, Failure> {
    let models: Vec<_> = models::entries().iter().map(|entry| entry.name).collect();
    let datasets: Vec<_> = formats::dataset_names().collect();
    let registry = Registry { models: &models, dataset_names: &datasets, dataset_facts: &known_facts };
    Ok(config::resolve(source, overrides, &registry)?)
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
