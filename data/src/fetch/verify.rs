//! Checks the files of a data set against the official checksums, or against their own structure if no checksum is known.

use std::cmp::Ordering;
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::sources::{Contents, DatasetSource, KnownFile, source};
use crate::formats::{
    DatasetFormat, DecodePolicy, LoadRequest, archives, decompressed, find_idx, load_unsplit, locate, read_names,
    require_dataset_info,
};
use crate::{DataError, EncodedImages};

/// The result of verifying all files of a data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    /// Name of the data set.
    pub name: String,
    /// The verified folder, or `built in`.
    pub dir: PathBuf,
    /// The files in the order in which they are read.
    pub files: Vec<FileReport>,
}

impl VerifyReport {
    /// Returns true if no file is missing or altered.
    pub fn is_ok(&self) -> bool {
        self.files.iter().all(|file| matches!(file.status, FileStatus::Ok(_)))
    }
}

/// The result for one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileReport {
    /// Path of the file. For an image folder, the path of a split.
    pub path: PathBuf,
    /// Its state.
    pub status: FileStatus,
}

/// State of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileStatus {
    /// The file is as expected.
    Ok(Check),
    /// There is no such file.
    Missing,
    /// The file differs from the official one, with the difference.
    Altered(String),
    /// The file, of a data set without official checksums, cannot be used, with the cause.
    Damaged(String),
}

/// The kind of check that a file has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// Its sha256 is that of the official file.
    Checksum,
    /// Its structure is valid: sizes, headers, labels; every image can be decoded.
    Structure,
}

impl std::fmt::Display for FileStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FileStatus::Ok(Check::Checksum) => f.write_str("ok (checksum)"),
            FileStatus::Ok(Check::Structure) => f.write_str("ok (structure)"),
            FileStatus::Missing => f.write_str("missing"),
            FileStatus::Altered(how) => write!(f, "altered: {how}"),
            FileStatus::Damaged(how) => f.write_str(how),
        }
    }
}

/// Checks every file of the data set `name` in `dir` or in one of the usual folders below it. `label_delim` is that of
/// [`LoadRequest::label_delim`].
///
/// # Errors
/// An unknown name, or no file of the data set in `dir`. Missing and altered files are part of the report.
pub fn verify(name: &str, dir: &Path, label_delim: Option<char>) -> Result<VerifyReport, DataError> {
    match source(name) {
        Some(source) => verify_source(source, dir),
        None => verify_structure(name, dir, label_delim),
    }
}

/// Checks the files of `source` in `dir` or in one of the usual folders below it.
pub(super) fn verify_source(source: &DatasetSource, dir: &Path) -> Result<VerifyReport, DataError> {
    let found = locate(require_dataset_info(source.name)?, dir)?;
    Ok(report(source, found))
}

/// Checks the files of `source` in exactly this folder.
pub(super) fn report(source: &DatasetSource, dir: PathBuf) -> VerifyReport {
    let files = source
        .files
        .iter()
        .map(|file| (file, check_file(source, &dir, file)))
        // The list of class names may be missing.
        .filter(|(file, report)| file.is_required() || report.status != FileStatus::Missing)
        .map(|(_, report)| report)
        .collect();
    VerifyReport { name: source.name.to_owned(), dir, files }
}

/// Checks one file in exactly this folder.
pub(super) fn check_file(source: &DatasetSource, dir: &Path, file: &KnownFile) -> FileReport {
    match resolve(dir, file) {
        Some(path) => FileReport { status: check(&path, file, source.name), path },
        None => FileReport { path: dir.join(file.name), status: FileStatus::Missing },
    }
}

/// Finds the file under any of its spellings.
fn resolve(dir: &Path, file: &KnownFile) -> Option<PathBuf> {
    match file.name.split_once("-idx") {
        Some((stem, _)) => find_idx(dir, stem),
        None => Some(dir.join(file.name)).filter(|path| path.exists()),
    }
}

