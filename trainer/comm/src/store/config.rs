//! The settings that the server and the clients of one rendezvous share.

use std::fmt;
use std::time::Duration;

use crate::auth::Secret;

/// The kind of a rendezvous's members, for error messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberKind {
    /// The ranks of a job.
    Rank,
    /// The launchers of a job's nodes.
    Node,
}

impl MemberKind {
    /// Returns the name of the setting that holds a member's number.
    pub(super) fn setting(self) -> &'static str {
        match self {
            MemberKind::Rank => "RANK",
            MemberKind::Node => "--node-rank",
        }
    }
}

impl fmt::Display for MemberKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemberKind::Rank => "rank",
            MemberKind::Node => "node",
        })
    }
}

/// Settings of a rendezvous, the same at both ends of its connections.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// The secret that members must prove to join.
    pub secret: Secret,
    /// Number of members.
    pub world_size: usize,
    /// The kind of the members.
    pub member: MemberKind,
    /// A connection ends when the other end's host has not answered for this long. The connection survives shorter outages of the
    /// network.
    pub answer_timeout: Duration,
}

impl StoreConfig {
    /// Returns the settings for a rendezvous of `world_size` ranks, with an `answer_timeout` of 10 minutes.
    pub fn new(secret: Secret, world_size: usize) -> Self {
        Self { secret, world_size, member: MemberKind::Rank, answer_timeout: Duration::from_secs(600) }
    }
}
