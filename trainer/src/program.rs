//! The whole program: parses the command line, runs the command and returns the exit code.

mod arguments;

use std::{
    ffi::OsString,
    panic::{self, AssertUnwindSafe},
    process::ExitCode,
};

use crate::{
    cli::{self, Cli, DATA_DIR},
    commands, console, device, diagnostics,
    failure::Failure,
    signals,
};
use clap::Parser;

/// Runs the command line of this process and returns the exit code.
///
/// A program with more networks and data sets registers them ([`models::register`], [`data::formats::register`]) and then calls
/// this function. The workers of a run are processes of the same program, with other environment variables. So each worker
/// registers the same names.
pub fn main() -> ExitCode {
    if let Some(code) = launch::helper::run_if_asked() {
        return ExitCode::from(code);
    }
    console::start();
    // A panic is a defect of this program. Print its location once, below, instead of a dump inside a progress bar.
    panic::set_hook(Box::new(|info| {
        // `main` prints this failure at the end.
        if info.payload_as_str().is_some_and(|text| Failure::of_panic(text).is_some()) {
            return;
        }
        let location = info.location().map(|at| format!(" at {}:{}", at.file(), at.line())).unwrap_or_default();
        console::eprint(format_args!("internal error{location}: {}", info.payload_as_str().unwrap_or("no message")));
    }));
    // A worker's report to its launcher is written when it panics, before `main` converts the panic below.
    launch::explain_panics(|text| {
        Failure::of_panic(text).map(|failure| (failure.message, failure.hint.unwrap_or_default()))
    });
    let run = || {
        let words = arguments::normalized(std::env::args_os())?;
        let cli = match Cli::try_parse_from(&words) {
            Ok(cli) => cli.with_data_dir(std::env::var_os(DATA_DIR)),
            // `console` escapes control characters: the arguments may have file names.
            Err(mistake) if mistake.use_stderr() => {
                if let Some(failure) = arguments::explain(&mistake, &words) {
                    return Err(failure);
                }
                console::eprint(mistake.render());
                if let Some(hint) = cli::hint_of(&mistake, &words) {
                    console::eprint(format_args!("  hint: {hint}"));
                }
                return Ok(mistake.exit_code() as u8);
            }
            Err(help) => help.exit(),
        };
        signals::install_for_every_command()?;
        check_threads(std::env::var_os(launch::cores::RAYON_NUM_THREADS))?;
        diagnostics::start(&cli)?;
        device::configure();
        commands::run(cli)
    };
    let result = panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let message = "the program stopped at an internal error, shown above";
        let defect = || Failure::run(message, "please report it; checkpoints saved before are intact");
        Err(Failure::of_panic_value(&*panic).unwrap_or_else(defect))
    });
    device::save_kernels();
    diagnostics::write_to_stderr();
    match result.and_then(|code| console::check().map(|()| code).map_err(Failure::from)) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            console::eprint(format_args!("error: {failure}"));
            ExitCode::from(failure.code)
        }
    }
}

/// Checks `RAYON_NUM_THREADS`, the number of threads of a process. 0 means all cores. rayon would ignore a value that is not a
/// number.
///
/// # Errors
/// The value is not a number, or is more threads than a process can start.
fn check_threads(variable: Option<OsString>) -> Result<(), Failure> {
    const MOST: usize = 1024;
    let Some(text) = variable.filter(|text| !text.is_empty()) else { return Ok(()) };
    match text.to_str().and_then(|text| text.parse::<usize>().ok()) {
        Some(0..=MOST) => Ok(()),
        _ => Err(Failure::usage(
            format!("RAYON_NUM_THREADS={}: it is not a number from 0 to {MOST}", text.display()),
            "it is the number of threads of a process; without it, a process has one per core",
        )),
    }
}
