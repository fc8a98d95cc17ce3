//! Values by section and key, read with their defaults; every mistake is kept with its place.
//!
//! A key is known because somebody reads it: there is no second list of keys to keep in step. What nobody has read
//! in the end is an unknown key.

use std::collections::BTreeMap;
use std::fmt::{Debug, Display};
use std::ops::{Bound, RangeBounds};

use toml::de::{DeTable, DeValue};

use super::choice::Choice;
use super::error::ConfigError;
use super::origin::{Origin, Origins};
use super::source::Source;
use super::suggest;
use super::syntax;
use super::value::{Mistake, Value};

/// One key as it was set.
struct Entry<'a> {
    value: DeValue<'a>,
    text: &'a str,
    read: bool,
}

/// The keys that were set, where they came from, and what is wrong with them.
pub(super) struct Reader<'a> {
    entries: BTreeMap<(String, String), Entry<'a>>,
    /// Sections and keys in the order in which they are read.
    known: Vec<(&'static str, Vec<&'static str>)>,
    pub(super) origins: Origins,
    pub(super) errors: Vec<ConfigError>,
    pub(super) notes: Vec<String>,
}

impl<'a> Reader<'a> {
    /// Takes the keys of a file.
    ///
    /// # Errors
    /// The first place at which the text is not TOML.
    pub(super) fn new(source: &'a Source) -> Result<Self, ConfigError> {
        let table = syntax::parse(source)?;
        let mut reader = Self {
            entries: BTreeMap::new(),
            known: Vec::new(),
            origins: Origins::new(source.clone()),
            errors: Vec::new(),
            notes: Vec::new(),
        };
        let mut loose = Vec::new();
        for (name, content) in table {
            let span = name.span();
            let section = name.into_inner().into_owned();
            match content.into_inner() {
                DeValue::Table(keys) => {
                    reader.origins.headers.insert(section.clone(), span);
                    reader.take_section(&section, keys, &source.text);
                }
                other => loose.push((section, span, other)),
            }
        }
        for (name, span, value) in loose {
            // Reported at the end, when the sections and their keys are known.
            reader.origins.insert("", &name, Origin::File { key: span.clone(), value: span });
            reader.entries.insert((String::new(), name), Entry { value, text: "", read: false });
        }
        Ok(reader)
    }

    /// Takes the keys of one section.
    fn take_section(&mut self, section: &str, keys: DeTable<'a>, text: &'a str) {
        for (key, value) in keys {
            let origin = Origin::File { key: key.span(), value: value.span() };
            let written = text.get(value.span()).unwrap_or_default();
            self.set(section, key.get_ref(), value.into_inner(), written, origin);
        }
    }

    /// Sets one key; what it was set to before is forgotten.
    pub(super) fn set(&mut self, section: &str, key: &str, value: DeValue<'a>, text: &'a str, origin: Origin) {
        self.origins.insert(section, key, origin);
        self.entries.insert((section.to_owned(), key.to_owned()), Entry { value, text, read: false });
    }

    /// Starts reading a section.
    pub(super) fn section(&mut self, name: &'static str) -> Section<'_, 'a> {
        self.known.push((name, Vec::new()));
        Section { reader: self, name, broken: Vec::new() }
    }

    /// The keys of a section.
    pub(super) fn keys_of(&self, section: &str) -> &[&'static str] {
        self.known.iter().find(|(name, _)| *name == section).map(|(_, keys)| keys.as_slice()).unwrap_or_default()
    }

