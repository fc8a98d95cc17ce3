//! Starts a node's launcher for `ssh_launcher.rs`, on another host over ssh, or on this host, as Open MPI's `orted` does.
//! torchrun's elastic agent corresponds to `launcher.rs`.
//!
//! ```text
//! agent → standard output   trainer-agent {"version": …, "build": …, "port": …}     the ssh launcher compares the programs
//! standard input → agent    a [`StartRequest`] as one line of JSON: folder, arguments, secret, part of the job
//!                           `signal 15`                                             forwarded to the launcher
//!                           the end of the stream                                   the ssh launcher is gone: end the launcher
//! ```
//!
//! After the agent's first line, the launcher writes to the standard output. The agent's exit code is the launcher's exit code.
//! The secret is sent over standard input, since all users of a host can see a command line.

use std::io::{self, BufRead, Read, Write};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};

use super::error::{LaunchError, Result, USAGE, WORKER_DIED, to_json};
use super::helper::EXEC;
use super::hosts::{NODE, SshNodePlan};
use super::screen::Screen;
use super::secret;
use super::signals::{self, STOPPING};
use super::system::ProcessHandle;
use comm::fnv;

/// First word of the agent's first line.
pub(super) const GREETING: &str = "trainer-agent ";
/// Longest start request in bytes.
const LONGEST_REQUEST: u64 = 4 << 20;
/// Time for the launcher to save a checkpoint and to end when the ssh launcher is gone.
const END_TIMEOUT: Duration = Duration::from_secs(180);

/// The agent's first line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AgentHello {
    pub(super) version: String,
    /// Checksum of the executable.
    pub(super) build: String,
    /// A free port of this host, for the rendezvous of the launchers if this is node 0.
    pub(super) port: u16,
}

/// The ssh launcher's message with everything that the agent needs to start a launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StartRequest {
    pub(super) directory: PathBuf,
    pub(super) arguments: Vec<String>,
    /// 64 hexadecimal digits.
    pub(super) secret: String,
    pub(super) plan: SshNodePlan,
}

impl AgentHello {
    /// Describes this program and host.
    ///
    /// # Errors
    /// The executable cannot be read, or no port is left.
    pub(super) fn of_this_program() -> io::Result<Self> {
        let program = std::fs::read(std::env::current_exe()?)?;
        let port = TcpListener::bind("0.0.0.0:0")?.local_addr()?.port();
        let build = format!("{:016x}", fnv::hash(program.iter().copied()));
        Ok(Self { version: env!("CARGO_PKG_VERSION").to_owned(), build, port })
    }

    /// Parses the JSON in the first line of the agent on `host`.
    ///
    /// # Errors
    /// The text is not an [`AgentHello`], or the agent's version or build differs from `own`.
    pub(super) fn parse(text: &str, host: &str, own: &Self) -> Result<Self> {
        let hint = "all hosts need the same program: copy this one to the same path";
        let theirs: Self = serde_json::from_str(text)
            .map_err(|_| LaunchError::usage(format!("{host}: its trainer is of another version"), hint))?;
        if theirs.version != own.version {
            let (version, here) = (&theirs.version, &own.version);
            return Err(LaunchError::usage(
                format!("{host}: its trainer is version {version}, this one is {here}"),
                hint,
            ));
        }
        if theirs.build != own.build {
            let cause = format!("{host}: its trainer is another build of version {}", own.version);
            return Err(LaunchError::usage(cause, hint));
        }
        Ok(theirs)
    }
}

/// Runs the agent and returns the exit code.
pub(super) fn run() -> u8 {
    match serve() {
        Ok(code) => code,
        Err(error) => {
            Screen::default().say(&format!("error: {error}"));
            error.code
        }
    }
}

