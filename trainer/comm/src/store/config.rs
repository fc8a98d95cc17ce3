//! What the server and the clients of one rendezvous share.

use std::fmt;
use std::time::Duration;

use crate::auth::Secret;

/// Who meets at a rendezvous, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    /// The ranks of a job.
    Rank,
    /// The launchers of a job's nodes.
    Node,
}

impl Member {
    /// Returns the name of the setting that numbers the members.
    pub(super) fn setting(self) -> &'static str {
        match self {
            Member::Rank => "RANK",
            Member::Node => "--node-rank",
        }
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Member::Rank => "rank",
            Member::Node => "node",
        })
    }
}

/// Settings of a rendezvous, the same at both ends of its connections.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Lets members in, and nobody else.
    pub secret: Secret,
    /// Number of members.
    pub world: usize,
    /// What a member is called.
    pub member: Member,
    /// A member, or the server, whose host has not answered for this long is given up. Shorter outages of the network are
    /// survived.
    pub answer_limit: Duration,
}

impl StoreConfig {
    /// Describes the rendezvous of `world` ranks that are given up after 10 minutes without an answer.
    pub fn new(secret: Secret, world: usize) -> Self {
        Self { secret, world, member: Member::Rank, answer_limit: Duration::from_secs(600) }
    }
}
