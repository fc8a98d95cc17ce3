//! What a worker is doing, written where its death does not reach: a page of memory that launcher and worker share.
//!
//! The page is an anonymous file that the worker inherits as its standard input (workers read nothing there) and exchanges
//! for `/dev/null` at once. Both sides use plain reads and writes: a report costs the worker one system call and no
//! network, it is still there after SIGKILL, and the page goes away with the last of the two processes.
//!
//! ```text
//! byte 0    beats   u64   grows several times a second while the worker's threads get to run
//! byte 64   number  u64   of the report          ┐
//!           since   u64   milliseconds, monotonic │ one write; the reader tries again
//!           stage   u8    how far it has come     │ while the sum is wrong  
//!           length  u16   of the text             │
//!           text    TEXT bytes                    │
//!           sum     u64   FNV-1a of all that        ┘
//! ```

use std::fmt::{self, Write as _};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::time::{ClockId, clock_gettime};

const BEATS: u64 = 0;
const REPORT: u64 = 64;
/// Longest text of a report; what is longer is cut.
const TEXT: usize = 221;
const LENGTH: usize = 8 + 8 + 1 + 2 + TEXT + 8;

/// How far a worker has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Stage {
    /// Nothing was heard of it: it loads, or is stuck before its first line.
    Started = 0,
    /// It runs, and has not met the others.
    Starting = 1,
    /// It has met the others.
    Joined = 2,
}

/// A worker's last report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// How far it has come.
    pub stage: Stage,
    /// In its own words: `all_reduce #17, bucket 3`.
    pub text: String,
    /// How long ago it said so.
    pub age: Duration,
}

/// Either side's view of the page.
#[derive(Debug)]
pub struct StatusPage {
    file: File,
    beats: AtomicU64,
    reports: AtomicU64,
}

/// FNV-1a: two reports mixed in a copy, in whatever order the kernel copies, do not have the sum of either.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

impl StatusPage {
    /// A fresh page.
    ///
    /// # Errors
    /// The kernel gives none.
    pub fn create() -> std::io::Result<Self> {
        let file = File::from(memfd_create("trainer-worker", MemfdFlags::CLOEXEC)?);
        file.set_len(REPORT + LENGTH as u64)?;
        Ok(Self::from(file))
    }

    /// The page that a worker has inherited.
    ///
    /// # Errors
    /// It is none: somebody else has started this process, or changed its standard input.
    pub fn open(file: File) -> std::io::Result<Self> {
        match file.metadata()?.len() {
            size if size == REPORT + LENGTH as u64 => Ok(Self::from(file)),
            _ => Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is something else")),
        }
    }

    /// The same page for the worker to inherit.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn share(&self) -> std::io::Result<OwnedFd> {
        self.file.try_clone().map(OwnedFd::from)
    }

    /// Worker: shows that it is alive.
    pub fn beat(&self) {
        let beats = self.beats.fetch_add(1, Ordering::Relaxed) + 1;
        // memory that exists already: the write cannot fail
        let _ = self.file.write_all_at(&beats.to_le_bytes(), BEATS);
    }

    /// Launcher: beats so far.
    pub fn beats(&self) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, BEATS).map_or(0, |()| u64::from_le_bytes(bytes))
    }

    /// Worker: says what it is doing from now on. Cuts what is too long, allocates nothing.
    pub fn set_status(&self, stage: Stage, text: fmt::Arguments<'_>) {
        let mut cut = Cut { bytes: [0; TEXT], len: 0 };
        // what does not fit is left out
        let _ = cut.write_fmt(text);
        let number = self.reports.fetch_add(1, Ordering::Relaxed) + 1;
        let mut record = [0; LENGTH];
        record[..8].copy_from_slice(&number.to_le_bytes());
        record[8..16].copy_from_slice(&now_ms().to_le_bytes());
        record[16] = stage as u8;
        record[17..19].copy_from_slice(&(cut.len as u16).to_le_bytes());
        record[19..19 + TEXT].copy_from_slice(&cut.bytes);
        let sum = checksum(&record[..19 + TEXT]);
        record[19 + TEXT..].copy_from_slice(&sum.to_le_bytes());
        let _ = self.file.write_all_at(&record, REPORT);
    }

    /// Launcher: the last report.
    pub fn status(&self) -> Status {
        let mut record = [0; LENGTH];
        // a writer that is stopped in mid-write must not stop the reader
        for _ in 0..256 {
            if self.file.read_exact_at(&mut record, REPORT).is_ok()
                && checksum(&record[..19 + TEXT]).to_le_bytes() == record[19 + TEXT..]
            {
                break;
            }
            std::thread::yield_now();
        }
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| record[at + i]));
        let length = usize::from(u16::from_le_bytes([record[17], record[18]])).min(TEXT);
        let stage = match record[16] {
            0 => Stage::Started,
            1 => Stage::Starting,
            _ => Stage::Joined,
        };
        let text = match word(0) {
            0 => "starting, before rendezvous".to_owned(),
            _ => String::from_utf8_lossy(&record[19..19 + length]).into_owned(),
        };
        let since = if word(0) == 0 { now_ms() } else { word(8) };
        Status { stage, text, age: Duration::from_millis(now_ms().saturating_sub(since)) }
    }
}

impl From<File> for StatusPage {
    fn from(file: File) -> Self {
        Self { file, beats: AtomicU64::new(0), reports: AtomicU64::new(0) }
    }
}

/// One clock for all processes of a host.
fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Takes text until it is full, cutting between characters.
struct Cut {
    bytes: [u8; TEXT],
    len: usize,
}

impl fmt::Write for Cut {
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
    fn the_other_side_reads_the_last_report() {
        let ours = StatusPage::create().unwrap();
        let theirs = StatusPage::from(File::from(ours.share().unwrap()));
        assert_eq!((ours.status().stage, ours.status().text.as_str()), (Stage::Started, "starting, before rendezvous"));
        theirs.set_status(Stage::Joined, format_args!("all_reduce #{}, bucket {}", 17, 3));
        assert_eq!((ours.status().stage, ours.status().text.as_str()), (Stage::Joined, "all_reduce #17, bucket 3"));
        theirs.set_status(Stage::Joined, format_args!("x"));
        assert_eq!(ours.status().text, "x", "nothing is left of a longer report");
        assert_eq!(ours.beats(), 0);
        theirs.beat();
        theirs.beat();
        assert_eq!((ours.beats(), ours.status().text.as_str()), (2, "x"));
    }

    #[test]
    fn long_reports_are_cut_between_characters() {
        let page = StatusPage::create().unwrap();
        page.set_status(Stage::Starting, format_args!("{}", "ä".repeat(500)));
        assert_eq!(page.status().text, "ä".repeat(TEXT / 2));
    }

    #[test]
    fn a_reader_never_sees_halves_of_two_reports() {
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
