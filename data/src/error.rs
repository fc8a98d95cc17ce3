//! The one error of data files: file, place, cause and what to do about it.

use std::path::{Path, PathBuf};

/// What is wrong with a data file or folder. `Display` gives `file: place: cause`; the hint is for the line below.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataError {
    /// File or folder (empty for an error that concerns none).
    pub file: PathBuf,
    /// Where in the file: `record 17`, `byte 4`; empty where the whole file is meant.
    pub place: String,
    /// What is wrong.
    pub cause: String,
    /// What the user can do.
    pub hint: String,
}

impl DataError {
    /// An error about a whole file.
    pub fn new(file: impl AsRef<Path>, cause: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { file: file.as_ref().to_owned(), place: String::new(), cause: cause.into(), hint: hint.into() }
    }

    /// Says where in the file.
    pub fn at(mut self, place: impl Into<String>) -> Self {
        self.place = place.into();
        self
    }
}

impl std::fmt::Display for DataError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.file.as_os_str().is_empty() {
            write!(f, "{}: ", self.file.display())?;
        }
        if !self.place.is_empty() {
            write!(f, "{}: ", self.place)?;
        }
        f.write_str(&self.cause)
    }
}

impl std::error::Error for DataError {}
