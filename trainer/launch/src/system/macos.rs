//! The functions of this module for macOS, with POSIX only. macOS has no pidfd, no parent-death signal and no affinity masks.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, getppid, kill_process, waitid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use comm::Secret;

/// Names of the signals from 1 on, without `SIG`.
pub(crate) const SIGNAL_NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "EMT", "FPE", "KILL", "BUS", "SEGV", "SYS", "PIPE", "ALRM", "TERM",
    "URG", "STOP", "TSTP", "CONT", "CHLD", "TTIN", "TTOU", "IO", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "INFO",
    "USR1", "USR2",
];

/// A child process, as a process id. The id refers to this process until the process is reaped.
#[derive(Debug)]
pub(crate) struct ProcessHandle(Pid);

impl ProcessHandle {
    /// Opens the process, which must not have been reaped.
    ///
    /// # Errors
    /// None; the type is that of Linux.
    pub(crate) fn of_child(pid: Pid) -> io::Result<Self> {
        Ok(Self(pid))
    }

    /// Returns `None`: on macOS no file descriptor becomes readable when the process has ended.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns whether the process has ended. Does not reap it.
    ///
    /// # Errors
    /// The kernel refuses to wait, which it does only for wrong arguments.
    pub(crate) fn has_ended(&self) -> io::Result<bool> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        Ok(waitid(WaitId::Pid(self.0), options)?.is_some())
    }

    /// Sends a signal. The process must not have been reaped.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = kill_process(self.0, signal);
    }
}

/// Watches the end of the parent process.
#[derive(Debug)]
pub(crate) struct ParentWatch(Pid);

impl ParentWatch {
    /// Starts to watch the parent process.
    ///
    /// # Errors
    /// None; the type is that of Linux.
    pub(crate) fn new(parent: Pid) -> io::Result<Self> {
        Ok(Self(parent))
    }

    /// Waits for `interval`. Returns whether the parent process has ended, since this process then has another parent.
    pub(crate) fn has_ended_within(&self, interval: Duration) -> bool {
        std::thread::sleep(interval);
        getppid() != Some(self.0)
    }
}

/// Does nothing: macOS has no such signal.
///
/// # Errors
/// None; the type is that of Linux.
pub fn set_parent_death_signal(_: Signal) -> io::Result<()> {
    Ok(())
}

/// Makes a file of `len` zeros without a name. The kernel frees the file when the last process has closed it.
///
/// # Errors
/// The folder for temporary files cannot be written, or is full.
pub(crate) fn nameless_file(len: usize) -> io::Result<File> {
    let name = Secret::random().map_err(|error| io::Error::other(error.message))?.to_hex();
    let path = std::env::temp_dir().join(format!("trainer-worker-{name}"));
    let mut file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    std::fs::remove_file(&path)?;
    // Allocate the space on the disk now, so that later writes cannot fail.
    file.write_all(&vec![0; len])?;
    Ok(file)
}

/// Opens a pseudo-terminal. It does not become the controlling terminal of any process. Returns master and slave.
///
/// # Errors
/// The system has no pseudo-terminal or file descriptor left.
pub(crate) fn open_terminal() -> io::Result<(OwnedFd, OwnedFd)> {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    fcntl_setfd(&master, FdFlags::CLOEXEC)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let slave = open(ptsname(&master, Vec::new())?, flags, Mode::empty())?;
    Ok((master, slave))
}

/// A set of cores, with the functions of rustix's type.
#[derive(Debug, Clone)]
pub(crate) struct CpuSet([bool; Self::MAX_CPU]);

impl CpuSet {
    pub(crate) const MAX_CPU: usize = 1024;

    pub(crate) fn new() -> Self {
        Self([false; Self::MAX_CPU])
    }

    pub(crate) fn set(&mut self, core: usize) {
        self.0[core] = true;
    }

    pub(crate) fn is_set(&self, core: usize) -> bool {
        self.0[core]
    }
}

/// Returns all cores.
///
/// # Errors
/// None; the type is that of Linux.
pub(crate) fn sched_getaffinity(_: Option<Pid>) -> rustix::io::Result<CpuSet> {
    let mut all = CpuSet::new();
    (0..super::super::cores::quota().min(CpuSet::MAX_CPU)).for_each(|core| all.set(core));
    Ok(all)
}

/// Returns an error: on macOS only the scheduler chooses cores.
///
/// # Errors
/// Always.
pub(crate) fn sched_setaffinity(_: Option<Pid>, _: &CpuSet) -> rustix::io::Result<()> {
    Err(Errno::NOTSUP)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::FileExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_child_that_has_ended_is_seen_and_not_reaped() {
        let mut child = Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let process = ProcessHandle::of_child(Pid::from_child(&child)).unwrap();
        assert!(!process.has_ended().unwrap());
        process.signal(Signal::KILL);
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(Pid::from_child(&child)), options).unwrap();
        assert!(process.has_ended().unwrap() && process.has_ended().unwrap());
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    fn a_parent_that_lives_is_still_the_parent() {
        let moment = Duration::from_millis(1);
        assert!(!ParentWatch::new(getppid().unwrap()).unwrap().has_ended_within(moment));
        assert!(ParentWatch::new(rustix::process::getpid()).unwrap().has_ended_within(moment));
    }

    #[test]
    fn a_file_without_a_name_has_zeros() {
        use std::os::unix::fs::MetadataExt;
        let file = nameless_file(100).unwrap();
        let mut bytes = [1; 100];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!((bytes, file.metadata().unwrap().len(), file.metadata().unwrap().nlink()), ([0; 100], 100, 0));
    }

    #[test]
    fn what_is_written_to_a_terminal_is_read_from_its_master() {
        let (master, slave) = open_terminal().unwrap();
        File::from(slave).write_all(b"x\n").unwrap();
        let mut bytes = [0; 3];
        File::from(master).read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"x\r\n");
    }

    #[test]
    fn all_cores_are_allowed() {
        let set = sched_getaffinity(None).unwrap();
        assert_eq!((0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).count(), crate::cores::quota());
    }
}
