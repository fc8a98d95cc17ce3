//! The secret with which nodes join a job on several nodes.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::environment::{self, Variables};
use super::error::{LaunchError, Result};
use comm::Secret;

/// The variable that holds the secret of a job. Between nodes the value is the user's text; between a launcher and its workers
/// it is 64 hexadecimal digits.
pub const VARIABLE: &str = "TRAINER_SECRET";
/// Minimum length in bytes. Shorter secrets can be guessed.
const SHORTEST: usize = 8;
/// Maximum size of a file in bytes. A larger file was named by mistake.
const LARGEST_FILE: u64 = 4096;
/// How to give a secret.
pub(super) const HINT: &str = "give all nodes the same secret: --secret-file FILE, or TRAINER_SECRET; \
                               `(umask 077; openssl rand -hex 32 > FILE)` makes one";

/// Reads `--secret-file` and replaces `TRAINER_SECRET` in `variables` with its content: the flag takes precedence. A worker of
/// this program's launcher keeps the variable, which holds the secret of its attempt.
///
/// # Errors
/// `path` is not a regular file, cannot be read, is readable by other users, is too large, is not text, or the secret is too
/// short.
pub fn read_file(path: &Path, variables: &mut Variables) -> Result<()> {
    if variables.contains_key(environment::WORKER) {
        return Ok(());
    }
    let refused = |cause: String, hint: String| LaunchError::usage(format!("{}: {cause}", path.display()), hint);
    let unreadable = |error: std::io::Error| refused(format!("cannot read the job's secret: {error}"), HINT.to_owned());
    let (file, len) = folder::open_regular(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if metadata.mode() & 0o077 != 0 {
        let cause = format!("other users may read the job's secret (mode {:03o})", metadata.mode() & 0o777);
        return Err(refused(cause, format!("chmod 600 {}", path.display())));
    }
    if len > LARGEST_FILE {
        let cause = format!("{len} bytes are too many for the job's secret, at most {LARGEST_FILE}");
        return Err(refused(cause, HINT.to_owned()));
    }
    let mut bytes = Vec::new();
    file.take(LARGEST_FILE).read_to_end(&mut bytes).map_err(unreadable)?;
    let text = String::from_utf8(bytes)
        .map_err(|_| refused("the job's secret is not text (UTF-8)".to_owned(), HINT.to_owned()))?;
    check(&path.display().to_string(), text.trim())?;
    variables.insert(VARIABLE.to_owned(), text.trim().to_owned());
    Ok(())
}

/// Returns the user's secret: the value of `TRAINER_SECRET`.
///
/// # Errors
/// The secret is too short.
pub fn of_job(variables: &Variables) -> Result<Option<Secret>> {
    let Some(text) = variables.get(VARIABLE) else { return Ok(None) };
    let text = check(VARIABLE, text.trim())?;
    Ok(Some(Secret::from_hex(text).unwrap_or_else(|| Secret::from_words(&["trainer", text]))))
}

/// Derives the secret for one purpose and attempt. The derived secret reveals nothing about other derived secrets.
pub(super) fn derive(secret: &Secret, purpose: &str, attempt: usize) -> Secret {
    Secret::from_words(&[&secret.to_hex(), purpose, &attempt.to_string()])
}

fn check<'a>(place: &str, text: &'a str) -> Result<&'a str> {
    if text.is_empty() {
        return Err(LaunchError::usage(format!("{place}: the secret is empty"), HINT));
    }
    if text.len() < SHORTEST {
        return Err(LaunchError::usage(
            format!("{place}: a secret of {} bytes is too short", text.len()),
            format!("at least {SHORTEST}; `openssl rand -hex 32` makes a good one"),
        ));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use super::*;

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn file(&self, content: impl AsRef<[u8]>, mode: u32) -> PathBuf {
            let path = self.0.path().join("secret");
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            path
        }
    }

    fn variables(secret: Option<&str>) -> Variables {
        secret.map(|secret| (VARIABLE.to_owned(), secret.to_owned())).into_iter().collect()
    }

    /// The secret of a job with this file and variable.
    fn read(path: &Path, variable: Option<&str>) -> Result<Secret> {
        let mut variables = variables(variable);
        read_file(path, &mut variables)?;
        Ok(of_job(&variables)?.expect("a secret"))
    }

    #[test]
    fn a_secret_comes_from_file_or_variable() {
        let folder = Folder(tempfile::tempdir().unwrap());
        let of_file = read(&folder.file("correct horse\n", 0o600), None).unwrap();
        assert_eq!(of_job(&variables(Some("correct horse"))).unwrap(), Some(of_file.clone()), "line ends do not count");
        assert_eq!(of_job(&Variables::new()).unwrap(), None);
        let other = read(&folder.file("battery staple", 0o400), Some("correct horse")).unwrap();
        assert_ne!(other, of_file, "the file takes precedence");
        let hex = "0123456789abcdef".repeat(4);
        assert_eq!(Some(read(&folder.file(format!("{hex}\n"), 0o600), None).unwrap()), Secret::from_hex(&hex));
        assert_ne!(derive(&of_file, "workers", 0), derive(&of_file, "workers", 1));
        assert_ne!(derive(&of_file, "workers", 0), derive(&of_file, "nodes", 0));
    }

    #[test]
    fn a_worker_keeps_the_secret_of_its_attempt() {
        let folder = Folder(tempfile::tempdir().unwrap());
        let mut variables = variables(Some("of the attempt"));
        variables.insert(environment::WORKER.to_owned(), "1".to_owned());
        read_file(&folder.file("of the user", 0o600), &mut variables).unwrap();
        assert_eq!(variables[VARIABLE], "of the attempt");
    }

    #[test]
    fn a_bad_file_is_refused_with_path_cause_and_hint() {
        let folder = Folder(tempfile::tempdir().unwrap());
        let fifo = folder.0.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let refused = |path: &Path, cause: &str, hint: &str| {
            let error = read(path, None).unwrap_err();
            assert_eq!((error.code, error.message), (2, format!("{}: {cause}", path.display())));
            assert!(error.hint.contains(hint), "{}", error.hint);
        };
        let missing = "cannot read the job's secret: No such file or directory (os error 2)";
        refused(&folder.0.path().join("none"), missing, "--secret-file FILE");
        refused(folder.0.path(), "cannot read the job's secret: it is a folder, not a file", "--secret-file FILE");
        refused(&fifo, "cannot read the job's secret: it is a pipe, not a file", "--secret-file FILE");
        for (content, mode, cause, hint) in [
            (&b"correct horse"[..], 0o640, "other users may read the job's secret (mode 640)", "chmod 600 /"),
            (b"correct horse", 0o604, "other users may read the job's secret (mode 604)", "chmod 600 /"),
            (b"", 0o600, "the secret is empty", "openssl rand"),
            (b"\n", 0o600, "the secret is empty", "openssl rand"),
            (b"12345\n", 0o600, "a secret of 5 bytes is too short", "at least 8"),
            (b"correct \xff horse", 0o600, "the job's secret is not text (UTF-8)", "openssl rand"),
            (&[b'x'; 4097], 0o600, "4097 bytes are too many for the job's secret, at most 4096", "openssl rand"),
        ] {
            refused(&folder.file(content, mode), cause, hint);
        }
        let error = of_job(&variables(Some("12345"))).unwrap_err();
        assert_eq!(error.message, "TRAINER_SECRET: a secret of 5 bytes is too short");
    }
}
