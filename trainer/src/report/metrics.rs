//! `metrics.jsonl`: one line per step, for scripts and for the curves.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, Serializer};

use crate::files::{self, FileError};
use crate::snapshot::{EvalRecord, null_is_nan};

/// One optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct StepRecord {
    /// Epoch, counted from 1, as everywhere in files and on the screen.
    pub epoch: usize,
    /// Step, counted from 0 over the whole run.
    pub step: u64,
    /// Mean loss of this step's batch over all ranks (label smoothing and mixing included).
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// Learning rate of this step.
    #[serde(deserialize_with = "null_is_nan")]
    pub lr: f64,
    /// Images per second in this step, over all ranks.
    #[serde(serialize_with = "tenths", deserialize_with = "null_is_nan")]
    pub images_per_s: f64,
    /// Top-1 accuracy of this step's batch in percent (not a running mean), over all ranks.
    #[serde(serialize_with = "thousandths", deserialize_with = "null_is_nan")]
    pub top1: f64,
    /// Norm of all gradients before clipping, if it was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// Milliseconds of this step spent waiting for the batch.
    #[serde(serialize_with = "thousandths", deserialize_with = "null_is_nan")]
    pub data_ms: f64,
    /// Milliseconds of host to device, forward and loss. All times here are those of rank 0.
    #[serde(default, serialize_with = "thousandths", deserialize_with = "null_is_nan")]
    pub forward_ms: f64,
    /// Milliseconds of backward.
    #[serde(default, serialize_with = "thousandths", deserialize_with = "null_is_nan")]
    pub backward_ms: f64,
    /// Milliseconds of communication that no other part covers: waiting for other devices, reducing, copying.
    #[serde(default, serialize_with = "thousandths", deserialize_with = "null_is_nan")]
    pub communication_ms: f64,
    /// Milliseconds of reductions while backward runs; on a GPU, only the time to enqueue them. This time is already in
    /// `backward_ms`.
    #[serde(default, serialize_with = "thousandths", deserialize_with = "null_is_nan")]
    pub communication_hidden_ms: f64,
    /// Milliseconds of clipping, optimizer and weight average.
    #[serde(default, serialize_with = "thousandths", deserialize_with = "null_is_nan")]
    pub optimizer_ms: f64,
    /// Milliseconds of the whole step, including the wait for the batch.
    #[serde(serialize_with = "thousandths", deserialize_with = "null_is_nan")]
    pub step_ms: f64,
    /// Bytes that devices send to other devices, summed over all devices.
    #[serde(default)]
    pub bytes_moved: u64,
    /// Peak memory of this process so far, in bytes; absent if the system does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
}

/// One epoch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EpochRecord {
    /// Epoch, counted from 1.
    pub epoch: usize,
    /// Mean training loss over the epoch's samples.
    pub train_loss: f64,
    /// Training accuracy over the epoch's samples in percent. Each sample is predicted by the network as it was in the sample's
    /// step.
    pub train_top1: f64,
    /// The evaluation after this epoch, if there was one.
    pub eval: Option<EvalRecord>,
    /// Whether that evaluation is the best one so far (`checkpoint.best`).
    pub is_best: bool,
    /// Learning rate of the epoch's last step.
    pub lr: f64,
    /// Training images per second, without evaluation.
    pub images_per_s: f64,
    /// Wall-clock seconds of this epoch, training and evaluation, over all sessions of the run.
    pub seconds: f64,
    /// Seconds of the evaluation, which are a part of `seconds`.
    pub eval_seconds: f64,
}

// Losses and rates are compared between runs, so they keep all digits. Timings and percentages are rounded for
// readability.

fn tenths<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64((value * 10.0).round() / 10.0)
}

fn thousandths<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64((value * 1000.0).round() / 1000.0)
}

/// Writes `metrics.jsonl`. Each step is one immediate `write` of a whole line, so the file has all finished steps of a
/// run that was killed. The cost is a microsecond per step.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: File,
}

impl MetricsWriter {
    /// Creates an empty file.
    ///
    /// # Errors
    /// When the file exists or cannot be created.
    pub fn create(path: &Path) -> Result<Self, FileError> {
        Ok(Self { path: path.to_owned(), file: files::create_new(path)? })
    }

