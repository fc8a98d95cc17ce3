//! The functions of this module for Linux.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, set_parent_process_death_signal,
    waitid,
};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};

pub(crate) use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Names of the signals from 1 on, without `SIG`.
pub(crate) const SIGNAL_NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM",
    "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO",
    "PWR", "SYS",
];

/// A child process, as a pidfd. Unlike a process id, a pidfd never refers to another process.
#[derive(Debug)]
pub(crate) struct ProcessHandle(OwnedFd);

impl ProcessHandle {
    /// Opens the process, which must not have been reaped.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub(crate) fn of_child(pid: Pid) -> io::Result<Self> {
        Ok(Self(pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Returns the file descriptor that becomes readable when the process has ended.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    /// Returns whether the process has ended. Does not reap it.
    ///
    /// # Errors
    /// The kernel refuses to wait, which it does only for wrong arguments.
    pub(crate) fn has_ended(&self) -> io::Result<bool> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        Ok(waitid(WaitId::PidFd(self.0.as_fd()), options)?.is_some())
    }

    /// Sends a signal. Does nothing if the process has ended.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = pidfd_send_signal(&self.0, signal);
    }
}

/// Watches the end of the parent process.
#[derive(Debug)]
pub(crate) struct ParentWatch(OwnedFd);

impl ParentWatch {
    /// Starts to watch the parent process.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub(crate) fn new(parent: Pid) -> io::Result<Self> {
        Ok(Self(pidfd_open(parent, PidfdFlags::empty())?))
    }

    /// Waits for `interval`, which is less than a second, or until the parent process has ended. Returns whether it has.
    pub(crate) fn has_ended_within(&self, interval: Duration) -> bool {
        let interval = Timespec { tv_sec: 0, tv_nsec: i64::from(interval.subsec_nanos()) };
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut fds, Some(&interval)).is_ok() && !fds[0].revents().is_empty()
    }
}

/// Makes the kernel send a signal to this process when the thread that started this process ends. The setting survives `exec`.
/// Does nothing on macOS.
///
/// # Errors
/// The kernel refuses, as a sandbox may.
pub fn set_parent_death_signal(signal: Signal) -> io::Result<()> {
    Ok(set_parent_process_death_signal(Some(signal))?)
}

/// Makes a file of `len` zeros without a name. The kernel frees the file when the last process has closed it.
///
/// # Errors
/// The kernel cannot make an anonymous memory file.
pub(crate) fn nameless_file(len: usize) -> io::Result<File> {
    let file = File::from(memfd_create("trainer-worker", MemfdFlags::CLOEXEC)?);
    file.set_len(len as u64)?;
    Ok(file)
}

/// Opens a pseudo-terminal. It does not become the controlling terminal of any process. Returns master and slave.
///
/// # Errors
/// The system has no pseudo-terminal or file descriptor left.
pub(crate) fn open_terminal() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = openpt(flags)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let slave = ioctl_tiocgptpeer(&master, flags)?;
    Ok((master, slave))
}
