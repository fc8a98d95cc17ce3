//! One worker process, on the launcher's side: starts, watches, signals and ends the process.
//!
//! Each worker has its own POSIX process group, which is not a [`ProcessGroup`](crate::ProcessGroup) of ranks. A POSIX process
//! group is a set of processes that one `kill` signals together. Its number is the process id of its first member, and child
//! processes inherit the group. So the launcher can end a worker together with the processes that the worker has started, and a
//! terminal's Ctrl-C, which goes to the terminal's foreground group, does not reach the worker.

use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use comm::limits;
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

use super::cores::AffinityGuard;
use super::error::{LaunchError, Result};
use super::failure_report::{self, FailureReport};
use super::helper::Guard;
use super::output::{self, WorkerOutput};
use super::screen::OnScreen;
use super::status_page::{Status, StatusPage};
use super::system::ProcessHandle;
use super::worker_environment::NOT_INHERITED;

/// Longest time for which the launcher still reads the streams of a dead worker. Only a process that has left the worker's group
/// keeps them open for so long.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Describes a worker to start.
pub(super) struct WorkerSpec<'a> {
    pub(super) rank: usize,
    pub(super) program: &'a Path,
    pub(super) arguments: &'a [OsString],
    pub(super) variables: Vec<(String, OsString)>,
    pub(super) cores: Option<&'a Vec<usize>>,
    /// The folder of all logs, and in it the folder of this worker.
    pub(super) logs: &'a Path,
    pub(super) folder: &'a [String],
    pub(super) screen: Option<OnScreen>,
    /// Set for a worker that is any program.
    pub(super) guard: Option<&'a Arc<Guard>>,
}

/// How a worker ended.
#[derive(Debug)]
pub(super) struct WorkerExit {
    pub(super) status: ExitStatus,
    pub(super) at: SystemTime,
    pub(super) ran: Duration,
    /// The last status on its page.
    pub(super) last_status: Status,
    pub(super) report: Option<FailureReport>,
}

/// A worker of this node.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    pub(super) rank: usize,
    pub(super) pid: Pid,
    pub(super) page: StatusPage,
    pub(super) output: WorkerOutput,
    pub(super) folder: PathBuf,
    /// Set once the worker has ended.
    pub(super) exit: Option<WorkerExit>,
    /// Time since the last heartbeat, counted only while the launcher itself could run.
    pub(super) silent: Duration,
    /// The launcher has asked the worker to end.
    pub(super) termination_requested: bool,
    /// Set for a worker that is any program. It has no status and no heartbeats, and signals go to all its processes.
    guard: Option<Arc<Guard>>,
    heartbeats: u64,
    child: Child,
    process: ProcessHandle,
    started: Instant,
}

impl WorkerProcess {
    /// Starts a worker in its own process group, so that Ctrl-C reaches only the launcher. The worker is
    /// limited to its cores from the first instruction on, and inherits a [`StatusPage`] as its standard input.
    ///
    /// On Linux the kernel kills the worker when the *thread* that called this function ends. So this thread must live as long
    /// as the job.
    ///
    /// # Errors
    /// The logs cannot be written, the program cannot be run, or a limit of the system is reached.
    pub(super) fn start(spec: WorkerSpec<'_>) -> Result<Self> {
        let path = spec.folder.iter().fold(spec.logs.to_owned(), |path, name| path.join(name));
        let opened =
            output::prepare(spec.logs, spec.folder).and_then(|logs| WorkerOutput::open(&logs, spec.screen.as_ref()));
        let (output, stdio) = opened.map_err(|error| {
            LaunchError::failed(
                format!("{}: cannot write the logs of rank {}: {error}", path.display(), spec.rank),
                match spec.guard {
                    _ if limits::is_limit(&error) => limits::HINT,
                    Some(_) => {
                        "make the folder writable for this user and free of links, or name another with --log-dir DIR"
                    }
                    None => {
                        "make the folder writable for this user and free of links, or name another with --run-dir DIR"
                    }
                },
            )
        })?;
        Self::spawn(&spec, path, output, stdio).map_err(|error| {
            LaunchError::failed(
                format!("cannot start rank {} ({}): {error}", spec.rank, spec.program.display()),
                limits::HINT,
            )
        })
    }

    fn spawn(spec: &WorkerSpec<'_>, path: PathBuf, output: WorkerOutput, stdio: [Stdio; 2]) -> io::Result<Self> {
        let [stdout, stderr] = stdio;
        let folder = std::path::absolute(path)?;
        let page = StatusPage::create()?;
        let mut command = Command::new(spec.program);
        // Keep the program name that the user typed, since a worker may print it.
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        let report = folder.join(failure_report::FILE_NAME);
        if spec.guard.is_some() {
            NOT_INHERITED.iter().for_each(|name| _ = command.env_remove(name));
            command.env(failure_report::TORCHELASTIC_FILE, report).stdin(Stdio::null());
        } else {
            command.env(super::worker::FAILURE_FILE, report).stdin(Stdio::from(page.share()?));
        }
        command
            .args(spec.arguments)
            .envs(spec.variables.iter().map(|(name, value)| (name, value)))
            .stdout(stdout)
            .stderr(stderr)
            .process_group(0);
        let child = {
            let _pinned = AffinityGuard::new(spec.cores);
            command.spawn()?
        };
        let pid = Pid::from_child(&child);
        let process = match ProcessHandle::of_child(pid) {
            Ok(process) => process,
            Err(error) => {
                kill_unwatched(child, pid);
                return Err(error);
            }
        };
        if let Some(guard) = spec.guard {
            guard.add(pid);
        }
        Ok(Self {
            rank: spec.rank,
            pid,
            page,
            output,
            folder,
            exit: None,
            silent: Duration::ZERO,
            termination_requested: false,
            guard: spec.guard.cloned(),
            heartbeats: 0,
            child,
            process,
            started: Instant::now(),
        })
    }

