//! The TOML that describes a run, resolved.
//!
//! The file, `--set` and the flags for single keys (`--epochs`) become one [`RunPlan`] that is complete and checked. All modules
//! read the run's settings from the [`RunPlan`], not from flags. ARCHITECTURE.md lists the environment variables that modules read.
//! Every mistake is a [`ConfigError`] with the line or the flag that made it.
//!
//! Every key is declared once, in `sections.rs`. The reader, the defaults, the hints, [`RunPlan::settings`], [`RunPlan::to_toml`]
//! and the table in `configs/README.md` come from the declarations.
//!
//! Keys that the chosen kind does not use (`milestones` with cosine) are errors, and [`RunPlan::to_toml`] writes only
//! the keys that apply: a run folder's `config.toml` shows every default that is in force and reads back as the same
//! plan. If a flag changes the kind, the file's keys of the other kind are left out, with a note in [`RunPlan::notes`].

mod augment;
mod check;
mod class_weights;
mod devices;
mod documentation;
mod error;
mod image_sizes;
mod key;
mod keyword;
mod lr_factors;
mod multi_label;
mod origin;
mod overrides;
mod plan;
mod reader;
mod sections;
mod source;
mod suggest;
mod syntax;
#[cfg(test)]
mod tests;
mod value;

pub use class_weights::ClassWeights;
pub use devices::Devices;
pub use documentation::{key_called, key_tables};
pub use error::{ConfigError, ConfigErrors, Location, SourceLine};
pub use image_sizes::small_image_epoch;
pub use keyword::{
    Anneal, Backend, BatchNormPolicy, BatchScope, BestBy, Compression, Decode, Keyword, LrScale, Mode, OnError,
    OptimizerKind, Precision, ScheduleKind, Tta, Tunable,
};
pub use origin::SetBy;
pub use overrides::Overrides;
pub use plan::{RunPlan, Setting};
pub use sections::{
    CheckpointConfig, DataConfig, LogConfig, ModelConfig, OptimizerConfig, ParallelConfig, ScheduleConfig, TrainConfig,
};
pub use source::ConfigSource;
pub use suggest::{data_set_hint, layer_hint};

use plan::Provenance;
use reader::Reader;

/// The facts about a data set that the configuration needs.
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

/// The models and data sets of this build.
pub struct Registry<'a> {
    /// Names of the models.
    pub models: &'a [&'a str],
    /// Names of the data sets.
    pub dataset_names: &'a [&'a str],
    /// Returns the facts of a data set; `None` where they are known only after its folder is read. Such a data set
    /// needs `data.dir`.
    pub dataset_facts: &'a dyn Fn(&str) -> Option<DatasetFacts>,
}

/// Resolves a configuration from its text.
///
/// # Errors
/// Every mistake in the text and the flags; only the first where the text is not TOML at all.
pub fn resolve(source: &ConfigSource, overrides: &Overrides, registry: &Registry) -> Result<RunPlan, ConfigErrors> {
    let flags = overrides.flags()?;
    let mut reader = Reader::new(source)?;
    for flag in &flags {
        flag.apply(&mut reader);
    }
    let mut plan = RunPlan::default();
    plan.visit(&mut reader);
    check::consistency(&plan, &mut reader, registry);
    check::fill_in_resize(&mut plan);
    reader.report_unknown();

    let Reader { origins, mut errors, notes, .. } = reader;
    if let Some(facts) = (registry.dataset_facts)(&plan.data.name) {
        check::fill_in_size(&mut plan, &facts);
        errors.extend(check::check_dataset(&mut plan, &origins, &facts));
    }
    ConfigErrors::check(errors)?;
    plan.provenance = Provenance { origins: origins.into(), notes };
    Ok(plan)
}
