//! `error.json`: the report that a worker writes about its own failure, for the launcher. torchrun's workers write a file of
//! the same name.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use folder::Folder;
use serde::{Deserialize, Serialize};

/// Name of the file in a worker's folder of logs.
pub(super) const FILE_NAME: &str = "error.json";
/// Maximum size of a report in bytes. A larger file is not a report.
const LARGEST_FILE: u64 = 1 << 20;
/// The variable by which torchrun passes the file's path to its workers.
pub(super) const TORCHELASTIC_FILE: &str = "TORCHELASTIC_ERROR_FILE";

/// How a worker failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum FailureKind {
    /// A thread panicked.
    Panic,
    /// The worker returned an error.
    Error,
}

/// Content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FailureReport {
    /// Rank of the worker.
    pub(super) rank: usize,
    /// Panic or error.
    pub(super) kind: FailureKind,
    /// The cause.
    pub(super) message: String,
    /// What the user can do about the cause; may be empty.
    #[serde(default)]
    pub(super) hint: String,
    /// `file:line:column` of a panic.
    #[serde(default)]
    pub(super) location: Option<String>,
    /// Name of the thread that panicked.
    #[serde(default)]
    pub(super) thread: Option<String>,
    /// The worker's last status.
    pub(super) status: String,
    /// Whether the cause is the end of another rank, or a wait for another rank. Then this failure is not the root cause.
    pub(super) consequence: bool,
    /// Whether the same job would fail in the same way again, so a restart cannot help.
    #[serde(default)]
    pub(super) permanent: bool,
    /// The rank that caused the failure, if known.
    #[serde(default)]
    pub(super) culprit: Option<usize>,
    /// Milliseconds since 1970.
    pub(super) at_ms: u64,
}

impl FailureReport {
    /// Writes the file atomically: the launcher sees the whole file or no file.
    ///
    /// # Errors
    /// The folder does not exist, or the disk is full.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        Folder::of_file(path)?.replace(path.file_name().unwrap_or_default(), &serde_json::to_vec_pretty(self)?)
    }

    /// Reads the file at `path`. Returns `None` if there is no file, or if its content is not a failure report. The worker may be
    /// any program, so the file may be anything.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let bytes = folder::read_regular(path, LARGEST_FILE).ok()?;
        serde_json::from_slice(&bytes).ok().or_else(|| {
            // Use the file's modification time: the timestamp inside has whole seconds, too coarse to find the earliest failure.
            let at = fs::metadata(path).and_then(|found| found.modified()).unwrap_or_else(|_| SystemTime::now());
            Self::of_torchelastic(&bytes, unix_ms(at))
        })
    }

    /// Reads the content that PyTorch's decorator `record` writes: `{"message": {"message": …, "extraInfo": …}}`, or
    /// `{"message": …}` (`torch.distributed.elastic.multiprocessing.errors.ErrorHandler`).
    fn of_torchelastic(bytes: &[u8], at_ms: u64) -> Option<Self> {
        let content: serde_json::Value = serde_json::from_slice(bytes).ok()?;
        let message = &content["message"];
        let message = message.as_str().or_else(|| message["message"].as_str())?;
        Some(Self {
            rank: 0,
            kind: FailureKind::Error,
            message: message.to_owned(),
            hint: String::new(),
            location: None,
            thread: None,
            status: String::new(),
            consequence: false,
            permanent: false,
            culprit: None,
            at_ms,
        })
    }
}

/// Returns the milliseconds from 1970 to `at`.
pub(super) fn unix_ms(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_pytorch_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        let read = |content: &str| {
            fs::write(&path, content).unwrap();
            FailureReport::read(&path)
        };
        let content = r#"{"message": {"message": "ValueError: no", "extraInfo": {"timestamp": "1700000000"}}}"#;
        let report = read(content).unwrap();
        assert_eq!((report.message.as_str(), report.consequence), ("ValueError: no", false));
        assert!(report.at_ms > 1_700_000_001_000, "the time of the file: {}", report.at_ms);
        assert_eq!(read(r#"{"message": "killed"}"#).unwrap().message, "killed");
        for content in ["", "{}", "[]", r#"{"message": 3}"#, r#"{"message": {}}"#, "\u{0}"] {
            assert_eq!(read(content), None, "{content}");
        }
        assert_eq!(read(&format!("{{\"message\": \"{}\"}}", "x".repeat(LARGEST_FILE as usize))), None);
    }

    /// The launcher would wait for a writer, which never comes.
    #[test]
    fn a_pipe_in_place_of_the_file_is_not_a_report() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(FailureReport::read(&path), None);
    }
}