    /// Returns a file descriptor that is readable once the worker has ended. `None` on macOS, where only
    /// [`WorkerProcess::reap`] notices the end.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.process.fd()
    }

    pub(super) fn is_alive(&self) -> bool {
        self.exit.is_none()
    }

    /// Returns whether the worker is any program, which does not report to its launcher.
    pub(super) fn is_any_program(&self) -> bool {
        self.guard.is_some()
    }

    /// Reaps the worker if it has ended, and kills its process group. Returns whether it has ended since the last call. Its last
    /// output may still be on the way to the logs ([`WorkerProcess::drain`]).
    ///
    /// # Errors
    /// The kernel refuses to wait, which it does only for wrong arguments.
    pub(super) fn reap(&mut self) -> io::Result<bool> {
        if self.exit.is_some() || !self.process.has_ended()? {
            return Ok(false);
        }
        self.kill_unix_process_group();
        let status = self.child.wait()?;
        tracing::debug!(rank = self.rank, %status, "worker ended");
        self.exit = Some(WorkerExit {
            status,
            at: SystemTime::now(),
            ran: self.started.elapsed(),
            last_status: self.page.status(),
            report: FailureReport::read(&self.folder.join(failure_report::FILE_NAME)),
        });
        Ok(true)
    }

    /// Waits until the logs have everything that the worker has written, but only for a short time after its end.
    pub(super) fn drain(&self) {
        self.output.drain_until(self.started + self.ran() + DRAIN_TIMEOUT);
    }

    /// Counts the time without a heartbeat. `passed` is the time since the last call.
    pub(super) fn check_heartbeat(&mut self, passed: Duration) {
        let heartbeats = self.page.heartbeats();
        if heartbeats != self.heartbeats {
            (self.heartbeats, self.silent) = (heartbeats, Duration::ZERO);
        } else if !self.is_any_program() {
            self.silent += passed;
        }
    }

    /// Returns how long the worker has run.
    pub(super) fn ran(&self) -> Duration {
        self.exit.as_ref().map_or_else(|| self.started.elapsed(), |exit| exit.ran)
    }

    /// Returns the kernel's letter for the worker's state: `T` stopped, `t` stopped by a debugger, `D` waiting for a device.
    pub(super) fn state(&self) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid.as_raw_nonzero())).ok()?;
        // The name before the state is in brackets and may contain brackets itself, so search from the end.
        stat.rsplit_once(')')?.1.trim_start().chars().next()
    }

    /// Sends a signal to the worker, unless the worker has ended. If the worker is any program, the signal goes to its whole
    /// process group: the program may be a shell that waits for its children.
    pub(super) fn signal(&self, signal: Signal) {
        if self.is_any_program() {
            self.signal_group(signal);
        } else if self.is_alive() {
            self.process.signal(signal);
        }
    }

    /// Sends a signal to the worker and to all processes that it has started.
    pub(super) fn signal_group(&self, signal: Signal) {
        if self.is_alive() && test_kill_process_group(self.pid).is_ok() {
            let _ = kill_process_group(self.pid, signal);
        }
    }

    /// Kills the worker's process group: the worker and all processes that it has started. Call this function before the worker is
    /// reaped: until then, no other process group can have the worker's number.
    fn kill_unix_process_group(&self) {
        self.signal_group(Signal::KILL);
        if let Some(guard) = &self.guard {
            guard.remove(self.pid);
        }
    }
}

impl Drop for WorkerProcess {
    /// Kills the worker: no worker may outlive the job.
    fn drop(&mut self) {
        if self.is_alive() {
            self.kill_unix_process_group();
            let _ = self.child.wait();
        }
    }
}

/// Kills a worker for which no process handle could be opened.
fn kill_unwatched(mut child: Child, pid: Pid) {
    let _ = kill_process_group(pid, Signal::KILL);
    let _ = child.wait();
}

/// Describes an exit status: `was killed by SIGKILL`, `exited with code 7`.
pub(super) fn describe_exit(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => {
            let core = if status.core_dumped() { ", core dumped" } else { "" };
            format!("was killed by {} (signal {signal}{core})", super::signals::name(signal))
        }
        (None, Some(code)) => format!("exited with code {code}"),
        (None, None) => "ended without a status".to_owned(),
    }
}
