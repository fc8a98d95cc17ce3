//! Errors of a configuration, as the user reads them: file, line, column, cause, caret and hint.

use std::fmt;
use std::path::PathBuf;

use launch::console::printable_line;

/// Largest number of mistakes that are shown at once; the rest is counted.
const SHOWN: usize = 20;

/// Where a mistake was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// A line of the file.
    Line(Box<SourceLine>),
    /// The file as a whole.
    File(PathBuf),
    /// A command-line flag and its value, such as `--set optimizer.lr=nan`.
    Flag(String),
}

/// A part of one line of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceLine {
    /// The file, as the user named it.
    pub file: PathBuf,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// The line made printable: tabs are spaces, control characters replaced, long lines cut.
    pub text: String,
    /// Display columns of `text` before the marked part.
    pub indent: usize,
    /// Display columns of the marked part, at least 1.
    pub width: usize,
}

/// One mistake: cause, location and hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// What is wrong.
    pub cause: String,
    /// Where the mistake was made.
    pub location: Location,
    /// What the user can do.
    pub hint: String,
}

impl ConfigError {
    /// Returns the sort key of a report: the file as a whole, then its lines, then flags.
    pub(super) fn position(&self) -> (usize, usize, usize) {
        match &self.location {
            Location::File(_) => (0, 0, 0),
            Location::Line(line) => (1, line.line, line.column),
            Location::Flag(_) => (2, 0, 0),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "error: {}", printable_line(&self.cause))?;
        match &self.location {
            Location::Line(excerpt) => {
                let SourceLine { file, line, column, text, indent, width } = excerpt.as_ref();
                let number = line.to_string();
                let gutter = number.len();
                let file = file.display().to_string();
                writeln!(f, "{:gutter$}--> {}:{line}:{column}", "", printable_line(&file))?;
                writeln!(f, "{:gutter$} |", "")?;
                writeln!(f, "{}", format!("{number} | {text}").trim_end())?;
                writeln!(f, "{:gutter$} | {:indent$}{}", "", "", "^".repeat(*width))?;
            }
            Location::File(file) => writeln!(f, "  --> {}", printable_line(&file.display().to_string()))?,
            Location::Flag(flag) => writeln!(f, "  --> {}", printable_line(flag.trim_end()))?,
        }
        write!(f, "  hint: {}", printable_line(&self.hint))
    }
}

impl std::error::Error for ConfigError {}

/// Every mistake found in one configuration, in the order of the file, then of the flags. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors(pub(super) Vec<ConfigError>);

impl ConfigErrors {
    /// Sorts the mistakes; `Ok` where there are none.
    pub(super) fn check(mut errors: Vec<ConfigError>) -> Result<(), Self> {
        if errors.is_empty() {
            return Ok(());
        }
        errors.sort_by_key(ConfigError::position);
        errors.dedup();
        Err(Self(errors))
    }
}

impl From<ConfigError> for ConfigErrors {
    fn from(error: ConfigError) -> Self {
        Self(vec![error])
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().take(SHOWN).enumerate() {
            if index > 0 {
                f.write_str("\n\n")?;
            }
            write!(f, "{error}")?;
        }
        if self.0.len() > SHOWN {
            write!(f, "\n\nerror: and {} more", self.0.len() - SHOWN)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}
