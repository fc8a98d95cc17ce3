//! Reads variables, with errors that name the variable.

use super::{Variables, WorkerRole};
use crate::error::{LaunchError, Result};
use crate::rendezvous_parameters::MOST_MEMBERS;

/// Environment variables. An empty variable counts as not set.
pub(super) struct VariableReader<'a>(pub(super) &'a Variables);

impl VariableReader<'_> {
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    pub(super) fn owned(&self, name: &str) -> Option<String> {
        self.text(name).map(str::to_owned)
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| {
            LaunchError::usage(
                format!("{name}={text} is not a whole number"),
                format!("{name} comes from a launcher or the shell: correct it, or unset it and say --launcher local"),
            )
        })
    }

    pub(super) fn port(&self, name: &str) -> Result<Option<u16>> {
        match self.number(name)? {
            None => Ok(None),
            Some(port @ 1..=65535) => Ok(Some(port as u16)),
            Some(port) => {
                Err(LaunchError::usage(format!("{name}={port} is not a port"), "ports are numbers from 1 to 65535"))
            }
        }
    }

    /// Returns a number that must be set because the variable `because` is set.
    pub(super) fn need(&self, name: &str, because: &str) -> Result<usize> {
        self.number(name)?.ok_or_else(|| self.missing(name, because))
    }

    pub(super) fn missing(&self, name: &str, because: &str) -> LaunchError {
        LaunchError::usage(
            format!("{because}={} is set but {name} is not", self.text(because).unwrap_or_default()),
            format!(
                "a launcher sets both: set {name} too, or unset {because}; --launcher local ignores them and starts \
                 workers from here"
            ),
        )
    }
}

/// Checks that ranks are below world sizes, and that the local world is within the global one. `names` are the variables of
/// rank, world size, local rank and local world size.
pub(super) fn check(role: &WorkerRole, names: [&str; 4]) -> Result<()> {
    let below = |(small, value): (&str, usize), (large, limit): (&str, usize)| {
        if value < limit {
            return Ok(());
        }
        Err(LaunchError::usage(
            format!("{small}={value} is not below {large}={limit}"),
            "ranks count from 0; is a variable left over from another job? --launcher local ignores all of them",
        ))
    };
    let [rank, world_size, local_rank, local_world_size] = names;
    if role.world_size > MOST_MEMBERS {
        return Err(LaunchError::usage(
            format!("{world_size}={} is more ranks than a job may have, {MOST_MEMBERS}", role.world_size),
            format!(
                "{world_size} comes from a launcher or the shell: correct it, or unset it and say --launcher local"
            ),
        ));
    }
    below((rank, role.rank), (world_size, role.world_size))?;
    below((local_rank, role.local_rank), (local_world_size, role.local_world_size))?;
    if role.local_world_size > role.world_size {
        return Err(LaunchError::usage(
            format!("{local_world_size}={} is more than {world_size}={}", role.local_world_size, role.world_size),
            "a host has at most all ranks of the job; is a variable left over from another job?",
        ));
    }
    Ok(())
}

/// Returns whether `host` is a loopback address or name, which can only be this host.
pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}
