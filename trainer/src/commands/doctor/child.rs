//! Runs checks that may hang or crash in another `doctor` process.

use std::{
    io::Read,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Timeout for the other process, which must create a CUDA context or initialize MPI.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Runs `trainer doctor` with `flags`, and returns its output.
///
/// # Errors
/// The process fails or does not end in time. The error of a failed process is the first line of its stderr.
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
    let deadline = Instant::now() + TIMEOUT;
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
            None => {
                // The process hangs in the driver or in MPI.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("no answer for {} seconds", TIMEOUT.as_secs()));
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
