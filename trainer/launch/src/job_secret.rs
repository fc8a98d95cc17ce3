//! The secret of a job on several nodes: from the user, or from node 0 if the job's address is a loopback address.

use std::time::Duration;

use super::error::{LaunchError, Result};
use super::local_secret::{self, SecretOffer};
use super::node_failure::RendezvousError;
use super::node_wait::NodeWait;
use super::rendezvous_parameters::RendezvousParameters;
use comm::Secret;

/// The secret of the launchers of a job.
pub(super) struct JobSecret {
    pub(super) secret: Secret,
    /// On node 0, if the user has given no secret: offers the secret to the other nodes.
    _offer: Option<SecretOffer>,
}

impl JobSecret {
    /// Returns the user's secret. If the user has set none, node 0 makes a secret, and the other nodes wait for it.
    ///
    /// # Errors
    /// Node 0 does not start in time, a process of another user offers a secret, or a signal ends the wait.
    pub(super) fn of(
        parameters: &RendezvousParameters,
        wait: &mut NodeWait<'_>,
    ) -> std::result::Result<Self, RendezvousError> {
        if let Some(secret) = &parameters.secret {
            return Ok(Self { secret: secret.clone(), _offer: None });
        }
        let name = local_secret::name(&["nodes".to_owned(), parameters.master_port.to_string()]);
        if parameters.node_rank == 0 {
            let secret = random_secret()?;
            let offer = SecretOffer::new(&name, &secret)?;
            return Ok(Self { secret, _offer: Some(offer) });
        }
        loop {
            if let Some(secret) = local_secret::request(&name)? {
                return Ok(Self { secret, _offer: None });
            }
            let missing = "its launcher does not run on this machine yet";
            if wait.is_over() {
                let node = parameters.node_rank;
                return Err(LaunchError::failed(
                    format!("node {node} cannot join node 0 at {}: {missing}", wait.address()),
                    "is the job started on node 0, as the same user and with the same --master-port? A loopback address \
                     leads to this machine only",
                )
                .into());
            }
            wait.check_signals_and_notify("node 0", Some(missing))?;
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Makes a new secret.
pub(super) fn random_secret() -> Result<Secret> {
    Secret::random().map_err(LaunchError::from)
}
