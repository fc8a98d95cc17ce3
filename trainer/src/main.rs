//! `trainer`: parses the command line, runs the command and returns the exit code.

use std::{
    panic::{self, AssertUnwindSafe},
    process::ExitCode,
};

use clap::Parser;
use trainer::{cli::Cli, commands, device, diagnostics, failure::Failure};

fn main() -> ExitCode {
    // A panic is a defect of this program. Print its location once, below, instead of a dump inside a progress bar.
    panic::set_hook(Box::new(|info| {
        // `main` prints this failure at the end
        if info.payload_as_str().is_some_and(|text| Failure::of_panic(text).is_some()) {
            return;
        }
        let place = info.location().map(|place| format!(" at {}:{}", place.file(), place.line())).unwrap_or_default();
        eprintln!("internal error{place}: {}", info.payload_as_str().unwrap_or("no message"));
    }));
    let run = || {
        let cli = Cli::parse();
        diagnostics::start(&cli)?;
        device::configure();
        commands::run(cli)
    };
    let result = panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let message = "the program stopped at an internal error, shown above";
        let defect = || Failure::run(message, "please report it; checkpoints saved before are intact");
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(text.and_then(Failure::of_panic).unwrap_or_else(defect))
    });
    diagnostics::write_to_stderr();
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(failure.code)
        }
    }
}