fn serve() -> Result<u8> {
    let broken = |what: &str, error: io::Error| LaunchError::failed(format!("{what}: {error}"), "see `ulimit -a`");
    // Ignore signals to this process, for example from a batch system: the launcher decides, and must not lose its agent.
    for signal in STOPPING {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))
            .map_err(|e| broken("cannot catch signals", e))?;
    }
    let greeting = AgentHello::of_this_program().map_err(|e| broken("cannot describe this program", e))?;
    let text = to_json("the agent's greeting", &greeting)?;
    let mut out = io::stdout();
    writeln!(out, "{GREETING}{text}").and_then(|()| out.flush()).map_err(|e| broken("cannot answer", e))?;
    let mut input = io::BufReader::new(io::stdin());
    let mut line = String::new();
    input
        .by_ref()
        .take(LONGEST_REQUEST)
        .read_line(&mut line)
        .map_err(|e| broken("cannot read the start request", e))?;
    if line.is_empty() {
        // The ssh launcher ends the job before its start, and reports the reason itself.
        return Ok(0);
    }
    let request: StartRequest = serde_json::from_str(&line).map_err(|error| {
        LaunchError::usage(format!("this is not a start request: {error}"), "only -H starts this process")
    })?;
    let mut child = start(&request)?;
    let launcher =
        ProcessHandle::of_child(Pid::from_child(&child)).map_err(|e| broken("cannot watch the launcher", e))?;
    std::thread::spawn(move || {
        for line in input.lines().map_while(io::Result::ok) {
            let signal = line.strip_prefix("signal ").and_then(|number| number.parse().ok());
            if let Some(signal) = signal.and_then(Signal::from_named_raw) {
                launcher.signal(signal);
            }
        }
        launcher.signal(Signal::TERM);
        std::thread::sleep(END_TIMEOUT);
        // The workers die with their launcher.
        launcher.signal(Signal::KILL);
    });
    let status = child.wait().map_err(|e| broken("cannot wait for the launcher", e))?;
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(WORKER_DIED),
        (None, signal) => {
            let name = signal.map_or_else(|| "something unknown".to_owned(), signals::name);
            Screen::default()
                .say(&format!("error: the launcher of node {} was killed by {name}", request.plan.node_rank));
            WORKER_DIED
        }
    })
}

/// Starts the launcher. The kernel kills the launcher when this process ends.
fn start(request: &StartRequest) -> Result<Child> {
    if !request.directory.is_dir() {
        return Err(LaunchError {
            code: USAGE,
            message: format!("there is no folder {} on this host", request.directory.display()),
            hint: "all hosts need the same working folder: use a shared file system, or make it".to_owned(),
        });
    }
    let plan = to_json("a node's plan", &request.plan)?;
    let start = || -> io::Result<Child> {
        let program = std::env::current_exe()?;
        let mut command = Command::new(&program);
        command.arg(EXEC).arg(std::process::id().to_string()).arg(&program).args(&request.arguments);
        command.current_dir(&request.directory).env(NODE, plan).env(secret::VARIABLE, &request.secret);
        command.stdin(Stdio::null()).spawn()
    };
    start().map_err(|error| LaunchError::failed(format!("cannot start the launcher: {error}"), "see `ulimit -u -n`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_of_another_version_or_build_is_refused() {
        let own = AgentHello { version: "0.1.0".into(), build: "a".into(), port: 1 };
        let text = |greeting: &AgentHello| serde_json::to_string(greeting).unwrap();
        assert_eq!(AgentHello::parse(&text(&own), "b", &own).unwrap(), own);
        for (theirs, cause) in [
            (
                text(&AgentHello { version: "0.2.0".into(), ..own.clone() }),
                "b: its trainer is version 0.2.0, this one is 0.1.0",
            ),
            (
                text(&AgentHello { build: "b".into(), ..own.clone() }),
                "b: its trainer is another build of version 0.1.0",
            ),
            ("{}".to_owned(), "b: its trainer is of another version"),
        ] {
            let error = AgentHello::parse(&theirs, "b", &own).unwrap_err();
            assert_eq!((error.code, error.message.as_str()), (2, cause));
        }
    }
}
