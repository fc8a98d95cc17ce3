//! Downloads data sets from their official addresses and verifies files.

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

pub use sources::can_be_fetched;
pub use verify::{Check, FileReport, FileStatus, VerifyReport, verify};

use crate::DataError;
use crate::formats::{DatasetFormat, locate, require_dataset_info};
use download::{FailureKind, Transfer};
use sources::{DatasetSource, Download, source};

/// Options of a download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchOptions {
    /// Base address instead of the official one. The files must be directly below it under their official names.
    pub mirror: Option<String>,
    /// Number of times that one call resumes after a lost connection, or asks a busy server again (HTTP 429, 502, 503 and 504).
    /// After a lost connection, an attempt must have received at least one byte.
    pub retries: u32,
    /// Pause before a busy server is asked again; the second one is twice as long, the third one three times, and so on.
    pub busy_pause: Duration,
    /// A server that is silent for this long counts as lost.
    pub stall_timeout: Duration,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self { mirror: None, retries: 5, busy_pause: Duration::from_secs(2), stall_timeout: Duration::from_secs(30) }
    }
}

/// Receives the progress of a download. All methods default to doing nothing; `()` ignores all of them.
pub trait FetchProgress {
    /// Called when the download of a file of `total` bytes starts, or starts again from 0.
    fn start(&self, file: &str, total: u64) {
        let _ = (file, total);
    }

    /// Called when `bytes` more bytes have arrived.
    fn advance(&self, bytes: u64) {
        let _ = bytes;
    }

    /// Called when the current file is complete.
    fn finish(&self) {}

    /// Called with a line for the user about any other event.
    fn note(&self, message: &str) {
        let _ = message;
    }
}

impl FetchProgress for () {}

/// The outcome of [`fetch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fetched {
    /// All files were there already and are verified.
    AlreadyThere(PathBuf),
    /// The files are downloaded to this folder and verified.
    Done(PathBuf),
    /// The data set cannot be downloaded, with the reason.
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

/// Downloads the missing and altered files of the data set `name` to a folder below `dest`, and verifies all files.
///
/// The next call resumes an interrupted download. Checksums are compared before anything is unpacked, and each file appears
/// complete or not at all. An archive that the user has put into `dest` is used instead of the network.
///
/// # Errors
/// An unknown name; no network, server or file; a wrong checksum; a disk that cannot be written. The error names the address,
/// and the hint says which files to put where by hand.
pub fn fetch(
    name: &str,
    dest: &Path,
    options: &FetchOptions,
    progress: &dyn FetchProgress,
) -> Result<Fetched, DataError> {
    match source(name) {
        Some(source) => fetch_source(source, dest, options, progress),
        None => Ok(Fetched::Nothing(match require_dataset_info(name)?.format {
            DatasetFormat::BuiltIn | DatasetFormat::Custom(_) => {
                format!("`{name}` is part of the program: there is nothing to fetch")
            }
            DatasetFormat::Manifest => {
                format!(
                    "`{name}` reads your own images, there is nothing to fetch: list them in a CSV file (docs/data.md)"
                )
            }
            DatasetFormat::Webdataset => format!(
                "`{name}` reads your own images, there is nothing to fetch: put archives train-*.tar and test-*.tar into \
                 DIR and name DIR with `dir` in [data] or --data-dir"
            ),
            _ => format!(
                "`{name}` reads your own images, there is nothing to fetch: put them into \
                 DIR/train/CLASS and DIR/test/CLASS and name DIR with `dir` in [data] or --data-dir"
            ),
        })),
    }
}

/// Downloads the missing and altered files of `source`.
fn fetch_source(
    source: &DatasetSource,
    dest: &Path,
    options: &FetchOptions,
    progress: &dyn FetchProgress,
) -> Result<Fetched, DataError> {
    let target = dest.join(source.folder);
    // An error only means that the files are not there yet.
    if let Ok(found) = locate(require_dataset_info(source.name)?, dest) {
        let report = verify::report(source, found);
        if report.is_ok() {
            return Ok(Fetched::AlreadyThere(report.dir));
        }
        check_no_other_copy(source, &report, &target)?;
    }
    for download in source.downloads {
        if download.archive {
            fetch_archive(source, download, dest, &target, options, progress)?;
        } else {
            fetch_file(source, download, dest, &target, options, progress)?;
        }
    }
    let report = verify::report(source, target.clone());
    match report.files.iter().find(|file| !matches!(file.status, FileStatus::Ok(_))) {
        None => Ok(Fetched::Done(target)),
        Some(file) => {
            Err(DataError::new(&file.path, format!("is wrong after the download: {}", file.status), "check the disk"))
        }
    }
}

/// Creates `dir` and the folders above it.
fn make_folder(dir: &Path) -> Result<(), DataError> {
    std::fs::create_dir_all(dir)
        .map_err(|e| DataError::new(dir, format!("cannot be created: {e}"), "use --data-dir to name a writable folder"))
}

/// Refuses altered files in another folder than `target`: the readers would prefer them to the files downloaded to `target`.
fn check_no_other_copy(source: &DatasetSource, report: &VerifyReport, target: &Path) -> Result<(), DataError> {
    if report.dir == target {
        return Ok(());
    }
    match report.files.iter().find(|file| !matches!(file.status, FileStatus::Ok(_))) {
        None => Ok(()),
        Some(file) => Err(DataError::new(
            &file.path,
            format!("{}; files of `{}` are here already and would be read first", file.status, source.name),
            format!("move the folder {} away, then fetch again", report.dir.display()),
        )),
    }
}

