//! An open folder, in which files are written without following symbolic links.
//!
//! A run folder may be shared: on a cluster's file system, or below `/tmp`. A user who can write there could put a symbolic link
//! in the place of a file that a run is about to write, and the run would overwrite the file that the link names. So every file
//! is opened relative to its open folder with `O_NOFOLLOW`, and a new file with `O_EXCL`. The path of the folder itself may
//! contain links: the user has named that path.
//!
//! Files that are only read are opened by [`open_regular`], also through links: the user has named them.

mod regular;

use std::error::Error;
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, mkdirat, openat, renameat, statat, unlinkat};
use rustix::io::Errno;

pub use regular::{open_regular, read_regular};

/// Permissions of new files, of which the umask removes some.
const FILE: Mode = Mode::from_raw_mode(0o666);
/// Permissions of new folders, of which the umask removes some.
const FOLDER: Mode = Mode::from_raw_mode(0o777);

/// The cause of an error: the name belongs to something that is not written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// A symbolic link.
    Link,
    /// A FIFO, a socket or a device.
    Special,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Link => "it is a symbolic link, and nothing is written through links",
            Self::Special => "it is not a regular file",
        })
    }
}

impl Error for Refused {}

impl Refused {
    /// Returns the refusal that `error` carries, if it carries one.
    pub fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl From<Refused> for io::Error {
    fn from(refused: Refused) -> Self {
        Self::new(io::ErrorKind::InvalidInput, refused)
    }
}

/// An open folder.
#[derive(Debug)]
pub struct Folder {
    fd: OwnedFd,
}

impl Folder {
    /// Opens the folder at `path`. Links in `path` are followed.
    ///
    /// # Errors
    /// There is no such folder, or this user may not enter it.
    pub fn open(path: &Path) -> io::Result<Self> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { fd: openat(CWD, path, flags, Mode::empty())? })
    }

    /// Opens the folder of the file at `path`.
    ///
    /// # Errors
    /// As [`Folder::open`].
    pub fn of_file(path: &Path) -> io::Result<Self> {
        Self::open(path.parent().unwrap_or(Path::new("/")))
    }

    /// Opens the folder `name` in this folder.
    ///
    /// # Errors
    /// There is no such folder, or it is a link.
    pub fn folder(&self, name: impl AsRef<OsStr>) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.open_at(name.as_ref(), flags).map(|fd| Self { fd })
    }

    /// Creates the folder `name` and opens it.
    ///
    /// # Errors
    /// The name is taken, or this folder cannot be written.
    pub fn create_folder(&self, name: impl AsRef<OsStr>) -> io::Result<Self> {
        mkdirat(&self.fd, name.as_ref(), FOLDER)?;
        self.folder(name)
    }

    /// Opens the folder `name`, and creates it if it is missing.
    ///
    /// # Errors
    /// The name belongs to a link or a file, or this folder cannot be written.
    pub fn ensure_folder(&self, name: impl AsRef<OsStr>) -> io::Result<Self> {
        match mkdirat(&self.fd, name.as_ref(), FOLDER) {
            Ok(()) | Err(Errno::EXIST) => self.folder(name),
            Err(error) => Err(error.into()),
        }
    }

    /// Creates a file for writing.
    ///
    /// # Errors
    /// The name is taken, even if by a link that leads nowhere; or this folder cannot be written.
    pub fn create_new(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        self.open_at(name.as_ref(), OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC).map(File::from)
    }

    /// Creates a file for writing in the place of a file or link of this name.
    ///
    /// # Errors
    /// The name belongs to a folder, or this folder cannot be written.
    pub fn create(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        self.remove(name.as_ref())?;
        self.create_new(name)
    }

    /// Opens a regular file for appending, and creates it if it is missing.
    ///
    /// # Errors
    /// The name belongs to a link or to anything but a regular file, or the file cannot be written.
    pub fn append(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        self.open_regular(name.as_ref(), OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE)
    }

    /// Opens a regular file for reading and writing, and creates it if it is missing.
    ///
    /// # Errors
    /// As [`Folder::append`].
    pub fn read_write(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        self.open_regular(name.as_ref(), OFlags::RDWR | OFlags::CREATE)
    }

    /// Opens a regular file for reading.
    ///
    /// # Errors
    /// The file is missing, or its name belongs to a link or to anything but a regular file.
    pub fn read(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        self.open_regular(name.as_ref(), OFlags::RDONLY)
    }

    /// Replaces the file `name` atomically: writes `NAME.tmp`, syncs it and renames it. A reader sees the old content or the
    /// new. A link of this name is replaced, not followed.
    ///
    /// # Errors
    /// This folder cannot be written, or the disk is full.
    pub fn replace(&self, name: impl AsRef<OsStr>, content: &[u8]) -> io::Result<()> {
        let mut temporary = name.as_ref().to_owned();
        temporary.push(".tmp");
        let write = || {
            let mut file = self.create(&temporary)?;
            file.write_all(content)?;
            file.sync_all()?;
            self.rename(&temporary, name.as_ref())
        };
        write().inspect_err(|_| {
            // The first error is the one to report. A failure to remove the temporary file does not change that error.
            let _ = self.remove(&temporary);
        })
    }

    /// Renames a file, link or folder in this folder.
    ///
    /// # Errors
    /// There is none of this name, or `to` is a folder.
    pub fn rename(&self, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(renameat(&self.fd, from.as_ref(), &self.fd, to.as_ref())?)
    }

    /// Removes a file or link, if it exists.
    ///
    /// # Errors
    /// The name belongs to a folder, or this folder cannot be written.
    pub fn remove(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        match unlinkat(&self.fd, name.as_ref(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until the folder's entries are on the disk (`fsync`).
    ///
    /// # Errors
    /// The disk is gone.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.fd)?)
    }

    fn open_regular(&self, name: &OsStr, flags: OFlags) -> io::Result<File> {
        // Without NONBLOCK, opening a FIFO would wait for another process. A regular file ignores the flag
        let opened = self.open_at(name, flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC);
        match opened.map(File::from) {
            Ok(file) if file.metadata()?.is_file() => Ok(file),
            Ok(_) => Err(Refused::Special.into()),
            // A FIFO that nobody reads
            Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => Err(Refused::Special.into()),
            Err(error) => Err(error),
        }
    }

    fn open_at(&self, name: &OsStr, flags: OFlags) -> io::Result<OwnedFd> {
        openat(&self.fd, name, flags, FILE).map_err(|error| match error {
            // A link is LOOP for a file, NOTDIR for a folder and EXIST for a new file
            Errno::LOOP | Errno::NOTDIR | Errno::EXIST if self.is_link(name) => Refused::Link.into(),
            error => error.into(),
        })
    }

    fn is_link(&self, name: &OsStr) -> bool {
        let found = statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Symlink)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// Makes a folder with a victim's file outside of it.
    fn shared() -> (tempfile::TempDir, Folder, std::path::PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let victim = root.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        fs::create_dir(root.path().join("run")).unwrap();
        let folder = Folder::open(&root.path().join("run")).unwrap();
        (root, folder, victim)
    }

    #[test]
    fn links_are_replaced_or_refused_and_never_followed() {
        let (root, folder, victim) = shared();
        let run = root.path().join("run");
        for name in ["a.tmp", "a", "b", "log"] {
            symlink(&victim, run.join(name)).unwrap();
        }
        symlink(root.path(), run.join("logs")).unwrap();
        folder.replace("a", b"new").unwrap();
        folder.create("b").unwrap().write_all(b"new").unwrap();
        for refused in [
            folder.create_new("log").err(),
            folder.append("log").err(),
            folder.read_write("log").err(),
            folder.read("log").err(),
            folder.folder("logs").err(),
            folder.ensure_folder("logs").err(),
        ] {
            assert_eq!(refused.as_ref().and_then(Refused::of), Some(Refused::Link), "{refused:?}");
        }
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        assert_eq!(fs::read_to_string(run.join("a")).unwrap(), "new");
        assert!(fs::symlink_metadata(run.join("b")).unwrap().is_file());
        assert!(!run.join("a.tmp").exists());
    }

    /// A link that leads nowhere is not a free name: following it would create the file that it names.
    #[test]
    fn a_link_to_nothing_creates_nothing() {
        let (root, folder, _) = shared();
        let target = root.path().join("new");
        symlink(&target, root.path().join("run/log")).unwrap();
        folder.append("log").unwrap_err();
        folder.create_new("log").unwrap_err();
        folder.create("log").unwrap();
        assert!(!target.exists());
    }

    #[test]
    fn a_fifo_is_refused_instead_of_waited_for() {
        let (root, folder, _) = shared();
        let fifo = root.path().join("run/fifo");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        for refused in [folder.append("fifo"), folder.read_write("fifo"), folder.read("fifo")] {
            assert_eq!(refused.as_ref().err().and_then(Refused::of), Some(Refused::Special), "{refused:?}");
        }
    }

    #[test]
    fn a_folder_is_moved_and_its_files_stay_reachable() {
        let (root, folder, _) = shared();
        let logs = folder.create_folder("logs").unwrap();
        assert_eq!(folder.create_folder("logs").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        fs::rename(root.path().join("run"), root.path().join("moved")).unwrap();
        logs.append("out.log").unwrap().write_all(b"1").unwrap();
        folder.ensure_folder("logs").unwrap().append("out.log").unwrap().write_all(b"2").unwrap();
        assert_eq!(fs::read_to_string(root.path().join("moved/logs/out.log")).unwrap(), "12");
    }
}
