//! `error.json`: a worker's report of its own failure, for its launcher. torchrun's workers write a file of the same name.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use folder::Folder;
use serde::{Deserialize, Serialize};

/// Name of the file in `logs/rank-N/`.
pub(super) const FILE_NAME: &str = "error.json";

/// How a worker failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum FailureKind {
    /// A thread panicked.
    Panic,
    /// The worker returned an error.
    Error,
}

/// Content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FailureReport {
    /// Rank of the worker.
    pub(super) rank: usize,
    /// Panic or error.
    pub(super) kind: FailureKind,
    /// The cause.
    pub(super) message: String,
    /// What the user can do about the cause; may be empty.
    #[serde(default)]
    pub(super) hint: String,
    /// `file:line:column` of a panic.
    #[serde(default)]
    pub(super) location: Option<String>,
    /// Name of the thread that panicked.
    #[serde(default)]
    pub(super) thread: Option<String>,
    /// The worker's last status.
    pub(super) doing: String,
    /// Whether another rank's end, or a wait for another rank, is the cause. Then this failure is not the root cause.
    pub(super) consequence: bool,
    /// The rank that is to blame, where that is known.
    #[serde(default)]
    pub(super) culprit: Option<usize>,
    /// Milliseconds since 1970.
    pub(super) at_ms: u64,
}

impl FailureReport {
    /// Writes the file atomically: the launcher sees all of it or nothing.
    ///
    /// # Errors
    /// The folder does not exist, or the disk is full.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        Folder::of_file(path)?.replace(path.file_name().unwrap_or_default(), &serde_json::to_vec_pretty(self)?)
    }

    /// Reads the file at `path`. `None` where there is none, or where its content is something else.
    pub(super) fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }
}

/// Milliseconds from 1970 to `at`.
pub(super) fn unix_ms(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
