//! Standard output of a run, which may be a terminal that closes during the run.

use std::io::{self, ErrorKind, IsTerminal, Write};

/// Standard output. A terminal that has closed is like a pipe without a reader: writes fail with [`ErrorKind::BrokenPipe`].
pub struct StandardOutput {
    /// Detected at the start: a closed terminal is no terminal to the kernel.
    is_terminal: bool,
}

impl StandardOutput {
    /// Opens the standard output of this process.
    pub fn open() -> Self {
        Self { is_terminal: io::stdout().is_terminal() }
    }

    fn check<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| match error.raw_os_error() {
            // EIO is also the error of a damaged disk, so only a terminal's is translated.
            Some(code) if self.is_terminal && code == rustix::io::Errno::IO.raw_os_error() => {
                ErrorKind::BrokenPipe.into()
            }
            _ => error,
        })
    }
}

impl Write for StandardOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.check(io::stdout().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.check(io::stdout().flush())
    }
}
