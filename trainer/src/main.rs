//! `trainer`: parses the command line, runs the command and returns the exit code.

use std::{
    io::{self, Write},
    panic::{self, AssertUnwindSafe},
    process::ExitCode,
};

use clap::Parser;
use trainer::{cli::Cli, commands, diagnostics, failure::Failure, signals};

fn main() -> ExitCode {
    // A panic is a defect of this program. Print its location once, below, instead of a dump inside a progress bar.
    panic::set_hook(Box::new(|info| {
        // `main` prints this failure at the end
        if info.payload_as_str().is_some_and(|text| Failure::of_panic(text).is_some()) {
            return;
        }
        let place = info.location().map(|place| format!(" at {}:{}", place.file(), place.line())).unwrap_or_default();
        print_error(format_args!("internal error{place}: {}", info.payload_as_str().unwrap_or("no message")));
    }));
    let run = || {
        let cli = Cli::parse();
        signals::install_for_every_command()?;
        diagnostics::start(&cli)?;
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
            print_error(format_args!("error: {failure}"));
            ExitCode::from(failure.code)
        }
    }
}

/// Prints a line on stderr. `eprintln!` would panic where the terminal has closed, and hide the exit code.
fn print_error(line: std::fmt::Arguments) {
    let _ = writeln!(io::stderr(), "{line}");
}
