//! The tables of keys in `configs/README.md`.

use std::fmt::Write;

use super::key::{Key, KeyValue, KeyVisitor, Range, unquoted};
use super::plan::RunPlan;
use super::suggest;

/// Returns every key with its default, its values and its meaning: a Markdown table per section.
pub fn key_tables() -> String {
    let mut documenter = Documenter { section: "", text: String::new() };
    RunPlan::default().visit(&mut documenter);
    documenter.text
}

/// Returns the key, `section.key`, that another trainer calls `word`: `optimizer.lr` for `learning-rate`. `None` for an unknown
/// word.
pub fn key_called(word: &str) -> Option<String> {
    let mut search = Search { word, found: None };
    RunPlan::default().visit(&mut search);
    search.found
}

/// Searches the first key that has a name.
struct Search<'a> {
    word: &'a str,
    found: Option<String>,
}

impl KeyVisitor for Search<'_> {
    fn key<T: KeyValue>(&mut self, key: &Key<T>, _: &mut T) {
        // Several sections have a key of this name.
        let is_ambiguous = ["name", "kind", "every"].contains(&self.word);
        if self.found.is_none() && !is_ambiguous && suggest::is_called(self.word, (key.name, key.aliases)) {
            self.found = Some(format!("{}.{}", key.section, key.name));
        }
    }
}

/// Writes a table per section, a row per key.
struct Documenter {
    section: &'static str,
    text: String,
}

impl KeyVisitor for Documenter {
    fn key<T: KeyValue>(&mut self, key: &Key<T>, _: &mut T) {
        if key.section != self.section {
            self.section = key.section;
            let title = "| key | default | values | meaning |\n|---|---|---|---|";
            let _ = writeln!(self.text, "\n### `[{}]`\n\n{title}", key.section);
        }
        let code = |value: &T| match value.write()? {
            toml::Value::String(word) => (!word.is_empty()).then(|| format!("{word:?}")),
            number => Some(unquoted(&number)),
        };
        let mut default = match (code(&key.default), key.unset_meaning) {
            (Some(text), _) => format!("`{text}`"),
            (None, Some(meaning)) => meaning.to_owned(),
            (None, None) => "must be set".to_owned(),
        };
        for (kind, other) in &key.kind_defaults {
            let _ = write!(default, "; {kind}: `{}`", code(other).unwrap_or_default());
        }
        let mut values = T::values();
        if key.range != Range::ANY {
            let _ = write!(values, " {}", key.range);
        }
        if let Some((zero, meaning)) = T::UNSET_VALUE.zip(key.unset_meaning) {
            let _ = write!(values, ", {zero}: {meaning}");
        }
        let only = if key.only_kinds.is_empty() { String::new() } else { format!("{}: ", key.only_kinds.join(", ")) };
        let _ = writeln!(self.text, "| `{}` | {default} | {values} | {only}{} |", key.name, key.doc);
    }
}
