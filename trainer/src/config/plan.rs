//! The resolved run: every value that the rest of the program reads, one struct a section of the TOML.

use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;

use super::DatasetFacts;
use super::augment::Augmentation;
use super::check;
use super::choice::{
    Anneal, Backend, BatchNormPolicy, BatchScope, Compression, LrScale, Mode, OptimizerName, Precision, ScheduleName,
};
use super::error::{ConfigError, ConfigErrors};
use super::origin::Origins;

/// `[model]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Model {
    /// A name of the model registry.
    pub name: String,
    /// Classes of the last layer; the data set's, once that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_classes: Option<usize>,
}

/// `[data]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Data {
    /// A name of the data-set registry.
    pub name: String,
    /// Where the files are, relative to the current directory; absent: the usual places.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
    /// What is done to each training image, in this order.
    pub augment: Vec<Augmentation>,
    /// Mean of each channel of pixels in 0..1, `[C]`; the data set's, once that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean: Option<Vec<f32>>,
    /// Standard deviation of each channel of pixels in 0..1, `[C]`; the data set's, once that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub std: Option<Vec<f32>>,
    /// Side of the square images in pixels; the data set's, once that is known (absent where they are not square).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_size: Option<usize>,
    /// Background threads that assemble batches.
    pub workers: usize,
    /// Training images used, from the first; 0: all.
    pub limit_train: usize,
    /// Test images used, from the first; 0: all.
    pub limit_test: usize,
}

/// `[train]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Train {
    /// Passes over the training set; 0 only with `max_steps`.
    pub epochs: usize,
    /// Samples a step, see `batch_scope`.
    pub batch_size: usize,
    /// What `batch_size` counts.
    pub batch_scope: BatchScope,
    /// Number format of activations and gradients.
    pub precision: Precision,
    /// Seeds the weights, the shuffling and the augmentation; below 2^63, which is what TOML can hold.
    pub seed: u64,
    /// Share of the target spread over all classes, in [0, 1).
    pub label_smoothing: f64,
    /// Alpha of mixup's Beta distribution; 0: off.
    pub mixup: f64,
    /// Alpha of CutMix's Beta distribution; 0: off.
    pub cutmix: f64,
    /// Side of the square cut out of each training image, in pixels; 0: off.
    pub cutout: usize,
    /// Decay of the exponential moving average of the weights, in [0, 1); 0: off.
    pub ema: f64,
    /// Largest global L2 norm of the gradients; 0: off.
    pub grad_clip: f64,
    /// Batches an optimizer step.
    pub accumulate: usize,
    /// Leaves out an epoch's last batch where it is smaller than the others.
    pub drop_last: bool,
    /// Epochs between evaluations.
    pub eval_every: usize,
    /// Optimizer steps after which the run ends; 0: no limit.
    pub max_steps: usize,
    /// Seconds of training, over all sessions of the run, after which it is evaluated and saved; 0: no limit.
    pub max_time_s: usize,
    /// Early stopping: epochs without a better test top-1 after which the run ends; 0: off.
    pub patience: usize,
}

/// `[optimizer]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Optimizer {
    /// Which one, with the parameters that only it has.
    #[serde(flatten)]
    pub kind: OptimizerKind,
    /// Learning rate; the schedule's highest.
    pub lr: f64,
    /// Weight decay: L2 for SGD, decoupled for AdamW.
    pub weight_decay: f64,
    /// False exempts batch norm and biases from weight decay.
    pub decay_norm_and_bias: bool,
    /// How `lr` grows with the world size.
    pub lr_scale: LrScale,
}

/// An optimizer's own parameters.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind")]
pub enum OptimizerKind {
    /// PyTorch's `SGD`.
    #[serde(rename = "sgd")]
    Sgd {
        /// Momentum, in [0, 1).
        momentum: f64,
        /// Nesterov momentum.
        nesterov: bool,
    },
    /// PyTorch's `AdamW`.
    #[serde(rename = "adamw")]
    AdamW {
        /// Decay of the first and the second moment, each in [0, 1).
        betas: [f64; 2],
        /// Added to the denominator.
        eps: f64,
    },
}

