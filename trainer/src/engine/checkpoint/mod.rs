//! Checkpoints are atomic and have checksums. Several are kept, and a run resumes from the newest complete one.
//!
//! ```text
//! checkpoints/epoch-3/   model.safetensors  optimizer.safetensors  [ema.safetensors]  state.json  manifest.json
//! checkpoints/step-1234/ the same, taken inside an epoch (interrupted, train.max_steps, or checkpoint.every_steps)
//! checkpoints/last -> epoch-3      checkpoints/best -> epoch-2
//! ```
//!
//! A checkpoint is written to a hidden temporary folder. Every file is synced, the last one is `manifest.json` (sizes and
//! SHA-256 of the other files). Then the folder is renamed to its final name. Therefore a folder with a visible name is
//! complete, however the process ended. `last` and `best` are relative symbolic links, which are replaced by a rename. Before a
//! folder is deleted, it is renamed to a hidden name.

mod links;
mod read;
mod store;

pub use links::BestPolicy;
pub use read::{LoadedCheckpoint, exists, load, load_newest};
pub use store::CheckpointFolder;

use std::{fmt::Display, path::Path};

use serde::{Deserialize, Serialize};

use crate::files::FileError;
use crate::snapshot::{DatasetRecord, RunProgress};

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const EMA: &str = "ema.safetensors";
const STATE: &str = "state.json";
/// The file that lists the other files of a checkpoint. A folder with this file is a checkpoint.
pub(crate) const MANIFEST: &str = "manifest.json";

/// The links that point to a checkpoint once it is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkUpdate {
    /// `last`.
    Last,
    /// `last` and `best`.
    LastAndBest,
}

/// Version of the folder's layout.
const VERSION: u32 = 1;

/// `state.json`.
#[derive(Debug, Serialize, Deserialize)]
struct StateFile {
    progress: RunProgress,
    optimizer_steps: u64,
    /// The seed of permutation, augmentation and mixing; no other random state exists.
    seed: u64,
    /// The data set. `None` in older checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dataset: Option<DatasetRecord>,
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

/// Returns the error of a checkpoint that cannot be written.
fn write_error(path: impl AsRef<Path>, error: impl Display) -> FileError {
    FileError::new(
        path,
        format!("cannot write the checkpoint: {error}"),
        "free some space, raise the limit for the size of a file (`ulimit -f`), or choose another place with --run-dir; \
         earlier checkpoints are intact",
    )
}

/// Returns the SHA-256 in hexadecimal.
fn sha256(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    comm::hex::encode(&Sha256::digest(bytes))
}

#[cfg(test)]
mod link_tests;
#[cfg(test)]
mod tests;
