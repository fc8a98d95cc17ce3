//! Downloads data sets from their official addresses, and checks files that are there.

mod download;
mod sources;
#[cfg(test)]
mod tests;
mod unpack;
mod verify;

use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use verify::{Check, FileReport, FileStatus, VerifyReport, verify};

use crate::DataError;
use crate::formats::{Format, info, locate};
use download::Transfer;
use sources::{Download, Source, source};

/// How to download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchOptions {
    /// Base address to use instead of the official one: the files must lie directly below it under their official names.
    pub mirror: Option<String>,
    /// How often a lost connection is taken up again within one call; each time must have brought something.
    pub retries: u32,
    /// A server that is silent for so long counts as lost.
    pub stall_timeout: Duration,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self { mirror: None, retries: 5, stall_timeout: Duration::from_secs(30) }
    }
}

/// Watches a download. All methods have empty defaults; `()` watches nothing.
pub trait Progress {
    /// A file of `total` bytes begins, or begins again from 0.
    fn start(&self, file: &str, total: u64) {
        let _ = (file, total);
    }

    /// So many more bytes are there.
    fn advance(&self, bytes: u64) {
        let _ = bytes;
    }

    /// The file that was started is complete.
    fn finish(&self) {}

    /// A line for people: what happens besides.
    fn note(&self, message: &str) {
        let _ = message;
    }
}

impl Progress for () {}

/// What [`fetch`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fetched {
    /// Everything was there already, and every file was checked.
    AlreadyThere(PathBuf),
    /// The files are in this folder now.
    Done(PathBuf),
    /// This data set is not downloaded: why.
    Nothing(String),
}

impl std::fmt::Display for Fetched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fetched::AlreadyThere(dir) => write!(f, "already there and verified: {}", dir.display()),
            Fetched::Done(dir) => write!(f, "fetched and verified: {}", dir.display()),
            Fetched::Nothing(why) => f.write_str(why),
        }
    }
}

/// Downloads what is missing or altered of the data set `name` to a folder of its own in `dest`, and checks all of it.
///
/// A download that was cut is resumed by the next call. Checksums are compared before anything is unpacked, and each file
/// appears complete or not at all. An archive that someone put into `dest` by hand is used instead of the network.
///
/// # Errors
/// Unknown name; no network, server or file; a checksum that is wrong; a disk that cannot be written. The error says which
/// address was tried, and the hint which files to put where by hand.
pub fn fetch(name: &str, dest: &Path, options: &FetchOptions, progress: &dyn Progress) -> Result<Fetched, DataError> {
    match source(name) {
        Some(source) => fetch_source(source, dest, options, progress),
        None => Ok(Fetched::Nothing(match info(name)?.format {
            Format::BuiltIn => format!("`{name}` is part of the program: there is nothing to fetch"),
            _ => format!(
                "`{name}` reads your own images, there is nothing to fetch: put them into \
                 DIR/train/CLASS and DIR/test/CLASS and name DIR with `dir` in [data] or --data-dir"
            ),
        })),
    }
}

fn fetch_source(
    source: &Source,
    dest: &Path,
    options: &FetchOptions,
    progress: &dyn Progress,
) -> Result<Fetched, DataError> {
    let target = dest.join(source.folder);
    // Found under `dest` or not, what matters here is that it is complete and unaltered.
    if let Ok(found) = locate(info(source.name)?, dest) {
        let report = verify::report(source, found);
        if report.is_ok() {
            return Ok(Fetched::AlreadyThere(report.dir));
        }
        refuse_foreign(source, &report, &target)?;
    }
    for want in source.downloads {
        if want.archive {
            fetch_archive(source, want, dest, &target, options, progress)?;
        } else {
            fetch_file(source, want, dest, &target, options, progress)?;
        }
    }
    let report = verify::report(source, target.clone());
    match report.files.iter().find(|file| !matches!(file.status, FileStatus::Ok(_))) {
        None => Ok(Fetched::Done(target)),
        Some(file) => Err(DataError::new(
            &file.path,
            format!("is not as it should be after the download: {}", file.status),
            "check the disk",
        )),
    }
}

fn make_folder(dir: &Path) -> Result<(), DataError> {
    std::fs::create_dir_all(dir).map_err(|e| {
        DataError::new(dir, format!("cannot be made: {e}"), "name a folder that you can write to with --data-dir")
    })
}

