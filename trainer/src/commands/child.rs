//! Runs of this program that `compare` and `sweep` start, each as a process of its own.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use time::{OffsetDateTime, macros::format_description};

use crate::failure::Failure;
use crate::files::{self, FileError};
use launch::environment::Variables;

/// Passes the process id of the command to the runs that it starts.
const PARENT: &str = "TRAINER_PARENT";
/// Number of a failed run's last message lines that are shown.
const SHOWN: usize = 12;

/// Has the kernel send SIGTERM to this process when the command that started it ends.
pub(super) fn follow(variables: &Variables) {
    let parent = variables.get(PARENT).and_then(|text| text.parse().ok()).and_then(Pid::from_raw);
    if parent.is_some() && parent == getppid() {
        // Ignore a refusal by the kernel: the run then ends when it is done.
        let _ = set_parent_process_death_signal(Some(Signal::TERM));
    }
}

/// Starts this program with `arguments` in its own process group, so that Ctrl-C reaches only this process. The file `log` gets all
/// that the run prints.
///
/// # Errors
/// The file cannot be created, or the process cannot be started.
pub(super) fn start(command: &mut Command, log: &Path) -> Result<Child, Failure> {
    let file = files::create(log)?;
    let failed = |error| Failure::run(format!("a run cannot be started: {error}"), "see `ulimit -u`");
    command.env(PARENT, std::process::id().to_string()).env_remove("TRAINER_DATA_DIR");
    command.stderr(file.try_clone().map_err(failed)?).stdout(file).stdin(Stdio::null());
    command.process_group(0).spawn().map_err(failed)
}

/// Returns the command of this program.
///
/// # Errors
/// The program's own file cannot be found.
pub(super) fn command() -> Result<Command, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::run(format!("cannot find this program's own file: {error}"), "is /proc mounted?"))?;
    Ok(Command::new(program))
}

/// Returns the exit status of a run that has ended.
///
/// # Errors
/// The kernel refuses to wait.
pub(super) fn ended(child: &mut Child) -> Result<Option<ExitStatus>, Failure> {
    child.try_wait().map_err(|error| Failure::run(format!("waiting for a run: {error}"), "please report this"))
}

/// Passes a signal on to a run.
pub(super) fn signal(child: &Child, signal: i32) {
    let pid = Pid::from_raw(child.id() as i32);
    if let (Some(pid), Some(signal)) = (pid, Signal::from_named_raw(signal)) {
        // The run may just have ended. It needs no signal then.
        let _ = kill_process(pid, signal);
    }
}

/// Returns the end of a failed run's output.
pub(super) fn last_lines(log: &Path, status: ExitStatus) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    match lines.len() {
        0 => format!("{status}, and it said nothing"),
        count => lines[count.saturating_sub(SHOWN)..].join("\n"),
    }
}

/// Returns the folder for the results of `command`: the one that was asked for, or a new one under `runs/`.
///
/// # Errors
/// The folder cannot be created.
pub(super) fn folder(asked: Option<&Path>, command: &str) -> Result<PathBuf, Failure> {
    let create = |path: PathBuf| match fs::create_dir_all(&path) {
        Ok(()) => Ok(path),
        Err(error) => Err(Failure::from(FileError::io(&path, "create the folder", &error))),
    };
    if let Some(path) = asked {
        return create(path.to_owned());
    }
    let stamp = OffsetDateTime::now_utc()
        .format(format_description!("[year][month][day]-[hour][minute][second]"))
        .map_err(|error| Failure::run(format!("the clock: {error}"), "set the machine's clock"))?;
    create(Path::new("runs").join(format!("{stamp}-{command}-{}", std::process::id())))
}
