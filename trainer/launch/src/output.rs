//! Copies a worker's output: all of it to the worker's logs, the last lines to memory for failure reports, and rank 0's output
//! to the screen as well.
//!
//! Rank 0's output looks as if rank 0 had no launcher. If the launcher's stdout or stderr is a terminal, rank 0 gets a
//! pseudo-terminal of the same size, so its progress bars have the right width. If stdout and stderr are the same terminal,
//! rank 0 gets one pseudo-terminal for both. With two pseudo-terminals, the order of the two streams would be lost: erase a
//! bar, print a line, draw the bar again. With one, `stdout.log` has both streams, and `stderr.log` contains a line that says
//! so. The log of a terminal has the final lines, not every redraw.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Instant;

use folder::Folder;
use parking_lot::Mutex;
use rustix::termios::{OptionalActions, OutputModes, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};

use super::failure_report;
use super::screen::{OnScreen, Screen, StdStream};
use super::system::open_terminal;
use super::terminal_lines::{OutputTail, TerminalLines};

/// Number of lines that a failure report shows.
const TAIL: usize = 12;
/// Whether the screen has already shown that a log cannot be written (disk full).
static LOG_LOST: AtomicBool = AtomicBool::new(false);
/// The same for stdout or stderr, which may be a file on a full disk.
static SCREEN_LOST: AtomicBool = AtomicBool::new(false);

/// A worker's stdout and stderr, on the launcher's side.
#[derive(Debug)]
pub(super) struct WorkerOutput {
    stdout: Arc<Mutex<OutputTail>>,
    stderr: Arc<Mutex<OutputTail>>,
    /// One receiver per stream. It disconnects when the stream has ended.
    pumps: Vec<Receiver<()>>,
    /// Pseudo-terminals, each with the launcher's stream that it represents.
    terminals: Vec<(OwnedFd, StdStream)>,
}

impl WorkerOutput {
    /// Opens the logs in `folder` and starts the threads that fill them. `screen` is set for a rank that is shown on the
    /// screen. Also returns stdout and stderr for the worker.
    ///
    /// # Errors
    /// A log cannot be written, or no pipe, pseudo-terminal or thread is left.
    pub(super) fn open(folder: &Folder, screen: Option<&OnScreen>) -> io::Result<(Self, [Stdio; 2])> {
        let (mut stdout_log, mut stderr_log) = (folder.append("stdout.log")?, folder.append("stderr.log")?);
        let mut output = Self {
            stdout: Arc::new(Mutex::new(OutputTail::new(TAIL))),
            stderr: Arc::new(Mutex::new(OutputTail::new(TAIL))),
            pumps: Vec::new(),
            terminals: Vec::new(),
        };
        let alone = screen.filter(|screen| screen.prefix.is_none());
        let (Some(alone), true) =
            (alone, StdStream::Out.is_terminal() && StdStream::Err.is_terminal() && are_one_terminal())
        else {
            let stdout = output.start_copying(stdout_log, StdStream::Out, screen)?;
            let stderr = output.start_copying(stderr_log, StdStream::Err, screen)?;
            return Ok((output, [stdout.into(), stderr.into()]));
        };
        stderr_log.write_all(b"(stdout and stderr were one terminal: see stdout.log)\n")?;
        stdout_log.flush()?;
        output.stderr = Arc::clone(&output.stdout);
        let end = output.start_copying(stdout_log, StdStream::Err, Some(alone))?;
        Ok((output, [end.try_clone()?.into(), end.into()]))
    }

    /// Starts to copy one stream. Returns the worker's end.
    fn start_copying(&mut self, log: File, stream: StdStream, screen: Option<&OnScreen>) -> io::Result<OwnedFd> {
        let tail = if stream == StdStream::Out { &self.stdout } else { &self.stderr };
        let mut pump = StreamPump {
            log,
            tail: Arc::clone(tail),
            screen: screen.map(|shown| Arc::clone(&shown.screen)),
            prefixed: screen.and_then(|shown| shown.prefix.clone()).map(|prefix| (prefix, TerminalLines::default())),
            stream,
            lines: None,
        };
        let alone = screen.is_some_and(|screen| screen.prefix.is_none());
        let (source, end): (File, OwnedFd) = if alone && stream.is_terminal() {
            let (master, slave) = terminal(stream)?;
            pump.lines = Some(TerminalLines::default());
            self.terminals.push((master.try_clone()?, stream));
            (master.into(), slave)
        } else {
            let (reader, writer) = io::pipe()?;
            (OwnedFd::from(reader).into(), writer.into())
        };
        let (done, ended) = channel();
        std::thread::Builder::new().name("worker-output".into()).stack_size(256 << 10).spawn(move || {
            pump.run(source);
            drop(done);
        })?;
        self.pumps.push(ended);
        Ok(end)
    }

    /// Returns the name of a stream and its last lines: of stderr, or of stdout if stderr is empty.
    pub(super) fn last_lines(&self) -> (&'static str, Vec<String>) {
        let lines = self.stderr.lock().lines();
        match lines {
            none if none.is_empty() => ("stdout", self.stdout.lock().lines()),
            some => ("stderr", some),
        }
    }

    /// Returns whether the logs have everything that the worker and its children have written.
    pub(super) fn is_drained(&self) -> bool {
        self.pumps.iter().all(|pump| pump.try_recv() == Err(TryRecvError::Disconnected))
    }

    /// Waits until the logs have everything, or until the time `until`: a child process of a dead worker may keep the streams open.
    pub(super) fn drain_until(&self, until: Instant) {
        drain_until(&self.pumps, until);
    }

