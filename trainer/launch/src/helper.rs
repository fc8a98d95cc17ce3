//! Helper processes, which the launcher starts from its own executable. They ensure that no process is left when the launcher
//! dies.
//!
//! | first argument | what the process does |
//! |---|---|
//! | `launch-exec` | sets the parent-death signal (on Linux), which any program cannot do itself, and executes the program |
//! | `launch-guard` | kills the workers' process groups when the launcher has died: a shell's children survive the shell |
//! | `launch-agent` | starts a node's launcher on another host (`agent.rs`) |

use std::ffi::OsString;
use std::io::{self, PipeWriter, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, getppid, kill_process_group};

use super::error::{LaunchError, Result, WORKER_DIED};
use super::screen::Screen;
use super::signals::STOPPING;
use super::system::set_parent_death_signal;
use super::thread::start_thread;

/// First argument of a process that becomes a worker.
pub(super) const EXEC: &str = "launch-exec";
/// First argument of the guard.
pub(super) const GUARD: &str = "launch-guard";
/// First argument of the process that starts a node's launcher on another host.
pub(super) const AGENT: &str = "launch-agent";

/// Exit codes of a shell for a program that cannot be executed, and for a program that does not exist.
const CANNOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Runs a helper if the first argument names one, and returns the exit code. Call this function first in `main`.
pub fn run_if_asked() -> Option<u8> {
    let mut arguments = std::env::args_os().skip(1);
    match arguments.next()?.to_str()? {
        EXEC => Some(become_worker(arguments.collect())),
        GUARD => Some(guard()),
        AGENT => Some(super::agent::run()),
        _ => None,
    }
}

/// Replaces this process by a program that the kernel kills when the launcher ends.
fn become_worker(arguments: Vec<OsString>) -> u8 {
    let [launcher, program, rest @ ..] = arguments.as_slice() else {
        Screen::default().say(&format!("error: {EXEC} is for the launcher: LAUNCHER PROGRAM ARGUMENTS"));
        return CANNOT_RUN;
    };
    // This setting survives exec. A thread that watches the launcher would not.
    if let Err(error) = set_parent_death_signal(Signal::KILL) {
        Screen::default().say(&format!("error: a worker cannot have its parent-death signal: {error}"));
        return CANNOT_RUN;
    }
    // The launcher may have died before the call above.
    if getppid().map(|parent| parent.as_raw_nonzero().to_string()) != launcher.to_str().map(str::to_owned) {
        return WORKER_DIED;
    }
    let error = Command::new(program).args(rest).exec();
    let missing = error.kind() == io::ErrorKind::NotFound;
    let hint = match error.kind() {
        _ if missing && Path::new(program).is_file() => {
            "the file exists: the interpreter that its first line names is missing"
        }
        _ if missing => "check the name of the program and PATH",
        io::ErrorKind::PermissionDenied => "make the file executable: chmod +x",
        _ => "the file must be a program of this machine, or a script whose first line names its interpreter",
    };
    Screen::default().say(&format!("error: {}: {error}\n  hint: {hint}", program.to_string_lossy()));
    if missing { NOT_FOUND } else { CANNOT_RUN }
}

/// The launcher's connection to the guard. Dropping it ends the guard, which then kills the groups that are still on its list.
#[derive(Debug)]
pub(super) struct Guard {
    pipe: Mutex<PipeWriter>,
}

impl Guard {
    /// Starts the guard.
    ///
    /// # Errors
    /// This program's executable cannot be started, or a limit of the system is reached.
    pub(super) fn start() -> Result<Arc<Self>> {
        let start = || -> io::Result<(Self, Child)> {
            let (read, write) = io::pipe()?;
            let mut command = Command::new(std::env::current_exe()?);
            command.arg(GUARD).stdin(Stdio::from(read)).stdout(Stdio::null()).stderr(Stdio::null());
            // Run outside of the terminal's foreground group: Ctrl-C must reach only the launcher.
            let guard = command.process_group(0).spawn()?;
            Ok((Self { pipe: Mutex::new(write) }, guard))
        };
        let (guard, mut process) = start().map_err(|error| {
            LaunchError::failed(format!("cannot start the guard of the workers: {error}"), "see `ulimit -u -n`")
        })?;
        // Wait for the process, so that a job with many restarts leaves no zombies.
        start_thread("guard", "the guard of the workers", move || _ = process.wait())?;
        Ok(Arc::new(guard))
    }

    /// Adds the process group of a worker to the list.
    pub(super) fn add(&self, group: Pid) {
        self.write('+', group);
    }

    /// Removes a group from the list. Another group may get the same number soon.
    pub(super) fn remove(&self, group: Pid) {
        self.write('-', group);
    }

    fn write(&self, verb: char, group: Pid) {
        // If the guard was killed, the kernel still kills the workers themselves, though not their children.
        let _ = self.pipe.lock().write_all(format!("{verb}{}\n", group.as_raw_nonzero()).as_bytes());
    }
}

/// Reads the list from standard input until the launcher has ended, and then kills the groups on the list.
fn guard() -> u8 {
    // Ignore signals: a batch system may signal all processes of a job, and the guard must outlive the launcher.
    for signal in STOPPING {
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let mut text = String::new();
    let _ = io::stdin().read_to_string(&mut text);
    remaining(&text).into_iter().for_each(|group| _ = kill_process_group(group, Signal::KILL));
    0
}

/// Returns the groups that were added to the list and not removed.
fn remaining(text: &str) -> Vec<Pid> {
    let mut groups = Vec::new();
    for line in text.lines() {
        let Some((verb, number)) = line.split_at_checked(1) else { continue };
        let Some(group) = number.parse().ok().and_then(Pid::from_raw) else { continue };
        match verb {
            "+" => groups.push(group),
            _ => groups.retain(|other| *other != group),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_have_ended_are_off_the_list() {
        let pid = |number| Pid::from_raw(number).unwrap();
        assert_eq!(remaining("+10\n+11\n-10\n+12\n"), [pid(11), pid(12)]);
        assert_eq!(remaining("+10\n-10\n+10\n"), [pid(10)], "the number may come again");
        assert!(remaining("").is_empty() && remaining("+\n+x\nq\n+0\n").is_empty());
    }
}
