//! A CSV file that lists images with their labels, `path,label[,split]`:
//!
//! ```text
//! path,label,split
//! photos/1.jpg,cat,train
//! photos/2.jpg,dog,test
//! ```
//!
//! The first line names the columns, in any order. Paths are relative to the manifest's folder. Labels are class names, which are
//! numbered in the order of the sorted names, or class numbers from 0 in all lines. The split is `train`, `val` or `test`; without
//! the column all images are training images. Without `test` images, `val` is the test split, as of an image folder.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use csv::{ByteRecord, ReaderBuilder, Trim};

use super::file::read_error;
use super::images::{Sample, SplitFiles, load_splits, thin};
use super::{DatasetInfo, LoadRequest};
use crate::encoded::ImageFile;
use crate::{DataError, Splits, read_regular};

/// What to do where no manifest is named.
pub(super) const NAME_IT: &str =
    "name the CSV file itself with `dir` in [data] or --data-dir: dir = \"photos/labels.csv\"";

/// Maximum size of a manifest in bytes: ten times that of ImageNet.
const MAX_BYTES: u64 = 1 << 30;

/// Classes that a label can number.
const MAX_CLASSES: usize = u16::MAX as usize + 1;

const HEADER: &str = "the first line names the columns: path,label or path,label,split";

/// One line of the manifest.
#[derive(Debug)]
struct Row {
    /// Line in the file, from 1.
    line: u64,
    path: PathBuf,
    label: String,
    part: Part,
}

/// The split of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Train,
    Val,
    Test,
}

/// Positions of the columns.
struct Columns {
    path: usize,
    label: usize,
    split: Option<usize>,
}

/// Reads a manifest and the images that it lists. `needs_test`: without test images there is an error.
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
    let rows = rows(file, &bytes)?;
    check_repeated(file, &rows)?;
    let (classes, labels) = classes(file, &rows)?;
    let evaluated = |part| rows.iter().any(|row| row.part == part);
    if needs_test && !evaluated(Part::Test) && !evaluated(Part::Val) {
        let cause = "no line has the split test or val: there is nothing to evaluate";
        return Err(DataError::new(file, cause, "add a column split, or set data.validation = 0.1 to hold images out"));
    }
    check_files(file, &rows)?;
    let has_test = evaluated(Part::Test);
    let mut files = SplitFiles::default();
    for (row, label) in rows.into_iter().zip(labels) {
        let split = match row.part {
            Part::Train => &mut files.train,
            Part::Val if has_test => &mut files.val,
            Part::Val | Part::Test => &mut files.test,
        };
        split.push(Sample { file: ImageFile::Path(row.path), label });
    }
    let count = classes.len();
    let files = SplitFiles {
        train: thin(files.train, count, request.limit_train, "limit_train")?,
        val: thin(files.val, count, request.limit_test, "limit_test")?,
        test: thin(files.test, count, request.limit_test, "limit_test")?,
    };
    load_splits(info, file, files, &classes, request)
}

/// Parses the lines.
fn rows(file: &Path, bytes: &[u8]) -> Result<Vec<Row>, DataError> {
    // Spreadsheets begin a file with a byte order mark.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let mut reader = ReaderBuilder::new().has_headers(false).flexible(true).trim(Trim::All).from_reader(bytes);
    let mut record = ByteRecord::new();
    let folder = file.parent().unwrap_or(Path::new(""));
    let mut columns = None;
    let mut rows = Vec::new();
    while reader.read_byte_record(&mut record).map_err(|error| DataError::new(file, error.to_string(), HEADER))? {
        let line = record.position().map_or(0, csv::Position::line);
        let mistake = |cause: String, hint: &str| Err(DataError::new(file, cause, hint).at(format!("line {line}")));
        let fields: Result<Vec<&str>, _> = record.iter().map(std::str::from_utf8).collect();
        let Ok(fields) = fields else {
            return mistake("is not UTF-8".into(), "save the file as UTF-8");
        };
        let Some(Columns { path, label, split }) = columns else {
            columns = Some(header(file, line, &fields)?);
            continue;
        };
        let expected = 2 + usize::from(split.is_some());
        if fields.len() != expected {
            let cause = format!("{} fields, the first line names {expected}", fields.len());
            return mistake(cause, "a path with a comma stands in quotes: \"a,b.png\",cat");
        }
        let [path, label] = [fields[path], fields[label]];
        if path.is_empty() || label.is_empty() {
            let missing = if path.is_empty() { "path" } else { "label" };
            return mistake(format!("the {missing} is empty"), "each line has a path and a label");
        }
        let part = match split.map(|column| fields[column]) {
            None | Some("train") => Part::Train,
            Some("val") => Part::Val,
            Some("test") => Part::Test,
            Some(other) => return mistake(format!("unknown split {other:?}"), "splits: train, val, test"),
        };
        rows.push(Row { line, path: folder.join(path), label: label.to_owned(), part });
    }
    if columns.is_none() {
        return Err(DataError::new(file, "the manifest is empty", HEADER));
    }
    Ok(rows)
}

