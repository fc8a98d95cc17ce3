//! Checkpoints: atomic, checksummed, several kept, the newest complete one resumed.
//!
//! ```text
//! checkpoints/epoch-3/   model.safetensors  optimizer.safetensors  [ema.safetensors]  state.json  manifest.json
//! checkpoints/step-1234/ the same, taken inside an epoch (interrupted, or checkpoint.every_steps)
//! checkpoints/last -> epoch-3      checkpoints/best -> epoch-2
//! ```
//!
//! A checkpoint is written to a hidden temporary folder, every file synced, `manifest.json` (sizes and SHA-256 of the
//! others) last, then renamed into place: a folder with a visible name is complete, whatever killed the process.
//! `last` and `best` are relative symbolic links, replaced by a rename. A folder is hidden before it is deleted.

mod read;
mod store;

pub use read::{Loaded, any, load, load_newest};
pub use store::Store;

use std::{
    fmt::Display,
    path::{Path, PathBuf},
};

use data::sampler::FIRST_EPOCH;
use serde::{Deserialize, Serialize};

use crate::{failure::Failure, report::Evaluated};

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const EMA: &str = "ema.safetensors";
const STATE: &str = "state.json";
/// Lists the other files of a checkpoint; a folder that has it is one.
pub(crate) const MANIFEST: &str = "manifest.json";
/// Version of the folder's layout.
const VERSION: u32 = 1;

/// Where a run stands, and what an epoch has added up so far: all that is not a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Epoch in progress, from [`FIRST_EPOCH`]; `epochs + 1` when all epochs are done.
    pub epoch: usize,
    /// Next batch of that epoch, from 0: the sampler's position.
    pub batch: usize,
    /// Optimizer steps taken.
    pub step: u64,
    /// Sums over the epoch in progress.
    pub partial: Partial,
    /// Best evaluation by top-1 so far.
    pub best: Option<Evaluated>,
    /// Last evaluation.
    pub last: Option<Evaluated>,
    /// Seconds of training over all sessions of the run.
    pub elapsed_s: f64,
}

impl Progress {
    /// Before the first step.
    pub fn start() -> Self {
        Self {
            epoch: FIRST_EPOCH,
            batch: 0,
            step: 0,
            partial: Partial::default(),
            best: None,
            last: None,
            elapsed_s: 0.0,
        }
    }
}

/// Sums over the steps of an epoch that is not finished.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Partial {
    /// Sum of sample losses.
    pub loss_sum: f64,
    /// Samples classified right.
    pub correct: u64,
    /// Samples seen.
    pub samples: u64,
    /// Seconds of training.
    pub seconds: f64,
}

/// `state.json`.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    progress: Progress,
    optimizer_steps: u64,
    /// The seed from which permutation, augmentation and mixing follow; no other random state exists.
    seed: u64,
}

/// `manifest.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    version: u32,
    files: Vec<ManifestFile>,
}

/// One file of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
struct ManifestFile {
    name: String,
    bytes: u64,
    sha256: String,
}

/// What went wrong with a checkpoint's file or folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointError {
    /// File or folder.
    pub path: PathBuf,
    /// What is wrong with it.
    pub cause: String,
    /// What the user can do.
    pub hint: String,
}

impl CheckpointError {
    fn new(path: impl AsRef<Path>, cause: impl Display, hint: impl Into<String>) -> Self {
        Self { path: path.as_ref().to_owned(), cause: cause.to_string(), hint: hint.into() }
    }

    fn writing(path: impl AsRef<Path>, error: impl Display) -> Self {
        Self::new(
            path,
            format!("cannot write the checkpoint: {error}"),
            "free some space or choose another place with --run-dir; earlier checkpoints are intact",
        )
    }
}

impl Display for CheckpointError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.cause)
    }
}

impl std::error::Error for CheckpointError {}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        Self::run(&error, &error.hint)
    }
}

/// Hexadecimal SHA-256.
fn sha256(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
