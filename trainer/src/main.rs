//! `trainer`: parse → resolve → run → exit code.

use std::{
    panic::{self, AssertUnwindSafe},
    process::ExitCode,
};

use clap::Parser;
use trainer::{cli::Cli, commands, failure::Failure};

fn main() -> ExitCode {
    // a panic is a defect of this program: its place is said once, below, instead of a dump in the middle of a progress bar
    panic::set_hook(Box::new(|info| {
        let place = info.location().map(|place| format!(" at {}:{}", place.file(), place.line())).unwrap_or_default();
        eprintln!("internal error{place}: {}", info.payload_as_str().unwrap_or("no message"));
    }));
    let result = panic::catch_unwind(AssertUnwindSafe(|| commands::run(Cli::parse()))).unwrap_or_else(|_| {
        let message = "the program stopped at an internal error, shown above";
        Err(Failure::run(message, "please report it; checkpoints saved before are intact"))
    });
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(failure.code)
        }
    }
}
