//! Checks that may hang or end the process: another `doctor` runs them.

use std::{
    io::Read,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Timeout for the other process, which has to start its own CUDA context or MPI.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs `trainer doctor` with `flags`, and returns what it prints.
///
/// # Errors
/// It fails, with the first line of its standard error, or does not end in time.
pub(super) fn ask(flags: &[&str]) -> Result<String, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut child = Command::new(program)
        .arg("doctor")
        .args(flags)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
            None => {
                // The process hangs in the driver or in MPI, and will not answer any more.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("no answer for {} seconds", PATIENCE.as_secs()));
            }
        }
    };
    let (mut out, mut said) = (String::new(), String::new());
    let streams = (child.stdout.take(), child.stderr.take());
    // The pipes hold the few bytes of each stream, so the process never blocks on a write.
    streams.0.map(|mut stream| stream.read_to_string(&mut out));
    streams.1.map(|mut stream| stream.read_to_string(&mut said));
    match status.success() {
        true => Ok(out.trim().to_owned()),
        false => Err(said.lines().next().unwrap_or("it said nothing").to_owned()),
    }
}
