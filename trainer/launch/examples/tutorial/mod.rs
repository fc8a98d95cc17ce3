//! What the examples share: joining the job over the transport of the command line, and printing.

use std::fmt::Arguments;
use std::io::Write;

use launch::{InitOptions, LaunchError, ProcessGroup};

/// Result of an example.
pub type Result = std::result::Result<(), Box<dyn std::error::Error>>;

/// Joins the job over the transport that the first argument names (`shm`, `tcp` or `mpi`), PyTorch's `init_process_group`.
///
/// # Errors
/// The argument names no transport, or the job cannot be joined.
pub fn join() -> std::result::Result<ProcessGroup, LaunchError> {
    let transport = std::env::args().nth(1).map(|word| word.parse()).transpose();
    let transport = transport.map_err(|error: String| LaunchError::usage(error, "p2p_blocking tcp"))?;
    InitOptions { transport, ..InitOptions::default() }.init()
}

/// Prints a line, in one write: several processes may share the screen.
///
/// # Errors
/// The output is closed.
pub fn print(line: Arguments<'_>) -> Result {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{line}\n").as_bytes())?;
    Ok(out.flush()?)
}
