//! The functions that differ between Linux and macOS. `no_local_secret.rs` replaces `local_secret.rs` on macOS.
//!
//! | | Linux | macOS |
//! |---|---|---|
//! | a worker ends | its pidfd becomes readable | the launcher checks in each tick |
//! | a launcher ends | the kernel kills its workers | a worker of this program polls its parent process id |
//! | cores of a worker | an affinity mask | all cores |
//! | a status page | `memfd_create` | a file without a name in the folder for temporary files |
//!
//! The tests on Linux compile and run `macos.rs` too.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(any(test, not(target_os = "linux")))]
#[cfg_attr(target_os = "linux", allow(dead_code, reason = "the tests use a part of it"))]
mod macos;

#[cfg(target_os = "linux")]
pub use linux::set_parent_death_signal;
#[cfg(target_os = "linux")]
pub(crate) use linux::{
    CpuSet, ParentWatch, ProcessHandle, SIGNAL_NAMES, nameless_file, open_terminal, sched_getaffinity,
    sched_setaffinity,
};
#[cfg(not(target_os = "linux"))]
pub use macos::set_parent_death_signal;
#[cfg(not(target_os = "linux"))]
pub(crate) use macos::{
    CpuSet, ParentWatch, ProcessHandle, SIGNAL_NAMES, nameless_file, open_terminal, sched_getaffinity,
    sched_setaffinity,
};
