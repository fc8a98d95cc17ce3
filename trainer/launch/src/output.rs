//! Where a worker's output goes: into its log, its last lines into memory for reports, and rank 0's to the screen as well.
//!
//! Rank 0 shall behave on the screen as if it had no launcher: where the launcher's stdout or stderr is a terminal, rank 0
//! gets a pseudo-terminal of the same size, so that progress bars are drawn, at the right width. Where both are the same
//! terminal rank 0 gets one for both, because two channels would lose the order in which a bar is taken away, a line
//! printed and the bar drawn again; then `stdout.log` has both, and `stderr.log` says so. A log of a terminal holds the
//! lines as they stood in the end, not each redraw.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{OptionalActions, OutputModes, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};

use super::terminal_lines::{Lines, Tail};

/// Lines that a report shows of each stream.
const TAIL: usize = 12;
/// A log that nobody can write to any more (disk full) is told once on the screen.
static LOG_LOST: AtomicBool = AtomicBool::new(false);

/// One of the launcher's own two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Out,
    Err,
}

impl Side {
    fn is_terminal(self) -> bool {
        match self {
            Self::Out => io::stdout().is_terminal(),
            Self::Err => io::stderr().is_terminal(),
        }
    }

    fn write(self, bytes: &[u8]) -> io::Result<()> {
        match self {
            // past std's line buffer: a bar has no newlines
            Self::Out => {
                let mut out = io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush())
            }
            Self::Err => io::stderr().lock().write_all(bytes),
        }
    }
}

/// The launcher's screen, which rank 0 and the launcher share.
#[derive(Debug, Default)]
pub struct Screen {
    /// The cursor stands behind text, such as a bar's.
    in_line: AtomicBool,
}

impl Screen {
    fn show(&self, side: Side, bytes: &[u8]) -> io::Result<()> {
        if let (Some(last), true) = (bytes.last(), side.is_terminal()) {
            self.in_line.store(*last != b'\n', Ordering::Relaxed);
        }
        side.write(bytes)
    }

    /// Shows the launcher's own words, on lines of their own, on stderr.
    pub fn say(&self, text: &str) {
        let start = if self.in_line.swap(false, Ordering::Relaxed) { "\n" } else { "" };
        // nobody is left to tell where stderr itself is gone
        let _ = Side::Err.write(format!("{start}{}\n", text.trim_end()).as_bytes());
    }
}

/// A worker's streams, from the launcher's side.
#[derive(Debug)]
pub(super) struct Output {
    stdout: Arc<Mutex<Tail>>,
    stderr: Arc<Mutex<Tail>>,
    /// Each ends when its stream has.
    pumps: Vec<Receiver<()>>,
    /// Pseudo-terminals, and which of the launcher's streams they stand for.
    terminals: Vec<(OwnedFd, Side)>,
}

/// The worker's ends.
pub(super) struct Ends {
    pub(super) stdout: Stdio,
    pub(super) stderr: Stdio,
}

impl Output {
    /// Opens the logs in `folder` and starts to fill them. `screen` is given for the rank that is shown.
    pub(super) fn open(folder: &Path, screen: Option<&Arc<Screen>>) -> io::Result<(Self, Ends)> {
        let log = |name: &str| File::options().append(true).create(true).open(folder.join(name));
        let (mut stdout_log, mut stderr_log) = (log("stdout.log")?, log("stderr.log")?);
        let mut output = Self {
            stdout: Arc::new(Mutex::new(Tail::new(TAIL))),
            stderr: Arc::new(Mutex::new(Tail::new(TAIL))),
            pumps: Vec::new(),
            terminals: Vec::new(),
        };
        let (Some(screen), true) = (screen, Side::Out.is_terminal() && Side::Err.is_terminal() && one_terminal())
        else {
            let stdout = output.channel(stdout_log, Side::Out, screen)?;
            let stderr = output.channel(stderr_log, Side::Err, screen)?;
            return Ok((output, Ends { stdout: stdout.into(), stderr: stderr.into() }));
        };
        stderr_log.write_all(b"(stdout and stderr were one terminal: see stdout.log)\n")?;
        stdout_log.flush()?;
        output.stderr = Arc::clone(&output.stdout);
        let end = output.channel(stdout_log, Side::Err, Some(screen))?;
        Ok((output, Ends { stdout: end.try_clone()?.into(), stderr: end.into() }))
    }

