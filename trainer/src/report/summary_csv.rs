//! `summary.csv`: one line per epoch.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::files::{self, FileError};
use crate::report::EpochRecord;

/// First line of the file.
pub const HEADER: &str = "epoch,train_loss,train_top1,eval_loss,eval_top1,eval_top5,lr,images_per_s,seconds";

/// First line of the file of a run whose images have several classes each.
const MULTI_LABEL_HEADER: &str =
    "epoch,train_loss,train_top1,eval_loss,eval_top1,eval_top5,lr,images_per_s,seconds,eval_map";

/// The columns of a run's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CsvColumns {
    /// The columns for images with one class each.
    SingleLabel,
    /// The same columns and `eval_map`, for images with several classes each.
    MultiLabel,
}

impl CsvColumns {
    /// Returns the columns of a run.
    pub fn of(multi_label: bool) -> Self {
        if multi_label { Self::MultiLabel } else { Self::SingleLabel }
    }

    fn header(self) -> &'static str {
        match self {
            Self::SingleLabel => HEADER,
            Self::MultiLabel => MULTI_LABEL_HEADER,
        }
    }
}

/// A line of `summary.csv`, in the order of the header. The evaluation cells are empty for an epoch without evaluation.
/// Values that are not finite are `NaN` or `inf`, which spreadsheet and data-frame readers accept.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SummaryRow {
    /// Epoch, counted from 1.
    pub epoch: usize,
    /// Mean training loss.
    pub train_loss: f64,
    /// Training accuracy in percent.
    pub train_top1: f64,
    /// Mean evaluation loss.
    pub eval_loss: Option<f64>,
    /// Evaluation accuracy in percent.
    pub eval_top1: Option<f64>,
    /// Top-5 evaluation accuracy in percent.
    pub eval_top5: Option<f64>,
    /// Learning rate of the epoch's last step.
    pub lr: f64,
    /// Training images per second.
    pub images_per_s: f64,
    /// Wall-clock seconds of the epoch.
    pub seconds: f64,
    /// Mean average precision in percent. Only files of multi-label runs have this column.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_map: Option<f64>,
}

impl From<&EpochRecord> for SummaryRow {
    fn from(record: &EpochRecord) -> Self {
        let rounded = |value: f64, digits: i32| (value * 10f64.powi(digits)).round() / 10f64.powi(digits);
        Self {
            epoch: record.epoch,
            train_loss: record.train_loss,
            train_top1: rounded(record.train_top1, 4),
            eval_loss: record.eval.map(|eval| eval.loss),
            eval_top1: record.eval.map(|eval| rounded(eval.top1, 4)),
            eval_top5: record.eval.filter(|eval| !eval.top5.is_nan()).map(|eval| rounded(eval.top5, 4)),
            lr: record.lr,
            images_per_s: rounded(record.images_per_s, 1),
            seconds: rounded(record.seconds, 3),
            eval_map: record.eval.and_then(|eval| eval.mean_average_precision).map(|map| rounded(map, 4)),
        }
    }
}

/// Writes `summary.csv`. Each epoch is on the disk when [`write`](Self::write) returns.
#[derive(Debug)]
pub struct SummaryWriter {
    path: PathBuf,
    file: File,
    columns: CsvColumns,
}

impl SummaryWriter {
    /// Creates a file with only the header.
    ///
    /// # Errors
    /// When the file exists, or cannot be created or written.
    pub fn create(path: &Path, columns: CsvColumns) -> Result<Self, FileError> {
        let mut file = files::create_new(path)?;
        writeln!(file, "{}", columns.header()).map_err(|error| FileError::io(path, "write", &error))?;
        Ok(Self { path: path.to_owned(), file, columns })
    }

    /// Continues after a resume. `epoch` is the epoch that runs next, possibly for the second time; see
    /// [`truncate_to_epoch`].
    ///
    /// # Errors
    /// When the file cannot be read or written, or a line other than the last is damaged.
    pub fn resume(path: &Path, columns: CsvColumns, epoch: usize) -> Result<Self, FileError> {
        truncate_to_epoch(path, columns, epoch)?;
        Ok(Self { path: path.to_owned(), file: files::append(path)?, columns })
    }

