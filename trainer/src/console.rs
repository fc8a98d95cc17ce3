//! The screen: the one place of this crate that writes to stdout and stderr.
//!
//! Names of files, classes and tensors, and the texts of old summaries, come from others. Their control characters are escaped
//! ([`launch::console::printable`]), so that a terminal does not execute them.

use std::{
    fmt::Display,
    io::{self, ErrorKind, IsTerminal, Write},
    sync::{LazyLock, OnceLock},
};

use indicatif::{ProgressBar, WeakProgressBar};
use launch::console::printable;
use parking_lot::Mutex;
use rustix::io::Errno;

use crate::files::FileError;

/// The first error of [`print`].
static FIRST_PRINT_ERROR: OnceLock<String> = OnceLock::new();

/// The bar of [`set_bar`].
static BAR: Mutex<Option<WeakProgressBar>> = Mutex::new(None);

/// Whether stdout is a terminal. After a terminal has closed, the kernel no longer reports it as a terminal.
static TERMINAL: LazyLock<bool> = LazyLock::new(|| io::stdout().is_terminal());

/// Records whether stdout is a terminal. Call this function first, before the terminal can close.
pub fn start() {
    LazyLock::force(&TERMINAL);
}

/// Writes text to stdout, and a newline if the text does not end in one. [`check`] returns the first error.
pub fn print(text: impl Display) {
    match Stdout.write_all(whole_lines(text).as_bytes()).and_then(|()| Stdout.flush()) {
        // The reader of the pipe has seen enough (`| head`).
        Err(error) if error.kind() != ErrorKind::BrokenPipe => _ = FIRST_PRINT_ERROR.set(error.to_string()),
        _ => {}
    }
}

/// Writes text to stderr, and a newline if the text does not end in one. A closed stderr cannot be reported anywhere.
pub fn eprint(text: impl Display) {
    let _ = io::stderr().write_all(printable(&whole_lines(text)).as_bytes());
}

/// Sets the progress bar that [`eprint_above_bar`] hides while it writes, until the last clone of the bar is dropped.
pub fn set_bar(bar: &ProgressBar) {
    *BAR.lock() = Some(bar.downgrade());
}

/// Writes text to stderr, as [`eprint()`] does, above the progress bar. For threads that do not own the bar.
pub fn eprint_above_bar(text: impl Display) {
    let bar = BAR.lock().as_ref().and_then(WeakProgressBar::upgrade);
    match bar {
        Some(bar) => bar.suspend(|| eprint(text)),
        None => eprint(text),
    }
}

/// Checks that all text of [`print()`] was written.
///
/// # Errors
/// Stdout could not be written, for example on a full disk.
pub fn check() -> Result<(), FileError> {
    FIRST_PRINT_ERROR.get().map_or(Ok(()), |cause| Err(not_written(cause)))
}

/// Returns the error of a stdout that cannot be written.
pub fn not_written(cause: impl Display) -> FileError {
    let hint = "free some space where it goes, or send it elsewhere; a training run goes on with --resume";
    FileError::new("standard output", format!("cannot write: {cause}"), hint)
}

fn whole_lines(text: impl Display) -> String {
    let mut text = text.to_string();
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

/// Stdout for text: control characters are escaped. A terminal that has closed is like a pipe without a reader: writes fail
/// with [`ErrorKind::BrokenPipe`].
pub struct Stdout;

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        to_stdout(|mut stdout| stdout.write_all(printable(&text).as_bytes()))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        to_stdout(|mut stdout| stdout.flush())
    }
}

fn to_stdout(write: impl FnOnce(io::Stdout) -> io::Result<()>) -> io::Result<()> {
    let terminal = *TERMINAL;
    write(io::stdout()).map_err(|error| match error.raw_os_error() {
        // EIO is also the error of a damaged disk, so it is translated for terminals only.
        Some(code) if terminal && code == Errno::IO.raw_os_error() => ErrorKind::BrokenPipe.into(),
        _ => error,
    })
}
