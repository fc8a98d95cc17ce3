//! What the command line sets: `--set section.key=value` and its short forms, such as `--epochs`.

use std::borrow::Cow;
use std::path::PathBuf;

use toml::de::DeValue;

use super::error::{ConfigError, Location};
use super::origin::Origin;
use super::reader::Reader;
use super::syntax;

/// Raw command-line values that change the configuration. Later wins: file, `set` in order, the others.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// `--set section.key=value`, each as it was given.
    pub set: Vec<String>,
    /// `--epochs`
    pub epochs: Option<usize>,
    /// `--seed`
    pub seed: Option<u64>,
    /// `--data-dir` (or `TRAINER_DATA_DIR`)
    pub data_dir: Option<PathBuf>,
    /// `--mode`, checked here.
    pub mode: Option<String>,
    /// `--backend`, checked here.
    pub backend: Option<String>,
}

/// One flag, split into path and value.
pub(super) struct Flag {
    /// As the user wrote it, for the error's location.
    shown: String,
    /// `section.key`; for `--set` what stands before the equals sign, if there is one.
    path: Option<String>,
    /// The value's text.
    value: String,
    /// The value is taken as a string, whatever it looks like.
    word: bool,
}

impl Overrides {
    /// Lists the flags in the order in which they apply.
    ///
    /// # Errors
    /// A data folder whose name is not UTF-8 could not be written into the run's configuration.
    pub(super) fn flags(&self) -> Result<Vec<Flag>, ConfigError> {
        let mut flags: Vec<Flag> = self.set.iter().map(|text| Flag::set(text)).collect();
        let mut add = |name: &str, path: &str, value: Option<String>, word| {
            flags.extend(value.map(|value| Flag {
                shown: format!("--{name} {value}"),
                path: Some(path.to_owned()),
                value,
                word,
            }));
        };
        add("epochs", "train.epochs", self.epochs.map(|epochs| epochs.to_string()), false);
        add("seed", "train.seed", self.seed.map(|seed| seed.to_string()), false);
        add("mode", "parallel.mode", self.mode.clone(), true);
        add("backend", "parallel.backend", self.backend.clone(), true);
        let dir = self.data_dir.as_ref().map(|dir| match dir.to_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(ConfigError {
                cause: "the data folder's name is not UTF-8 text".into(),
                location: Location::Flag(format!("--data-dir {}", dir.display())),
                hint: "rename the folder, or reach it through a link with a plain name".into(),
            }),
        });
        add("data-dir", "data.dir", dir.transpose()?, true);
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
        Self { shown: format!("--set {text}"), path, value, word: false }
    }

    /// Sets the value in the reader, over the file's.
    pub(super) fn apply<'a>(&'a self, reader: &mut Reader<'a>) {
        let mut fail = |cause: String, hint: String| {
            reader.errors.push(ConfigError { cause, location: Location::Flag(self.shown.clone()), hint });
        };
        let Some(path) = &self.path else {
            return fail("expected section.key=value, found no equals sign".into(), EXAMPLE.into());
        };
        // A key alone is reported with its section once all keys are known.
        let (section, key) = path.split_once('.').unwrap_or(("", path));
        if key.is_empty() || key.contains('.') || path.starts_with('.') {
            return fail(format!("expected section.key=value, found the path `{path}`"), EXAMPLE.into());
        }
        if self.value.is_empty() {
            return fail(format!("no value for `{path}`"), EXAMPLE.into());
        }
        match self.parse() {
            Ok(value) => reader.set(section, key, value, &self.value, Origin::Flag(self.shown.clone())),
            Err((cause, hint)) => fail(cause, hint),
        }
    }

    /// Reads the value as TOML, else as a bare string.
    fn parse(&self) -> Result<DeValue<'_>, (String, String)> {
        if self.word {
            return Ok(DeValue::String(Cow::Borrowed(&self.value)));
        }
        match DeValue::parse(&self.value) {
            Ok(value) => Ok(value.into_inner()),
            // What opens a quote or a bracket was meant as TOML.
            Err(error) if self.value.starts_with(['"', '\'', '[', '{']) => {
                let text = error.span().and_then(|span| self.value.get(span)).unwrap_or_default();
                let (cause, _) = syntax::explain(error.message(), text);
                Err((cause, "keep the shell from taking quotes away: --set 'data.augment=[\"crop\", \"flip\"]'".into()))
            }
            Err(_) => Ok(DeValue::String(Cow::Borrowed(&self.value))),
        }
    }
}

/// The hint for a flag that is not of the right form.
const EXAMPLE: &str = "write it like --set optimizer.lr=0.1";