/// Downloads an archive and unpacks it.
fn fetch_archive(
    source: &DatasetSource,
    download: &Download,
    dest: &Path,
    target: &Path,
    options: &FetchOptions,
    progress: &dyn FetchProgress,
) -> Result<(), DataError> {
    make_folder(dest)?;
    let user_archive = dest.join(download.file);
    if user_archive.is_file() {
        let sum = File::open(&user_archive).and_then(verify::hash);
        if sum.is_ok_and(|(_, sum)| sum == download.sha256) {
            progress.note(&format!("using {}: its checksum is right", user_archive.display()));
            make_folder(target)?;
            return unpack::unpack(&user_archive, source, target);
        }
        progress.note(&format!("{} does not have the official checksum and is not used", user_archive.display()));
    }
    let part = dest.join(format!("{}.part", download.file));
    get(source, download, &part, dest, options, progress)?;
    progress.note(&format!("unpacking {}", download.file));
    make_folder(target)?;
    unpack::unpack(&part, source, target)?;
    std::fs::remove_file(&part).map_err(|e| {
        DataError::new(&part, format!("cannot be removed: {e}"), "remove it by hand: everything is unpacked")
    })
}

/// Downloads a file that needs no unpacking, unless it is already there under any of its spellings.
fn fetch_file(
    source: &DatasetSource,
    download: &Download,
    dest: &Path,
    target: &Path,
    options: &FetchOptions,
    progress: &dyn FetchProgress,
) -> Result<(), DataError> {
    let known = source.files.iter().find(|file| download.file.strip_suffix(".gz") == Some(file.name));
    if let Some(FileReport { path, status }) = known.map(|known| verify::check_file(source, target, known)) {
        match status {
            FileStatus::Ok(_) => return Ok(()),
            FileStatus::Missing => {}
            FileStatus::Altered(how) | FileStatus::Damaged(how) => {
                progress.note(&format!("{}: {how}; downloading it again", path.display()));
                // A file of another spelling would be read instead of the new one.
                if path != target.join(download.file) {
                    std::fs::remove_file(&path).map_err(|e| {
                        DataError::new(&path, format!("is damaged and cannot be removed: {e}"), "remove it by hand")
                    })?;
                }
            }
        }
    }
    make_folder(target)?;
    let part = target.join(format!("{}.part", download.file));
    get(source, download, &part, dest, options, progress)?;
    let path = target.join(download.file);
    std::fs::rename(&part, &path)
        .map_err(|e| DataError::new(&path, format!("cannot be written: {e}"), "check the disk and permissions"))
}

/// Downloads a file to `part`. The error names the address and says what to do without a network.
fn get(
    source: &DatasetSource,
    download: &Download,
    part: &Path,
    dest: &Path,
    options: &FetchOptions,
    progress: &dyn FetchProgress,
) -> Result<(), DataError> {
    let base = options.mirror.as_deref().unwrap_or(source.base).trim_end_matches('/');
    if !["http://", "https://"].iter().any(|scheme| base.starts_with(scheme)) {
        let hint = "it begins with http:// or https://";
        return Err(DataError::new("", format!("`{base}` is not the address of a server"), hint).at("mirror"));
    }
    let url = format!("{base}/{}", download.file);
    Transfer { url: &url, part, download, options, progress }.run().map_err(|failure| {
        let elsewhere = manual_instructions(source, dest);
        let is_empty = || std::fs::metadata(part).is_ok_and(|meta| meta.len() == 0);
        let hint = match failure.kind {
            FailureKind::Local => {
                "make the folder writable, free some space, or name another folder with --data-dir; then run the same command \
                 again"
                    .to_owned()
            }
            FailureKind::Locked => {
                "wait until the other process has downloaded the file, then run the same command again".to_owned()
            }
            FailureKind::Final | FailureKind::Temporary if is_empty() => {
                // An empty file is useless. Failing to remove it is not worth another error.
                let _ = std::fs::remove_file(part);
                match failure.kind {
                    FailureKind::Temporary => format!("run the same command again later\n  or {elsewhere}"),
                    _ => elsewhere,
                }
            }
            FailureKind::Temporary => {
                format!("run the same command again: it resumes from {}\n  or {elsewhere}", part.display())
            }
            FailureKind::Final => elsewhere,
        };
        DataError::new(&url, failure.cause, hint)
    })
}

/// Says which files to put where.
fn manual_instructions(source: &DatasetSource, dest: &Path) -> String {
    let mut text = String::from("without a network, get by other means");
    for download in source.downloads {
        let place = if download.archive { dest.to_owned() } else { dest.join(source.folder) };
        let _ = write!(text, "\n    {} ({} bytes)", place.join(download.file).display(), download.bytes);
    }
    let _ = write!(text, "\n  from {} and run `trainer data fetch {}` again: it checks", source.base, source.name);
    text.push_str(if source.downloads.iter().any(|download| download.archive) { " and unpacks them" } else { " them" });
    text
}
