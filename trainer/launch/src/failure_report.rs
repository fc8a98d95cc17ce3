//! `error.json`: a worker's own account of why it ended, left for its launcher.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Its name, in `logs/rank-N/`.
pub const NAME: &str = "error.json";

/// How a worker came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A thread panicked.
    Panic,
    /// It returned an error.
    Error,
}

/// The file's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureReport {
    /// Rank of the worker.
    pub rank: usize,
    /// Panic or error.
    pub kind: Kind,
    /// What it was.
    pub message: String,
    /// What to do about it; may be empty.
    #[serde(default)]
    pub hint: String,
    /// `file:line:column` of a panic.
    #[serde(default)]
    pub location: Option<String>,
    /// Name of the thread that panicked.
    #[serde(default)]
    pub thread: Option<String>,
    /// What the worker was doing, as last reported.
    pub doing: String,
    /// Whether another rank's end, or a wait for it, is the cause: then this one is not the root cause.
    pub consequence: bool,
    /// The rank that is to blame, where that is known.
    #[serde(default)]
    pub culprit: Option<usize>,
    /// Milliseconds since 1970.
    pub at_ms: u64,
}

impl FailureReport {
    /// Writes the file in one go: the launcher sees all of it or nothing.
    ///
    /// # Errors
    /// The folder is gone, or the disk full.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let temporary = path.with_extension("json.tmp");
        fs::write(&temporary, serde_json::to_vec_pretty(self)?)?;
        fs::rename(&temporary, path)
    }

    /// The file at `path`. None where there is none, or where it is not one of these.
    pub fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    /// Now, for [`FailureReport::at_ms`].
    pub fn now_ms() -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
    }
}
