//! `trainer [train]`: trains a network.

use super::{child, hosts};
use crate::cli::TrainArgs;
use crate::failure::Failure;
use crate::run;
use launch::environment;

/// Trains and returns the exit code.
///
/// # Errors
/// See [`run::run`], and with `-H` [`launch::SshLauncher::run`].
pub(super) fn run(arguments: &TrainArgs) -> Result<u8, Failure> {
    let variables = environment::variables();
    child::end_with_parent(&variables);
    let mut arguments = arguments.clone();
    hosts::apply_node_plan(&mut arguments, &variables)?;
    match hosts::requested_hosts(&arguments.job)? {
        Some(requested) => hosts::train(&arguments, &requested, variables),
        None => run::run(&arguments, variables),
    }
}
