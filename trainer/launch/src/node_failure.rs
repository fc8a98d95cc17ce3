//! The messages that launchers exchange about nodes and failures, and the error of a rendezvous.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::LaunchError;
use super::rendezvous_parameters::RendezvousParameters;
use comm::{CommError, ErrorKind};

/// A node's description, which its launcher sends to the other launchers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeInfo {
    pub(super) workers: usize,
    pub(super) host: String,
    pub(super) max_restarts: usize,
}

/// The first failure of a job, as its node reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeFailure {
    pub(super) node: usize,
    pub(super) what: String,
    /// The signal with which a user has stopped the job on that node. Then nothing has failed.
    pub(super) stopped_by: Option<i32>,
    /// Whether the job may be started again.
    pub(super) restartable: bool,
    /// How the connection to `node` broke, if this node has noticed that it is broken. Then `what` names the node.
    #[serde(skip)]
    pub(super) broken: Option<ErrorKind>,
}

impl NodeFailure {
    /// Makes the failure for an error of the launchers' store. The store's members are nodes, and node 0 hosts the store.
    ///
    /// A launcher that has ended closes its connections, and does not join again. After an outage of the network both launchers
    /// still run, so the job may be started again.
    pub(super) fn of(
        parameters: &RendezvousParameters,
        nodes: &[NodeInfo],
        limit: Duration,
        error: &CommError,
    ) -> Self {
        let node = error.culprit.unwrap_or(0);
        let host = match nodes.get(node) {
            Some(info) => format!(" ({})", info.host),
            None if node == 0 => format!(" ({})", parameters.master_addr),
            None => String::new(),
        };
        let what = match error.kind {
            ErrorKind::NoAnswer => format!("no answer from node {node} for {} s{host}", limit.as_secs_f64()),
            ErrorKind::Reset => format!("node {node}{host} has reset the connection"),
            _ => format!("the launcher of node {node}{host} is gone"),
        };
        let restartable = matches!(error.kind, ErrorKind::NoAnswer | ErrorKind::Reset);
        Self { node, what, stopped_by: None, restartable, broken: Some(error.kind) }
    }

    /// Returns the failure as one sentence. The text of a broken connection names the node already.
    pub(super) fn headline(&self) -> String {
        match self.broken {
            Some(_) => self.what.clone(),
            None => format!("node {}: {}", self.node, self.what),
        }
    }

    /// Returns the failure as an error of this launcher.
    pub(super) fn to_error(&self) -> LaunchError {
        LaunchError::failed(self.headline(), self.hint().unwrap_or_default())
    }

    /// Returns what the user can do about a broken connection.
    pub(super) fn hint(&self) -> Option<&'static str> {
        match self.broken? {
            ErrorKind::NoAnswer => Some(
                "the network between the nodes was down, or that machine is; a larger timeout ([parallel] timeout_s) survives \
                 longer outages, and --max-restarts N starts the job again",
            ),
            // The kernel of a machine whose launcher was killed resets the connection if messages were waiting in it.
            ErrorKind::Reset => Some(
                "its launcher was killed (then its screen says more), or the network between the nodes was down for too long; \
                 --max-restarts N starts the job again",
            ),
            _ => Some("it has ended or was killed: its screen says more"),
        }
    }
}

/// Why the rendezvous of launchers failed.
pub(super) enum RendezvousError {
    Failed(LaunchError),
    /// The connection to another node has broken, or another node has reported a failure.
    Lost(NodeFailure),
    /// A user's signal, here or on another node, has interrupted the wait.
    Interrupted(i32),
}

impl From<NodeFailure> for RendezvousError {
    fn from(failure: NodeFailure) -> Self {
        match failure.stopped_by {
            Some(signal) => Self::Interrupted(signal),
            None => Self::Lost(failure),
        }
    }
}

impl From<LaunchError> for RendezvousError {
    fn from(error: LaunchError) -> Self {
        Self::Failed(error)
    }
}