    /// Resizes the pseudo-terminals to the size of the terminals that they represent.
    pub(super) fn resize(&self) {
        for (master, stream) in &self.terminals {
            // Ignore errors: only the width of a progress bar depends on the size.
            let _ = match stream {
                StdStream::Out => same_size(master, io::stdout()),
                StdStream::Err => same_size(master, io::stderr()),
            };
        }
    }
}

/// Waits until the threads behind `pumps` have read their streams to the end, or until the time `until`.
pub(super) fn drain_until<'a>(pumps: impl IntoIterator<Item = &'a Receiver<()>>, until: Instant) {
    for pump in pumps {
        // Pumps send nothing. The wait ends when the pump drops its sender, or when the time is over.
        let _ = pump.recv_timeout(until.saturating_duration_since(Instant::now()));
    }
}

/// Returns whether stdout and stderr are the same terminal. Both must be terminals.
fn are_one_terminal() -> bool {
    match (rustix::fs::fstat(io::stdout()), rustix::fs::fstat(io::stderr())) {
        (Ok(out), Ok(err)) => out.st_rdev == err.st_rdev,
        _ => false,
    }
}

/// Opens a pseudo-terminal with the size of the launcher's terminal. It is not the controlling terminal of any process, so it
/// sends no Ctrl-C, and the kernel stops no process that writes to it.
fn terminal(stream: StdStream) -> io::Result<(OwnedFd, OwnedFd)> {
    let (master, slave) = open_terminal()?;
    // The real terminal already turns a newline into carriage return and newline, so the pseudo-terminal must not.
    let mut modes = tcgetattr(&slave)?;
    modes.output_modes -= OutputModes::OPOST;
    tcsetattr(&slave, OptionalActions::Now, &modes)?;
    match stream {
        StdStream::Out => same_size(&master, io::stdout())?,
        StdStream::Err => same_size(&master, io::stderr())?,
    }
    Ok((master, slave))
}

/// Copies the size of the terminal `like`.
fn same_size(master: &OwnedFd, like: impl AsFd) -> io::Result<()> {
    Ok(tcsetwinsize(master, tcgetwinsize(like)?)?)
}

/// Copies one stream.
struct StreamPump {
    log: File,
    tail: Arc<Mutex<OutputTail>>,
    screen: Option<Arc<Screen>>,
    /// Set if the screen gets whole lines, each with this text before it.
    prefixed: Option<(String, TerminalLines)>,
    stream: StdStream,
    /// Set for a terminal, whose log has final lines only.
    lines: Option<TerminalLines>,
}

impl StreamPump {
    fn run(mut self, mut source: File) {
        let mut buffer = vec![0; 64 << 10];
        loop {
            match source.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => self.take(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Reading a pseudo-terminal whose worker has ended returns EIO.
                Err(_) => break,
            }
        }
        if let Some(rest) = self.lines.as_ref().map(TerminalLines::rest).filter(|rest| !rest.is_empty()) {
            self.log(format!("{rest}\n").as_bytes());
        }
        let rest = self.prefixed.as_ref().map(|(prefix, lines)| (prefix, lines.rest()));
        if let Some(text) = rest.filter(|(_, rest)| !rest.is_empty()).map(|(prefix, rest)| format!("{prefix}{rest}\n"))
        {
            self.show(text.as_bytes());
        }
    }

    /// Writes to the screen.
    fn show(&mut self, bytes: &[u8]) {
        if let Some(screen) = &self.screen
            && let Err(error) = screen.show(self.stream, bytes)
        {
            // The run and its logs continue. A closed screen needs no message: the user has closed it, for example by `| head`.
            self.screen = None;
            if error.kind() != io::ErrorKind::BrokenPipe && !SCREEN_LOST.swap(true, Ordering::Relaxed) {
                let stream = self.stream;
                Screen::default().say(&format!(
                    "warning: {stream} shows no more of this run: {error}\n  hint: the run continues, and its logs have all output"
                ));
            }
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        // Write to the screen first, since a user waits for it.
        match &mut self.prefixed {
            None => self.show(bytes),
            Some((prefix, lines)) => {
                let mut text = String::new();
                lines.take(bytes, |line| text += &format!("{prefix}{line}\n"));
                self.show(text.as_bytes());
            }
        }
        self.tail.lock().take(bytes);
        match &mut self.lines {
            None => self.log(bytes),
            Some(lines) => {
                let mut text = String::new();
                lines.take(bytes, |line| {
                    text += line;
                    text.push('\n');
                });
                self.log(text.as_bytes());
            }
        }
    }

    fn log(&mut self, bytes: &[u8]) {
        if let Err(error) = self.log.write_all(bytes)
            && !LOG_LOST.swap(true, Ordering::Relaxed)
        {
            Screen::default().say(&format!("warning: logs/rank-*: a log cannot be written any more: {error}"));
        }
    }
}

/// Creates the folder of a worker in the folder of all logs, and removes an old `error.json`. `names` is the path below `logs`:
/// `rank-1`, or `attempt_0`, `1`.
///
/// # Errors
/// The folder cannot be written, or a link has its name.
pub(super) fn prepare(logs: &Path, names: &[String]) -> io::Result<Folder> {
    let folder = Folder::of_file(logs)?.ensure_folder(logs.file_name().unwrap_or_default())?;
    let folder = names.iter().try_fold(folder, |folder, name| folder.ensure_folder(name))?;
    folder.remove(failure_report::FILE_NAME)?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn streams_that_stay_open_share_one_limit() {
        // The time is over, so none of the open streams is waited for.
        let (open, pumps): (Vec<_>, Vec<_>) = (0..1000).map(|_| channel()).unzip();
        drain_until(&pumps, Instant::now());
        drop(open);
        // All streams have ended, so the wait ends without the limit.
        drain_until(&pumps, Instant::now() + Duration::from_secs(3600));
    }
}
