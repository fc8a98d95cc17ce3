//! One worker process, from the launcher's side: started, watched, asked, ended.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{
    Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal, test_kill_process_group,
};

use super::cores::Pinned;
use super::failure_report::{self, FailureReport};
use super::output::{self, Output, Screen};
use super::status_page::{Status, StatusPage};

/// After a worker's end its streams are read at most this much longer.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// What to start.
pub(super) struct Start<'a> {
    pub(super) rank: usize,
    pub(super) program: &'a Path,
    pub(super) arguments: &'a [OsString],
    pub(super) variables: Vec<(String, String)>,
    pub(super) cores: Option<&'a Vec<usize>>,
    pub(super) folder: PathBuf,
    pub(super) screen: Option<&'a Arc<Screen>>,
}

/// How a worker ended.
#[derive(Debug)]
pub(super) struct End {
    pub(super) status: ExitStatus,
    pub(super) at: SystemTime,
    pub(super) ran: Duration,
    pub(super) doing: Status,
    pub(super) account: Option<FailureReport>,
}

/// A worker.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) rank: usize,
    pub(super) pid: Pid,
    pub(super) page: StatusPage,
    pub(super) output: Output,
    pub(super) folder: PathBuf,
    /// Set once it has ended.
    pub(super) end: Option<End>,
    /// How long its beats have not grown, in time during which the launcher itself got to run.
    pub(super) silent: Duration,
    /// The launcher has told it to end.
    pub(super) told: bool,
    beats: u64,
    child: Child,
    pidfd: OwnedFd,
    started: Instant,
}

impl Process {
    /// Starts it: in a process group of its own, so that Ctrl-C goes to the launcher alone, which decides; kept to its
    /// cores from the first instruction; with the page of [`StatusPage`] as its standard input.
    ///
    /// The kernel kills it when the *thread* that calls this ends, so that has to be one that lives as long as the job.
    pub(super) fn start(start: Start<'_>) -> io::Result<Self> {
        output::prepare(&start.folder)?;
        let folder = std::path::absolute(&start.folder)?;
        let page = StatusPage::create()?;
        let (output, ends) = Output::open(&folder, start.screen)?;
        let mut command = Command::new(start.program);
        command
            .args(start.arguments)
            .envs(start.variables)
            .env(super::worker::FAILURE_FILE, folder.join(failure_report::NAME))
            .stdin(Stdio::from(page.share()?))
            .stdout(ends.stdout)
            .stderr(ends.stderr)
            .process_group(0);
        let child = {
            let _pinned = Pinned::to(start.cores);
            command.spawn()?
        };
        let pid = Pid::from_child(&child);
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(error) => {
                end_unwatched(child, pid);
                return Err(error.into());
            }
        };
        Ok(Self {
            rank: start.rank,
            pid,
            page,
            output,
            folder,
            end: None,
            silent: Duration::ZERO,
            told: false,
            beats: 0,
            child,
            pidfd,
            started: Instant::now(),
        })
    }

    /// Readable once it has ended.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub(super) fn is_alive(&self) -> bool {
        self.end.is_none()
    }

    /// Notices its end; true if that is news. What it has left behind in its group ends with it.
    pub(super) fn reap(&mut self) -> io::Result<bool> {
        use rustix::process::{WaitId, WaitIdOptions, waitid};
        if self.end.is_some() {
            return Ok(false);
        }
        // looks without reaping: until then the number of its group is nobody else's
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if waitid(WaitId::PidFd(self.pidfd.as_fd()), options)?.is_none() {
            return Ok(false);
        }
        self.signal_group(Signal::KILL);
        let status = self.child.wait()?;
        self.output.drain(LAST_WORDS);
        self.end = Some(End {
            status,
            at: SystemTime::now(),
            ran: self.started.elapsed(),
            doing: self.page.status(),
            account: FailureReport::read(&self.folder.join(failure_report::NAME)),
        });
        Ok(true)
    }

    /// Counts the time without a sign of life. `passed` is the time since the last call.
    pub(super) fn listen(&mut self, passed: Duration) {
        let beats = self.page.beats();
        if beats == self.beats {
            self.silent += passed;
        } else {
            (self.beats, self.silent) = (beats, Duration::ZERO);
        }
    }

    /// How long it has been running.
    pub(super) fn ran(&self) -> Duration {
        self.end.as_ref().map_or_else(|| self.started.elapsed(), |end| end.ran)
    }

    /// The kernel's letter for its state: `T` stopped, `t` held by a debugger, `D` waiting for a device.
    pub(super) fn state(&self) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid.as_raw_nonzero())).ok()?;
        // the name before it is in brackets and may hold anything
        stat.rsplit_once(')')?.1.trim_start().chars().next()
    }

    /// Sends it a signal. One that has ended gets none.
    pub(super) fn signal(&self, signal: Signal) {
        if self.is_alive() {
            let _ = pidfd_send_signal(&self.pidfd, signal);
        }
    }

    /// Sends a signal to it and to all that it has started.
    pub(super) fn signal_group(&self, signal: Signal) {
        if self.is_alive() && test_kill_process_group(self.pid).is_ok() {
            let _ = kill_process_group(self.pid, signal);
        }
    }
}

impl Drop for Process {
    /// No worker outlives its launcher's interest in it.
    fn drop(&mut self) {
        if self.is_alive() {
            self.signal_group(Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

fn end_unwatched(mut child: Child, pid: Pid) {
    let _ = kill_process_group(pid, Signal::KILL);
    let _ = child.wait();
}

/// How a status reads: `was killed by SIGKILL`, `exited with code 7`.
pub(super) fn how(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => {
            let core = if status.core_dumped() { ", core dumped" } else { "" };
            format!("was killed by {} (signal {signal}{core})", super::signals::name(signal))
        }
        (None, Some(code)) => format!("exited with code {code}"),
        (None, None) => "ended without a status".to_owned(),
    }
}
