//! The error type of commands: a message, a hint and an exit code.

use std::fmt::Display;

use data::DataError;

use crate::config::ConfigErrors;
use crate::files::FileError;
use crate::text;
use comm::CommError;
use launch::LaunchError;

pub use crate::files::{FAILED, USAGE};

/// An error for the user. `Display` is the full text that follows `error: ` on the screen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Exit code of the process: 1 failed, 2 wrong usage or input, 128 + n ended by signal n after a checkpoint.
    pub code: u8,
    /// What happened: file, location, cause.
    pub message: String,
    /// The action that fixes the problem.
    pub hint: Option<String>,
}

impl Failure {
    /// Returns the failure of a run.
    pub fn run(message: impl Display, hint: impl Display) -> Self {
        Self { code: FAILED, message: message.to_string(), hint: Some(hint.to_string()) }
    }

    /// Returns the failure for wrong input.
    pub fn usage(message: impl Display, hint: impl Display) -> Self {
        Self { code: USAGE, message: message.to_string(), hint: Some(hint.to_string()) }
    }

    /// Converts a panic's text to a failure if the GPU is out of memory: burn panics with this error wherever it reads results.
    /// Returns `None` for a defect of this program.
    pub fn of_panic(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once("out of device memory allocating ")?;
        let bytes: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let bytes = bytes.parse().map_or_else(|_| "more".to_owned(), |bytes| format!("{} more", text::bytes(bytes)));
        Some(Self::run(
            format!("the GPU's memory is used up: {bytes} was wanted"),
            "a smaller train.batch_size, with train.accumulate for steps of the same size; train.precision = \"bf16\" on a \
             GPU; `nvidia-smi` shows who else has memory there; checkpoints saved before are intact",
        ))
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}

/// An error with a hint for the user and an exit code.
pub trait Hint: std::error::Error {
    /// Returns file, location and cause, without the hint.
    fn message(&self) -> String {
        self.to_string()
    }

    /// Returns the text after `hint:`; `None` if the message needs no hint.
    fn hint(&self) -> Option<&str>;

    /// Returns the process's exit code.
    fn exit_code(&self) -> u8 {
        FAILED
    }
}

impl<E: Hint> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { code: error.exit_code(), message: error.message(), hint: error.hint().map(str::to_owned) }
    }
}

/// Converts an empty hint to `None`.
fn some(hint: &str) -> Option<&str> {
    (!hint.is_empty()).then_some(hint)
}

impl Hint for DataError {
    fn hint(&self) -> Option<&str> {
        some(&self.hint)
    }

    fn exit_code(&self) -> u8 {
        USAGE
    }
}

impl Hint for FileError {
    fn hint(&self) -> Option<&str> {
        some(&self.hint)
    }

    fn exit_code(&self) -> u8 {
        self.code
    }
}

impl Hint for CommError {
    fn message(&self) -> String {
        self.message.clone()
    }

    fn hint(&self) -> Option<&str> {
        some(&self.hint)
    }
}

impl Hint for LaunchError {
    fn message(&self) -> String {
        self.message.clone()
    }

    fn hint(&self) -> Option<&str> {
        some(&self.hint)
    }

    fn exit_code(&self) -> u8 {
        self.code
    }
}

impl From<ConfigErrors> for Failure {
    /// Renders all errors in one message. Each error has its own location and hint.
    fn from(errors: ConfigErrors) -> Self {
        let text = errors.to_string();
        let message = text.strip_prefix("error: ").unwrap_or(&text).to_owned();
        Self { code: USAGE, message, hint: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_up_memory_is_told_from_a_defect() {
        let burns = "a device can copy them back: Execution(An IO error happened\nCaused by:\n  out of device memory \
                     allocating 8388608 bytes\nNo backtrace available)";
        let failure = Failure::of_panic(burns).unwrap();
        assert_eq!(failure.message, "the GPU's memory is used up: 8.4 MB more was wanted");
        assert_eq!(failure.code, FAILED);
        assert_eq!(Failure::of_panic("index out of bounds"), None);
    }
}