    /// Appends one epoch.
    ///
    /// # Errors
    /// When the disk is full or gone.
    pub fn write(&mut self, record: &EpochRecord) -> Result<(), FileError> {
        let mut line = csv::WriterBuilder::new().has_headers(false).from_writer(Vec::new());
        let row = SummaryRow::from(record);
        line.serialize(row).expect("a row of numbers always becomes CSV");
        let mut line = line.into_inner().expect("memory does not refuse a write");
        if self.columns == CsvColumns::MultiLabel && row.eval_map.is_none() {
            // An epoch without evaluation: the last cell is empty.
            line.insert(line.len() - 1, b',');
        }
        self.file.write_all(&line).map_err(|error| FileError::io(&self.path, "write", &error))?;
        files::sync(&self.file, &self.path)
    }
}

/// Removes the lines at or after `epoch` and an incomplete last line, in one atomic write. Creates a missing file with
/// the header.
///
/// # Errors
/// When the file cannot be read or written, or a line other than the last is damaged.
pub fn truncate_to_epoch(path: &Path, columns: CsvColumns, epoch: usize) -> Result<(), FileError> {
    let bytes = files::read_or_empty(path)?;
    let mut kept = format!("{}\n", columns.header()).into_bytes();
    for (line, row) in parse(path, &bytes)? {
        if row.epoch < epoch {
            kept.extend_from_slice(line);
        }
    }
    if kept == bytes { Ok(()) } else { files::write_atomic(path, &kept) }
}

/// Returns all epochs of a file, without an incomplete last line. A missing file has no lines.
///
/// # Errors
/// When the file cannot be read, its header differs, or a line other than the last is damaged.
pub fn read_summary(path: &Path) -> Result<Vec<SummaryRow>, FileError> {
    let bytes = files::read_or_empty(path)?;
    Ok(parse(path, &bytes)?.into_iter().map(|(_, row)| row).collect())
}

