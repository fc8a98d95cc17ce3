//! The text of a configuration file, and locations in the text.

use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use unicode_width::UnicodeWidthChar;

use super::error::{ConfigError, Location, SourceLine};
use super::suggest;

/// Largest configuration file in bytes. A larger file is another kind of file, such as a checkpoint.
const LARGEST_FILE: u64 = 1 << 20;
/// Columns of a tab in an excerpt. Tabs become spaces there, so that the caret is under its text.
const TAB: usize = 4;
/// Longest line, in characters, that an excerpt shows whole. Of a longer line it shows the part around the caret.
const LONGEST_LINE: usize = 160;

/// The text of a configuration file, and the file's name in errors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfigSource {
    /// The path, as the user wrote it.
    pub path: PathBuf,
    /// The text, without a byte-order mark.
    pub text: String,
}

impl ConfigSource {
    /// Makes a source from text that was read before.
    pub fn new(path: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        let mut text: String = text.into();
        if text.starts_with('\u{feff}') {
            text.drain(..'\u{feff}'.len_utf8());
        }
        Self { path: path.into(), text }
    }

    /// Reads the file at `path`.
    ///
    /// # Errors
    /// The file is missing, a folder, unreadable, larger than 1 MiB or not UTF-8.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let whole = |cause: &str, hint: &str| {
            Err(ConfigError { cause: cause.into(), location: Location::File(path.to_owned()), hint: hint.into() })
        };
        if path.is_dir() {
            return whole("this is a folder, not a configuration file", &files_in(path));
        }
        let mut bytes = Vec::new();
        let read = std::fs::File::open(path).and_then(|file| file.take(LARGEST_FILE + 1).read_to_end(&mut bytes));
        match read.map_err(|error| (error.kind(), error)) {
            Ok(_) if bytes.len() as u64 <= LARGEST_FILE => {}
            Ok(_) => {
                let hint = "give the TOML file that describes the run, such as configs/quickstart.toml";
                return whole("larger than 1 MiB: not a configuration file", hint);
            }
            Err((ErrorKind::NotFound, _)) => return whole("no such file", &nearest_file(path)),
            Err((ErrorKind::PermissionDenied, _)) => {
                return whole("permission denied", "make the file readable for this user");
            }
            Err((_, error)) => return whole(&format!("cannot be read: {error}"), "check the path and the disk"),
        }
        String::from_utf8(bytes).map(|text| Self::new(path, text)).map_err(|error| {
            let start = error.utf8_error().valid_up_to();
            let bytes = error.into_bytes();
            let cause = format!("not UTF-8 text: byte 0x{:02x}", bytes[start]);
            // The text before `start` is valid, so `start` is the same offset in the lossy text.
            let lossy = Self { path: path.to_owned(), text: String::from_utf8_lossy(&bytes).into_owned() };
            let location = lossy.locate(start..start + char::REPLACEMENT_CHARACTER.len_utf8());
            ConfigError { cause, location, hint: "save the file as UTF-8 text".into() }
        })
    }

    /// Returns the location of the bytes `range`: line, column and excerpt. Limits a range that exceeds the text.
    pub fn locate(&self, range: Range<usize>) -> Location {
        let text = self.text.as_str();
        let mut start = text.floor_char_boundary(range.start);
        if start == text.len() {
            // Show "unexpected end of file" at the end of the last line that is not blank.
            start = text.trim_end().len();
        }
        let end = text.floor_char_boundary(range.end).max(start);
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |newline| start + newline);
        let line = text[line_start..line_end].trim_end_matches('\r');
        let before = &text[line_start..start];
        let marked = &text[start..end.min(line_start + line.len()).max(start)];
        let mut shown = SourceLine {
            file: self.path.clone(),
            line: text[..line_start].matches('\n').count() + 1,
            column: before.chars().count() + 1,
            text: String::new(),
            indent: 0,
            width: 0,
        };
        shown.excerpt(line, marked.chars().count());
        Location::Line(Box::new(shown))
    }
}

impl SourceLine {
    /// Sets `text`, `indent` and `width` from `line`. The marked part starts at `column` and has `marked` characters.
    fn excerpt(&mut self, line: &str, marked: usize) {
        let (before, length) = (self.column - 1, line.chars().count());
        let (first, last) = match length > LONGEST_LINE {
            true => (before.saturating_sub(LONGEST_LINE / 2), before + LONGEST_LINE / 2),
            false => (0, length),
        };
        if first > 0 {
            self.text.push('…');
            self.indent = 1;
        }
        for (index, symbol) in line.chars().enumerate().skip(first).take(last - first) {
            let (shown, count, columns) = match (symbol, symbol.width()) {
                ('\t', _) => (' ', TAB, TAB),
                (_, Some(columns)) => (symbol, 1, columns),
                // The terminal would execute a control character.
                (_, None) => (char::REPLACEMENT_CHARACTER, 1, 1),
            };
            self.text.extend(std::iter::repeat_n(shown, count));
            if index < before {
                self.indent += columns;
            } else if index < before + marked {
                self.width += columns;
            }
        }
        if last < length {
            self.text.push('…');
        }
        self.text.truncate(self.text.trim_end().len());
        self.width = self.width.max(1);
    }
}

/// Returns the sorted names of the `.toml` files in `folder`. Returns none if the folder cannot be read.
fn toml_files(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".toml"))
        .collect();
    names.sort();
    names
}

/// Returns the hint for a path that is a folder and not a file.
fn files_in(folder: &Path) -> String {
    let names = toml_files(folder);
    match names.is_empty() {
        true => "give the TOML file itself, such as configs/quickstart.toml".into(),
        false => format!("give one of its files: {}", names.join(", ")),
    }
}

/// Returns the hint for a file that does not exist.
fn nearest_file(path: &Path) -> String {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        return format!("there is no folder `{}`; paths are relative to the current directory", folder.display());
    }
    let names = toml_files(folder);
    let wanted = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let candidates: Vec<&str> = names.iter().map(String::as_str).collect();
    match suggest::nearest(&wanted, &suggest::without_aliases(&candidates)) {
        Some(name) => format!("did you mean `{}`?", path.with_file_name(name).display()),
        None if names.is_empty() => format!("`{}` holds no .toml file", folder.display()),
        None if names.len() > 6 => {
            format!("`{}` holds {} .toml files: {} and others", folder.display(), names.len(), names[..5].join(", "))
        }
        None => format!("`{}` holds {}", folder.display(), names.join(", ")),
    }
}
