//! The parameters of the rendezvous of launchers on several nodes.

use std::net::Ipv6Addr;

use super::environment::is_loopback;
use super::error::{LaunchError, Result};
use super::secret;
use comm::Secret;

/// The parameters of the rendezvous of launchers on several nodes, like torchrun's class of this name.
#[derive(Debug, Clone)]
pub struct RendezvousParameters {
    /// `--nnodes`.
    pub nnodes: usize,
    /// `--node-rank`.
    pub node_rank: usize,
    /// `--master-addr`: host of node 0.
    pub master_addr: String,
    /// `--master-port`: where node 0's launcher listens.
    pub master_port: u16,
    /// Secret that only the launchers of the job know. `None` is allowed on a loopback address only: node 0 then makes a secret
    /// and passes it to the other nodes.
    pub secret: Option<Secret>,
}

/// Most nodes, and most ranks, of a job. A larger number is a mistake, and would cost memory before the job fails.
pub(super) const MOST_MEMBERS: usize = 1 << 16;

impl RendezvousParameters {
    /// Checks the values of the command line. A secret is required unless the address is this machine's loopback: without one,
    /// any process that reaches the port could join.
    ///
    /// # Errors
    /// A number is out of range, or there is no secret.
    pub fn new(
        nnodes: usize,
        node_rank: usize,
        master_addr: String,
        master_port: u16,
        secret: Option<Secret>,
    ) -> Result<Self> {
        if node_rank >= nnodes {
            return Err(LaunchError::usage(
                format!("--node-rank {node_rank} is not below --nnodes {nnodes}"),
                "nodes count from 0: the first of two is --node-rank 0, the second --node-rank 1",
            ));
        }
        if master_port == 0 {
            return Err(LaunchError::usage(
                "the port of node 0 is not set, and the other nodes could not know it",
                "--master-port PORT: a free port of node 0, the same on all nodes",
            ));
        }
        if nnodes > MOST_MEMBERS {
            return Err(LaunchError::usage(
                format!("--nnodes {nnodes} is more than a job may have, {MOST_MEMBERS}"),
                "nodes are machines: --nnodes 2 for two; --cpus or --gpus counts the workers on each",
            ));
        }
        // `[::1]`, as in a URL, is an IPv6 address.
        let inner = master_addr.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).map(str::to_owned);
        let master_addr = inner.filter(|inner| inner.parse::<Ipv6Addr>().is_ok()).unwrap_or(master_addr);
        if secret.is_none() && !is_loopback(&master_addr) {
            return Err(LaunchError::usage(
                format!(
                    "--nnodes {nnodes} over {master_addr} needs a secret: without one, any process that reaches the port could join"
                ),
                secret::HINT,
            ));
        }
        Ok(Self { nnodes, node_rank, master_addr, master_port, secret })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_address_may_have_brackets() {
        let address = |text: &str| RendezvousParameters::new(2, 0, text.to_owned(), 29500, None).unwrap().master_addr;
        assert_eq!(
            (address("[::1]"), address("::1"), address("127.0.0.1")),
            ("::1".into(), "::1".into(), "127.0.0.1".into())
        );
    }
}
