//! The settings that autotuning changes (`parallel.autotune`), its measurements and its result.

use serde::{Deserialize, Serialize};

use crate::config::{Compression, RunPlan};

/// The settings of a step that may change while a run trains: keys of `[parallel]`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepSettings {
    /// `parallel.bucket_mb`.
    pub bucket_mb: f64,
    /// `parallel.first_bucket_mb`.
    pub first_bucket_mb: f64,
    /// `parallel.compression`.
    #[serde(with = "word")]
    pub compression: Compression,
    /// `parallel.threads`; `None`: the worker's share of the cores.
    pub threads: Option<usize>,
}

impl StepSettings {
    /// Returns the settings of a plan.
    pub fn of(plan: &RunPlan) -> Self {
        let parallel = &plan.parallel;
        Self {
            bucket_mb: parallel.bucket_mb,
            first_bucket_mb: parallel.first_bucket_mb,
            compression: parallel.compression,
            threads: parallel.threads,
        }
    }

    /// Writes the settings to a plan, and turns autotuning off in it.
    pub fn write_to(&self, plan: &mut RunPlan) {
        let parallel = &mut plan.parallel;
        parallel.bucket_mb = self.bucket_mb;
        parallel.first_bucket_mb = self.first_bucket_mb;
        parallel.compression = self.compression;
        parallel.threads = self.threads;
        parallel.autotune.clear();
    }
}

/// The measurement of one combination of settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// The settings.
    pub settings: StepSettings,
    /// Number of buckets with these settings.
    pub buckets: usize,
    /// Seconds per step: the largest of the ranks' medians. If the settings were measured twice, the smaller value.
    pub seconds: f64,
}

/// The result of autotuning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TuningReport {
    /// The settings that the run keeps.
    pub chosen: StepSettings,
    /// Optimizer steps that the search took.
    pub steps: u64,
    /// All measurements. The first trial has the plan's settings.
    pub trials: Vec<Trial>,
}

/// Serializes a wire format with the keyword of the TOML file.
mod word {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::config::{Compression, Keyword};

    pub(super) fn serialize<S: Serializer>(value: &Compression, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(value.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Compression, D::Error> {
        let word = String::deserialize(deserializer)?;
        Compression::from_name(&word).ok_or_else(|| D::Error::custom(format!("unknown compression {word:?}")))
    }
}
