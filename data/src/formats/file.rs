//! Opens and reads files of known size.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use crate::{DataError, open_regular};

/// Converts an I/O error into one that names the file and what to do.
pub(crate) fn read_error(path: &Path, error: &io::Error) -> DataError {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => "check the path; --data-dir names the data folder",
        io::ErrorKind::InvalidInput => "a data file is expected here",
        io::ErrorKind::PermissionDenied => "check the permissions of the file and of the folders above it",
        _ => "check the disk, or copy the file again",
    };
    DataError {
        is_bad_image: error.kind() == io::ErrorKind::NotFound,
        is_transient: is_transient(error),
        ..DataError::new(path, format!("cannot be read: {error}"), hint)
    }
}

/// Converts an error that a parser met while it read a file: that of a disk or a network that does not answer, otherwise
/// `damaged`.
pub(super) fn transient_or(path: &Path, error: &io::Error, damaged: impl FnOnce() -> DataError) -> DataError {
    if is_transient(error) { read_error(path, error) } else { damaged() }
}

/// Returns whether the operation may succeed later: a disk or a network does not answer.
fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, StaleNetworkFileHandle, TimedOut};
    /// Input/output error, on Linux and macOS. It has no stable kind.
    const EIO: i32 = 5;
    let kinds = [HostUnreachable, NetworkDown, NetworkUnreachable, StaleNetworkFileHandle, TimedOut];
    error.raw_os_error() == Some(EIO) || kinds.contains(&error.kind())
}

/// Opens a regular file and returns it with its length in bytes.
pub(crate) fn open(path: &Path) -> Result<(File, u64), DataError> {
    open_regular(path).map_err(|e| read_error(path, &e))
}

/// A file for a parser whose errors are texts. It keeps the last error of a disk or a network that does not answer.
pub(crate) struct ParsedFile<'a> {
    path: &'a Path,
    file: File,
    /// The last such error.
    pub(crate) failure: Option<DataError>,
}

impl<'a> ParsedFile<'a> {
    /// `path` is that of the file.
    pub(crate) fn new(path: &'a Path, file: File) -> Self {
        Self { path, file, failure: None }
    }
}

impl Read for ParsedFile<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.file.read(out).inspect_err(|error| {
            if is_transient(error) {
                self.failure = Some(read_error(self.path, error));
            }
        })
    }
}

impl Seek for ParsedFile<'_> {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        self.file.seek(position)
    }
}

/// Checks that `dir` is a folder. `hint` is that of a wrong path.
pub(super) fn check_folder(dir: &Path, hint: &str) -> Result<(), DataError> {
    let cause = match std::fs::metadata(dir) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => "is not a folder",
        Err(error) if error.kind() == io::ErrorKind::NotFound => "there is no such folder",
        Err(error) => return Err(read_error(dir, &error)),
    };
    Err(DataError::new(dir, cause, hint))
}

/// Returns whether there is a folder `path`.
pub(super) fn is_folder(path: &Path) -> Result<bool, DataError> {
    match std::fs::metadata(path) {
        Ok(metadata) => Ok(metadata.is_dir()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(read_error(path, &error)),
    }
}

/// Reads a file of exactly `records` records of `record_len` bytes.
///
/// The length is compared before anything is read, so a truncated or overlong file costs no memory.
pub(super) fn read_records(path: &Path, records: usize, record_len: usize, hint: &str) -> Result<Vec<u8>, DataError> {
    let (mut file, actual) = open(path)?;
    let expected = records as u64 * record_len as u64;
    check_length(path, actual, 0, expected, record_len, hint)?;
    let mut bytes = vec![0; records * record_len];
    file.read_exact(&mut bytes).map_err(|e| read_error(path, &e))?;
    Ok(bytes)
}

/// Compares a file's length with the expected length of `header` bytes and whole records of `record_len` bytes.
pub(super) fn check_length(
    path: &Path,
    actual: u64,
    header: u64,
    expected: u64,
    record_len: usize,
    hint: &str,
) -> Result<(), DataError> {
    if actual == expected {
        return Ok(());
    }
    let error = if actual < expected {
        let record = actual.saturating_sub(header) / record_len as u64;
        let cause = format!("the file is truncated: {actual} bytes of {expected}, it ends in this record");
        DataError::new(path, cause, hint).at(format!("record {record}"))
    } else {
        let cause = format!("the file is {actual} bytes long, {} more than the {expected} expected", actual - expected);
        DataError::new(path, cause, hint).at(format!("byte {expected}"))
    };
    Err(error)
}

/// Returns the hint for a damaged file of a data set that can be fetched.
pub(super) fn damaged(name: &str) -> String {
    format!(
        "the file is damaged: `trainer data verify {name}` checks it, `trainer data fetch {name}` downloads it again"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_disks_and_networks_are_transient() {
        // EIO, ESTALE and ETIMEDOUT of Linux; then ENOENT, EACCES and EISDIR.
        for (number, expected) in [(5, true), (116, true), (110, true), (2, false), (13, false), (21, false)] {
            let error = io::Error::from_raw_os_error(number);
            assert_eq!(read_error(Path::new("image.png"), &error).is_transient, expected, "{error}");
        }
    }
}
