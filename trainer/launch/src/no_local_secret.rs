//! Replaces `local_secret.rs` on macOS, which has no abstract Unix sockets. On macOS the user must set the secret.

use std::convert::Infallible;

use super::error::{LaunchError, Result};
use comm::Secret;

/// A type without values: on macOS no process offers a secret.
#[derive(Debug)]
pub(super) struct SecretOffer(#[allow(dead_code, reason = "makes the type empty")] Infallible);

impl SecretOffer {
    /// Returns the error that Linux is needed.
    ///
    /// # Errors
    /// Always.
    pub(super) fn new(_: &str, _: &Secret) -> Result<Self> {
        Err(needs_linux())
    }
}

/// The callers drop an offer explicitly, and clippy accepts this only for types with `Drop`.
impl Drop for SecretOffer {
    fn drop(&mut self) {}
}

/// Returns an empty name, which is not used.
pub(super) fn name(_: &[String]) -> String {
    String::new()
}

/// Returns the error that Linux is needed.
///
/// # Errors
/// Always.
pub(super) fn request(_: &str) -> Result<Option<Secret>> {
    Err(needs_linux())
}

fn needs_linux() -> LaunchError {
    LaunchError::usage("processes of one host agree on a secret by themselves only on Linux", super::secret::HINT)
}
