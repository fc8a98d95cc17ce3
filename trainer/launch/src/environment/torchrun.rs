//! `RANK`, `WORLD_SIZE` and `LOCAL_RANK`, as torchrun, this program and many others set them; and Kubeflow's `PET_*`.

use super::variables::{VariableReader, check, is_loopback};
use super::{Candidate, KubeflowNode, Launcher, WorkerRole};
use crate::error::{LaunchError, Result};

const NAMES: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
const PET: [&str; 3] = ["PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"];

/// Reads the role of a worker that this program's launcher has started. The launcher sets all of the variables.
pub(super) fn builtin(variables: &VariableReader<'_>) -> Result<WorkerRole> {
    let role = WorkerRole {
        rank: variables.need("RANK", super::WORKER)?,
        local_rank: variables.need("LOCAL_RANK", super::WORKER)?,
        world_size: variables.need("WORLD_SIZE", super::WORKER)?,
        local_world_size: variables.need("LOCAL_WORLD_SIZE", super::WORKER)?,
        node_rank: Some(variables.need("GROUP_RANK", super::WORKER)?),
        master_addr: variables.owned("MASTER_ADDR"),
        master_port: variables.port("MASTER_PORT")?,
        job: Vec::new(),
        launcher: Launcher::Builtin,
    };
    for (name, there) in [("MASTER_ADDR", role.master_addr.is_some()), ("MASTER_PORT", role.master_port.is_some())] {
        if !there {
            return Err(variables.missing(name, super::WORKER));
        }
    }
    check(&role, NAMES)?;
    Ok(role)
}

/// Reads the variables of torchrun. Returns `None` if none of them is set.
pub(super) fn detect(variables: &VariableReader<'_>) -> Result<Option<Candidate>> {
    let Some(because) = NAMES.into_iter().find(|name| variables.text(name).is_some()) else { return Ok(None) };
    let (rank, world_size) = (variables.need("RANK", because)?, variables.need("WORLD_SIZE", because)?);
    let local_rank = variables.number("LOCAL_RANK")?.ok_or_else(|| {
        LaunchError::usage(
            format!(
                "RANK={rank} and WORLD_SIZE={world_size} are set but LOCAL_RANK is not: they may count pods or hosts"
            ),
            "where they count processes set LOCAL_RANK and LOCAL_WORLD_SIZE too; where they count hosts say --nnodes, \
             --node-rank, --master-addr and --master-port; --launcher local ignores them",
        )
    })?;
    let (master_addr, port) = (variables.owned("MASTER_ADDR"), variables.port("MASTER_PORT")?);
    let local_world_size = match variables.number("LOCAL_WORLD_SIZE")? {
        Some(local_world_size) => local_world_size,
        None if master_addr.as_deref().is_none_or(is_loopback) => world_size,
        None => return Err(variables.missing("LOCAL_WORLD_SIZE", "LOCAL_RANK")),
    };
    let run = variables.owned("TORCHELASTIC_RUN_ID");
    // Torchrun's agent hosts PyTorch's store at MASTER_PORT, so this port is not free for the store of this program.
    let agent = variables.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let words = [Some("env".to_owned()), run.clone(), master_addr.clone(), port.map(|port| port.to_string())];
    let restart = variables.owned("TORCHELASTIC_RESTART_COUNT");
    let role = WorkerRole {
        rank,
        local_rank,
        world_size,
        local_world_size,
        node_rank: variables.number("GROUP_RANK")?.or((local_world_size == world_size).then_some(0)),
        master_addr: master_addr.or((local_world_size == world_size).then(|| "127.0.0.1".to_owned())),
        master_port: port.filter(|_| !agent),
        // Without a run id and a port, these words would be the same for all jobs.
        job: if run.is_some() || port.is_some() {
            words.into_iter().chain([restart]).flatten().collect()
        } else {
            Vec::new()
        },
        launcher: if run.is_some() { Launcher::Torchrun } else { Launcher::Env },
    };
    check(&role, NAMES)?;
    let evidence = format!("RANK={rank} of WORLD_SIZE={world_size}, LOCAL_RANK={local_rank}");
    Ok(Some(Candidate { role, local_known: true, evidence }))
}

/// Reads a Kubeflow pod's part of the job: one process per pod, which starts the workers of its node. Returns `None` if
/// `LOCAL_RANK` is set, since such a process is already a worker.
pub(super) fn kubeflow_node(variables: &VariableReader<'_>) -> Result<Option<KubeflowNode>> {
    let Some(because) = PET.into_iter().find(|name| variables.text(name).is_some()) else { return Ok(None) };
    if variables.text("LOCAL_RANK").is_some() {
        return Ok(None);
    }
    if let Some(range) = variables.text("PET_NNODES").filter(|text| text.contains(':')) {
        return Err(LaunchError::usage(
            format!("PET_NNODES={range} asks for an elastic job, whose number of nodes changes"),
            "give the job a fixed number of replicas, without an elastic policy",
        ));
    }
    let nodes = variables.need("PET_NNODES", because)?;
    let node_rank = variables.number("PET_NODE_RANK")?.or(variables.number("RANK")?);
    let node_rank = match (node_rank, nodes) {
        (Some(node_rank), _) => node_rank,
        (None, 1) => 0,
        (None, _) => return Err(variables.missing("PET_NODE_RANK", "PET_NNODES")),
    };
    if let Some(rank) = variables.number("RANK")?
        && rank != node_rank
    {
        return Err(LaunchError::usage(
            format!("RANK={rank} and PET_NODE_RANK={node_rank} disagree about the pod's index"),
            "set LOCAL_RANK too if RANK counts processes; otherwise correct one of them",
        ));
    }
    if node_rank >= nodes {
        return Err(LaunchError::usage(
            format!("PET_NODE_RANK={node_rank} is not below PET_NNODES={nodes}"),
            "nodes count from 0; is a variable left over from another job?",
        ));
    }
    let workers = match variables.text("PET_NPROC_PER_NODE") {
        None | Some("auto" | "cpu" | "gpu") => None,
        Some("0") => {
            return Err(LaunchError::usage("PET_NPROC_PER_NODE=0 asks for no workers", "set nprocPerNode of the job"));
        }
        Some(_) => variables.number("PET_NPROC_PER_NODE")?,
    };
    let address = match nodes {
        1 => either(variables, "MASTER_ADDR")?.unwrap_or_else(|| "127.0.0.1".to_owned()),
        _ => either(variables, "MASTER_ADDR")?.ok_or_else(|| variables.missing("MASTER_ADDR", "PET_NNODES"))?,
    };
    either(variables, "MASTER_PORT")?;
    // 29500 is torchrun's default, and the port that Kubeflow's services open.
    let port = variables.port("MASTER_PORT")?.or(variables.port("PET_MASTER_PORT")?).unwrap_or(29500);
    Ok(Some(KubeflowNode { nodes, node_rank, workers, master_addr: address, master_port: port }))
}

/// Returns `NAME` or `PET_NAME`. If both are set, they must be equal.
fn either(variables: &VariableReader<'_>, name: &str) -> Result<Option<String>> {
    let (plain, pet) = (variables.owned(name), variables.owned(&format!("PET_{name}")));
    match (&plain, &pet) {
        (Some(a), Some(b)) if a != b => Err(LaunchError::usage(
            format!("{name}={a} and PET_{name}={b} disagree about where node 0 is"),
            format!("unset one of them, or set both to the same value ({name} is what the pod's service is called)"),
        )),
        _ => Ok(plain.or(pet)),
    }
}
