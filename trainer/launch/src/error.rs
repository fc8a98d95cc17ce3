//! The one error of the launcher: what it refuses before any worker runs.

use std::fmt;

/// Exit code of bad usage: flags or variables that contradict each other.
pub const USAGE: u8 = 2;
/// Exit code of a job of which a worker died, or which could not be put together.
pub const WORKER_DIED: u8 = 3;

/// Why there is no job. `Display` gives the cause and, on a line of its own, the hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchError {
    /// The process's exit code.
    pub code: u8,
    /// What is wrong, with the names of flags, variables, addresses.
    pub message: String,
    /// What to do about it.
    pub hint: String,
}

impl LaunchError {
    /// Flags or variables are to blame.
    pub fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: USAGE, message: message.into(), hint: hint.into() }
    }

    /// The machine, the network or another node is to blame.
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

/// Result of everything in this module.
pub type Result<T> = std::result::Result<T, LaunchError>;
