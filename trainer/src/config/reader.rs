//! The keys that a file and flags set, read into a plan; every mistake is kept with its location.
//!
//! The plan itself is the list of known keys: a key that no section has read is unknown.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use toml::Spanned;
use toml::de::DeValue;

use super::error::ConfigError;
use super::key::{Key, KeyValue, KeyVisitor};
use super::origin::{Origin, Origins, SetBy};
use super::source::ConfigSource;
use super::suggest;
use super::syntax;
use super::value::RawValue;

/// One key as it was set. `source` is the text that the value is a part of.
struct Entry<'a> {
    value: Spanned<DeValue<'a>>,
    source: &'a str,
}

/// A key that the plan has.
struct KnownKey {
    section: &'static str,
    name: &'static str,
    aliases: &'static [&'static str],
}

/// The keys that were set, where they came from, and what is wrong with them.
pub(super) struct Reader<'a> {
    entries: BTreeMap<(String, String), Entry<'a>>,
    /// The plan's keys, in the order in which they were read.
    known: Vec<KnownKey>,
    /// Keys that were set to something that cannot be used.
    broken: BTreeSet<(&'static str, &'static str)>,
    /// The value of the last `kind`, which is a section's first key. `None` if the value is broken.
    kind: Option<String>,
    pub(super) origins: Origins,
    pub(super) errors: Vec<ConfigError>,
    pub(super) notes: Vec<String>,
}

impl<'a> Reader<'a> {
    /// Reads the keys of a file.
    ///
    /// # Errors
    /// The first location at which the text is not TOML.
    pub(super) fn new(source: &'a ConfigSource) -> Result<Self, ConfigError> {
        let table = syntax::parse(source)?;
        let mut reader = Self {
            entries: BTreeMap::new(),
            known: Vec::new(),
            broken: BTreeSet::new(),
            kind: None,
            origins: Origins::new(source.clone()),
            errors: Vec::new(),
            notes: Vec::new(),
        };
        for (name, content) in table {
            let (key, value) = (name.span(), content.span());
            match content.into_inner() {
                DeValue::Table(keys) => {
                    reader.origins.headers.insert(name.get_ref().to_string(), key);
                    for (key, value) in keys {
                        let origin = Origin::File { key: key.span(), value: value.span() };
                        reader.set(name.get_ref(), key.get_ref(), value, &source.text, origin);
                    }
                }
                other => {
                    let other = Spanned::new(value.clone(), other);
                    reader.set("", name.get_ref(), other, &source.text, Origin::File { key, value });
                }
            }
        }
        Ok(reader)
    }

    /// Sets one key; an earlier value of the key is forgotten.
    pub(super) fn set(
        &mut self,
        section: &str,
        key: &str,
        value: Spanned<DeValue<'a>>,
        source: &'a str,
        origin: Origin,
    ) {
        self.origins.insert(section, key, origin);
        self.entries.insert((section.to_owned(), key.to_owned()), Entry { value, source });
    }

    /// Returns whether the key was set to something that cannot be used.
    pub(super) fn is_broken(&self, section: &'static str, key: &'static str) -> bool {
        self.broken.contains(&(section, key))
    }

    /// Reports a mistake in the value of `path`, `section.key`.
    pub(super) fn reject(&mut self, path: &str, cause: impl Display, hint: impl Into<String>) {
        self.errors.push(self.origins.error(path, format!("`{path}`: {cause}"), hint));
    }

    /// Reports a key that is set although the section's kind does not use it.
    ///
    /// If a flag has changed the kind and the file sets the key, the key is no mistake: it is left out, with a note.
    fn reject_unused_key<T>(&mut self, key: &Key<T>, kind: &str) {
        let Key { section, name, .. } = *key;
        let from_file = self.origins.set_by(section, name) == SetBy::File;
        match self.origins.get(section, "kind") {
            Some(Origin::Flag(flag)) if from_file => {
                let file = self.origins.source.path.display();
                self.notes.push(format!("{flag} has no use for `{section}.{name}` of {file}: left out"));
                self.origins.remove(section, name);
            }
            _ => {
                let cause = format!("`{section}.{name}` has no meaning for kind = \"{kind}\"");
                let hint = format!("remove it, or use kind = \"{}\"", key.only_kinds.join("\" or \""));
                self.errors.push(ConfigError { cause, location: self.origins.key(section, name), hint });
            }
        }
    }

