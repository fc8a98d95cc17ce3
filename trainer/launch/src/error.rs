//! The error of this crate: why a job cannot run.

use std::fmt;

use comm::CommError;
use serde::Serialize;

/// Exit code of bad usage: flags or variables that contradict each other.
pub const USAGE: u8 = 2;
/// Exit code if a worker died, or if the job could not be started.
pub const WORKER_DIED: u8 = 3;

/// Why a job cannot run. `Display` writes the cause and, on a second line, the hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchError {
    /// The process's exit code.
    pub code: u8,
    /// What is wrong, with the names of flags, variables and addresses.
    pub message: String,
    /// What the user can do about it.
    pub hint: String,
}

impl LaunchError {
    /// Makes an error about flags or variables: exit code 2.
    pub fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: USAGE, message: message.into(), hint: hint.into() }
    }

    /// Makes an error about the machine, the network or another node: exit code 3.
    pub fn failed(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: WORKER_DIED, message: message.into(), hint: hint.into() }
    }
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if self.hint.is_empty() { Ok(()) } else { write!(f, "\n  hint: {}", self.hint) }
    }
}

impl std::error::Error for LaunchError {}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, LaunchError>;

/// Encodes a message between launchers. `what` appears in the error message.
///
/// # Errors
/// A path or an argument is not UTF-8.
pub(super) fn to_json(what: &str, value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| {
        LaunchError::failed(format!("cannot encode {what}: {error}"), "use paths and arguments of UTF-8 text")
    })
}

/// An error of the crate `comm` ends the job.
impl From<CommError> for LaunchError {
    fn from(error: CommError) -> Self {
        Self::failed(error.message, error.hint)
    }
}
