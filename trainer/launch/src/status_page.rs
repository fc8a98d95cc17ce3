//! The status page: memory through which a worker reports its status to its launcher. The launcher can still read it after the
//! worker has died.
//!
//! The page is an anonymous file. The worker inherits the file as its standard input (workers read no input) and replaces its
//! standard input with `/dev/null` at once. Both sides use plain reads and writes. So a status costs the worker one system call
//! and no network, and survives SIGKILL. The kernel frees the page when both processes have ended.
//!
//! ```text
//! byte 0    heartbeats u64   grows several times a second while the worker's threads can run
//! byte 64   number     u64   of the status           ┐
//!           since      u64   milliseconds, monotonic │ one write; the reader tries again
//!           stage      u8    Stage                   │ while the checksum is wrong
//!           length     u16   of the text             │
//!           text       TEXT bytes                    │
//!           checksum   u64   FNV-1a of the above     ┘
//! ```

use std::fmt::{self, Write as _};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::system::nameless_file;
use comm::fnv;
use rustix::time::{ClockId, clock_gettime};

const HEARTBEATS: u64 = 0;
const STATUS: u64 = 64;
/// Longest text of a status in bytes. The rest is cut off.
const TEXT: usize = 221;
const LENGTH: usize = 8 + 8 + 1 + 2 + TEXT + 8;

/// The stage of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Stage {
    /// The process exists and has not written a status.
    Spawned = 0,
    /// The worker runs and has not joined the other ranks yet.
    Starting = 1,
    /// The worker has joined the other ranks. It has nothing to save yet.
    Joined = 2,
    /// The worker trains. On a signal the ranks agree on a step after which they save a checkpoint and exit.
    Training = 3,
}

impl From<u8> for Stage {
    fn from(stage: u8) -> Self {
        match stage {
            0 => Self::Spawned,
            1 => Self::Starting,
            2 => Self::Joined,
            _ => Self::Training,
        }
    }
}

/// A worker's last status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Status {
    /// The worker's stage.
    pub(super) stage: Stage,
    /// The worker's text: `all_reduce #17, bucket 3`.
    pub(super) text: String,
    /// Time since the worker wrote the text.
    pub(super) age: Duration,
}

/// The page, in the launcher or in the worker.
#[derive(Debug)]
pub(super) struct StatusPage {
    file: File,
    heartbeats: AtomicU64,
    statuses: AtomicU64,
}

impl StatusPage {
    /// Creates a page.
    ///
    /// # Errors
    /// The system cannot make a file without a name.
    pub(super) fn create() -> std::io::Result<Self> {
        Ok(Self::from(nameless_file(STATUS as usize + LENGTH)?))
    }

    /// Opens the page that a worker has inherited.
    ///
    /// # Errors
    /// The file is not a page: another program has started this process, or its standard input was replaced.
    pub(super) fn open(file: File) -> std::io::Result<Self> {
        match file.metadata()?.len() {
            size if size == STATUS + LENGTH as u64 => Ok(Self::from(file)),
            _ => Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is something else")),
        }
    }

