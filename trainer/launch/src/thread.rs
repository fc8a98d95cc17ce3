//! Starts a thread of the launcher, with an error that names its purpose.

use std::thread::{Builder, JoinHandle};

use super::error::{LaunchError, Result};

/// Stack size. It is small, since the threads only wait and copy text.
const STACK_BYTES: usize = 128 << 10;

/// Starts a thread. `purpose` appears in the error message.
///
/// # Errors
/// The limit on processes is reached.
pub(super) fn start_thread(name: &str, purpose: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    Builder::new().name(name.to_owned()).stack_size(STACK_BYTES).spawn(body).map_err(|error| {
        LaunchError::failed(format!("cannot start a thread for {purpose}: {error}"), "see `ulimit -u`")
    })
}
