//! One file a subcommand: puts the parts together.

mod bench;
mod compare;
mod data;
mod doctor;
mod ending;
mod eval;
mod export;
mod models;
mod place;
mod resolve;
mod start;
mod table;
mod train;
mod workers;

use std::path::PathBuf;

use serde::Serialize;

use crate::cli::{BenchCommand, Cli, Command};
use crate::failure::Failure;

/// Runs the command line; gives the exit code.
///
/// # Errors
/// Whatever ended the command, with its exit code.
pub fn run(cli: Cli) -> Result<u8, Failure> {
    match cli.command {
        None => train::run(cli.train),
        Some(Command::Train(arguments)) => train::run(arguments),
        Some(Command::Compare(arguments)) => compare::run(&arguments),
        Some(Command::Eval(arguments)) => eval::run(&arguments).map(|()| 0),
        Some(Command::Export(arguments)) => export::run(&arguments).map(|()| 0),
        Some(Command::Models { json }) => models::run(json).map(|()| 0),
        Some(Command::Table(arguments)) => table::run(&arguments).map(|()| 0),
        Some(Command::Data(command)) => data::run(command),
        Some(Command::Doctor(arguments)) => doctor::run(&arguments).map(|()| 0),
        Some(Command::Bench(BenchCommand::Allreduce(arguments))) => bench::run(&arguments),
    }
}

fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::run(error, "please report this"))?;
    println!("{text}");
    Ok(())
}

/// `~/.cache/trainer` or what `XDG_CACHE_HOME` says: where data sets are kept when nothing names a folder.
fn cache_folder() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    cache.or_else(home).unwrap_or_else(std::env::temp_dir).join("trainer")
}
