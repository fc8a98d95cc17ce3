//! The flags about nodes and restarts: refuses those that would have no effect, and reads this node's placement from the others.

use crate::cli::JobArgs;
use crate::failure::Failure;
use comm::Secret;
use launch::{
    RendezvousParameters, Role,
    environment::{KubeflowNode, Launcher},
};

/// Default of `--master-addr`.
pub(crate) const LOOPBACK: &str = "127.0.0.1";

/// This node's index in a job on several nodes, and the address of node 0.
#[derive(Debug, Clone)]
pub(crate) struct NodePlacement {
    /// Number of nodes.
    pub nodes: usize,
    /// Index of this node.
    pub node_rank: usize,
    /// Host of node 0.
    master_addr: String,
    /// Port on which node 0's launcher listens.
    master_port: u16,
}

impl NodePlacement {
    /// Reads the placement from Kubeflow's variables or from the flags. Returns `None` for a job on one node.
    pub(crate) fn of(flags: &JobArgs, kubeflow: Option<&KubeflowNode>) -> Option<Self> {
        if let Some(node) = kubeflow.filter(|node| node.nodes > 1) {
            let &KubeflowNode { nodes, node_rank, master_port, .. } = node;
            return Some(Self { nodes, node_rank, master_addr: node.master_addr.clone(), master_port });
        }
        let nodes = flags.nnodes.filter(|nodes| *nodes > 1)?;
        Some(Self {
            nodes,
            node_rank: flags.node_rank.unwrap_or(0),
            master_addr: flags.master_addr.clone().unwrap_or_else(|| LOOPBACK.to_owned()),
            master_port: flags.master_port.unwrap_or(0),
        })
    }

    /// Returns the address of node 0, `HOST:PORT`.
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
        Role::KubeflowLauncher(node) => check_kubeflow(job, node),
        Role::Launcher => match (job.nnodes.unwrap_or(1), job.node_rank) {
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
fn check_kubeflow(job: &JobArgs, node: &KubeflowNode) -> Result<(), Failure> {
    let theirs = [
        ("--nnodes", node.nodes.to_string()),
        ("--node-rank", node.node_rank.to_string()),
        ("--master-addr", node.master_addr.clone()),
        ("--master-port", node.master_port.to_string()),
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
