//! Signals of the launcher: as a file descriptor to poll, and by name.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

/// The signals that ask the launcher to stop its job.
pub const STOPPING: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];

/// Queue of the signals that the launcher has received. Dropping it does not restore the kernel's default actions: a second
/// job in the same process installs a new queue.
pub(super) struct Signals(SignalDelivery<UnixStream, SignalOnly>);

impl Signals {
    /// Catches [`STOPPING`], SIGTSTP and SIGWINCH, except signals that the parent process has set to be ignored: `nohup`
    /// ignores SIGHUP, and a shell ignores SIGINT for its background jobs.
    ///
    /// # Errors
    /// The kernel refuses a handler or a socket.
    pub(super) fn install() -> io::Result<Self> {
        let ignored = ignored(&fs::read_to_string("/proc/self/status").unwrap_or_default());
        let wanted = STOPPING.into_iter().chain([SIGTSTP, SIGWINCH]).filter(|signal| !ignored.contains(signal));
        let (read, write) = UnixStream::pair()?;
        SignalDelivery::with_pipe(read, write, SignalOnly, wanted).map(Self)
    }

    /// Readable when signals have arrived.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.get_read().as_fd()
    }

    /// Takes the signals that have arrived since the last call.
    pub(super) fn take(&mut self) -> Vec<i32> {
        self.0.pending().collect()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.0.handle().close();
    }
}

/// Returns the signals that a process ignores, from its `/proc/self/status`.
fn ignored(status: &str) -> Vec<i32> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()).unwrap_or(0);
    (1..=64).filter(|signal| mask >> (signal - 1) & 1 == 1).collect()
}

/// Returns the name of a signal: `SIGKILL`; `signal 40` where there is none.
pub fn name(signal: i32) -> String {
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM",
        "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF",
        "WINCH", "IO", "PWR", "SYS",
    ];
    match usize::try_from(signal).ok().and_then(|signal| NAMES.get(signal.checked_sub(1)?)) {
        Some(name) => format!("SIG{name}"),
        None => format!("signal {signal}"),
    }
}

/// Returns the usual reason for a death by this signal.
pub(super) fn hint(signal: i32) -> Option<&'static str> {
    Some(match name(signal).as_str() {
        "SIGKILL" => {
            "somebody sent SIGKILL: often the kernel, out of memory (`dmesg | tail`); fewer workers or smaller batches \
             need less"
        }
        "SIGSEGV" | "SIGILL" | "SIGFPE" | "SIGTRAP" | "SIGSYS" => {
            "the program did what it must not do: please report this, with the worker's stderr.log"
        }
        "SIGBUS" => "often a full /dev/shm (`df /dev/shm`): containers need --shm-size, or say --backend tcp",
        "SIGABRT" => "the program ended itself: its last lines say why",
        "SIGXCPU" | "SIGXFSZ" => "a limit of the shell or the batch system was reached: see `ulimit -a`",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_kernels() {
        for (number, expected) in
            [(1, "SIGHUP"), (9, "SIGKILL"), (11, "SIGSEGV"), (15, "SIGTERM"), (19, "SIGSTOP"), (31, "SIGSYS")]
        {
            assert_eq!(name(number), expected);
        }
        assert_eq!((name(0), name(40)), ("signal 0".to_owned(), "signal 40".to_owned()));
    }

    #[test]
    fn ignored_signals_are_read_from_the_kernels_mask() {
        // As under nohup: SIGHUP, and SIGPIPE, which Rust's runtime ignores
        assert_eq!(ignored("Name:\tx\nSigBlk:\t0000000000000003\nSigIgn:\t0000000000001001\n"), [1, 13]);
        assert!(ignored("").is_empty());
    }
}
