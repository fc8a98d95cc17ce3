//! Errors of the system that come from a limit on processes, threads or open files.

use std::io;

use rustix::io::Errno;

/// What the user can do about such an error.
pub const HINT: &str = "see `ulimit -u -n` and `free -h`";

/// Returns whether the system refused a process, a thread or an open file because of a limit.
pub fn is_limit(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::AGAIN | Errno::MFILE | Errno::NFILE))
}