    /// Continues after a resume from a checkpoint whose next step is `step`; see [`truncate_to`].
    ///
    /// # Errors
    /// When the file cannot be read or written, or a line other than the last is damaged.
    pub fn resume(path: &Path, step: u64) -> Result<Self, FileError> {
        truncate_to(path, step)?;
        Ok(Self { path: path.to_owned(), file: files::append(path)? })
    }

    /// Appends one step.
    ///
    /// # Errors
    /// When the disk is full or gone.
    pub fn write(&mut self, record: &StepRecord) -> Result<(), FileError> {
        let mut line = serde_json::to_string(record).expect("a struct of numbers always becomes JSON");
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(|error| FileError::io(&self.path, "write", &error))
    }

    /// Waits until all data is on the disk (`fdatasync`), at the end of an epoch.
    ///
    /// # Errors
    /// When the disk is full or gone.
    pub fn sync(&mut self) -> Result<(), FileError> {
        files::sync(&self.file, &self.path)
    }
}

/// Removes the lines at or after `step`, which the run repeats, and an incomplete last line.
///
/// Replaces the file atomically. A missing file has no lines.
///
/// # Errors
/// When the file cannot be read or written, or a line other than the last is damaged.
pub fn truncate_to(path: &Path, step: u64) -> Result<(), FileError> {
    let bytes = files::read_or_empty(path)?;
    let mut kept = Vec::with_capacity(bytes.len());
    for (line, record) in parse(path, &bytes)? {
        if record.step < step {
            kept.extend_from_slice(line);
        }
    }
    if kept == bytes { Ok(()) } else { files::write_atomic(path, &kept) }
}

/// Returns all steps of a file, without an incomplete last line. A missing file has no lines.
///
/// # Errors
/// When the file cannot be read, or a line other than the last is damaged.
pub fn read_metrics(path: &Path) -> Result<Vec<StepRecord>, FileError> {
    let bytes = files::read_or_empty(path)?;
    Ok(parse(path, &bytes)?.into_iter().map(|(_, record)| record).collect())
}