    /// Returns a file descriptor of the page for the worker to inherit.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub(super) fn share(&self) -> std::io::Result<OwnedFd> {
        self.file.try_clone().map(OwnedFd::from)
    }

    /// Sends a heartbeat. The worker calls this function.
    pub(super) fn send_heartbeat(&self) {
        let heartbeats = self.heartbeats.fetch_add(1, Ordering::Relaxed) + 1;
        // The memory is already allocated, so the write cannot fail.
        let _ = self.file.write_all_at(&heartbeats.to_le_bytes(), HEARTBEATS);
    }

    /// Returns the number of heartbeats so far. The launcher calls this function.
    pub(super) fn heartbeats(&self) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, HEARTBEATS).map_or(0, |()| u64::from_le_bytes(bytes))
    }

    /// Sets the status. Cuts off text that is too long, and allocates nothing. The worker calls this function.
    pub(super) fn set_status(&self, stage: Stage, text: fmt::Arguments<'_>) {
        let mut cut = TruncatedText { bytes: [0; TEXT], len: 0 };
        // An error means only that text was cut off.
        let _ = cut.write_fmt(text);
        let number = self.statuses.fetch_add(1, Ordering::Relaxed) + 1;
        let mut record = [0; LENGTH];
        record[..8].copy_from_slice(&number.to_le_bytes());
        record[8..16].copy_from_slice(&now_ms().to_le_bytes());
        record[16] = stage as u8;
        record[17..19].copy_from_slice(&(cut.len as u16).to_le_bytes());
        record[19..19 + TEXT].copy_from_slice(&cut.bytes);
        let sum = checksum(&record);
        record[19 + TEXT..].copy_from_slice(&sum.to_le_bytes());
        let _ = self.file.write_all_at(&record, STATUS);
    }

    /// Returns the last status. The launcher calls this function.
    pub(super) fn status(&self) -> Status {
        let mut record = [0; LENGTH];
        // Limit the number of attempts, since a worker may be stopped in the middle of a write.
        for _ in 0..256 {
            if self.file.read_exact_at(&mut record, STATUS).is_ok()
                && checksum(&record).to_le_bytes() == record[19 + TEXT..]
            {
                break;
            }
            std::thread::yield_now();
        }
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| record[at + i]));
        if word(0) == 0 {
            let text = "starting, before rendezvous".to_owned();
            return Status { stage: Stage::Spawned, text, age: Duration::ZERO };
        }
        let length = usize::from(u16::from_le_bytes([record[17], record[18]])).min(TEXT);
        let text = String::from_utf8_lossy(&record[19..19 + length]).into_owned();
        let age = Duration::from_millis(now_ms().saturating_sub(word(8)));
        Status { stage: Stage::from(record[16]), text, age }
    }
}

impl From<File> for StatusPage {
    fn from(file: File) -> Self {
        Self { file, heartbeats: AtomicU64::new(0), statuses: AtomicU64::new(0) }
    }
}

/// Returns the checksum of a record. If a read mixes bytes of two statuses, the checksum does not match.
fn checksum(record: &[u8; LENGTH]) -> u64 {
    fnv::hash(record[..19 + TEXT].iter().copied())
}

/// Returns the milliseconds of a clock that all processes of a host share.
fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// A text buffer of fixed size. Text that does not fit is cut off between two characters.
struct TruncatedText {
    bytes: [u8; TEXT],
    len: usize,
}

impl fmt::Write for TruncatedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = TEXT - self.len;
        let take = if text.len() <= room { text.len() } else { text.floor_char_boundary(room) };
        self.bytes[self.len..self.len + take].copy_from_slice(&text.as_bytes()[..take]);
        self.len += take;
        if take == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_side_reads_the_last_status() {
        let ours = StatusPage::create().unwrap();
        let theirs = StatusPage::from(File::from(ours.share().unwrap()));
        assert_eq!((ours.status().stage, ours.status().text.as_str()), (Stage::Spawned, "starting, before rendezvous"));
        theirs.set_status(Stage::Joined, format_args!("all_reduce #{}, bucket {}", 17, 3));
        assert_eq!((ours.status().stage, ours.status().text.as_str()), (Stage::Joined, "all_reduce #17, bucket 3"));
        theirs.set_status(Stage::Training, format_args!("x"));
        assert_eq!((ours.status().stage, ours.status().text.as_str()), (Stage::Training, "x"));
        assert_eq!(ours.heartbeats(), 0);
        theirs.send_heartbeat();
        theirs.send_heartbeat();
        assert_eq!((ours.heartbeats(), ours.status().text.as_str()), (2, "x"));
    }

    #[test]
    fn long_statuses_are_cut_between_characters() {
        let page = StatusPage::create().unwrap();
        page.set_status(Stage::Starting, format_args!("{}", "ä".repeat(500)));
        assert_eq!(page.status().text, "ä".repeat(TEXT / 2));
    }

    #[test]
    fn a_reader_never_sees_halves_of_two_statuses() {
        let ours = StatusPage::create().unwrap();
        let theirs = StatusPage::from(File::from(ours.share().unwrap()));
        theirs.set_status(Stage::Joined, format_args!("0"));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..20_000 {
                    let digit = char::from(b'0' + (round % 10) as u8);
                    theirs.set_status(Stage::Joined, format_args!("{}", digit.to_string().repeat(200)));
                }
            });
            for _ in 0..5_000 {
                let text = ours.status().text;
                assert!(text.chars().all(|c| text.starts_with(c)), "{text}");
            }
        });
    }
}
