//! `trainer [train]`: trains a network.

use super::compare;
use crate::cli::TrainArgs;
use crate::failure::Failure;
use crate::run;
use launch::environment;

/// Trains and returns the exit code.
///
/// # Errors
/// See [`run::run`].
pub(super) fn run(arguments: &TrainArgs) -> Result<u8, Failure> {
    let variables = environment::variables();
    compare::follow(&variables);
    run::run(arguments, variables)
}