impl OptimizerKind {
    /// The word in the TOML.
    pub fn name(&self) -> OptimizerName {
        match self {
            Self::Sgd { .. } => OptimizerName::Sgd,
            Self::AdamW { .. } => OptimizerName::AdamW,
        }
    }
}

impl std::fmt::Display for OptimizerKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.name().fmt(f)
    }
}

/// `[schedule]`: the learning rate over the run, set anew each step.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Schedule {
    /// After the warm-up half a cosine from lr to 0.
    Cosine(Warmup),
    /// PyTorch's `OneCycleLR`: up from lr/div, down to lr/div/final_div.
    OneCycle(OneCycle),
    /// After the warm-up lr, times gamma at each milestone.
    MultiStep(MultiStep),
    /// After the warm-up lr.
    Constant(Warmup),
}

impl Schedule {
    /// The word in the TOML.
    pub fn name(&self) -> ScheduleName {
        match self {
            Self::Cosine(_) => ScheduleName::Cosine,
            Self::OneCycle(_) => ScheduleName::OneCycle,
            Self::MultiStep(_) => ScheduleName::MultiStep,
            Self::Constant(_) => ScheduleName::Constant,
        }
    }
}

impl std::fmt::Display for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.name().fmt(f)
    }
}

/// A straight rise of the learning rate at the start of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Warmup {
    /// Its length in epochs; 0: none.
    #[serde(rename = "warmup_epochs")]
    pub epochs: f64,
    /// The first step's learning rate as a factor of lr.
    #[serde(rename = "warmup_start")]
    pub start: f64,
}

/// Parameters of one-cycle, by PyTorch's names.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct OneCycle {
    /// Share of the run that rises, in (0, 1).
    pub pct_start: f64,
    /// lr / div is the first learning rate (`div_factor`).
    pub div: f64,
    /// lr / div / final_div is the last one (`final_div_factor`).
    pub final_div: f64,
    /// Shape of the slopes.
    pub anneal: Anneal,
}

/// Parameters of multi-step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MultiStep {
    /// Rising; all below 1: fractions of the run, all above 1: epochs.
    pub milestones: Vec<f64>,
    /// Factor at each milestone.
    pub gamma: f64,
    /// The rise before it all.
    #[serde(flatten)]
    pub warmup: Warmup,
}

/// `[parallel]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Parallel {
    /// How devices take part in a step.
    pub mode: Mode,
    /// What carries gradients.
    pub backend: Backend,
    /// Size of a gradient bucket in MiB.
    pub bucket_mb: f64,
    /// Size of the first bucket in MiB: small, so that the first reduction starts early.
    pub first_bucket_mb: f64,
    /// Reduces a bucket while the rest of the backward pass runs.
    pub overlap: bool,
    /// Format of gradients on the wire.
    pub compression: Compression,
    /// What batch norm does across workers.
    pub batch_norm: BatchNormPolicy,
    /// Seconds without an answer after which a worker counts as dead.
    pub timeout_s: usize,
    /// Steps between comparisons of all ranks' parameters; 0: never.
    pub check_sync_every: usize,
}

/// `[checkpoint]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Checkpoint {
    /// Epochs between checkpoints; 0: only at the end.
    pub every: usize,
    /// Optimizer steps between checkpoints within an epoch; 0: none.
    pub every_steps: usize,
    /// Newest checkpoints kept.
    pub keep_last: usize,
    /// Keeps the one with the best test accuracy as well.
    pub keep_best: bool,
}

/// `[log]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Log {
    /// Steps between plain progress lines.
    pub every: usize,
    /// Writes TensorBoard events.
    pub tensorboard: bool,
    /// Writes `timeline.json`, what each rank did when, over the run's first steps.
    pub timeline: bool,
}

/// One key of a plan with its value; shown as `section.key = value`.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// The section, such as `train`.
    pub section: &'static str,
    /// The key, such as `epochs`.
    pub key: String,
    /// The value in force.
    pub value: toml::Value,
}

impl std::fmt::Display for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{} = {}", self.section, self.key, self.value)
    }
}

