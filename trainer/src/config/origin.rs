//! Where each value of a plan came from, so that a check made after the data are read still points at its line.

use std::collections::BTreeMap;
use std::ops::Range;

use super::error::{ConfigError, Location};
use super::source::ConfigSource;

/// Where one key was set.
#[derive(Debug, Clone)]
pub(super) enum Origin {
    /// In the file: bytes of the key and of the value.
    File { key: Range<usize>, value: Range<usize> },
    /// By a command-line flag, written out.
    Flag(String),
}

/// Who set a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetBy {
    /// Nobody: the key has its default.
    Default,
    /// The configuration file.
    File,
    /// A command-line flag.
    Flag,
}

/// The source of a plan and the origin of each of its keys.
#[derive(Debug, Clone, Default)]
pub(super) struct Origins {
    pub(super) source: ConfigSource,
    /// Bytes of each section's name where it is opened.
    pub(super) headers: BTreeMap<String, Range<usize>>,
    keys: BTreeMap<(String, String), Origin>,
}

impl Origins {
    /// Starts with no key set.
    pub(super) fn new(source: ConfigSource) -> Self {
        Self { source, ..Self::default() }
    }

    /// Remembers where a key was set.
    pub(super) fn insert(&mut self, section: &str, key: &str, origin: Origin) {
        self.keys.insert((section.to_owned(), key.to_owned()), origin);
    }

    /// Forgets a key that is left out of the plan.
    pub(super) fn remove(&mut self, section: &str, key: &str) {
        self.keys.remove(&(section.to_owned(), key.to_owned()));
    }

    /// Returns where a key was set; `None` where the key has its default.
    pub(super) fn get(&self, section: &str, key: &str) -> Option<&Origin> {
        self.keys.get(&(section.to_owned(), key.to_owned()))
    }

    /// Returns whether the key `path`, `section.key`, was set, also to an invalid value.
    pub(super) fn has(&self, path: &str) -> bool {
        let (section, key) = split(path);
        self.get(section, key).is_some()
    }

    /// Returns who set a key.
    pub(super) fn set_by(&self, section: &str, key: &str) -> SetBy {
        match self.get(section, key) {
            None => SetBy::Default,
            Some(Origin::File { .. }) => SetBy::File,
            Some(Origin::Flag(_)) => SetBy::Flag,
        }
    }

    /// Returns the line that opens a section; the whole file where none does.
    pub(super) fn section(&self, section: &str) -> Location {
        let header = self.headers.get(section).map(|range| self.source.locate(range.clone()));
        header.unwrap_or_else(|| Location::File(self.source.path.clone()))
    }

    /// Returns the location of a key's name. If the key is not set, returns the location of its section.
    pub(super) fn key(&self, section: &str, key: &str) -> Location {
        match self.get(section, key) {
            Some(Origin::File { key, .. }) => self.source.locate(key.clone()),
            _ => self.value(section, key),
        }
    }

    /// Returns the location of a key's value. If the key is not set, returns the location of its section.
    pub(super) fn value(&self, section: &str, key: &str) -> Location {
        match self.get(section, key) {
            Some(Origin::File { value, .. }) => self.source.locate(value.clone()),
            Some(Origin::Flag(flag)) => Location::Flag(flag.clone()),
            None => self.section(section),
        }
    }

    /// Makes an error about the value of `path`, `section.key`.
    pub(super) fn error(&self, path: &str, cause: impl Into<String>, hint: impl Into<String>) -> ConfigError {
        let (section, key) = split(path);
        ConfigError { cause: cause.into(), location: self.value(section, key), hint: hint.into() }
    }
}

/// Splits `section.key`.
fn split(path: &str) -> (&str, &str) {
    path.split_once('.').unwrap_or((path, ""))
}
