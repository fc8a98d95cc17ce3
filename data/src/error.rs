//! The error type of the crate: file, place, cause and hint.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// A mistake in a data file, a data folder or the data configuration. `Display` writes `file: place: cause`; callers
/// print the hint on a line of its own.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{}{cause}", prefix(.file.display()), prefix(.place))]
pub struct DataError {
    /// File or folder (empty for an error that concerns none).
    pub file: PathBuf,
    /// Place in the file: `record 17`, `byte 4`. Empty for an error about the whole file.
    pub place: String,
    /// What is wrong.
    pub cause: String,
    /// What the user can do.
    pub hint: String,
    /// Whether a single image is damaged or missing, so that another one can replace it (`data.on_error = "skip"`).
    pub is_bad_image: bool,
    /// Whether the file may be readable later, as on a network disk that does not answer.
    pub is_transient: bool,
}

impl DataError {
    /// Makes an error about a whole file.
    pub fn new(file: impl AsRef<Path>, cause: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            file: file.as_ref().to_owned(),
            place: String::new(),
            cause: cause.into(),
            hint: hint.into(),
            is_bad_image: false,
            is_transient: false,
        }
    }

    /// Marks the error as that of a single image that is damaged or missing.
    pub fn of_bad_image(mut self) -> Self {
        self.is_bad_image = true;
        self
    }

    /// Sets the place in the file.
    pub fn at(mut self, place: impl Into<String>) -> Self {
        self.place = place.into();
        self
    }
}

/// Returns `text: `, or nothing for an empty text.
fn prefix(text: impl Display) -> String {
    let text = text.to_string();
    if text.is_empty() { text } else { text + ": " }
}