    /// Names of all sections.
    fn sections(&self) -> Vec<&'static str> {
        self.known.chunk_by(|one, next| one.section == next.section).map(|keys| keys[0].section).collect()
    }

    /// Returns whether the file or a flag has the section in a wrong form: as a value, or under a similar name.
    pub(super) fn is_misspelt(&self, section: &str) -> bool {
        let sections = self.sections();
        let near = |name: &str| suggest::nearest(name, &suggest::without_aliases(&sections)) == Some(section);
        let set = self.entries.keys().map(|(name, _)| name).chain(self.origins.headers.keys());
        self.entries.contains_key(&(String::new(), section.to_owned()))
            || set.filter(|name| !name.is_empty() && !sections.contains(&name.as_str())).any(|name| near(name))
    }

    /// Returns the section and the name of a key of that or a similar name.
    fn nearest_key(&self, key: &str) -> Option<(&'static str, &'static str)> {
        let of_section = |keys: &[KnownKey]| {
            let names: Vec<suggest::Name> = keys.iter().map(|known| (known.name, known.aliases)).collect();
            suggest::nearest(key, &names).map(|name| (keys[0].section, name))
        };
        let exact = self.known.iter().find(|known| known.name == key).map(|known| (known.section, known.name));
        exact.or_else(|| self.known.chunk_by(|one, next| one.section == next.section).find_map(of_section))
    }

    /// Reports every key and section that the plan does not have. Call the function after all keys were read.
    pub(super) fn report_unknown(&mut self) {
        let sections = self.sections();
        let mut reports = Vec::new();
        let is_known =
            |section: &str, key: &str| self.known.iter().any(|one| (one.section, one.name) == (section, key));
        for ((section, key), entry) in self.entries.iter().filter(|((section, key), _)| !is_known(section, key)) {
            let (cause, hint) = if section.is_empty() {
                self.explain_top_level_name(key, entry.value.get_ref())
            } else if sections.contains(&section.as_str()) {
                self.unknown_key(section, key)
            } else if self.origins.headers.contains_key(section.as_str()) {
                continue;
            } else {
                self.unknown_section(section)
            };
            reports.push(ConfigError { cause, location: self.origins.key(section, key), hint });
        }
        for section in self.origins.headers.keys().filter(|name| !sections.contains(&name.as_str())) {
            let (cause, hint) = self.unknown_section(section);
            reports.push(ConfigError { cause, location: self.origins.section(section), hint });
        }
        self.errors.append(&mut reports);
    }

    /// Explains a name at the top of the file that is not a section.
    fn explain_top_level_name(&self, name: &str, value: &DeValue<'_>) -> (String, String) {
        let flag = self.origins.set_by("", name) == SetBy::Flag;
        if self.sections().contains(&name) && flag {
            return (format!("`{name}` is a section, not a key"), format!("write --set {name}.KEY=VALUE"));
        }
        if self.sections().contains(&name) {
            let kind = if value.is_array() { "an array" } else { "a value" };
            let has_name = self.known.iter().any(|known| (known.section, known.name) == (name, "name"));
            let hint = match value.as_str().filter(|_| has_name) {
                Some(text) => format!("did you mean {name} = {{ name = {text:?} }}?"),
                None => format!("write its keys on the lines below `[{name}]`"),
            };
            return (format!("`{name}`: expected a section, found {kind}"), hint);
        }
        let hint = match self.nearest_key(name) {
            Some((section, key)) if flag => format!("write --set {section}.{key}=…"),
            Some((section, key)) => format!("put `{key}` below `[{section}]`"),
            None => format!("every key belongs to a section: [{}]", self.sections().join("], [")),
        };
        (format!("unknown key `{name}` outside of any section"), hint)
    }

    /// Explains a section that does not exist.
    fn unknown_section(&self, section: &str) -> (String, String) {
        let sections = self.sections();
        let near = suggest::nearest(section, &suggest::without_aliases(&sections));
        let near = near.map(|name| format!("did you mean [{name}]? ")).unwrap_or_default();
        (format!("unknown section [{section}]"), format!("{near}sections: [{}]", sections.join("], [")))
    }

    /// Explains a key that its section does not have.
    fn unknown_key(&self, section: &str, key: &str) -> (String, String) {
        let keys = self.known.iter().filter(|known| known.section == section);
        let keys: Vec<suggest::Name> = keys.map(|known| (known.name, known.aliases)).collect();
        let title = format!("keys of [{section}]");
        let hint = match self.known.iter().find(|known| known.name == key) {
            Some(elsewhere) => {
                let names: Vec<&str> = keys.iter().map(|(name, _)| *name).collect();
                format!("`{key}` is a key of [{}]; {title}: {}", elsewhere.section, names.join(", "))
            }
            None => suggest::hint(&title, key, &keys),
        };
        (format!("unknown key `{key}` in [{section}]"), hint)
    }
}

impl KeyVisitor for Reader<'_> {
    /// Reads a key; a value with a mistake counts as not set.
    fn key<T: KeyValue>(&mut self, key: &Key<T>, value: &mut T) {
        let Key { section, name, .. } = *key;
        self.known.push(KnownKey { section, name, aliases: key.aliases });
        *value = key.default_for(self.kind.as_deref());
        let entry = self.entries.get(&(section.to_owned(), name.to_owned()));
        if let Some(kind) = self.kind.clone().filter(|kind| !key.is_used_by(Some(kind))) {
            if entry.is_some() {
                self.reject_unused_key(key, &kind);
            }
            return;
        }
        if let Some(entry) = entry {
            let bare = self.origins.set_by(section, name) == SetBy::Flag;
            match T::read(&RawValue::new(&entry.value, entry.source, bare), &key.range) {
                Ok(read) => *value = read,
                Err(mistake) => {
                    let location = match (mistake.span, bare) {
                        (Some(span), false) => self.origins.source.locate(span),
                        _ => self.origins.value(section, name),
                    };
                    let cause = format!("`{section}.{name}`: {}", mistake.cause);
                    let hint = mistake.hint.unwrap_or_else(|| key.hint(self.kind.as_deref()));
                    self.errors.push(ConfigError { cause, location, hint });
                    self.broken.insert((section, name));
                }
            }
        }
        if name == "kind" {
            let word = value.write().and_then(|word| word.as_str().map(str::to_owned));
            self.kind = word.filter(|_| !self.is_broken(section, name));
        }
    }
}
