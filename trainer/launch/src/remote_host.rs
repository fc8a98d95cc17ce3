//! One host of a job that `ssh_launcher.rs` starts: its agent's process, its standard input, and its output.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, ExitStatus};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::agent::{GREETING, StartRequest};
use super::error::{LaunchError, Result, WORKER_DIED, to_json};
use super::output::drain_until;
use super::screen::LineSink;
use super::ssh_launcher::{CLOSE_TIMEOUT, POLL_INTERVAL};
use super::thread::start_thread;

/// Longest wait for the last lines of hosts.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of bytes that are read from a host before its agent's first line. A login shell may print a greeting.
const MAX_LOGIN_TEXT: u64 = 64 << 10;

/// An event on a host.
pub(super) enum Event {
    /// The agent's first line, or `None` if the stream has ended without it.
    AgentHello(usize, Option<String>),
    /// A line of ssh, or of a login shell, before the agent's first line.
    PreambleLine(usize, String),
}

/// A host with a running agent.
pub(super) struct RemoteHost {
    pub(super) name: String,
    pub(super) child: Child,
    pub(super) input: Option<ChildStdin>,
    /// One receiver per output stream. It disconnects when the stream has ended.
    pub(super) pumps: Vec<Receiver<()>>,
    pub(super) status: Option<ExitStatus>,
    /// The last lines of ssh or of a login shell before the agent's first line.
    pub(super) ssh_lines: Vec<String>,
    /// Whether the agent has received its start request, so that a launcher runs.
    pub(super) start_sent: bool,
}

impl RemoteHost {
    pub(super) fn send_start_request(&mut self, request: &StartRequest) -> Result<()> {
        let text = to_json("a start request", request)?;
        self.start_sent = true;
        self.send(&text).map_err(|error| {
            LaunchError::failed(format!("{}: the agent has ended: {error}", self.name), "see its host's logs")
        })
    }

    pub(super) fn send(&mut self, line: &str) -> std::io::Result<()> {
        let Some(input) = &mut self.input else { return Ok(()) };
        input.write_all(format!("{line}\n").as_bytes()).and_then(|()| input.flush())
    }

    pub(super) fn is_alive(&self) -> bool {
        self.status.is_none()
    }

    /// Notices the end of the agent. Returns whether it has ended since the last call. Its last lines may still be on the way to
    /// the screen ([`drain`]).
    pub(super) fn reap(&mut self) -> bool {
        if self.is_alive()
            && let Ok(Some(status)) = self.child.try_wait()
        {
            self.status = Some(status);
            return true;
        }
        false
    }

    /// Returns the exit code of the node's launcher.
    pub(super) fn code(&self) -> Option<u8> {
        let status = self.status?;
        let code = status.code().or(status.signal().map(|signal| 128 + signal));
        Some(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(WORKER_DIED))
    }

    /// Closes the agent's standard input, which ends the node's launcher. Ends ssh if it has not ended within `limit`.
    pub(super) fn close(&mut self, limit: Duration) {
        self.input = None;
        if !self.is_alive() {
            // The caller has waited for its last lines, with one limit for all hosts.
            return;
        }
        let until = Instant::now() + limit;
        while !self.reap() {
            if Instant::now() >= until {
                let _ = self.child.kill();
                self.status = self.child.wait().ok();
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        drain(std::iter::once(&*self));
    }
}

/// Waits for the last lines of hosts whose agents have ended. A process that ssh has left behind (`ControlPersist`) may keep the
/// streams open, so all hosts share one limit.
pub(super) fn drain<'a>(hosts: impl IntoIterator<Item = &'a RemoteHost>) {
    drain_until(hosts.into_iter().flat_map(|host| &host.pumps), Instant::now() + DRAIN_TIMEOUT);
}

impl Drop for RemoteHost {
    fn drop(&mut self) {
        self.close(if self.start_sent { CLOSE_TIMEOUT } else { Duration::ZERO });
    }
}

/// Waits for the agent's first line, and then copies the launcher's output to the screen.
pub(super) fn pump_out(index: usize, out: ChildStdout, sink: LineSink, events: Sender<Event>) -> Result<Receiver<()>> {
    pump(move || {
        let mut out = BufReader::new(out);
        let mut left = MAX_LOGIN_TEXT;
        loop {
            let mut line = Vec::new();
            let read = out.by_ref().take(left).read_until(b'\n', &mut line).unwrap_or(0);
            left -= read as u64;
            let line = String::from_utf8_lossy(&line);
            let greeting = line.strip_prefix(GREETING).map(|text| text.trim_end().to_owned());
            let is_last = read == 0 || greeting.is_some();
            let event = match is_last {
                true => Event::AgentHello(index, greeting),
                false => Event::PreambleLine(index, line.trim_end().to_owned()),
            };
            let begins = matches!(event, Event::AgentHello(_, Some(_)));
            if events.send(event).is_err() || (is_last && !begins) {
                return;
            }
            if begins {
                break;
            }
        }
        drop(events);
        sink.copy(out);
    })
}

/// Shows the standard error of an agent or of ssh. Lines before the agent's first line become events, since they may be the
/// reason why the agent does not start.
pub(super) fn pump_err(index: usize, err: ChildStderr, sink: LineSink, events: Sender<Event>) -> Result<Receiver<()>> {
    pump(move || {
        for line in BufReader::new(err).split(b'\n').map_while(std::io::Result::ok) {
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if let Err(unread) = events.send(Event::PreambleLine(index, line)) {
                // The launcher no longer receives events, so the job runs: show the line.
                let Event::PreambleLine(_, line) = unread.0 else { continue };
                sink.line(&line);
            }
        }
    })
}

fn pump(body: impl FnOnce() + Send + 'static) -> Result<Receiver<()>> {
    let (done, ended) = channel();
    let run = move || {
        body();
        drop(done);
    };
    start_thread("host-output", "the output of a host", run).map(|_| ended)
}
