//! TensorBoard event files: scalars over steps.
//!
//! A file is a sequence of TFRecords. A TFRecord is: length, masked CRC-32C of the length, payload, masked CRC-32C of the
//! payload. Each payload is an `Event` protocol buffer. Formats: tensorflow `core/lib/io/record_writer.cc`, tensorboard
//! `compat/proto/{event,summary}.proto`.

use std::{
    fs::{File, read_dir},
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use prost::Message;

use crate::files::{self, FileError};
use crate::report::{EpochRecord, StepRecord};

const PREFIX: &str = "events.out.tfevents.";

/// The fields of `tensorboard.Event` that this module writes.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(oneof = "Scalar", tags = "2")]
    value: Option<Scalar>,
}

/// A oneof with one variant. Unlike a plain proto3 field, a oneof is written even if the value is zero.
#[derive(Clone, Copy, PartialEq, prost::Oneof)]
enum Scalar {
    #[prost(float, tag = "2")]
    Simple(f32),
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// `SessionLog.START`.
const START: i32 = 1;

/// Writes one event file.
#[derive(Debug)]
pub struct TensorBoardWriter {
    path: PathBuf,
    file: File,
}

impl TensorBoardWriter {
    /// Starts an event file in `folder` for steps from `step` on: 0 in a new run, the next step in a resumed run.
    /// TensorBoard drops the points of earlier files at `step` and later.
    ///
    /// # Errors
    /// When the file cannot be created or written.
    pub fn start(folder: &Path, step: u64) -> Result<Self, FileError> {
        Self::start_at(folder, now(), step)
    }

    fn start_at(folder: &Path, now: f64, step: u64) -> Result<Self, FileError> {
        // TensorBoard reads the files in the order of their names. The new file must sort after the existing ones, even
        // if the run is stopped and resumed within one second or the clock was set back.
        let mut seconds = now as u64;
        if let Some(newest) = newest_seconds(folder)? {
            seconds = seconds.max(newest + 1);
        }
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let path = folder.join(format!("{PREFIX}{seconds:010}.{host}.{}.0", std::process::id()));
        let mut writer = Self { file: files::create_new(&path)?, path };
        writer.event(now, 0, What::FileVersion("brain.Event:2".to_owned()))?;
        // TensorBoard drops old points at the second and later session starts. Therefore a new run must write a session start
        // too.
        writer.event(now, step, What::SessionLog(SessionLog { status: START }))?;
        Ok(writer)
    }

    /// Writes `train/loss`, `train/top1`, `train/lr`, `train/images_per_s`.
    ///
    /// # Errors
    /// When the disk is full or gone.
    pub fn step(&mut self, record: &StepRecord) -> Result<(), FileError> {
        let scalars = [
            ("train/loss", record.loss),
            ("train/top1", record.top1),
            ("train/lr", record.lr),
            ("train/images_per_s", record.images_per_s),
        ];
        self.scalars(record.step, &scalars)
    }

    /// Writes `eval/loss`, `eval/top1` and `eval/top5` (for multi-label images `eval/map` instead of `eval/top5`), if the epoch
    /// was evaluated. `step` is the epoch's last step.
    ///
    /// # Errors
    /// When the disk is full or gone.
    pub fn epoch(&mut self, record: &EpochRecord, step: u64) -> Result<(), FileError> {
        match record.eval {
            Some(eval) => {
                let third = eval.mean_average_precision.map_or(("eval/top5", eval.top5), |map| ("eval/map", map));
                self.scalars(step, &[("eval/loss", eval.loss), ("eval/top1", eval.top1), third])
            }
            None => Ok(()),
        }
    }

    /// Writes scalars of one step under the caller's tags.
    ///
    /// # Errors
    /// When the disk is full or gone.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<(), FileError> {
        self.event(now(), step, summary(scalars))
    }

    /// Waits until all data is on the disk (`fdatasync`).
    ///
    /// # Errors
    /// When the disk is full or gone.
    pub fn sync(&mut self) -> Result<(), FileError> {
        files::sync(&self.file, &self.path)
    }

    fn event(&mut self, wall_time: f64, step: u64, what: What) -> Result<(), FileError> {
        // One `write` per record, so that a reader sees only whole records, also after a SIGKILL.
        let bytes = record(&Event { wall_time, step: step as i64, what: Some(what) });
        self.file.write_all(&bytes).map_err(|error| FileError::io(&self.path, "write", &error))
    }
}

fn summary(scalars: &[(&str, f64)]) -> What {
    let value = |&(tag, value): &(&str, f64)| Value { tag: tag.to_owned(), value: Some(Scalar::Simple(value as f32)) };
    What::Summary(Summary { value: scalars.iter().map(value).collect() })
}

/// Returns the seconds in the name of the folder's newest event file.
fn newest_seconds(folder: &Path) -> Result<Option<u64>, FileError> {
    let failed = |error: &std::io::Error| match error.kind() {
        ErrorKind::NotFound => FileError::new(folder, "no such folder", "was the run folder moved or deleted?"),
        _ => FileError::io(folder, "read the folder", error),
    };
    let mut newest = None;
    for entry in read_dir(folder).map_err(|error| failed(&error))? {
        let name = entry.map_err(|error| failed(&error))?.file_name();
        let name = name.to_string_lossy();
        let seconds = name.strip_prefix(PREFIX).and_then(|rest| rest.split('.').next()?.parse().ok());
        newest = newest.max(seconds);
    }
    Ok(newest)
}