    /// Names of all sections.
    pub(super) fn sections(&self) -> Vec<&'static str> {
        self.known.iter().map(|(name, _)| *name).collect()
    }

    /// The section that has a key of that or a similar name: "`lr` is a key of [optimizer]. ".
    pub(super) fn home_of(&self, key: &str) -> Option<(&'static str, &'static str)> {
        let exact = self.known.iter().find_map(|(section, keys)| {
            let found = keys.iter().find(|known| **known == key)?;
            Some((*section, *found))
        });
        exact.or_else(|| {
            self.known.iter().find_map(|(section, keys)| suggest::nearest(key, keys).map(|found| (*section, found)))
        })
    }

    /// Complains about every key and section that nobody has read. To be called after the last section.
    pub(super) fn report_unknown(&mut self) {
        let sections = self.sections();
        let mut unknown_sections: Vec<&str> = Vec::new();
        let mut reports = Vec::new();
        for ((section, key), entry) in self.entries.iter().filter(|(_, entry)| !entry.read) {
            let place = self.origins.key(section, key);
            let (cause, hint) = if section.is_empty() {
                self.loose(key, &entry.value)
            } else if !sections.contains(&section.as_str()) {
                unknown_sections.push(section);
                if self.origins.headers.contains_key(section.as_str()) {
                    continue;
                }
                self.unknown_section(section)
            } else {
                self.unknown_key(section, key)
            };
            reports.push(ConfigError { cause, place, hint });
        }
        for section in self.origins.headers.keys().filter(|name| !sections.contains(&name.as_str())) {
            let (cause, hint) = self.unknown_section(section);
            reports.push(ConfigError { cause, place: self.origins.section(section), hint });
        }
        self.errors.append(&mut reports);
    }

    /// A name at the top of the file that is no section.
    fn loose(&self, name: &str, value: &DeValue<'_>) -> (String, String) {
        if self.sections().contains(&name) && !matches!(self.origins.get("", name), Some(Origin::Flag(_))) {
            let kind = if value.is_array() { "an array" } else { "a value" };
            return (
                format!("`{name}`: expected a section, found {kind}"),
                format!("write its keys on the lines below `[{name}]`"),
            );
        }
        let flag = matches!(self.origins.get("", name), Some(Origin::Flag(_)));
        let hint = match self.home_of(name) {
            Some((section, key)) if flag => format!("write --set {section}.{key}=…"),
            Some((section, key)) => format!("put `{key}` below `[{section}]`"),
            None => format!("every key stands in a section: {}", bracketed(&self.sections())),
        };
        (format!("unknown key `{name}` outside of any section"), hint)
    }

    /// A section that does not exist.
    fn unknown_section(&self, section: &str) -> (String, String) {
        let sections = self.sections();
        let near = suggest::nearest(section, &sections).map(|name| format!("did you mean [{name}]? "));
        (
            format!("unknown section [{section}]"),
            format!("{}sections: {}", near.unwrap_or_default(), bracketed(&sections)),
        )
    }

    /// A key that its section does not have.
    fn unknown_key(&self, section: &str, key: &str) -> (String, String) {
        let keys = self.keys_of(section);
        let elsewhere = || {
            let home = self.known.iter().find(|(_, keys)| keys.contains(&key))?;
            Some(format!("`{key}` is a key of [{}]; ", home.0))
        };
        let near = || Some(suggest::did_you_mean(key, keys)).filter(|hint| !hint.is_empty());
        let start = elsewhere().or_else(near).unwrap_or_default();
        (format!("unknown key `{key}` in [{section}]"), format!("{start}keys of [{section}]: {}", keys.join(", ")))
    }
}

/// `[a], [b]`
fn bracketed(sections: &[&str]) -> String {
    sections.iter().map(|name| format!("[{name}]")).collect::<Vec<_>>().join(", ")
}

/// One section while it is read. `about` says what a key means: it is the hint where its value is wrong.
pub(super) struct Section<'r, 'a> {
    pub(super) reader: &'r mut Reader<'a>,
    name: &'static str,
    broken: Vec<&'static str>,
}

impl Section<'_, '_> {
    /// Reads a key; a mistake is kept and read as "not set".
    pub(super) fn get<T>(
        &mut self,
        key: &'static str,
        about: &str,
        read: impl Fn(&Value) -> Result<T, Mistake>,
    ) -> Option<T> {
        if let Some((_, keys)) = self.reader.known.last_mut() {
            keys.push(key);
        }
        let entry = self.reader.entries.get_mut(&(self.name.to_owned(), key.to_owned()))?;
        entry.read = true;
        let bare = matches!(self.reader.origins.get(self.name, key), Some(Origin::Flag(_)));
        match read(&Value { parsed: &entry.value, text: entry.text, bare }) {
            Ok(value) => Some(value),
            Err(mistake) => {
                let place = match (mistake.span, bare) {
                    (Some(span), false) => self.reader.origins.bytes(span),
                    _ => self.reader.origins.value(self.name, key),
                };
                let cause = format!("`{}.{key}`: {}", self.name, mistake.cause);
                let hint = mistake.hint.unwrap_or_else(|| about.to_owned());
                self.reader.errors.push(ConfigError { cause, place, hint });
                self.broken.push(key);
                None
            }
        }
    }

    /// A number within `range`.
    pub(super) fn number(&mut self, key: &'static str, default: f64, range: impl RangeBounds<f64>, about: &str) -> f64 {
        let about = with_default(about, default);
        self.get(key, &about, |value| within(value.number()?, &range, value.text, "a number")).unwrap_or(default)
    }

    /// A whole number within `range`.
    pub(super) fn count(
        &mut self,
        key: &'static str,
        default: usize,
        range: impl RangeBounds<i64>,
        about: &str,
    ) -> usize {
        let about = with_default(about, default);
        self.optional_count(key, range, &about).unwrap_or(default)
    }

    /// A whole number within `range` (which starts at 0 or above), without a default.
    pub(super) fn optional_count(
        &mut self,
        key: &'static str,
        range: impl RangeBounds<i64>,
        about: &str,
    ) -> Option<usize> {
        let read = |value: &Value| {
            let integer = within(value.integer()?, &range, value.text, "an integer")?;
            usize::try_from(integer).map_err(|_| Mistake::new(format!("expected an integer from 0, found {integer}")))
        };
        self.get(key, about, read)
    }

    /// A truth value.
    pub(super) fn flag(&mut self, key: &'static str, default: bool, about: &str) -> bool {
        self.get(key, &with_default(about, default), |value| value.boolean()).unwrap_or(default)
    }

