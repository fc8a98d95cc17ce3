//! Settings from the command line: `--set section.key=value`, and flags for single keys, such as `--epochs`.

use std::borrow::Cow;

use toml::Spanned;
use toml::de::DeValue;

use super::devices::Devices;
use super::error::{ConfigError, Location};
use super::origin::Origin;
use super::reader::Reader;
use super::syntax;
use crate::cli::DataDir;

/// Values from the command line that override the configuration file. The order is: the file, then `set`, then the other flags. The
/// last value applies, except where a field's doc says that an earlier value takes precedence.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// `--set section.key=value`, as the user wrote it.
    pub set: Vec<String>,
    /// `--epochs`
    pub epochs: Option<usize>,
    /// `--seed`
    pub seed: Option<u64>,
    /// `--data-dir`, or the variable `TRAINER_DATA_DIR`.
    pub data_dir: Option<DataDir>,
    /// `--mode`. [`super::resolve`] checks the word.
    pub mode: Option<String>,
    /// `--backend`. [`super::resolve`] checks the word.
    pub backend: Option<String>,
    /// `--cpus` or `--gpus`. [`super::resolve`] checks the number.
    pub devices: Option<Devices>,
    /// `--autotune`. A list in the file or in `set` takes precedence.
    pub autotune: bool,
}

/// One flag: the path of a key and its value.
pub(super) struct Flag {
    /// The flag as the user wrote it, for the location of an error.
    shown: String,
    /// `section.key`. `None` for a `--set` without an equals sign.
    path: Option<String>,
    /// The text of the value.
    value: String,
    /// Whether the value is a string, even if it looks like a number or a list.
    is_string: bool,
    /// Whether a value that is set already takes precedence.
    yields_to_set_value: bool,
}

impl Overrides {
    /// Returns the flags in the order in which they apply.
    ///
    /// # Errors
    /// The name of the data folder is not UTF-8. The run's configuration could not contain the name.
    pub(super) fn flags(&self) -> Result<Vec<Flag>, ConfigError> {
        let mut flags: Vec<Flag> = self.set.iter().map(|text| Flag::set(text)).collect();
        let mut add = |name: &str, path: &str, value: Option<String>, is_string| {
            flags.extend(value.map(|value| Flag {
                shown: format!("--{name} {value}"),
                path: Some(path.to_owned()),
                value,
                is_string,
                yields_to_set_value: false,
            }));
        };
        add("epochs", "train.epochs", self.epochs.map(|epochs| epochs.to_string()), false);
        add("seed", "train.seed", self.seed.map(|seed| seed.to_string()), false);
        add("mode", "parallel.mode", self.mode.clone(), true);
        add("backend", "parallel.backend", self.backend.clone(), true);
        if let Some(dir) = &self.data_dir {
            let shown = dir.to_string();
            let Some(text) = dir.path.to_str() else {
                return Err(ConfigError {
                    cause: "the data folder's name is not UTF-8 text".into(),
                    location: Location::Flag(shown),
                    hint: "rename the folder, or reach it through a link with a plain name".into(),
                });
            };
            let (value, path) = (text.to_owned(), Some("data.dir".to_owned()));
            flags.push(Flag { shown, path, value, is_string: true, yields_to_set_value: false });
        }
        if let Some(devices) = self.devices {
            let (value, path) = (devices.to_string(), Some("parallel.devices".to_owned()));
            flags.push(Flag {
                shown: format!("--{}", value.replace(':', " ")),
                path,
                value,
                is_string: true,
                yields_to_set_value: false,
            });
        }
        if self.autotune {
            let (shown, path) = ("--autotune".to_owned(), Some("parallel.autotune".to_owned()));
            flags.push(Flag { shown, path, value: AUTOTUNED.to_owned(), is_string: false, yields_to_set_value: true });
        }
        Ok(flags)
    }
}

impl Flag {
    /// Splits the text of `--set`.
    fn set(text: &str) -> Self {
        let (path, value) = match text.split_once('=') {
            Some((path, value)) => (Some(path.trim().to_owned()), value.trim().to_owned()),
            None => (None, text.to_owned()),
        };
        Self { shown: format!("--set {text}"), path, value, is_string: false, yields_to_set_value: false }
    }

    /// Sets the value in the reader, in place of the file's value.
    pub(super) fn apply<'a>(&'a self, reader: &mut Reader<'a>) {
        if self.yields_to_set_value && self.path.as_ref().is_some_and(|path| reader.origins.has(path)) {
            return;
        }
        let mut fail = |cause: String, hint: String| {
            reader.errors.push(ConfigError { cause, location: Location::Flag(self.shown.clone()), hint });
        };
        let Some(path) = &self.path else {
            return fail("expected section.key=value, found no equals sign".into(), EXAMPLE.into());
        };
        // A key without a section is reported later, when all keys are known, with its section.
        let (section, key) = path.split_once('.').unwrap_or(("", path));
        if key.is_empty() || key.contains('.') || path.starts_with('.') {
            return fail(format!("expected section.key=value, found the path `{path}`"), EXAMPLE.into());
        }
        if self.value.is_empty() {
            return fail(format!("no value for `{path}`"), EXAMPLE.into());
        }
        match self.parse() {
            Ok(value) => {
                let value = Spanned::new(0..self.value.len(), value);
                reader.set(section, key, value, &self.value, Origin::Flag(self.shown.clone()));
            }
            Err((cause, hint)) => fail(cause, hint),
        }
    }

    /// Parses the value as TOML. A value that is not TOML is a string.
    fn parse(&self) -> Result<DeValue<'_>, (String, String)> {
        if self.is_string {
            return Ok(DeValue::String(Cow::Borrowed(&self.value)));
        }
        match DeValue::parse(&self.value) {
            Ok(value) => Ok(value.into_inner()),
            // A value that starts with a quote or a bracket is meant as TOML.
            Err(error) if self.value.starts_with(['"', '\'', '[', '{']) => {
                let text = error.span().and_then(|span| self.value.get(span)).unwrap_or_default();
                let (cause, _) = syntax::explain(error.message(), text);
                Err((cause, "keep the shell from taking quotes away: --set 'data.augment=[\"crop\", \"flip\"]'".into()))
            }
            Err(_) => Ok(DeValue::String(Cow::Borrowed(&self.value))),
        }
    }
}

/// The settings that `--autotune` may change. They change a step's time, but not its result, except for the order of sums.
const AUTOTUNED: &str = r#"["bucket_mb", "first_bucket_mb", "threads"]"#;
/// Hint for a flag of the wrong form.
const EXAMPLE: &str = "write it like --set optimizer.lr=0.1";
