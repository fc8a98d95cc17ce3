//! A CSV file that lists images with their labels, `path,label[,split]`:
//!
//! ```text
//! path,label,split
//! photos/1.jpg,cat,train
//! photos/2.jpg,dog,test
//! ```
//!
//! The first line names the columns, in any order. Paths are relative to the manifest's folder. Labels are class names, which are
//! numbered in the order of the sorted names, or class numbers from 0 in all lines. The split is `train`, `val` or `test`;
//! without the column all images are training images. Without `test` images, `val` is the test split, as of an image folder.
//!
//! With [`LoadRequest::label_delim`] a label is a list of classes, `cat;dog`, and may be empty: fastai's
//! `ImageDataLoaders.from_df(…, label_delim=";")`.

mod columns;
mod labels;

use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};

use csv::{ByteRecord, ReaderBuilder, Trim};

use columns::{Columns, HEADER, header};
use labels::{Labels, labels};

use super::file::read_error;
use super::repeated::{DuplicateKind, Inode, Split, first_duplicate};
use super::split_files::{Sample, SplitFiles, load_splits};
use super::{DatasetInfo, LoadRequest};
use crate::encoded::ImageFile;
use crate::{DataError, Splits, open_regular, read_regular};

/// Hint for a missing path of the manifest.
pub(super) const NAME_IT: &str =
    "name the CSV file itself with `dir` in [data] or --data-dir: dir = \"photos/labels.csv\"";

/// Hint for a field that contains a line end.
const UNCLOSED_QUOTE: &str = "a quote is not closed; write \"\" for a quote inside a field";

/// Maximum size of a manifest in bytes: ten times that of ImageNet.
const MAX_BYTES: u64 = 1 << 30;

/// One line of the manifest.
#[derive(Debug)]
struct ManifestRow {
    /// Line in the file, from 1.
    line: u64,
    path: PathBuf,
    label: String,
    split: Split,
}

/// Reads a manifest and the images that it lists. `needs_test`: a manifest without test images is an error.
pub(super) fn load(
    info: &DatasetInfo,
    file: &Path,
    request: &LoadRequest,
    needs_test: bool,
) -> Result<Splits, DataError> {
    if file.is_dir() {
        return Err(DataError::new(file, "is a folder, not a CSV file", NAME_IT));
    }
    let bytes = read_regular(file, MAX_BYTES).map_err(|error| read_error(file, &error))?;
    let rows = rows(file, &bytes, request.label_delim.is_some())?;
    let Labels { classes, sets } = labels(file, &rows, request.label_delim)?;
    let evaluated = |part| rows.iter().any(|row| row.split == part);
    if needs_test && !evaluated(Split::Test) && !evaluated(Split::Val) {
        let cause = "no line has the split test or val: there is nothing to evaluate";
        return Err(DataError::new(file, cause, "add a column split, or set data.validation = 0.1 to hold images out"));
    }
    let has_test = evaluated(Split::Test);
    let test = if has_test { Split::Test } else { Split::Val };
    let needs_all = !request.only_for_evaluation || !evaluated(test);
    let is_used = |split: Split| needs_all || split == test;
    let metadata: Vec<_> = rows.iter().map(|row| std::fs::metadata(&row.path)).collect();
    let used: Vec<_> = rows.iter().zip(&metadata).filter(|(row, _)| is_used(row.split)).collect();
    check_files(file, &used, request.defer_missing)?;
    check_repeated(file, &rows, &metadata, request.split.validation.is_some())?;
    let mut files = SplitFiles::default();
    for (row, set) in rows.into_iter().zip(sets.iter()) {
        let split = match row.split {
            Split::Train => &mut files.train,
            Split::Val if has_test => &mut files.val,
            Split::Val | Split::Test => &mut files.test,
        };
        let (label, label_set) = match request.label_delim {
            None => (set[0], None),
            Some(_) => (0, Some(set.into())),
        };
        split.push(Sample { file: ImageFile::Path(row.path), label, label_set });
    }
    load_splits(info, file, files, &classes, request)
}

/// Returns the text with every line end as `\n`. Spreadsheets write `\r\n`, and `\r` as a format for old Macintosh computers. The
/// parser takes both as line ends, but counts only `\n`.
fn with_unix_line_ends(bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes.len());
    for (at, byte) in bytes.iter().enumerate() {
        match byte {
            b'\r' if bytes.get(at + 1) == Some(&b'\n') => {}
            b'\r' => text.push(b'\n'),
            byte => text.push(*byte),
        }
    }
    text
}