/// Files in a folder that is not ours win over those that we would put into `target`: they must go first.
fn refuse_foreign(source: &Source, report: &VerifyReport, target: &Path) -> Result<(), DataError> {
    if report.dir == target {
        return Ok(());
    }
    match report.files.iter().find(|file| !matches!(file.status, FileStatus::Ok(_))) {
        None => Ok(()),
        Some(file) => Err(DataError::new(
            &file.path,
            format!("{}; files of `{}` lie here already and would be read first", file.status, source.name),
            format!("move the folder {} away, then fetch again", report.dir.display()),
        )),
    }
}

/// Downloads an archive and unpacks it.
fn fetch_archive(
    source: &Source,
    want: &Download,
    dest: &Path,
    target: &Path,
    options: &FetchOptions,
    progress: &dyn Progress,
) -> Result<(), DataError> {
    make_folder(dest)?;
    let by_hand = dest.join(want.file);
    if by_hand.is_file() {
        let sum = File::open(&by_hand).and_then(verify::hash);
        if sum.is_ok_and(|(_, sum)| sum == want.sha256) {
            progress.note(&format!("using {}, its checksum is right", by_hand.display()));
            make_folder(target)?;
            return unpack::unpack(&by_hand, source, target);
        }
        progress.note(&format!("{} has not the official checksum and is not used", by_hand.display()));
    }
    let part = dest.join(format!("{}.part", want.file));
    get(source, want, &part, dest, options, progress)?;
    progress.note(&format!("unpacking {}", want.file));
    make_folder(target)?;
    unpack::unpack(&part, source, target)?;
    std::fs::remove_file(&part)
        .map_err(|e| DataError::new(&part, format!("cannot be removed: {e}"), "remove it by hand: all is unpacked"))
}

/// Downloads a file that is used as it is, unless it is there in any form.
fn fetch_file(
    source: &Source,
    want: &Download,
    dest: &Path,
    target: &Path,
    options: &FetchOptions,
    progress: &dyn Progress,
) -> Result<(), DataError> {
    let known = source.files.iter().find(|file| want.file.strip_suffix(".gz") == Some(file.name));
    if let Some(FileReport { path, status }) = known.map(|known| verify::check_file(source, target, known)) {
        match status {
            FileStatus::Ok(_) => return Ok(()),
            FileStatus::Missing => {}
            FileStatus::Altered(how) => {
                progress.note(&format!("{}: {how}; fetching it anew", path.display()));
                // Under another spelling it would be read instead of the new one.
                if path != target.join(want.file) {
                    std::fs::remove_file(&path).map_err(|e| {
                        DataError::new(&path, format!("is damaged and cannot be removed: {e}"), "remove it by hand")
                    })?;
                }
            }
        }
    }
    make_folder(target)?;
    let part = target.join(format!("{}.part", want.file));
    get(source, want, &part, dest, options, progress)?;
    let path = target.join(want.file);
    std::fs::rename(&part, &path)
        .map_err(|e| DataError::new(&path, format!("cannot be written: {e}"), "check the disk and permissions"))
}

/// Downloads to `part`; a failure comes with the address that was tried and with what to do without a network.
fn get(
    source: &Source,
    want: &Download,
    part: &Path,
    dest: &Path,
    options: &FetchOptions,
    progress: &dyn Progress,
) -> Result<(), DataError> {
    let base = options.mirror.as_deref().unwrap_or(source.base).trim_end_matches('/');
    let url = format!("{base}/{}", want.file);
    Transfer { url: &url, part, want, options, progress }.run().map_err(|failure| {
        let mut hint = String::new();
        if failure.resumable {
            let _ = write!(hint, "run the same command again: it goes on from {}\n  or ", part.display());
        } else if std::fs::metadata(part).is_ok_and(|meta| meta.len() == 0) {
            // An empty file helps nobody; that it cannot be removed is not worth another error.
            let _ = std::fs::remove_file(part);
        }
        hint.push_str(&by_hand(source, dest));
        DataError::new(&url, failure.cause, hint)
    })
}

/// Which files to put where.
fn by_hand(source: &Source, dest: &Path) -> String {
    let mut text = String::from("without a network, get by other means");
    for want in source.downloads {
        let place = if want.archive { dest.to_owned() } else { dest.join(source.folder) };
        let _ = write!(text, "\n    {} ({} bytes)", place.join(want.file).display(), want.bytes);
    }
    let _ = write!(text, "\n  from {} and run `trainer data fetch {}` again: it checks", source.base, source.name);
    text.push_str(if source.downloads.iter().any(|want| want.archive) { " and unpacks them" } else { " them" });
    text
}