/// Returns the complete lines below the header (newline included) with their rows.
fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<Vec<(&'a [u8], SummaryRow)>, FileError> {
    let damaged = |line: usize, cause: &str| {
        FileError::new(
            path,
            format!("line {line}: {cause}"),
            "the file was damaged or edited; put the line right, or move the file away to start a new one",
        )
    };
    let mut rows = Vec::new();
    let lines: Vec<_> = bytes.split_inclusive(|&byte| byte == b'\n').collect();
    for (i, line) in lines.iter().enumerate() {
        let (complete, last) = (line.ends_with(b"\n"), i + 1 == lines.len());
        if i == 0 {
            let known = [HEADER, MULTI_LABEL_HEADER].map(str::as_bytes);
            if complete && !known.contains(&line.trim_ascii_end()) {
                return Err(damaged(1, &format!("the header is not `{HEADER}`")));
            }
            continue;
        }
        let mut reader = csv::ReaderBuilder::new().has_headers(false).from_reader(*line);
        match reader.deserialize().next() {
            Some(Ok(row)) if complete => rows.push((*line, row)),
            _ if last => {}
            Some(Err(error)) => return Err(damaged(i + 1, &format!("not an epoch: {error}"))),
            _ => return Err(damaged(i + 1, "empty")),
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::snapshot::EvalRecord;

    const COLUMNS: CsvColumns = CsvColumns::SingleLabel;

    fn epoch(epoch: usize) -> EpochRecord {
        let eval = EvalRecord {
            loss: 1.5,
            top1: 43.21,
            top5: 90.005,
            correct: 4321,
            total: 10_000,
            balanced_accuracy: None,
            tta_top1: None,
            mean_average_precision: None,
        };
        EpochRecord {
            epoch,
            train_loss: 1.7345678901234,
            train_top1: 100.0 / 3.0,
            eval: epoch.is_multiple_of(2).then_some(eval),
            is_best: false,
            lr: 0.1,
            images_per_s: 1234.5678,
            seconds: 40.51234,
            eval_seconds: 2.5,
        }
    }

    #[test]
    fn an_epoch_is_a_line_and_no_evaluation_is_empty_cells() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("summary.csv");
        let mut writer = SummaryWriter::create(&path, COLUMNS).unwrap();
        writer.write(&epoch(1)).unwrap();
        writer.write(&epoch(2)).unwrap();
        writer.write(&EpochRecord { train_loss: f64::NAN, images_per_s: f64::INFINITY, ..epoch(3) }).unwrap();
        insta::assert_snapshot!(fs::read_to_string(&path).unwrap(), @r"
            epoch,train_loss,train_top1,eval_loss,eval_top1,eval_top5,lr,images_per_s,seconds
            1,1.7345678901234,33.3333,,,,0.1,1234.6,40.512
            2,1.7345678901234,33.3333,1.5,43.21,90.005,0.1,1234.6,40.512
            3,NaN,33.3333,,,,0.1,inf,40.512
            ");
        let rows = read_summary(&path).unwrap();
        assert_eq!(rows[0], SummaryRow::from(&epoch(1)));
        assert_eq!(rows[1].eval_top5, Some(90.005));
        assert!(rows[2].train_loss.is_nan() && rows[2].images_per_s.is_infinite());
    }

    #[test]
    fn the_file_of_multi_label_images_has_one_column_more() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("summary.csv");
        let mut writer = SummaryWriter::create(&path, CsvColumns::MultiLabel).unwrap();
        let mut second = epoch(2);
        second.eval = second.eval.map(|eval| EvalRecord { top5: f64::NAN, mean_average_precision: Some(61.5), ..eval });
        writer.write(&epoch(1)).unwrap();
        writer.write(&second).unwrap();
        let whole = fs::read_to_string(&path).unwrap();
        insta::assert_snapshot!(whole, @r"
            epoch,train_loss,train_top1,eval_loss,eval_top1,eval_top5,lr,images_per_s,seconds,eval_map
            1,1.7345678901234,33.3333,,,,0.1,1234.6,40.512,
            2,1.7345678901234,33.3333,1.5,43.21,,0.1,1234.6,40.512,61.5
            ");
        let rows = read_summary(&path).unwrap();
        assert_eq!((rows[0].eval_map, rows[1].eval_map, rows[1].eval_top5), (None, Some(61.5), None));
        SummaryWriter::resume(&path, CsvColumns::MultiLabel, 2).unwrap().write(&second).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), whole);
    }

    #[test]
    fn resuming_drops_later_epochs_and_a_half_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("summary.csv");
        let mut writer = SummaryWriter::create(&path, COLUMNS).unwrap();
        (1..=4).for_each(|i| writer.write(&epoch(i)).unwrap());
        let whole = fs::read(&path).unwrap();
        for cut in [1, 2, 30] {
            fs::write(&path, &whole[..whole.len() - cut]).unwrap();
            SummaryWriter::resume(&path, COLUMNS, 4).unwrap().write(&epoch(4)).unwrap();
            assert_eq!(fs::read(&path).unwrap(), whole);
        }
        SummaryWriter::resume(&path, COLUMNS, 3).unwrap();
        assert_eq!(read_summary(&path).unwrap().iter().map(|row| row.epoch).collect::<Vec<_>>(), [1, 2]);
        // A file that ends within the header, and a missing file.
        fs::write(&path, &HEADER[..20]).unwrap();
        SummaryWriter::resume(&path, COLUMNS, 1).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{HEADER}\n"));
        fs::remove_file(&path).unwrap();
        SummaryWriter::resume(&path, COLUMNS, 1).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{HEADER}\n"));
    }

    #[test]
    fn a_damaged_line_is_an_error_with_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("summary.csv");
        fs::write(&path, "a,b\n1,2\n").unwrap();
        assert!(read_summary(&path).unwrap_err().cause.starts_with("line 1: the header is not `epoch,"));
        fs::write(&path, format!("{HEADER}\n1,x,2,,,,0.1,5,6\n2,1,2,,,,0.1,5,6\n")).unwrap();
        let cause = read_summary(&path).unwrap_err().cause;
        assert!(cause.starts_with("line 2: not an epoch: "), "{cause}");
    }

    #[test]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let path = PathBuf::from("/dev/full");
        let mut writer = SummaryWriter { file: File::create(&path).unwrap(), path, columns: COLUMNS };
        let error = writer.write(&epoch(1)).unwrap_err();
        assert_eq!(error.to_string(), "/dev/full: cannot write: No space left on device (os error 28)");
    }
}