    /// One stream: returns the worker's end of it.
    fn channel(&mut self, log: File, side: Side, screen: Option<&Arc<Screen>>) -> io::Result<OwnedFd> {
        let tail = if side == Side::Out { &self.stdout } else { &self.stderr };
        let mut pump = Pump { log, tail: Arc::clone(tail), screen: screen.cloned(), side, lines: None };
        let (source, end): (File, OwnedFd) = if screen.is_some() && side.is_terminal() {
            let (master, slave) = terminal(side)?;
            pump.lines = Some(Lines::default());
            self.terminals.push((master.try_clone()?, side));
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

    /// Waits until everything that a dead worker has written is in its logs, up to `limit`: a process that it has left
    /// behind may keep the streams open.
    pub(super) fn drain(&self, limit: Duration) {
        let until = Instant::now() + limit;
        for pump in &self.pumps {
            let left = until.saturating_duration_since(Instant::now());
            // pumps send nothing: this ends when they hang up, or when time is up
            let _ = pump.recv_timeout(left);
        }
    }

    /// The last lines: stderr's, or stdout's where stderr has none.
    pub(super) fn last_lines(&self) -> (&'static str, Vec<String>) {
        let lines = |tail: &Mutex<Tail>| tail.lock().unwrap_or_else(PoisonError::into_inner).lines();
        match lines(&self.stderr) {
            none if none.is_empty() => ("stdout", lines(&self.stdout)),
            some => ("stderr", some),
        }
    }

    /// Gives the pseudo-terminals the size of the terminals that they stand for.
    pub(super) fn resize(&self) {
        for (master, side) in &self.terminals {
            // only the width of a bar depends on it
            let _ = match side {
                Side::Out => same_size(master, io::stdout()),
                Side::Err => same_size(master, io::stderr()),
            };
        }
    }
}

/// Whether stdout and stderr, both terminals, are the same one.
fn one_terminal() -> bool {
    match (rustix::fs::fstat(io::stdout()), rustix::fs::fstat(io::stderr())) {
        (Ok(out), Ok(err)) => out.st_rdev == err.st_rdev,
        _ => false,
    }
}

/// A pseudo-terminal as large as the launcher's own. Nobody's controlling terminal: no Ctrl-C comes through it, and no
/// process is stopped for writing to it.
fn terminal(side: Side) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = openpt(flags)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let slave = ioctl_tiocgptpeer(&master, flags)?;
    // the real terminal turns newlines into carriage return and newline; twice would be once too often
    let mut modes = tcgetattr(&slave)?;
    modes.output_modes -= OutputModes::OPOST;
    tcsetattr(&slave, OptionalActions::Now, &modes)?;
    match side {
        Side::Out => same_size(&master, io::stdout())?,
        Side::Err => same_size(&master, io::stderr())?,
    }
    Ok((master, slave))
}

fn same_size(master: &OwnedFd, like: impl AsFd) -> io::Result<()> {
    Ok(tcsetwinsize(master, tcgetwinsize(like)?)?)
}

/// Carries one stream.
struct Pump {
    log: File,
    tail: Arc<Mutex<Tail>>,
    screen: Option<Arc<Screen>>,
    side: Side,
    /// Set for a terminal: the log gets its lines.
    lines: Option<Lines>,
}

impl Pump {
    fn run(mut self, mut source: File) {
        let mut buffer = vec![0; 64 << 10];
        loop {
            match source.read(&mut buffer) {
                // a pseudo-terminal whose worker is gone gives EIO
                Ok(0) => break,
                Ok(read) => self.take(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        if let Some(rest) = self.lines.as_ref().map(Lines::rest).filter(|rest| !rest.is_empty()) {
            self.log(format!("{rest}\n").as_bytes());
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        // the screen first: a reader waits for it
        if let Some(screen) = &self.screen
            && screen.show(self.side, bytes).is_err()
        {
            // closed, as by `| head`: the run goes on, and its logs
            self.screen = None;
        }
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).take(bytes);
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

/// Makes the folder of a rank's logs and takes away an old `error.json`.
pub(super) fn prepare(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    match fs::remove_file(folder.join(super::failure_report::NAME)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