/// Returns the complete lines (newline included) with their records.
fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<Vec<(&'a [u8], StepRecord)>, FileError> {
    let lines: Vec<_> = bytes.split_inclusive(|&byte| byte == b'\n').collect();
    let mut records = Vec::with_capacity(lines.len());
    for (i, line) in lines.iter().enumerate() {
        match serde_json::from_slice(line) {
            Ok(record) if line.ends_with(b"\n") => records.push((*line, record)),
            // The last line is incomplete: a power failure or a full disk interrupted the write.
            _ if i + 1 == lines.len() => {}
            Ok(_) => unreachable!("only the last piece can lack its newline"),
            Err(error) => {
                return Err(FileError::new(
                    path,
                    format!("line {}: not a step record: {error}", i + 1),
                    "the file was damaged or edited; remove that line, or move the file away to start a new one",
                ));
            }
        }
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn step(step: u64) -> StepRecord {
        StepRecord {
            epoch: 1 + step as usize / 4,
            step,
            loss: 2.302_612_304_687_5,
            lr: 0.1,
            images_per_s: 1234.5678,
            top1: 10.15625,
            grad_norm: None,
            data_ms: 0.12345,
            forward_ms: 30.0,
            backward_ms: 60.0,
            communication_ms: 0.0,
            communication_hidden_ms: 0.0,
            optimizer_ms: 5.5,
            step_ms: 103.6789,
            bytes_moved: 0,
            peak_bytes: Some(1 << 20),
        }
    }

    #[test]
    fn a_step_is_a_line_of_json() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        writer.write(&step(0)).unwrap();
        writer.write(&StepRecord { grad_norm: Some(1.5), ..step(1) }).unwrap();
        insta::assert_snapshot!(fs::read_to_string(&path).unwrap(), @r#"
            {"epoch":1,"step":0,"loss":2.3026123046875,"lr":0.1,"images_per_s":1234.6,"top1":10.156,"data_ms":0.123,"forward_ms":30.0,"backward_ms":60.0,"communication_ms":0.0,"communication_hidden_ms":0.0,"optimizer_ms":5.5,"step_ms":103.679,"bytes_moved":0,"peak_bytes":1048576}
            {"epoch":1,"step":1,"loss":2.3026123046875,"lr":0.1,"images_per_s":1234.6,"top1":10.156,"grad_norm":1.5,"data_ms":0.123,"forward_ms":30.0,"backward_ms":60.0,"communication_ms":0.0,"communication_hidden_ms":0.0,"optimizer_ms":5.5,"step_ms":103.679,"bytes_moved":0,"peak_bytes":1048576}
            "#);
    }

    /// A run of an earlier version can be resumed.
    #[test]
    fn a_line_without_the_newer_keys_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let line =
            r#"{"epoch":1,"step":0,"loss":2.3,"lr":0.1,"images_per_s":12.5,"top1":10.0,"data_ms":0.1,"step_ms":10.0}"#;
        fs::write(&path, format!("{line}\n")).unwrap();
        let read = read_metrics(&path).unwrap();
        assert_eq!((read[0].step_ms, read[0].forward_ms, read[0].peak_bytes), (10.0, 0.0, None));
    }

    #[test]
    fn non_finite_values_are_null() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        let diverged =
            StepRecord { loss: f64::NAN, grad_norm: Some(f64::INFINITY), images_per_s: f64::INFINITY, ..step(0) };
        writer.write(&diverged).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert!(value["loss"].is_null() && value["grad_norm"].is_null() && value["images_per_s"].is_null(), "{value}");
        let back = read_metrics(&path).unwrap();
        assert!(back[0].loss.is_nan() && back[0].images_per_s.is_nan());
        assert_eq!((back[0].grad_norm, back[0].lr), (None, 0.1));
    }

    #[test]
    fn resuming_drops_later_steps_and_a_half_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        (0..10).for_each(|i| writer.write(&step(i)).unwrap());
        let whole = fs::read(&path).unwrap();
        for cut in [1, 2, 60] {
            // One byte short is a line without its newline: the JSON is complete, but a reader cannot know that.
            fs::write(&path, &whole[..whole.len() - cut]).unwrap();
            assert_eq!(read_metrics(&path).unwrap().len(), 9);
            MetricsWriter::resume(&path, 9).unwrap().write(&step(9)).unwrap();
            assert_eq!(fs::read(&path).unwrap(), whole);
        }
        MetricsWriter::resume(&path, 6).unwrap();
        assert_eq!(read_metrics(&path).unwrap().iter().map(|r| r.step).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        assert!(whole.starts_with(&fs::read(&path).unwrap()));
        MetricsWriter::resume(&path, 0).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
    }

    #[test]
    fn a_tail_of_zeros_after_a_power_cut_is_a_half_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        MetricsWriter::create(&path).unwrap().write(&step(0)).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes.extend([0; 300]);
        fs::write(&path, bytes).unwrap();
        assert_eq!(read_metrics(&path).unwrap().len(), 1);
    }

    #[test]
    fn a_missing_file_has_no_lines_and_resuming_makes_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        assert_eq!(read_metrics(&path).unwrap(), []);
        MetricsWriter::resume(&path, 5).unwrap().write(&step(5)).unwrap();
        assert_eq!(read_metrics(&path).unwrap()[0].step, 5);
    }

    #[test]
    fn damage_in_the_middle_is_an_error_with_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        (0..3).for_each(|i| writer.write(&step(i)).unwrap());
        let text = fs::read_to_string(&path).unwrap().replace("\"step\":1,", "\"step\":1 ");
        fs::write(&path, &text).unwrap();
        let error = truncate_to(&path, 2).unwrap_err();
        assert!(error.cause.starts_with("line 2: not a step record: "), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), text, "a file that is not understood is left alone");
    }

    #[test]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let path = PathBuf::from("/dev/full");
        let mut writer = MetricsWriter { file: File::create(&path).unwrap(), path };
        let error = writer.write(&step(0)).unwrap_err();
        assert_eq!(error.to_string(), "/dev/full: cannot write: No space left on device (os error 28)");
        assert!(error.hint.contains("free some space") && error.hint.contains("--resume"), "{}", error.hint);
    }
}
