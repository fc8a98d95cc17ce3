//! `run.lock`: lets only one program at a time write a run folder, or the folder of `compare`, `sweep` or `bench scaling`.
//!
//! The lock is a `flock(2)` lock. The kernel releases the lock when the last process that has the file open ends, also after a
//! crash. So a lock is never left over, and the file is never removed. A launcher's workers inherit the open file: the run stays
//! locked as long as one worker lives. The content of the file names the lock's holder, for the messages of other programs.
//!
//! Linux clients send this lock to an NFS server, so the lock also works between machines, unless the mount keeps locks local
//! (`nolock`, `local_lock`). If the file system has no locks, the program prints a note and continues without a lock.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use folder::Folder;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::getpid;
use rustix::system::uname;
use serde::{Deserialize, Serialize};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::console;
use crate::files::FileError;

/// Name of the file in the run folder.
pub const FILE_NAME: &str = "run.lock";
/// Maximum wait for the lock, or for the name of a holder of the same job. A wait is necessary for two reasons: a program that
/// only checks the lock holds it for a moment, and a holder writes its name a moment after it has taken the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The program that writes a run: the content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockHolder {
    /// Process id, on its own host.
    pub pid: i32,
    /// Name of the machine.
    pub host: String,
    /// When the lock was taken, RFC 3339, UTC.
    pub since: String,
    /// The job on several machines that the program belongs to: address and port of node 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
}

impl LockHolder {
    fn of_this_process(job: Option<&str>) -> Self {
        let now = OffsetDateTime::now_utc();
        Self {
            pid: getpid().as_raw_nonzero().get(),
            host: uname().nodename().to_string_lossy().into_owned(),
            since: now.replace_nanosecond(0).unwrap_or(now).format(&Rfc3339).unwrap_or_default(),
            job: job.map(str::to_owned),
        }
    }
}

/// A lock that this process holds. All clones share the same lock.
#[derive(Debug, Clone)]
pub struct RunLock(#[allow(dead_code, reason = "open as long as the run is written")] Arc<File>);

/// The answer to a request for the lock.
#[derive(Debug)]
pub enum LockAttempt {
    /// This process holds the lock; `None` if the file system has no locks.
    Acquired(Option<RunLock>),
    /// Another program holds the lock. `None` if the file does not name the program.
    HeldBy(Option<LockHolder>),
}

impl RunLock {
    /// Takes the lock of the run folder `run`. `job` names a job on several machines.
    ///
    /// # Errors
    /// The folder cannot be written, or `run.lock` is a link.
    pub fn take(run: &Path, job: Option<&str>) -> Result<LockAttempt, FileError> {
        let path = run.join(FILE_NAME);
        let failed = |error: io::Error| not_writable(&path, &error);
        let mut file = Folder::open(run).and_then(|folder| folder.read_write(FILE_NAME)).map_err(failed)?;
        let until = Instant::now() + LOCK_TIMEOUT;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(RETRY_INTERVAL),
                Err(TryLockError::WouldBlock) => return Ok(LockAttempt::HeldBy(read(&mut file))),
                Err(TryLockError::Error(error)) => {
                    let path = path.display();
                    console::eprint(format_args!(
                        "note: {path}: this file system has no locks ({error}): do not start two programs on one run"
                    ));
                    return Ok(LockAttempt::Acquired(None));
                }
            }
        }
        let holder = serde_json::to_string(&LockHolder::of_this_process(job)).unwrap_or_default();
        let write = |file: &mut File| {
            file.set_len(0)?;
            file.write_all(format!("{holder}\n").as_bytes())?;
            file.sync_data()?;
            // Clear close-on-exec: the workers inherit the file and keep the lock until the last worker has ended
            Ok(fcntl_setfd(&*file, FdFlags::empty())?)
        };
        write(&mut file).map_err(failed)?;
        Ok(LockAttempt::Acquired(Some(Self(Arc::new(file)))))
    }

    /// Returns the holder of the lock of the run folder `run`, unless the lock is free or the holder belongs to `job`. The inner
    /// value is `None` if the file does not name the holder. A folder without a readable lock file counts as free.
    pub fn other_holder(run: &Path, job: Option<&str>) -> Option<Option<LockHolder>> {
        let mut file = Folder::open(run).and_then(|folder| folder.read(FILE_NAME)).ok()?;
        let until = Instant::now() + LOCK_TIMEOUT;
        loop {
            // A shared lock, so that several programs can check at the same time
            let Err(TryLockError::WouldBlock) = file.try_lock_shared() else { return None };
            let holder = read(&mut file);
            let same = job.is_some() && holder.as_ref().and_then(|holder| holder.job.as_deref()) == job;
            match same {
                true => return None,
                false if job.is_some() && Instant::now() < until => thread::sleep(RETRY_INTERVAL),
                false => return Some(holder),
            }
        }
    }
}

/// Returns the error for a lock file that cannot be written. The run exists already, so the hint does not name another
/// `--run-dir`.
fn not_writable(path: &Path, error: &io::Error) -> FileError {
    match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => FileError::new(
            path,
            format!("cannot write: {error}"),
            "a run continues in its own folder: make the folder writable for this user, or copy it to a place that is, and \
             resume the copy (--resume COPY)",
        ),
        _ => FileError::io(path, "write", error),
    }
}

fn read(file: &mut File) -> Option<LockHolder> {
    let mut text = String::new();
    file.seek(SeekFrom::Start(0)).ok()?;
    file.take(4096).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// Returns the error for a run that another program writes.
pub fn locked_error(run: &Path, holder: Option<&LockHolder>) -> FileError {
    let (cause, hint) = match holder {
        None => (
            "another program writes this folder".to_owned(),
            format!("`fuser {}` finds the program; wait until it ends", run.join(FILE_NAME).display()),
        ),
        Some(LockHolder { pid, host, since, .. }) => (
            format!("process {pid} on {host} (or a worker of it) writes this folder since {since}"),
            format!("wait until it ends; or let it save a checkpoint and end (`kill -INT {pid}` on {host})"),
        ),
    };
    FileError::input(run, cause, hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::FAILED;

    #[test]
    fn the_error_for_a_read_only_folder_suggests_a_copy() {
        for kind in [io::ErrorKind::PermissionDenied, io::ErrorKind::ReadOnlyFilesystem] {
            let error = not_writable(Path::new("runs/old/run.lock"), &kind.into());
            assert_eq!(error.code, FAILED);
            assert!(error.hint.contains("--resume COPY") && !error.hint.contains("--run-dir"), "{}", error.hint);
        }
        let full = not_writable(Path::new("runs/old/run.lock"), &io::ErrorKind::StorageFull.into());
        assert!(full.hint.starts_with("free some space"), "{}", full.hint);
    }
}
