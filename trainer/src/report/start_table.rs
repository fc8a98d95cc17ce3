//! The table at the start of a run: all resolved settings, in sections.

use crate::text::{align_left, prefix, width};

/// Maximum width of a line in any table, in columns.
pub const MAX_LINE_WIDTH: usize = 100;

/// Blank columns between two cells.
const GAP: usize = 2;

/// A titled group of settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// `model`, `data`, `optimizer`, …
    pub title: String,
    /// Name and value, in display order.
    pub rows: Vec<(String, String)>,
}

impl Section {
    /// Creates a section without rows.
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), rows: Vec::new() }
    }

    /// Adds a setting.
    #[must_use]
    pub fn row(mut self, name: impl Into<String>, value: impl ToString) -> Self {
        self.rows.push((name.into(), value.to_string()));
        self
    }
}

/// Formats the sections as one aligned table of at most [`MAX_LINE_WIDTH`] columns.
///
/// Section titles are at the left. Two settings share a line if both are short. A long value has its own lines, folded at
/// blanks. The text ends with a newline.
pub fn start_table(sections: &[Section]) -> String {
    let sections: Vec<_> = sections.iter().filter(|section| !section.rows.is_empty()).collect();
    let widest = |names: &mut dyn Iterator<Item = &str>| names.map(width).max().unwrap_or(0);
    let title_width = widest(&mut sections.iter().map(|section| section.title.as_str()));
    let name_width = widest(&mut sections.iter().flat_map(|section| section.rows.iter().map(|row| row.0.as_str())));
    let indent = title_width + GAP;
    // The line has two halves. The first half takes the width of its widest short value.
    let half = MAX_LINE_WIDTH.saturating_sub(indent + GAP) / 2;
    let value_width = half.saturating_sub(name_width + GAP).max(8);
    let mut table = String::new();
    for section in sections {
        let mut title = section.title.as_str();
        let mut rows = section.rows.iter().peekable();
        while let Some((name, value)) = rows.next() {
            let cell = |name: &str, value: &str| format!("{}  {value}", align_left(name, name_width));
            let fits = |value: &str| width(value) <= value_width && !value.contains('\n');
            let lines = match rows.next_if(|(_, next)| fits(value) && fits(next)) {
                Some((second, next)) => {
                    vec![format!(
                        "{}  {}",
                        align_left(&cell(name, value), name_width + GAP + value_width),
                        cell(second, next)
                    )]
                }
                None => {
                    let room = MAX_LINE_WIDTH - indent - name_width - GAP;
                    let folded = folded(value, room);
                    folded.iter().enumerate().map(|(i, part)| cell(if i == 0 { name } else { "" }, part)).collect()
                }
            };
            for line in lines {
                table += format!("{}  {line}", align_left(title, title_width)).trim_end();
                table.push('\n');
                title = "";
            }
        }
    }
    table
}

/// Folds `text` into lines of at most `room` columns at blanks. Splits a word that is longer than `room`.
fn folded(text: &str, room: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.lines() {
        let mut line = String::new();
        for word in paragraph.split_whitespace() {
            let mut word = word.to_owned();
            if !line.is_empty() && width(&line) + 1 + width(&word) <= room {
                line.push(' ');
            } else if !line.is_empty() {
                lines.push(std::mem::take(&mut line));
            }
            // Paths and lists without blanks: split them, so that all characters are shown.
            while width(&word) > room {
                // A line has at least one character, or the loop would not end.
                let first = word.chars().next().map_or(0, char::len_utf8);
                let rest = word.split_off(prefix(&word, room).len().max(first));
                lines.push(std::mem::replace(&mut word, rest));
            }
            line += &word;
        }
        lines.push(line);
    }
    if lines.is_empty() { vec![String::new()] } else { lines }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_words_are_split_without_loss() {
        for length in [1, 9, 10, 11, 19, 20, 21, 22, 250] {
            for c in ['a', '…', '宽'] {
                let word: String = std::iter::repeat_n(c, length).collect();
                let lines = folded(&word, 10);
                assert!(lines.iter().all(|line| width(line) <= 10 && !line.is_empty()), "{lines:?}");
                assert_eq!(lines.concat(), word);
            }
        }
    }

    #[test]
    fn the_table_is_compact_and_aligned() {
        let sections = [
            Section::new("run")
                .row("folder", "runs/20260131-093005-resnet18-singlex1")
                .row("config", "configs/cifar_resnet18.toml")
                .row("seed", 1),
            Section::new("model")
                .row("name", "resnet18")
                .row("classes", 10)
                .row("parameters", "11,173,962")
                .row("multiply-adds", "555.4 M an image"),
            Section::new("data")
                .row("name", "cifar10")
                .row("images", "50,000 to train, 10,000 to test, 3x32x32")
                .row("folder", "/home/somebody/with/quite/a/long/path/to/the/data/sets/of/this/machine/cifar-10-batches-bin/and/more")
                .row("augment", "crop:4, flip, cutout:8")
                .row("mean, std", "0.4914 0.4822 0.4465 / 0.2023 0.1994 0.2010"),
            Section::new("empty"),
            Section::new("optimizer")
                .row("kind", "sgd")
                .row("lr", 0.1)
                .row("momentum", 0.9)
                .row("weight decay", "0.0005, none on batch norm and biases")
                .row("schedule", "cosine over 200 epochs (78,200 steps), no warm-up, down to zero, once for each and every step"),
        ];
        let table = start_table(&sections);
        assert!(table.lines().all(|line| width(line) <= MAX_LINE_WIDTH), "{table}");
        insta::assert_snapshot!(table, @r"
            run        folder         runs/20260131-093005-resnet18-singlex1
                       config         configs/cifar_resnet18.toml   seed           1
            model      name           resnet18                      classes        10
                       parameters     11,173,962                    multiply-adds  555.4 M an image
            data       name           cifar10
                       images         50,000 to train, 10,000 to test, 3x32x32
                       folder         /home/somebody/with/quite/a/long/path/to/the/data/sets/of/this/machine/cif
                                      ar-10-batches-bin/and/more
                       augment        crop:4, flip, cutout:8
                       mean, std      0.4914 0.4822 0.4465 / 0.2023 0.1994 0.2010
            optimizer  kind           sgd                           lr             0.1
                       momentum       0.9
                       weight decay   0.0005, none on batch norm and biases
                       schedule       cosine over 200 epochs (78,200 steps), no warm-up, down to zero, once for
                                      each and every step
            ");
    }

    #[test]
    fn long_and_empty_values_are_shown_completely() {
        let long = "x".repeat(250);
        let table = start_table(&[Section::new("a").row("b", &long)]);
        assert_eq!(table.matches('x').count(), 250);
        assert!(table.lines().all(|line| width(line) <= MAX_LINE_WIDTH));
        assert_eq!(start_table(&[]), "");
        assert_eq!(start_table(&[Section::new("a").row("b", "")]), "a  b\n");
    }
}