/// Parses the lines. `multi_label`: a label may be empty.
fn rows(file: &Path, bytes: &[u8], multi_label: bool) -> Result<Vec<ManifestRow>, DataError> {
    // Spreadsheets begin a file with a byte order mark.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let bytes = &*with_unix_line_ends(bytes);
    let mut reader = ReaderBuilder::new().has_headers(false).flexible(true).trim(Trim::Headers).from_reader(bytes);
    let mut record = ByteRecord::new();
    let folder = file.parent().unwrap_or(Path::new(""));
    let mut columns = None;
    let mut rows = Vec::new();
    while reader.read_byte_record(&mut record).map_err(|error| DataError::new(file, error.to_string(), HEADER))? {
        let line = record.position().map_or(0, |position| {
            // The position is that of the empty lines before the record.
            let empty = bytes[position.byte() as usize..].iter().take_while(|byte| **byte == b'\n').count();
            position.line() + empty as u64
        });
        let mistake = |cause: String, hint: &str| Err(DataError::new(file, cause, hint).at(format!("line {line}")));
        // A quote that is not closed makes the rest of the file one field.
        if record.iter().any(|field| field.contains(&b'\n')) {
            return mistake("a field contains a line end".into(), UNCLOSED_QUOTE);
        }
        let fields: Result<Vec<&str>, _> = record.iter().map(std::str::from_utf8).collect();
        let Ok(raw) = fields else {
            return mistake("is not UTF-8".into(), "save the file as UTF-8");
        };
        let fields: Vec<&str> = raw.iter().map(|field| field.trim()).collect();
        let Some(Columns { path, label, split }) = columns else {
            columns = Some(header(file, line, &fields)?);
            continue;
        };
        let expected = 2 + usize::from(split.is_some());
        if fields.len() != expected {
            let cause = format!("{} fields, the first line names {expected}", fields.len());
            return mistake(cause, "put a path that contains a comma in quotes: \"a,b.png\",cat");
        }
        let (raw, path, label) = (raw[path], fields[path], fields[label]);
        if path.is_empty() {
            return mistake("the path is empty".into(), "each line has a path and a label");
        }
        if label.is_empty() && !multi_label {
            let hint = "each line has a path and a label; where images have several classes or none, set label_delim = \";\" \
                        below [data] (--label-delim ';' for eval and data verify)";
            return mistake("the label is empty".into(), hint);
        }
        let part = match split.map(|column| fields[column]) {
            None | Some("train") => Split::Train,
            Some("val") => Split::Val,
            Some("test") => Split::Test,
            Some(other) => {
                let hint = match other.to_ascii_lowercase().as_str() {
                    "train" | "training" => "did you mean train? splits: train, val, test",
                    "val" | "valid" | "validation" | "dev" => "did you mean val? splits: train, val, test",
                    "test" | "testing" | "eval" => "did you mean test? splits: train, val, test",
                    _ => "splits: train, val, test",
                };
                return mistake(format!("unknown split {other:?}"), hint);
            }
        };
        // A file's name may begin or end with a space.
        let path = if raw != path && folder.join(raw).exists() { raw } else { path };
        rows.push(ManifestRow { line, path: folder.join(path), label: label.to_owned(), split: part });
    }
    if columns.is_none() {
        return Err(DataError::new(file, "the manifest is empty", HEADER));
    }
    Ok(rows)
}

/// Checks that no image has two labels or two splits. `metadata` is that of the rows' files. `splits` as in [`first_duplicate`].
fn check_repeated(
    file: &Path,
    rows: &[ManifestRow],
    metadata: &[io::Result<Metadata>],
    splits: bool,
) -> Result<(), DataError> {
    // A missing file has no inode.
    let inodes = metadata.iter().map(|found| found.as_ref().ok().map(Inode::of));
    let images = rows.iter().zip(inodes).filter_map(|(row, inode)| Some((inode?, row.label.as_str(), row.split, row)));
    let Some((first, row, repeat)) = first_duplicate(images, splits) else { return Ok(()) };
    let one = "keep one of the two lines: an image has one label and one split";
    let (has, hint) = match repeat {
        DuplicateKind::Label => ("has another label", one),
        DuplicateKind::Split => ("has another split", one),
        DuplicateKind::Validation => (
            "is repeated, and data.validation may take it and train on it too. It is listed",
            "list each image once (data.sampler_weights draws some classes more often), or name the split of each image in the manifest",
        ),
    };
    let same =
        if first.path == row.path { String::new() } else { format!(", as the same file {}", first.path.display()) };
    let cause = format!("{} {has} in line {}{same}", row.path.display(), first.line);
    Err(DataError::new(file, cause, hint).at(format!("line {}", row.line)))
}

/// Checks that images are regular files, before the first image is decoded. `used` has the rows whose images are read, with the
/// metadata of their files. `defer_missing` as in [`LoadRequest::defer_missing`].
fn check_files(
    file: &Path,
    used: &[(&ManifestRow, &io::Result<Metadata>)],
    defer_missing: bool,
) -> Result<(), DataError> {
    let is_missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    if !defer_missing {
        let mut missing = used.iter().filter(|(_, found)| found.as_ref().is_err_and(is_missing)).map(|(row, _)| row);
        if let Some(first) = missing.next() {
            let more = match missing.count() {
                0 => String::new(),
                more => format!(" (and {more} more of {} are missing)", used.len()),
            };
            let cause = format!("there is no file {}{more}", first.path.display());
            let hint = "paths are relative to the manifest's folder; correct them, or remove the lines";
            return Err(DataError::new(file, cause, hint).at(format!("line {}", first.line)));
        }
    }
    let mistake = used.iter().find_map(|(row, found)| {
        let error = match found {
            Ok(metadata) if metadata.is_file() => return None,
            // Opening names the kind of the file.
            Ok(_) => read_error(&row.path, &open_regular(&row.path).err()?),
            Err(error) if is_missing(error) => return None,
            Err(error) => read_error(&row.path, error),
        };
        let cause = format!("{} {}", row.path.display(), error.cause);
        Some(DataError { file: file.to_owned(), cause, is_bad_image: false, ..error }.at(format!("line {}", row.line)))
    });
    mistake.map_or(Ok(()), Err)
}
