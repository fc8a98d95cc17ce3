//! How a command ends when it does not succeed: a message, a hint and an exit code.

use std::fmt::Display;

use data::DataError;

use crate::config::ConfigErrors;
use crate::files::FileError;
use crate::text;
use comm::CommError;
use launch::LaunchError;

pub use crate::files::{FAILED, USAGE};

/// An error on its way to the user. `Display` is the whole of what the screen shows after `error: `.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The process's exit code: 1 failed, 2 bad usage or input, 128 + n ended by signal n after a checkpoint.
    pub code: u8,
    /// What happened: file, place, cause.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl Failure {
    /// The run failed.
    pub fn run(message: impl Display, hint: impl Display) -> Self {
        Self { code: FAILED, message: message.to_string(), hint: Some(hint.to_string()) }
    }

    /// The input is wrong.
    pub fn usage(message: impl Display, hint: impl Display) -> Self {
        Self { code: USAGE, message: message.to_string(), hint: Some(hint.to_string()) }
    }

    /// A panic's text as the failure that it is: a GPU whose memory is used up, which burn tells of wherever results are read.
    /// `None` for a defect of the program.
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

/// An error that says what to do about it and how the process ends.
pub trait Hint: std::error::Error {
    /// Returns file, place and cause, without the hint.
    fn message(&self) -> String {
        self.to_string()
    }

    /// Returns the text after `hint:`, or nothing where the message says it all.
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

/// An empty hint is none.
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
    /// The errors are rendered whole, with places and hints of their own.
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
