//! Signals that ask a process to stop: their names, and for the launcher a file descriptor to poll.
//!
//! All processes follow the same rules. The first signal of [`STOPPING`] asks the process to stop, and a second one ends the
//! process at once. A SIGHUP never counts as the second signal ([`ends_at_once`]). Signals that the parent process has set to
//! be ignored stay ignored ([`ignored`]).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

use super::screen::Screen;
use super::system::SIGNAL_NAMES;
use comm::fault_signals::is_ignored;

/// The signals that ask a process to stop.
pub const STOPPING: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];

/// Returns whether `signal` ends a process at once if an earlier signal has already asked the process to stop. SIGHUP does not:
/// when a terminal closes, the interactive shell sends SIGHUP to its jobs, and then the kernel sends it again to the foreground
/// job. A session manager sends SIGHUP right after SIGTERM.
pub fn ends_at_once(signal: i32) -> bool {
    signal != SIGHUP
}

/// Returns the signals that this process ignores because its parent process has set them to be ignored: `nohup` ignores
/// SIGHUP, and a shell ignores SIGINT for the background jobs of a script. A process must not catch these signals.
pub fn ignored() -> Vec<i32> {
    (1..=SIGNAL_NAMES.len() as i32).filter(|signal| is_ignored(*signal)).collect()
}

/// Makes each signal of [`STOPPING`] that this process catches end the process at once, with exit code 128 + n.
pub(super) fn end_at_once() {
    let ignored = ignored();
    for signal in STOPPING.into_iter().filter(|signal| !ignored.contains(signal)) {
        // Without the handler, only SIGKILL ends the process if it blocks.
        let _ = signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::new(AtomicBool::new(true)));
    }
}

/// Queue of the signals that the launcher has received. Dropping the queue does not restore the kernel's default actions, since a
/// second job in the same process installs a new queue.
pub(super) struct Signals(SignalDelivery<UnixStream, SignalOnly>);

impl Signals {
    /// Catches [`STOPPING`], SIGTSTP and SIGWINCH, except those of [`ignored`].
    ///
    /// # Errors
    /// The kernel refuses a handler or a socket.
    pub(super) fn install() -> io::Result<Self> {
        let ignored = ignored();
        let wanted = STOPPING.into_iter().chain([SIGTSTP, SIGWINCH]).filter(|signal| !ignored.contains(signal));
        let (read, write) = UnixStream::pair()?;
        SignalDelivery::with_pipe(read, write, SignalOnly, wanted).map(Self)
    }

    /// Returns the file descriptor that is readable when signals have arrived.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.get_read().as_fd()
    }

    /// Takes the signals that have arrived since the last call. A SIGHUP is last, so another signal that arrives with it counts
    /// as the first signal.
    pub(super) fn take(&mut self) -> Vec<i32> {
        let mut signals: Vec<i32> = self.0.pending().collect();
        signals.sort_by_key(|signal| *signal == SIGHUP);
        signals
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.0.handle().close();
    }
}

/// A signal that arrives while this process cannot act on it yet. The first signal is kept. A second signal ends the wait, unless
/// it is a SIGHUP ([`ends_at_once`]).
#[derive(Default)]
pub(super) struct DeferredSignal(Option<(i32, Instant)>);

impl DeferredSignal {
    /// Keeps `signal` if it is the first, and prints its `effect`. Otherwise returns whether `signal` ends the wait.
    pub(super) fn ends_wait(&mut self, signal: i32, effect: &str, screen: &Screen) -> bool {
        if self.0.is_some() {
            return ends_at_once(signal);
        }
        self.0 = Some((signal, Instant::now()));
        screen.say(&format!("{}: {effect}; once more ends this wait", name(signal)));
        false
    }

    /// Returns the first signal.
    pub(super) fn first(&self) -> Option<i32> {
        self.0.map(|(signal, _)| signal)
    }

    /// Returns the time since the first signal.
    pub(super) fn elapsed(&self) -> Option<Duration> {
        self.0.map(|(_, since)| since.elapsed())
    }
}

/// Returns the name of a signal: `SIGKILL`, or `signal 40` if the signal has no name.
pub fn name(signal: i32) -> String {
    match usize::try_from(signal).ok().and_then(|signal| SIGNAL_NAMES.get(signal.checked_sub(1)?)) {
        Some(name) => format!("SIG{name}"),
        None => format!("signal {signal}"),
    }
}

/// Returns the usual reason why a process is killed by this signal.
pub(super) fn hint(signal: i32, any_program: bool) -> Option<&'static str> {
    Some(match name(signal).as_str() {
        "SIGKILL" => {
            "a process or the kernel sent SIGKILL: often the kernel, out of memory (`dmesg | tail`); fewer workers or smaller batches \
             need less"
        }
        "SIGSEGV" | "SIGILL" | "SIGFPE" | "SIGTRAP" | "SIGSYS" if any_program => {
            "a defect of the program: a debugger shows where"
        }
        "SIGSEGV" | "SIGILL" | "SIGFPE" | "SIGTRAP" | "SIGSYS" => {
            "the program did what it must not do: please report this, with the worker's stderr.log"
        }
        "SIGBUS" => {
            "memory could not be allocated or a file could not be read: see `dmesg | tail`; NCCL and MPI need room in /dev/shm (`df \
             /dev/shm`; containers: --shm-size)"
        }
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
    fn ignored_signals_are_those_of_the_process() {
        // Rust's runtime ignores SIGPIPE
        assert!(ignored().contains(&signal_hook::consts::SIGPIPE));
        assert!(!ignored().contains(&signal_hook::consts::SIGCHLD));
    }
}