/// A run, resolved: every value that the program uses, none left to be guessed.
///
/// Two plans are equal where the same run follows from them, whatever file they came from.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunPlan {
    /// `[model]`
    pub model: Model,
    /// `[data]`
    pub data: Data,
    /// `[train]`
    pub train: Train,
    /// `[optimizer]`
    pub optimizer: Optimizer,
    /// `[schedule]`
    pub schedule: Schedule,
    /// `[parallel]`
    pub parallel: Parallel,
    /// `[checkpoint]`
    pub checkpoint: Checkpoint,
    /// `[log]`
    pub log: Log,
    /// Where the values came from.
    #[serde(skip)]
    pub(super) provenance: Provenance,
}

impl RunPlan {
    /// The plan as the run folder's `config.toml`: every key in force, which reads back as the same plan.
    ///
    /// # Errors
    /// A value that TOML cannot hold was put into a field by hand: [`super::load`] lets none through.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
    }

    /// Returns every key in force with its value, in the order of [`RunPlan::to_toml`].
    pub fn settings(&self) -> Vec<Setting> {
        let mut settings = Vec::new();
        let mut add = |section: &'static str, table: Result<toml::Table, toml::ser::Error>| {
            settings.extend(table.into_iter().flatten().map(|(key, value)| Setting { section, key, value }));
        };
        add("model", toml::Table::try_from(&self.model));
        add("data", toml::Table::try_from(&self.data));
        add("train", toml::Table::try_from(&self.train));
        add("optimizer", toml::Table::try_from(&self.optimizer));
        add("schedule", toml::Table::try_from(&self.schedule));
        add("parallel", toml::Table::try_from(&self.parallel));
        add("checkpoint", toml::Table::try_from(&self.checkpoint));
        add("log", toml::Table::try_from(&self.log));
        settings
    }

    /// Returns the first setting of this plan that `other` has not, and that key's setting in `other`. Keys that only `other`
    /// has are no difference.
    pub fn first_difference(&self, other: &Self) -> Option<(Setting, Option<Setting>)> {
        let others = other.settings();
        self.settings().into_iter().find_map(|setting| {
            let same_key = |other: &&Setting| (other.section, &other.key) == (setting.section, &setting.key);
            let other = others.iter().find(same_key);
            (other.map(|other| &other.value) != Some(&setting.value)).then(|| (setting.clone(), other.cloned()))
        })
    }

    /// Compares the plan with its data set once that is read, and fills in the number of classes, the image size and
    /// the normalisation where the configuration leaves them to the data set. Doing it again changes nothing.
    ///
    /// # Errors
    /// Each value that contradicts the data, with its line.
    pub fn check_against(&mut self, facts: &DatasetFacts) -> Result<(), ConfigErrors> {
        ConfigErrors::check(self.mistakes_against(facts))
    }

    /// [`RunPlan::check_against`] as a list.
    pub(super) fn mistakes_against(&mut self, facts: &DatasetFacts) -> Vec<ConfigError> {
        let provenance = self.provenance.clone();
        check::against(self, &provenance.0.origins, facts)
    }

    /// A mistake that another part of the program found in this plan, placed where the first of `keys` that is set was set
    /// (`section.key`), else where the last one's section is opened.
    pub fn mistake(&self, keys: &[&str], cause: impl Into<String>, hint: impl Into<String>) -> ConfigErrors {
        let origins = &self.provenance.0.origins;
        let mut paths = keys.iter().map(|path| path.split_once('.').unwrap_or((path, "")));
        let set = paths.clone().find(|(section, key)| origins.get(section, key).is_some());
        let (section, key) = set.or_else(|| paths.next_back()).unwrap_or_default();
        origins.error(section, key, cause, hint).into()
    }

    /// What was left out or cannot take effect, a sentence each, for the user to see at the start.
    pub fn notes(&self) -> &[String] {
        &self.provenance.0.notes
    }
}

/// The source of a plan: part of no comparison, shared by clones.
#[derive(Clone)]
pub(super) struct Provenance(Arc<Remembered>);

struct Remembered {
    origins: Origins,
    notes: Vec<String>,
}

impl Provenance {
    /// Keeps where the values came from and what there is to say about them.
    pub(super) fn new(origins: Origins, notes: Vec<String>) -> Self {
        Self(Arc::new(Remembered { origins, notes }))
    }
}

impl PartialEq for Provenance {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl std::fmt::Debug for Provenance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.origins.path().fmt(f)
    }
}
