//! One file or folder per subcommand, and helpers that they share: `child`, `hosts`, `saved_network`, `temporary_logs`, `views`.

mod bench;
mod child;
mod compare;
mod data;
mod doctor;
mod eval;
mod export;
mod hosts;
mod launch;
mod models;
mod predict;
mod saved_network;
mod scaling;
mod sweep;
mod table;
mod temporary_logs;
mod train;
mod views;

use serde::Serialize;

use crate::cli::{BenchCommand, Cli, Command};
use crate::console;
use crate::device;
use crate::failure::Failure;

/// Runs the command line and returns the exit code.
///
/// # Errors
/// The error that ended the command, with its exit code.
pub fn run(cli: Cli) -> Result<u8, Failure> {
    device::check_kernels()?;
    match cli.command {
        None => train::run(&cli.train),
        Some(Command::Train(arguments)) => train::run(&arguments),
        Some(Command::Launch(arguments)) => launch::run(&arguments),
        Some(Command::Compare(arguments)) => compare::run(&arguments),
        Some(Command::Sweep(arguments)) => sweep::run(&arguments),
        Some(Command::Eval(arguments)) => eval::run(&arguments).map(|()| 0),
        Some(Command::Predict(arguments)) => predict::run(&arguments).map(|()| 0),
        Some(Command::Export(arguments)) => export::run(&arguments).map(|()| 0),
        Some(Command::Models { json }) => models::run(json).map(|()| 0),
        Some(Command::Table(arguments)) => table::run(&arguments).map(|()| 0),
        Some(Command::Data(command)) => data::run(command),
        Some(Command::Doctor(arguments)) => doctor::run(&arguments).map(|()| 0),
        Some(Command::Bench(BenchCommand::Allreduce(arguments))) => bench::run(&arguments),
        Some(Command::Bench(BenchCommand::Scaling(arguments))) => scaling::run(&arguments).map(|()| 0),
    }
}

fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::run(error, "please report this"))?;
    console::print(&text);
    Ok(())
}