/// Reads the names of the columns.
fn header(file: &Path, line: u64, fields: &[&str]) -> Result<Columns, DataError> {
    let mistake = |cause: String| DataError::new(file, cause, HEADER).at(format!("line {line}"));
    let find = |name: &str| fields.iter().position(|field| *field == name);
    // A misspelt `split` must not make all images training images, so no other column is allowed.
    if let Some(unknown) = fields.iter().find(|field| !["path", "label", "split"].contains(*field)) {
        return Err(mistake(format!("unknown column {unknown:?}")));
    }
    let missing = |name: &str| mistake(format!("there is no column {name:?}"));
    let columns = Columns {
        path: find("path").ok_or_else(|| missing("path"))?,
        label: find("label").ok_or_else(|| missing("label"))?,
        split: find("split"),
    };
    match fields.len() == 2 + usize::from(columns.split.is_some()) {
        true => Ok(columns),
        false => Err(mistake("a column is there twice".into())),
    }
}

/// Checks that no image has two labels or two splits. A test image that is also trained on is no test.
fn check_repeated(file: &Path, rows: &[Row]) -> Result<(), DataError> {
    let mut seen: HashMap<&Path, &Row> = HashMap::with_capacity(rows.len());
    for row in rows {
        let Some(first) = seen.insert(&row.path, row) else { continue };
        let other = match (first.label == row.label, first.part == row.part) {
            (true, true) => continue,
            (false, _) => "label",
            (true, false) => "split",
        };
        let cause = format!("{} has another {other} in line {}", row.path.display(), first.line);
        let hint = "keep one of the two lines: an image has one label and one split";
        return Err(DataError::new(file, cause, hint).at(format!("line {}", row.line)));
    }
    Ok(())
}

/// Returns the names of the classes and the label of each row.
fn classes(file: &Path, rows: &[Row]) -> Result<(Vec<String>, Vec<u16>), DataError> {
    let at =
        |row: &Row, cause: String, hint: &str| Err(DataError::new(file, cause, hint).at(format!("line {}", row.line)));
    if !rows.iter().any(|row| row.part == Part::Train) {
        return Err(DataError::new(file, "no line has the split train: there is nothing to train on", HEADER));
    }
    let number = |row: &Row| row.label.parse::<i64>().ok();
    let numbered = number(&rows[0]).is_some();
    if let Some(row) = rows.iter().find(|row| number(row).is_some() != numbered) {
        let [this, first] = if numbered { ["a name", "a number"] } else { ["a number", "a name"] };
        let cause = format!("the label {:?} is {this}, that of line {} is {first}", row.label, rows[0].line);
        return at(row, cause, "use class names in all lines, or class numbers from 0 in all lines");
    }
    let mut names: Vec<String> = Vec::new();
    let mut labels = Vec::with_capacity(rows.len());
    if numbered {
        for row in rows {
            match number(row).and_then(|number| u16::try_from(number).ok()) {
                Some(label) => labels.push(label),
                None => {
                    let hint = format!("class numbers are from 0 to {}", u16::MAX);
                    return at(row, format!("the label {} is out of range", row.label), &hint);
                }
            }
        }
        let most = labels.iter().copied().max().unwrap_or(0);
        names.extend((0..=most).map(|class| class.to_string()));
    } else {
        names.extend(rows.iter().map(|row| row.label.clone()));
        names.sort_unstable();
        names.dedup();
        if names.len() > MAX_CLASSES {
            let cause = format!("{} classes, at most {MAX_CLASSES} are supported", names.len());
            return Err(DataError::new(file, cause, "the column label holds the class of each image"));
        }
        let label = |row: &Row| names.binary_search(&row.label).unwrap_or_default() as u16;
        labels.extend(rows.iter().map(label));
    }
    let mut trained = vec![false; names.len()];
    let parts = || rows.iter().zip(&labels);
    parts().filter(|(row, _)| row.part == Part::Train).for_each(|(_, &label)| trained[usize::from(label)] = true);
    let Some(class) = trained.iter().position(|trained| !trained) else { return Ok((names, labels)) };
    let cause = format!("the class `{}` has no training image", names[class]);
    match parts().find(|(_, label)| usize::from(**label) == class) {
        Some((row, _)) => at(row, cause, "give the class images of the split train, or remove its lines"),
        None => {
            let hint = format!("class numbers go up to {} here: number without gaps, or write names", names.len() - 1);
            Err(DataError::new(file, cause, hint))
        }
    }
}

/// Checks that all images exist, before the first is decoded.
fn check_files(file: &Path, rows: &[Row]) -> Result<(), DataError> {
    let mut missing = rows.iter().filter(|row| !row.path.exists());
    let Some(first) = missing.next() else { return Ok(()) };
    let more = match missing.count() {
        0 => String::new(),
        more => format!(" (and {more} more of {} are missing)", rows.len()),
    };
    let cause = format!("there is no file {}{more}", first.path.display());
    let hint = "paths are relative to the manifest's folder; correct them, or remove the lines";
    Err(DataError::new(file, cause, hint).at(format!("line {}", first.line)))
}
