//! The error of files that cannot be created, written or read, and writes that follow no symbolic links.
//!
//! All files of a run folder are opened here (the crate `folder` does the work), except those of checkpoints and logs, whose
//! writers use that crate directly.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
};

use data::read_regular;
use folder::{Folder, Refused};

/// Exit code of a failed run.
pub const FAILED: u8 = 1;
/// Exit code of bad usage, configuration or input.
pub const USAGE: u8 = 2;

/// A file that cannot be created, written or read. `Display` prints `path: cause`; the hint is for the line below.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {cause}", path.display())]
pub struct FileError {
    /// File or folder.
    pub path: PathBuf,
    /// The cause, with the location in the file if there is one.
    pub cause: String,
    /// What the user can do.
    pub hint: String,
    /// Exit code of the process.
    pub code: u8,
}

impl FileError {
    /// Returns an error with exit code 1.
    pub fn new(path: impl AsRef<Path>, cause: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { path: path.as_ref().to_owned(), cause: cause.into(), hint: hint.into(), code: FAILED }
    }

    /// Returns an error with exit code 2, about a file that the user named.
    pub fn input(path: impl AsRef<Path>, cause: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: USAGE, ..Self::new(path, cause, hint) }
    }

    /// Returns the error of a system call. `doing` completes "cannot …": `write`, `create`, `read`.
    pub fn io(path: impl AsRef<Path>, doing: &str, error: &io::Error) -> Self {
        let reads = doing.starts_with("read") || doing == "open the run folder";
        let hint = match error.kind() {
            _ if comm::limits::is_limit(error) => comm::limits::HINT,
            _ if Refused::of(error).is_some() => {
                "remove it, and find out who put it there; a run goes on with --resume"
            }
            ErrorKind::FileTooLarge => {
                "the limit for the size of a file is reached: raise it (`ulimit -f`); a run goes on with --resume"
            }
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free some space; a run goes on with --resume",
            ErrorKind::PermissionDenied if reads => "make it readable for this user",
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => "make the folder writable for this user",
            ErrorKind::NotFound => "check the path; was the folder moved or deleted while the run went on?",
            ErrorKind::AlreadyExists => "something of this name exists: move it, or choose another folder",
            ErrorKind::NotADirectory => "a part of the path is a file, not a folder: choose another folder",
            _ => "see whether the disk is mounted and healthy (dmesg)",
        };
        Self::new(path, format!("cannot {doing}: {error}"), hint)
    }

    /// Adds to the hint the flag that names another folder.
    pub fn with_folder_flag(self, flag: &str) -> Self {
        Self { hint: format!("{}; {flag} DIR names another folder", self.hint), ..self }
    }
}

/// Replaces the file atomically: writes a temporary file beside it, syncs it and renames it. A reader sees the old
/// content or the new. A symbolic link is replaced, not followed.
///
/// # Errors
/// Names `path` when the folder is missing or not writable, or the disk is full.
pub fn write_atomic(path: &Path, content: &[u8]) -> Result<(), FileError> {
    let write = || Folder::of_file(path)?.replace(name(path), content);
    write().map_err(|error| FileError::io(path, "write", &error))
}

/// A file that is written in parts. Until it is complete it is a temporary file in the same folder, which is renamed at the end and
/// removed after an error.
#[derive(Debug)]
pub struct PartialFile {
    path: PathBuf,
    folder: Folder,
    /// Name of the temporary file; `None` once it is renamed.
    temporary: Option<OsString>,
    file: File,
}

impl PartialFile {
    /// Creates the temporary file. Its name has the number of this process, since two programs may write the same file.
    ///
    /// # Errors
    /// Names `path` when the folder is missing or not writable.
    pub fn create(path: &Path) -> Result<Self, FileError> {
        let mut temporary = name(path).to_owned();
        temporary.push(format!(".{}.tmp", std::process::id()));
        let create = || {
            let folder = Folder::of_file(path)?;
            let file = folder.create(&temporary)?;
            Ok((folder, file))
        };
        let (folder, file) = create().map_err(|error| FileError::io(path, "write", &error))?;
        Ok(Self { path: path.to_owned(), folder, temporary: Some(temporary), file })
    }