    /// One word of a list.
    pub(super) fn choice<T: Choice + Display>(&mut self, key: &'static str, default: T, about: &str) -> T {
        let words: Vec<&str> = T::ALL.iter().map(|choice| choice.name()).collect();
        let about = format!("{about}: {}", words.join(", "));
        let read = |value: &Value| {
            let word = value.string()?;
            T::from_name(&word).ok_or_else(|| {
                Mistake::new(format!("unknown value {word:?}")).hint(format!(
                    "{}choices: {}",
                    suggest::did_you_mean(&word, &words),
                    suggest::nearest_first(&word, &words)
                ))
            })
        };
        self.get(key, &with_default(&about, default), read).unwrap_or(default)
    }

    /// A name out of a registry; must be set.
    pub(super) fn name(&mut self, key: &'static str, kind: &str, names: &[&str]) -> Option<String> {
        let about = format!("{kind}: {}", names.join(", "));
        let read = |value: &Value| {
            let word = value.string()?;
            match names.contains(&word.as_str()) {
                true => Ok(word),
                false => Err(Mistake::new(format!("no {kind} is called {word:?}")).hint(format!(
                    "{}names: {}",
                    suggest::did_you_mean(&word, names),
                    suggest::nearest_first(&word, names)
                ))),
            }
        };
        let name = self.get(key, &about, read);
        if name.is_none() && !self.is_broken(key) {
            let place = self.reader.origins.section(self.name);
            let cause = match self.reader.origins.headers.contains_key(self.name) {
                true => format!("missing key `{key}` in [{}]", self.name),
                false => format!("missing section [{}]", self.name),
            };
            let example = names.first().copied().unwrap_or("…");
            let hint = format!("write `{key} = \"{example}\"` below `[{}]`; names: {}", self.name, names.join(", "));
            self.reader.errors.push(ConfigError { cause, place, hint });
        }
        name
    }

    /// Whether the key was set, rightly or wrongly.
    pub(super) fn is_set(&self, key: &str) -> bool {
        self.reader.origins.get(self.name, key).is_some()
    }

    /// Whether the key was set to something that cannot be used.
    pub(super) fn is_broken(&self, key: &str) -> bool {
        self.broken.contains(&key)
    }

    /// A mistake that more than one key has a part in, shown at `key`.
    pub(super) fn reject(&mut self, key: &str, cause: impl Into<String>, hint: impl Into<String>) {
        let error = self.reader.origins.error(self.name, key, cause, hint);
        self.reader.errors.push(error);
    }

    /// Complains about those of `keys` that are set although `kind` has no use for them.
    ///
    /// Where the file sets the key and a flag has changed the kind, the file is not to blame: the key is left out
    /// and noted.
    pub(super) fn only_for<T: Choice>(&mut self, kind: T, users: &[T], keys: &[&'static str]) {
        if users.contains(&kind) || self.is_broken("kind") {
            return;
        }
        let users: Vec<String> = users.iter().map(|user| format!("\"{}\"", user.name())).collect();
        for key in keys.iter().filter(|key| self.is_set(key)).copied().collect::<Vec<_>>() {
            let file = self.reader.origins.path().display().to_string();
            let from_file = matches!(self.reader.origins.get(self.name, key), Some(Origin::File { .. }));
            match self.reader.origins.get(self.name, "kind") {
                Some(Origin::Flag(flag)) if from_file => {
                    let note = format!("{flag} has no use for `{}.{key}` of {file}: left out", self.name);
                    self.reader.notes.push(note);
                    self.reader.origins.remove(self.name, key);
                }
                _ => {
                    let cause = format!("`{}.{key}` has no meaning for kind = \"{}\"", self.name, kind.name());
                    let hint = format!("remove it, or use kind = {}", users.join(" or "));
                    let place = self.reader.origins.key(self.name, key);
                    self.reader.errors.push(ConfigError { cause, place, hint });
                }
            }
        }
    }
}

/// A key's meaning and its default, as a hint.
fn with_default(about: &str, default: impl Display) -> String {
    format!("{about}; default {default}")
}

/// The value where it is in range.
fn within<T: PartialOrd + Display + Debug>(
    value: T,
    range: &impl RangeBounds<T>,
    text: &str,
    wanted: &str,
) -> Result<T, Mistake> {
    match range.contains(&value) {
        true => Ok(value),
        false => {
            let found = if text.is_empty() { value.to_string() } else { text.to_owned() };
            Err(Mistake::new(format!("expected {wanted} {}, found {found}", describe(range))))
        }
    }
}

/// A range in words: `above 0 and at most 1000`, `from 1 to 10`.
pub(super) fn describe<T: PartialOrd + Display>(range: &impl RangeBounds<T>) -> String {
    match (range.start_bound(), range.end_bound()) {
        (Bound::Included(low), Bound::Included(high)) => format!("from {low} to {high}"),
        (low, high) => {
            let low = match low {
                Bound::Included(low) => Some(format!("of at least {low}")),
                Bound::Excluded(low) => Some(format!("above {low}")),
                Bound::Unbounded => None,
            };
            let high = match high {
                Bound::Included(high) => Some(format!("at most {high}")),
                Bound::Excluded(high) => Some(format!("below {high}")),
                Bound::Unbounded => None,
            };
            low.into_iter().chain(high).collect::<Vec<_>>().join(" and ")
        }
    }
}
