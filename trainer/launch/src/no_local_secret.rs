//! Replaces `local_secret.rs` on macOS, which has no socket names that end with their process. The user gives the secret there.

use std::convert::Infallible;

use super::error::{LaunchError, Result};
use comm::Secret;

/// No process makes one.
#[derive(Debug)]
pub(super) struct SecretOffer(#[allow(dead_code, reason = "makes the type empty")] Infallible);

impl SecretOffer {
    /// Refuses.
    ///
    /// # Errors
    /// Always.
    pub(super) fn new(_: &str, _: &Secret) -> Result<Self> {
        Err(needs_linux())
    }
}

/// The callers drop an offer to end it. clippy wants a `Drop` for that.
impl Drop for SecretOffer {
    fn drop(&mut self) {}
}

/// Returns a name that nobody asks for.
pub(super) fn name(_: &[String]) -> String {
    String::new()
}

/// Refuses.
///
/// # Errors
/// Always.
pub(super) fn request(_: &str) -> Result<Option<Secret>> {
    Err(needs_linux())
}

fn needs_linux() -> LaunchError {
    LaunchError::usage("processes of one host agree on a secret by themselves only on Linux", super::secret::HINT)
}