    /// Appends the content.
    ///
    /// # Errors
    /// The disk is full.
    pub fn write(&mut self, content: &[u8]) -> Result<(), FileError> {
        self.file.write_all(content).map_err(|error| FileError::io(&self.path, "write", &error))
    }

    /// Syncs the temporary file and renames it. A file or link of this name is replaced.
    ///
    /// # Errors
    /// The disk is full, or the name belongs to a folder.
    pub fn finish(mut self) -> Result<(), FileError> {
        let Some(temporary) = &self.temporary else { return Ok(()) };
        let renamed = self.file.sync_all().and_then(|()| self.folder.rename(temporary, name(&self.path)));
        renamed.map_err(|error| FileError::io(&self.path, "write", &error))?;
        self.temporary = None;
        Ok(())
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // An error here is ignored: the caller reports the error that ended the work.
            let _ = self.folder.remove(temporary);
        }
    }
}

/// Creates a file that must not exist.
///
/// # Errors
/// Names `path` when it exists, or the folder is missing or not writable.
pub fn create_new(path: &Path) -> Result<File, FileError> {
    let create = || Folder::of_file(path)?.create_new(name(path));
    create().map_err(|error| FileError::io(path, "create", &error))
}

/// Creates a file, and replaces an earlier file of this name. Processes that have the earlier file open keep its content.
///
/// # Errors
/// Names `path` when the folder is missing or not writable.
pub fn create(path: &Path) -> Result<File, FileError> {
    let create = || Folder::of_file(path)?.create(name(path));
    create().map_err(|error| FileError::io(path, "create", &error))
}

/// Opens a file to append to it, and creates it if it is missing.
///
/// # Errors
/// Names `path` when it is a symbolic link, or cannot be written.
pub fn append(path: &Path) -> Result<File, FileError> {
    let open = || Folder::of_file(path)?.append(name(path));
    open().map_err(|error| FileError::io(path, "open for writing", &error))
}

fn name(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

/// Returns the file's bytes; empty if the file does not exist.
///
/// # Errors
/// Names `path` when the file exists and cannot be read.
pub fn read_or_empty(path: &Path) -> Result<Vec<u8>, FileError> {
    match read_regular(path, u64::MAX) {
        Ok(bytes) => Ok(bytes),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(FileError::io(path, "read", &error)),
    }
}

/// Waits until a file's content is on the disk (`fdatasync`). A pipe or `/dev/null` needs no sync and is not an error.
///
/// # Errors
/// Names `path` when the disk is full or gone.
pub fn sync(file: &File, path: &Path) -> Result<(), FileError> {
    match file.sync_data() {
        Err(error) if error.kind() != ErrorKind::InvalidInput => Err(FileError::io(path, "write", &error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_atomic_write_replaces_and_leaves_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("curves.svg");
        write_atomic(&path, b"one").unwrap();
        write_atomic(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_partial_file_gets_its_name_when_it_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("predictions.csv");
        let mut dropped = PartialFile::create(&path).unwrap();
        dropped.write(b"one").unwrap();
        assert!(!path.exists());
        drop(dropped);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let mut complete = PartialFile::create(&path).unwrap();
        complete.write(b"one").unwrap();
        complete.write(b"two").unwrap();
        complete.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"onetwo");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn errors_name_file_and_cause_and_hint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gone/curves.svg");
        let error = write_atomic(&path, b"x").unwrap_err();
        assert_eq!(error.path, path);
        assert_eq!(
            error.to_string(),
            format!("{}: cannot write: No such file or directory (os error 2)", path.display())
        );
        assert!(error.hint.starts_with("check the path"));
        let full = FileError::io("m.jsonl", "write", &io::Error::from(ErrorKind::StorageFull));
        assert!(full.hint.starts_with("free some space"), "{}", full.hint);
        let denied = io::Error::from(ErrorKind::PermissionDenied);
        assert_eq!(FileError::io("m.jsonl", "read", &denied).hint, "make it readable for this user");
        let hint = FileError::io("runs", "create the folder", &denied).with_folder_flag("--run-dir").hint;
        assert_eq!(hint, "make the folder writable for this user; --run-dir DIR names another folder");
    }
}