/// Encodes one event as a TFRecord.
fn record(event: &Event) -> Vec<u8> {
    let payload = event.encode_to_vec();
    let length = (payload.len() as u64).to_le_bytes();
    let mut bytes = Vec::with_capacity(payload.len() + 16);
    bytes.extend(length);
    bytes.extend(masked_crc(&length).to_le_bytes());
    bytes.extend(&payload);
    bytes.extend(masked_crc(&payload).to_le_bytes());
    bytes
}

/// Returns the CRC-32C, rotated and shifted. The mask is needed because CRCs of data that contains CRCs are weak
/// (tensorflow `lib/hash/crc32c.h`).
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Returns the seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::EvalRecord;

    fn hex(event: Event) -> String {
        record(&event).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The expected bytes are from `tensorboard.summary.writer.record_writer.RecordWriter` 2.21 for the same events.
    #[test]
    fn records_have_the_bytes_that_tensorboard_writes() {
        let version = What::FileVersion("brain.Event:2".to_owned());
        assert_eq!(
            hex(Event { wall_time: 1_700_000_000.25, step: 0, what: Some(version) }),
            "1800000000000000a37f4b220900001040fc54d9411a0d627261696e2e4576656e743a32338d2fe9"
        );
        let start = What::SessionLog(SessionLog { status: START });
        assert_eq!(
            hex(Event { wall_time: 1_700_000_001.5, step: 12, what: Some(start) }),
            "0f000000000000006d532b090900006040fc54d941100c3a020801fcbd5a55"
        );
        let scalars = summary(&[("train/loss", 2.25), ("train/lr", 0.1)]);
        assert_eq!(
            hex(Event { wall_time: 1_700_000_002.75, step: 300, what: Some(scalars) }),
            "3200000000000000241956ec090000b040fc54d94110ac022a240a110a0a747261696e2f6c6f737315000010400a0f0a08747261696e\
             2f6c7215cdcccc3d5d3ebc72"
        );
        let odd = summary(&[("train/loss", f64::NAN), ("eval/top1", 0.0)]);
        assert_eq!(
            hex(Event { wall_time: 1_700_000_003.0, step: 0, what: Some(odd) }),
            "300000000000000095f5d05f090000c040fc54d9412a250a110a0a747261696e2f6c6f7373150000c07f0a100a096576616c2f746f70\
             311500000000f9773288"
        );
    }

    /// Returns the events of a file after a check of the CRCs.
    fn read(path: &Path) -> Vec<Event> {
        let bytes = std::fs::read(path).unwrap();
        let mut rest = &bytes[..];
        let mut events = Vec::new();
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(u32::from_le_bytes(rest[8..12].try_into().unwrap()), masked_crc(&rest[..8]));
            let payload = &rest[12..12 + length];
            assert_eq!(u32::from_le_bytes(rest[12 + length..16 + length].try_into().unwrap()), masked_crc(payload));
            events.push(Event::decode(payload).unwrap());
            rest = &rest[16 + length..];
        }
        events
    }

    #[test]
    fn a_resumed_run_has_a_later_file_that_starts_a_new_session() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = TensorBoardWriter::start_at(dir.path(), 1_700_000_000.5, 0).unwrap();
        first.step(&StepRecord { step: 7, loss: 1.0, ..StepRecord::default() }).unwrap();
        // A writer in the same second, then a writer after the clock was set back.
        let second = TensorBoardWriter::start_at(dir.path(), 1_700_000_000.9, 5).unwrap();
        let mut third = TensorBoardWriter::start_at(dir.path(), 1_600_000_000.0, 6).unwrap();
        assert!(first.path < second.path && second.path < third.path);
        let eval = EvalRecord {
            loss: 0.5,
            top1: 80.0,
            top5: 99.0,
            correct: 8,
            total: 10,
            balanced_accuracy: None,
            tta_top1: None,
            mean_average_precision: None,
        };
        third.epoch(&EpochRecord { eval: Some(eval), ..EpochRecord::default() }, 9).unwrap();
        third.epoch(&EpochRecord::default(), 19).unwrap();
        let starts = [&first, &second, &third].map(|writer| read(&writer.path)[1].clone());
        assert!(starts.iter().all(|event| event.what == Some(What::SessionLog(SessionLog { status: START }))));
        assert_eq!(starts.map(|event| event.step), [0, 5, 6]);
        let events = read(&third.path);
        assert_eq!(events.len(), 3, "an epoch without evaluation has no event");
        assert_eq!(events[0].what, Some(What::FileVersion("brain.Event:2".into())));
        assert_eq!(events[2].what, Some(summary(&[("eval/loss", 0.5), ("eval/top1", 80.0), ("eval/top5", 99.0)])));
        assert_eq!(events[2].step, 9);
    }

    #[test]
    fn a_folder_that_does_not_exist_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone");
        assert_eq!(TensorBoardWriter::start(&gone, 0).unwrap_err().path, gone);
    }
}
