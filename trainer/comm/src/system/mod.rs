//! The functions that differ between Linux and macOS, apart from `shm/`, which only Linux has.
//!
//! `portable.rs` needs only POSIX. The tests on Linux compile and run it too.

use std::time::Duration;

#[cfg(target_os = "linux")]
mod linux;
#[cfg(not(target_os = "linux"))]
mod macos;
#[cfg(any(test, not(target_os = "linux")))]
#[cfg_attr(target_os = "linux", allow(dead_code))]
mod portable;

#[cfg(target_os = "linux")]
pub use linux::peer_user;
#[cfg(target_os = "linux")]
pub(crate) use linux::{Wakeup, boot_id, random, set_peer_timeout};
#[cfg(not(target_os = "linux"))]
pub(crate) use macos::boot_id;
#[cfg(not(target_os = "linux"))]
pub(crate) use portable::{Wakeup, random, set_peer_timeout};

/// The kernel probes a connection that has been idle for this long, and then again every [`KEEPALIVE_INTERVAL`].
pub(crate) const KEEPALIVE_IDLE: Duration = Duration::from_secs(2);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
