//! The launcher's screen. Only this module writes to stdout and stderr, except for an agent's first line (`agent.rs`).

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use super::console::printable;
use super::error::Result;
use super::signals;
use super::thread::start_thread;

/// Longest wait at the end for a screen that nobody reads.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// The launcher's stdout or stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StdStream {
    Out,
    Err,
}

impl fmt::Display for StdStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Out => "stdout",
            Self::Err => "stderr",
        })
    }
}

impl StdStream {
    pub(super) fn is_terminal(self) -> bool {
        match self {
            Self::Out => io::stdout().is_terminal(),
            Self::Err => io::stderr().is_terminal(),
        }
    }

    fn write(self, bytes: &[u8]) -> io::Result<()> {
        match self {
            // Flush the line buffer of std, since a progress bar has no newlines.
            Self::Out => {
                let mut out = io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush())
            }
            Self::Err => io::stderr().lock().write_all(bytes),
        }
    }
}

/// The launcher's screen, which rank 0 and the launcher share.
///
/// A started screen has its own thread, the only one that writes. So the supervisor never waits for a screen that nobody reads:
/// a paused terminal, or a full pipe.
#[derive(Debug, Default)]
pub(super) struct Screen {
    /// The queue of the thread. Unset for a screen without one, which writes at once.
    queue: Option<Sender<ScreenWrite>>,
}

/// Text for the screen, in the order in which it is shown.
#[derive(Debug)]
struct ScreenWrite {
    stream: StdStream,
    bytes: Vec<u8>,
    /// The text starts on a new line.
    is_message: bool,
    /// Gets the result, for a caller that waits for it.
    done: Option<Sender<io::Result<()>>>,
}

impl ScreenWrite {
    /// Writes the text. `in_line` tells whether the cursor is behind text, for example behind a progress bar.
    fn write(&self, in_line: &mut bool) -> io::Result<()> {
        if self.is_message && std::mem::take(in_line) {
            self.stream.write(b"\n")?;
        }
        if let (Some(last), true) = (self.bytes.last(), self.stream.is_terminal()) {
            *in_line = *last != b'\n';
        }
        self.stream.write(&self.bytes)
    }
}

impl Screen {
    /// Starts the thread that writes.
    ///
    /// # Errors
    /// No thread is left.
    pub(super) fn start() -> Result<Self> {
        let (queue, writes) = channel::<ScreenWrite>();
        start_thread("screen", "the screen", move || {
            let mut in_line = false;
            for write in writes {
                let result = write.write(&mut in_line);
                if let Some(done) = write.done {
                    // The caller may have stopped to wait.
                    let _ = done.send(result);
                }
            }
        })?;
        Ok(Self { queue: Some(queue) })
    }

    /// Shows a worker's output, and returns when it is written. A worker whose output nobody reads thus waits, as it would
    /// without a launcher.
    pub(super) fn show(&self, stream: StdStream, bytes: &[u8]) -> io::Result<()> {
        let (done, written) = channel();
        self.write(ScreenWrite { stream, bytes: bytes.to_vec(), is_message: false, done: Some(done) });
        written.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))
    }

    fn write(&self, write: ScreenWrite) {
        match &self.queue {
            // The thread runs as long as the queue exists.
            Some(queue) => _ = queue.send(write),
            None => {
                let result = write.write(&mut false);
                // A closed stderr cannot be reported anywhere
                _ = write.done.map(|done| done.send(result));
            }
        }
    }

    /// Waits until all earlier text is written. Call this function before the process ends. If nobody reads the screen, the text is
    /// lost after [`FLUSH_TIMEOUT`], and from then on a signal ends the process at once: what it still writes would block it for ever.
    pub(super) fn end(&self) {
        if !self.flush(FLUSH_TIMEOUT) {
            signals::end_at_once();
        }
    }

    /// Waits up to `limit` until all earlier text is written. Returns whether it is.
    fn flush(&self, limit: Duration) -> bool {
        let (done, written) = channel();
        self.write(ScreenWrite { stream: StdStream::Err, bytes: Vec::new(), is_message: false, done: Some(done) });
        written.recv_timeout(limit).is_ok()
    }

    /// Returns a function that writes messages with [`Screen::say`], for other threads.
    pub(super) fn message_writer(self: &Arc<Self>) -> impl Fn(&str) + Send + 'static {
        let screen = Arc::clone(self);
        move |text| screen.say(text)
    }

    /// Shows a message of the launcher on stderr, starting on a new line. Does not wait until the message is written, if the screen
    /// has a thread.
    pub(super) fn say(&self, text: &str) {
        let bytes = format!("{}\n", printable(text.trim_end())).into_bytes();
        self.write(ScreenWrite { stream: StdStream::Err, bytes, is_message: true, done: None });
    }
}

/// How a worker's output is shown on the screen.
#[derive(Debug, Clone)]
pub(super) struct OnScreen {
    pub(super) screen: Arc<Screen>,
    /// The text before each line, if several workers are shown on the screen. `None` if only this worker is.
    pub(super) prefix: Option<String>,
}

/// Copies the output of a program on another host to the screen, line by line.
pub(super) struct LineSink {
    screen: Arc<Screen>,
    stream: StdStream,
    prefix: Option<String>,
}

impl LineSink {
    /// Returns a sink on standard output. `prefix` is the text before each line.
    pub(super) fn stdout(screen: &Arc<Screen>, prefix: Option<String>) -> Self {
        Self { screen: Arc::clone(screen), stream: StdStream::Out, prefix }
    }

    /// Returns a sink on standard error.
    pub(super) fn stderr(screen: &Arc<Screen>, prefix: Option<String>) -> Self {
        Self { screen: Arc::clone(screen), stream: StdStream::Err, prefix }
    }

    /// Writes one line, with control characters escaped. A closed screen does not end the job.
    pub(super) fn line(&self, line: &str) {
        let prefix = self.prefix.as_deref().unwrap_or_default();
        let _ = self.screen.show(self.stream, format!("{prefix}{}\n", printable(line)).as_bytes());
    }

    /// Copies all lines of `source`.
    pub(super) fn copy(&self, source: impl io::BufRead) {
        for line in source.split(b'\n').map_while(io::Result::ok) {
            self.line(String::from_utf8_lossy(&line).trim_end_matches('\r'));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_do_not_wait_for_a_screen_that_does_not_take_them() {
        // The thread of this screen is busy with an earlier text.
        let (queue, writes) = channel();
        let screen = Screen { queue: Some(queue) };
        screen.say("first");
        assert!(!screen.flush(Duration::ZERO));
        screen.say("second");
        let texts: Vec<String> = writes
            .try_iter()
            .map(|write| String::from_utf8(write.bytes).unwrap())
            .filter(|text| !text.is_empty())
            .collect();
        assert_eq!(texts, ["first\n", "second\n"], "the order stays");
    }
}
