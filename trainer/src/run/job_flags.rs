//! Refuses flags about nodes and restarts that would have no effect.

use crate::cli::JobArgs;
use crate::failure::Failure;
use comm::Secret;
use launch::{
    RendezvousParameters, Role,
    environment::{Launcher, NodeAssignment},
};

/// Default of `--master-addr`.
pub(crate) const LOOPBACK: &str = "127.0.0.1";

/// One node of a job on several nodes.
#[derive(Debug, Clone)]
pub(crate) struct NodeOfJob {
    pub nodes: usize,
    /// Index of this node.
    pub node_rank: usize,
    /// Host of node 0.
    master_addr: String,
    /// Port on which node 0's launcher listens.
    master_port: u16,
}

impl NodeOfJob {
    /// Reads the node from Kubeflow's variables (`share`) or from the flags. `None` for a job on one node.
    pub(crate) fn of(flags: &JobArgs, share: Option<&NodeAssignment>) -> Option<Self> {
        if let Some(share) = share.filter(|share| share.nodes > 1) {
            let &NodeAssignment { nodes, node_rank, master_port, .. } = share;
            return Some(Self { nodes, node_rank, master_addr: share.master_addr.clone(), master_port });
        }
        let nodes = flags.nnodes.filter(|nodes| *nodes > 1)?;
        Some(Self {
            nodes,
            node_rank: flags.node_rank.unwrap_or(0),
            master_addr: flags.master_addr.clone().unwrap_or_else(|| LOOPBACK.to_owned()),
            master_port: flags.master_port.unwrap_or(0),
        })
    }

    /// Returns the address of the job, `HOST:PORT`.
    pub(crate) fn address(&self) -> String {
        format!("{}:{}", self.master_addr, self.master_port)
    }

    /// Returns the parameters of the nodes' rendezvous.
    ///
    /// # Errors
    /// The index of the node is not below the number of nodes, or a secret is missing.
    pub(crate) fn rendezvous(&self, secret: Option<Secret>) -> Result<RendezvousParameters, Failure> {
        let address = self.master_addr.clone();
        Ok(RendezvousParameters::new(self.nodes, self.node_rank, address, self.master_port, secret)?)
    }
}

/// Checks the flags against the launcher that has started this process.
///
/// # Errors
/// A flag has no effect in this process, or contradicts its launcher.
pub(super) fn check(job: &JobArgs, role: &Role) -> Result<(), Failure> {
    if job.nnodes == Some(0) {
        return Err(Failure::usage("--nnodes 0: a job needs at least one machine", "use --nnodes 1 or more"));
    }
    match role {
        Role::Worker(worker) if worker.launcher == Launcher::Builtin => Ok(()),
        Role::Worker(_) => match given(job).into_iter().next() {
            Some((flag, value)) => Err(Failure::usage(
                format!("{flag} {value} has no effect: {role}"),
                format!("leave {flag} out; or say --launcher local to start workers from here"),
            )),
            None => Ok(()),
        },
        Role::Local(Some(share)) => check_share(job, share),
        Role::Local(None) => match (job.nnodes.unwrap_or(1), job.node_rank) {
            (1, Some(rank @ 1..)) => Err(Failure::usage(
                format!("--node-rank {rank} is not below --nnodes 1"),
                "say how many machines the job has: --nnodes N",
            )),
            _ => Ok(()),
        },
    }
}

/// Checks that a run in one process has no flag that only a launcher uses.
///
/// # Errors
/// `--max-restarts` is set.
pub(super) fn check_one_process(job: &JobArgs) -> Result<(), Failure> {
    match job.max_restarts {
        None | Some(0) => Ok(()),
        Some(restarts) => Err(Failure::usage(
            format!("--max-restarts {restarts}: this run is one process, and nothing would start it again"),
            "only worker processes are started again: --cpus N or --gpus N; or leave --max-restarts out",
        )),
    }
}

/// Returns the flags that the user has set, with their values.
pub(super) fn given(job: &JobArgs) -> Vec<(&'static str, String)> {
    let values = [
        ("--nnodes", job.nnodes.map(|value| value.to_string())),
        ("--node-rank", job.node_rank.map(|value| value.to_string())),
        ("--master-addr", job.master_addr.clone()),
        ("--master-port", job.master_port.map(|value| value.to_string())),
        ("--max-restarts", job.max_restarts.map(|value| value.to_string())),
    ];
    values.into_iter().filter_map(|(flag, value)| Some((flag, value?))).collect()
}

/// Checks the flags against Kubeflow's variables.
fn check_share(job: &JobArgs, share: &NodeAssignment) -> Result<(), Failure> {
    let theirs = [
        ("--nnodes", share.nodes.to_string()),
        ("--node-rank", share.node_rank.to_string()),
        ("--master-addr", share.master_addr.clone()),
        ("--master-port", share.master_port.to_string()),
    ];
    for (flag, value) in given(job) {
        if let Some((_, other)) = theirs.iter().find(|(name, other)| *name == flag && *other != value) {
            return Err(Failure::usage(
                format!("{flag} {value}, but Kubeflow's variables (PET_…) say {other}"),
                format!("leave {flag} out, or say --launcher local to ignore the variables"),
            ));
        }
    }
    Ok(())
}
