//! The resolved run: every value that the rest of the program reads.

use std::fmt::{self, Write};
use std::sync::Arc;

use super::DatasetFacts;
use super::check;
use super::error::ConfigErrors;
use super::key::{Key, KeyValue, KeyVisitor, unquoted};
use super::keyword::{BatchScope, Mode};
use super::origin::{Origins, SetBy};
use super::sections::{
    CheckpointConfig, DataConfig, LogConfig, ModelConfig, OptimizerConfig, ParallelConfig, ScheduleConfig, TrainConfig,
};

/// A run, resolved: every value that the program uses, none left to be guessed.
///
/// Two plans are equal if they describe the same run, even if they come from different files. In the default plan, keys that
/// must be set are empty.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunPlan {
    /// `[model]`
    pub model: ModelConfig,
    /// `[data]`
    pub data: DataConfig,
    /// `[train]`
    pub train: TrainConfig,
    /// `[optimizer]`
    pub optimizer: OptimizerConfig,
    /// `[schedule]`
    pub schedule: ScheduleConfig,
    /// `[parallel]`
    pub parallel: ParallelConfig,
    /// `[checkpoint]`
    pub checkpoint: CheckpointConfig,
    /// `[log]`
    pub log: LogConfig,
    /// Where the values came from.
    pub(super) provenance: Provenance,
}

impl TrainConfig {
    /// Returns the number of images of a loader's batch on all devices.
    pub fn global_batch(&self, devices: usize) -> usize {
        match self.batch_scope {
            BatchScope::Global => self.batch_size,
            BatchScope::PerWorker => self.batch_size * devices,
        }
    }
}

impl RunPlan {
    /// Shows every key with its value to `visitor`, in the order of the file.
    pub(super) fn visit(&mut self, visitor: &mut impl KeyVisitor) {
        self.model.visit(visitor);
        self.data.visit(visitor);
        self.train.visit(visitor);
        self.optimizer.visit(visitor);
        self.schedule.visit(visitor);
        self.parallel.visit(visitor);
        self.checkpoint.visit(visitor);
        self.log.visit(visitor);
    }

    /// Returns every key in force with its value, in the order of the file.
    pub fn settings(&self) -> Vec<Setting> {
        let mut writer = SettingCollector { settings: Vec::new(), kind: None };
        self.clone().visit(&mut writer);
        writer.settings
    }

    /// Returns the plan as the run folder's `config.toml`: every key in force, which reads back as the same plan.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        let mut section = "";
        for Setting { section: next, key, value, .. } in self.settings() {
            if next != section {
                let gap = if section.is_empty() { "" } else { "\n" };
                let _ = writeln!(text, "{gap}[{next}]");
                section = next;
            }
            let _ = writeln!(text, "{key} = {value}");
        }
        text
    }

    /// Returns the plan as the start screen shows it, a row per section: `("train", [("epochs", "10"), …])`.
    ///
    /// Keys that are switched off are listed under the single key `off`, so that a row fits on a line or two. With one worker,
    /// `[parallel]` shows only its mode.
    pub fn table(&self) -> Vec<(&'static str, Vec<(&'static str, String)>)> {
        let mut settings = self.settings();
        settings.retain(|one| one.section != "parallel" || self.parallel.mode != Mode::Single || one.key == "mode");
        let row = |settings: &[Setting]| {
            let (off, on): (Vec<_>, Vec<_>) = settings.iter().partition(|setting| setting.is_off);
            let off = off.iter().map(|setting| setting.key).collect::<Vec<_>>().join(" ");
            let on = on.iter().map(|setting| (setting.key, setting.shown()));
            (settings[0].section, on.chain((!off.is_empty()).then_some(("off", off))).collect())
        };
        settings.chunk_by(|one, next| one.section == next.section).map(row).collect()
    }

    /// Returns the first setting that differs in `other`, and the setting of its key in `other`. Keys that only `other` has are
    /// not compared.
    pub fn first_difference(&self, other: &Self) -> Option<(Setting, Option<Setting>)> {
        let others = other.settings();
        self.settings().into_iter().find_map(|setting| {
            let other = others.iter().find(|other| (other.section, other.key) == (setting.section, setting.key));
            (other.map(|other| &other.value) != Some(&setting.value)).then(|| (setting.clone(), other.cloned()))
        })
    }

    /// Compares the plan with its data set after the data set was read. Fills in the number of classes and the
    /// normalisation where the configuration leaves them to the data set. A second call changes nothing.
    ///
    /// # Errors
    /// Each value that contradicts the data, with its line.
    pub fn check_against(&mut self, facts: &DatasetFacts) -> Result<(), ConfigErrors> {
        let origins = Arc::clone(&self.provenance.origins);
        ConfigErrors::check(check::check_dataset(self, &origins, facts))
    }

    /// Makes the error of a mistake that another part of the program found in this plan. The location is that of the first of
    /// `keys` (`section.key`) that is set; if none is set, the section of the last one.
    pub fn error_at(&self, keys: &[&str], cause: impl Into<String>, hint: impl Into<String>) -> ConfigErrors {
        let origins = &self.provenance.origins;
        let path = keys.iter().find(|path| origins.has(path)).or(keys.last()).copied();
        origins.error(path.unwrap_or_default(), cause, hint).into()
    }

    /// Returns who set a key.
    pub fn set_by(&self, section: &str, key: &str) -> SetBy {
        self.provenance.origins.set_by(section, key)
    }

    /// Returns a sentence for each setting that was left out or has no effect. The user sees the sentences at the start.
    pub fn notes(&self) -> &[String] {
        &self.provenance.notes
    }
}

/// One key of a plan with its value; shown as `section.key = value`.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// The section, such as `train`.
    pub section: &'static str,
    /// The key, such as `epochs`.
    pub key: &'static str,
    /// The value in force.
    pub value: toml::Value,
    /// Whether the value switches the key's feature off.
    is_off: bool,
}

impl Setting {
    /// Returns the value without TOML's quotes and brackets: `["crop:4", "flip"]` is `crop:4 flip`.
    fn shown(&self) -> String {
        match &self.value {
            toml::Value::Array(list) => list.iter().map(unquoted).collect::<Vec<_>>().join(" "),
            value => unquoted(value),
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} = {}", self.section, self.key, self.value)
    }
}

/// Lists the keys that are in force.
struct SettingCollector {
    settings: Vec<Setting>,
    /// The last `kind`: a section's first key.
    kind: Option<String>,
}

impl KeyVisitor for SettingCollector {
    fn key<T: KeyValue>(&mut self, key: &Key<T>, value: &mut T) {
        let Some(value) = value.write().filter(|_| key.is_used_by(self.kind.as_deref())) else { return };
        if key.name == "kind" {
            self.kind = value.as_str().map(str::to_owned);
        }
        let is_off = key.unset_meaning.is_some() && matches!(unquoted(&value).as_str(), "0" | "false" | "none" | "[]");
        self.settings.push(Setting { section: key.section, key: key.name, value, is_off });
    }
}

/// The source of a plan. Comparisons of plans ignore the source, and clones share it.
#[derive(Clone, Default)]
pub(super) struct Provenance {
    pub(super) origins: Arc<Origins>,
    /// A sentence for each setting that was left out or has no effect.
    pub(super) notes: Vec<String>,
}

impl PartialEq for Provenance {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl fmt::Debug for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.origins.source.path.fmt(f)
    }
}