/// Checks the contents of one file.
fn check(path: &Path, file: &KnownFile, name: &str) -> FileStatus {
    match file.contents {
        Contents::Official { bytes, sha256 } => check_sum(path, bytes, sha256).unwrap_or_else(FileStatus::Altered),
        Contents::ClassNames => {
            let classes = require_dataset_info(name).map_or(0, |info| info.class_names.len());
            read_names(path, classes, name)
                .map_or_else(|e| FileStatus::Altered(e.cause), |_| FileStatus::Ok(Check::Structure))
        }
    }
}

/// Compares length and checksum. An error means that the file cannot be read.
fn check_sum(path: &Path, bytes: u64, official: &str) -> Result<FileStatus, String> {
    let (input, _) = decompressed(path).map_err(|e| e.cause)?;
    // Read one byte more than expected, so that an overlong file is not read to its end.
    let (len, sum) = hash(input.take(bytes + 1)).map_err(|e| format!("cannot be read: {e}"))?;
    Ok(match len.cmp(&bytes) {
        Ordering::Less => FileStatus::Altered(format!("{len} bytes of {bytes}")),
        Ordering::Greater => FileStatus::Altered(format!("longer than {bytes} bytes")),
        Ordering::Equal if sum == official => FileStatus::Ok(Check::Checksum),
        Ordering::Equal => FileStatus::Altered(format!("sha256 is {sum}, the official file's is {official}")),
    })
}

/// Returns the length in bytes and the sha256 (lower-case hexadecimal) of the input.
pub(super) fn hash(mut input: impl Read) -> std::io::Result<(u64, String)> {
    let mut sha = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    let mut len = 0;
    loop {
        match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                sha.update(&buffer[..n]);
                len += n as u64;
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok((len, sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect()))
}

/// Reports a mistake in a file of a data set without official checksums.
fn damaged(error: DataError) -> FileReport {
    let DataError { file, place, cause, hint, .. } = error;
    let how = if place.is_empty() { format!("{cause} ({hint})") } else { format!("{place}: {cause} ({hint})") };
    FileReport { path: file, status: FileStatus::Damaged(how) }
}

/// Checks a data set without official checksums by reading and decoding all of it. All damaged images are in the report.
fn verify_structure(name: &str, dir: &Path, label_delim: Option<char>) -> Result<VerifyReport, DataError> {
    let info = require_dataset_info(name)?;
    let built_in = matches!(info.format, DatasetFormat::BuiltIn | DatasetFormat::Custom(_));
    let request = LoadRequest {
        name: name.to_owned(),
        dir: Some(dir.to_owned()),
        // Different sizes are not damage, because the configuration can resize the images.
        image_size: (!built_in).then_some(32),
        // The images need not fit into memory.
        decode: DecodePolicy::Epoch,
        defer_missing: true,
        label_delim,
        ..LoadRequest::default()
    };
    let ok = |path: PathBuf| FileReport { path, status: FileStatus::Ok(Check::Structure) };
    let (dir, parts): (_, Vec<PathBuf>) = if built_in {
        (PathBuf::from("built in"), ["train", "test"].map(PathBuf::from).into())
    } else if info.format == DatasetFormat::Manifest {
        (dir.to_owned(), vec![dir.to_owned()])
    } else if info.format == DatasetFormat::Webdataset {
        (dir.to_owned(), archives(dir)?.concat())
    } else {
        let splits = ["train", "val", "valid", "validation", "test"].map(|split| dir.join(split));
        (dir.to_owned(), splits.into_iter().filter(|split| split.is_dir()).collect())
    };
    let files = match load_unsplit(&request, false) {
        Ok(splits) => {
            let encoded = splits.iter().filter_map(|(_, split)| split.encoded.as_ref());
            let reports: Vec<FileReport> = encoded.flat_map(EncodedImages::check).map(damaged).collect();
            if reports.is_empty() { parts.into_iter().map(ok).collect() } else { reports }
        }
        // A missing folder means a wrong `dir`. Anything else is a damaged data set.
        Err(error) if built_in || error.file.exists() => vec![damaged(error)],
        Err(error) => return Err(error),
    };
    Ok(VerifyReport { name: name.to_owned(), dir, files })
}
