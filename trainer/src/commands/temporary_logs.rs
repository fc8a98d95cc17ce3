//! Logs of workers in a temporary folder, for commands whose user has named no folder.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::failure::Failure;
use launch::LaunchError;

/// Creates a temporary folder for the logs of a command's workers. Only this user may enter the folder. An existing folder is not
/// used, because it may belong to another user.
pub(super) fn create(command: &str) -> Result<PathBuf, Failure> {
    let id = std::process::id();
    for attempt in 0.. {
        let folder = std::env::temp_dir().join(format!("trainer-{command}-{id}-{attempt}"));
        match DirBuilder::new().mode(0o700).create(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => {
                let cause = format!("{}: {error}", folder.display());
                return Err(Failure::run(cause, "set TMPDIR to a folder you can write"));
            }
        }
    }
    unreachable!("a name is found or creating fails")
}

/// Removes the folder at the end of the job, unless a worker has failed: then the launcher's report names a log in the folder.
/// `result` is the job's exit code, or why the job could not run.
pub(super) fn remove_unless_failed(folder: &Path, result: &Result<u8, LaunchError>) {
    let failed = match result {
        Ok(0) => false,
        // Stopped by a signal, also by a second one
        Ok(code) => *code < 128,
        // The job could not start, or a later attempt could not. Then earlier attempts have logs.
        Err(_) => has_content(folder),
    };
    if !failed {
        let _ = fs::remove_dir_all(folder);
    }
}

/// Returns whether a file in the folder, or below, has content.
fn has_content(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => has_content(&entry.path()),
        Ok(metadata) => metadata.len() > 0,
        Err(_) => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_kept_only_after_a_failure() {
        let error = || LaunchError::failed("node 1 did not join", "");
        for (result, log, kept) in [
            (Ok(0), "text", false),
            (Ok(130), "text", false),
            (Ok(143), "text", false),
            (Ok(3), "text", true),
            (Ok(3), "", true),
            (Err(error()), "text", true),
            (Err(error()), "", false),
        ] {
            let root = tempfile::tempdir().unwrap();
            let folder = root.path().join("logs");
            fs::create_dir_all(folder.join("none/attempt_0/0")).unwrap();
            fs::write(folder.join("none/attempt_0/0/stdout.log"), log).unwrap();
            remove_unless_failed(&folder, &result);
            assert_eq!(folder.exists(), kept, "{result:?} {log:?}");
        }
    }
}
