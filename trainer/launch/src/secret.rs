//! The secret that lets nodes into a job of several.

use std::path::Path;

use super::environment::Variables;
use super::error::{LaunchError, Result};
use comm::Secret;

/// The variable that holds the secret of a job: the user's words between nodes, 64 hexadecimal digits between a launcher
/// and its workers.
pub const VARIABLE: &str = "TRAINER_SECRET";
/// Fewer characters than this are guessed too soon.
const SHORTEST: usize = 8;

/// What the user gives as the job's secret: the content of `file`, or else `TRAINER_SECRET`.
///
/// # Errors
/// The file cannot be read, or the secret is too short.
pub fn given(variables: &Variables, file: Option<&Path>) -> Result<Option<Secret>> {
    let (place, text) = match (file, variables.get(VARIABLE)) {
        (Some(path), _) => {
            let text = std::fs::read_to_string(path).map_err(|error| {
                LaunchError::usage(
                    format!("{}: cannot read the job's secret: {error}", path.display()),
                    format!("the file holds a line of your choice, the same on all nodes; or set {VARIABLE}"),
                )
            })?;
            (path.display().to_string(), text)
        }
        (None, Some(text)) => (VARIABLE.to_owned(), text.clone()),
        (None, None) => return Ok(None),
    };
    let text = text.trim();
    if text.len() < SHORTEST {
        return Err(LaunchError::usage(
            format!("{place}: a secret of {} characters is too short", text.len()),
            format!("at least {SHORTEST}; `openssl rand -hex 32` makes a good one"),
        ));
    }
    Ok(Some(Secret::from_hex(text).unwrap_or_else(|| Secret::from_words(&["trainer", text]))))
}

/// The secret of one purpose and attempt, which says nothing about that of another.
pub(super) fn derived(secret: &Secret, purpose: &str, attempt: usize) -> Secret {
    Secret::from_words(&[&secret.to_hex(), purpose, &attempt.to_string()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_come_from_file_or_variable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "correct horse\n").unwrap();
        let variables = Variables::from([(VARIABLE.to_owned(), "correct horse".to_owned())]);
        let from_file = given(&Variables::new(), Some(&path)).unwrap().unwrap();
        assert_eq!(given(&variables, None).unwrap(), Some(from_file.clone()), "line ends do not count");
        assert_eq!(given(&Variables::new(), None).unwrap(), None);
        std::fs::write(&path, "battery staple").unwrap();
        assert_ne!(given(&variables, Some(&path)).unwrap(), Some(from_file.clone()), "the file goes first");
        std::fs::write(&path, "12345\n").unwrap();
        let error = given(&variables, Some(&path)).unwrap_err();
        assert!(error.message.contains("a secret of 5 characters is too short"), "{error}");
        let error = given(&variables, Some(&dir.path().join("none"))).unwrap_err();
        assert!(error.message.contains("cannot read the job's secret"), "{error}");
        assert_ne!(derived(&from_file, "workers", 0), derived(&from_file, "workers", 1));
        assert_ne!(derived(&from_file, "workers", 0), derived(&from_file, "nodes", 0));
    }
}
