//! The TOML that describes a run, resolved.
//!
//! File, `--set` and the flags that are short for it become one [`RunPlan`] that is complete and checked; nothing
//! below this module reads flags or the environment. Every mistake is a [`ConfigError`] that points at the line or the
//! flag that made it.
//!
//! Keys that the chosen kind has no use for (`milestones` with cosine) are errors, and [`RunPlan::to_toml`] writes only
//! the keys that apply: a run folder's `config.toml` shows every default that is in force and reads back as the same
//! plan. A flag that changes the kind leaves the file's keys of the other kind out and says so in [`RunPlan::notes`].

mod augment;
mod check;
mod choice;
mod error;
mod origin;
mod overrides;
mod plan;
mod reader;
mod schedule;
mod schema;
mod source;
mod suggest;
mod syntax;
mod table;
#[cfg(test)]
mod tests;
mod value;

use std::path::Path;

pub use augment::Augmentation;
pub use choice::{
    Anneal, Backend, BatchNormPolicy, BatchScope, Choice, Compression, LrScale, Mode, OptimizerName, Precision,
    ScheduleName,
};
pub use error::{ConfigError, ConfigErrors, Line, Place};
pub use overrides::Overrides;
pub use plan::{
    Checkpoint, Data, Log, Model, MultiStep, OneCycle, Optimizer, OptimizerKind, Parallel, RunPlan, Schedule, Setting,
    Train, Warmup,
};
pub use source::Source;
pub use table::Row;

use plan::Provenance;
use reader::Reader;

/// What the configuration has to know of a data set.
#[derive(Debug, Clone, PartialEq)]
pub struct DatasetFacts {
    /// Colour planes.
    pub channels: usize,
    /// Rows of an image.
    pub height: usize,
    /// Columns of an image.
    pub width: usize,
    /// Number of classes.
    pub classes: usize,
    /// Default mean of each channel of pixels in 0..1, `[C]`.
    pub mean: Vec<f32>,
    /// Default standard deviation of each channel of pixels in 0..1, `[C]`.
    pub std: Vec<f32>,
}

/// What this build can train, and on what.
pub struct Registry<'a> {
    /// Names of the models.
    pub models: &'a [&'a str],
    /// Names of the data sets.
    pub dataset_names: &'a [&'a str],
    /// The facts of a data set; `None` for one of which they are known only once its folder is read. Such a data set
    /// needs `data.dir`.
    pub datasets: &'a dyn Fn(&str) -> Option<DatasetFacts>,
    /// Whether the run is on GPUs.
    pub gpu: bool,
}

/// Reads the file at `path` and resolves it.
///
/// # Errors
/// Every mistake in the file and the flags; only the first where the text is not TOML at all.
pub fn load(path: &Path, overrides: &Overrides, registry: &Registry) -> Result<RunPlan, ConfigErrors> {
    resolve(&Source::read(path)?, overrides, registry)
}

/// Resolves a configuration whose text is at hand.
///
/// # Errors
/// Every mistake in the text and the flags; only the first where the text is not TOML at all.
pub fn resolve(source: &Source, overrides: &Overrides, registry: &Registry) -> Result<RunPlan, ConfigErrors> {
    let flags = overrides.flags()?;
    let mut reader = Reader::new(source)?;
    for flag in &flags {
        flag.apply(&mut reader);
    }
    let model = schema::model(&mut reader, registry);
    let data = schema::data(&mut reader, registry);
    let train = schema::train(&mut reader, registry, &data);
    let optimizer = schema::optimizer(&mut reader);
    let schedule = schedule::schedule(&mut reader, &train);
    let parallel = schema::parallel(&mut reader);
    let checkpoint = schema::checkpoint(&mut reader);
    let log = schema::log(&mut reader);
    reader.report_unknown();

    let Reader { origins, mut errors, notes, .. } = reader;
    let mut plan = RunPlan {
        model,
        data,
        train,
        optimizer,
        schedule,
        parallel,
        checkpoint,
        log,
        provenance: Provenance::new(origins, notes),
    };
    if let Some(facts) = (registry.datasets)(&plan.data.name) {
        errors.extend(plan.mistakes_against(&facts));
    }
    ConfigErrors::check(errors)?;
    Ok(plan)
}
