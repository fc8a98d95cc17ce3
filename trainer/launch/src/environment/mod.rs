//! Decides which launcher started this process: a pure function from environment variables to a [`Role`].
//!
//! | started by | recognised by | role |
//! |---|---|---|
//! | this program | `TRAINER_WORKER` | worker |
//! | torchrun, and others that set the same variables | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` | worker |
//! | Open MPI | `OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}` | worker |
//! | Slurm's srun | `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID` | worker |
//! | MPICH, Intel MPI | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | worker |
//! | LSF's jsrun | `JSM_NAMESPACE_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}` | worker |
//! | Kubeflow | `PET_NNODES`, `PET_NODE_RANK`, `PET_NPROC_PER_NODE` | launcher of one node |
//! | a shell | none of these | launcher |
//!
//! Kubeflow's `RANK` is the index of the pod. Therefore `RANK` and `WORLD_SIZE` count processes only if `LOCAL_RANK` is set
//! too. Contradictions are refused. Otherwise the job would wait for ranks that no launcher starts, or have two processes with
//! rank 0, and would fail later with a less useful message.

mod mpi;
mod slurm;
#[cfg(test)]
mod tests;
mod torchrun;
mod variables;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::error::{LaunchError, Result};
use variables::VariableReader;
pub(super) use variables::is_loopback;

/// Marks a worker of this program's launcher. Its value is the launcher's process id.
pub const WORKER: &str = "TRAINER_WORKER";

/// Environment variables by name.
pub type Variables = BTreeMap<String, String>;

/// Returns the variables of this process. Skips names and values that are not UTF-8: no launcher sets such variables.
pub fn variables() -> Variables {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// Value of `--launcher`: the launcher whose variables are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LauncherChoice {
    /// Any launcher that is found. Contradictions are refused.
    #[default]
    Auto,
    /// No launcher: this process starts the workers itself, or trains alone.
    Local,
    /// `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, as torchrun sets them, and Kubeflow's `PET_*`.
    Env,
    /// Slurm's variables.
    Slurm,
    /// Open MPI's variables, or else MPICH's.
    Mpi,
    /// The variables of LSF's jsrun.
    Lsf,
}

impl FromStr for LauncherChoice {
    type Err = LaunchError;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "auto" => Self::Auto,
            "local" => Self::Local,
            "env" => Self::Env,
            "slurm" => Self::Slurm,
            "mpi" => Self::Mpi,
            "lsf" => Self::Lsf,
            _ => {
                return Err(LaunchError::usage(
                    format!("--launcher {text}: there is no such launcher"),
                    "one of auto, local, env, slurm, mpi, lsf",
                ));
            }
        })
    }
}

/// The role of this process in its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// One rank of a job that a launcher has started.
    Worker(WorkerRole),
    /// Not a worker: this process starts the workers, or trains alone.
    Launcher,
    /// The launcher of one node: Kubeflow starts one process per pod, and this process must start the node's workers.
    KubeflowLauncher(KubeflowNode),
}

impl Role {
    /// Returns the node of a [`Role::KubeflowLauncher`].
    pub fn kubeflow_node(&self) -> Option<&KubeflowNode> {
        match self {
            Self::KubeflowLauncher(node) => Some(node),
            Self::Worker(_) | Self::Launcher => None,
        }
    }
}

/// One rank of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerRole {
    /// 0 to `world_size` - 1.
    pub rank: usize,
    /// 0 to `local_world_size` - 1, on this host.
    pub local_rank: usize,
    /// Number of ranks of the job.
    pub world_size: usize,
    /// Number of ranks on this host.
    pub local_world_size: usize,
    /// Index of this host in the job. `None` if no variable has it: MPI has no such variable.
    pub node_rank: Option<usize>,
    /// Host of rank 0 (with this program's launcher: host of the store). `None` if no variable has it.
    pub master_addr: Option<String>,
    /// Port of the store. `None` if no variable has it, or if the launcher itself uses the port. Then a port is derived from
    /// `job`.
    pub master_port: Option<u16>,
    /// Words that distinguish this job from others, such as its launcher and its id. Empty if there are none.
    pub job: Vec<String>,
    /// The launcher that started the rank.
    pub launcher: Launcher,
}

/// One node's part of a job, from the variables of a Kubeflow pod (`PET_*`, those of torchrun's flags).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeflowNode {
    /// Number of nodes of the job.
    pub nodes: usize,
    /// Index of this node.
    pub node_rank: usize,
    /// Number of workers on this node. `None` for `auto`: the command line or the number of devices decides.
    pub workers: Option<usize>,
    /// Host of node 0.
    pub master_addr: String,
    /// Port on which node 0's launcher listens.
    pub master_port: u16,
}

/// The launcher that started a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// This program's launcher.
    Builtin,
    /// torchrun, recognised by `TORCHELASTIC_RUN_ID`.
    Torchrun,
    /// A launcher that sets the same variables as torchrun.
    Env,
    /// Slurm's srun.
    Slurm,
    /// Open MPI's mpirun.
    OpenMpi,
    /// MPICH's or Intel MPI's mpiexec.
    Mpich,
    /// LSF's jsrun.
    Jsrun,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Builtin => "this program's launcher",
            Self::Torchrun => "torchrun",
            Self::Env => "RANK, WORLD_SIZE and LOCAL_RANK",
            Self::Slurm => "Slurm",
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH (PMI)",
            Self::Jsrun => "LSF's jsrun",
        })
    }
}

/// Decides the role of this process. `workers` is the flag that asks for a number of workers, and the number: `("--cpus", 4)`.
///
/// # Errors
/// A variable that belongs to a launcher is missing, not a number or out of range; or variables contradict each other or
/// the command line.
pub fn detect(variables: &Variables, choice: LauncherChoice, workers: Option<(&str, usize)>) -> Result<Role> {
    let variables = VariableReader(variables);
    if variables.text(WORKER).is_some() {
        return torchrun::builtin(&variables).map(Role::Worker);
    }
    let role = match choice {
        LauncherChoice::Local => return Ok(Role::Launcher),
        LauncherChoice::Auto => auto(&variables)?,
        LauncherChoice::Env => Some(match torchrun::kubeflow_node(&variables)? {
            Some(node) => Role::KubeflowLauncher(node),
            None => Role::Worker(required(torchrun::detect(&variables)?, "env", "RANK, WORLD_SIZE and LOCAL_RANK")?),
        }),
        LauncherChoice::Slurm => Some(Role::Worker(required(
            slurm::detect(&variables)?,
            "slurm",
            "SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID",
        )?)),
        LauncherChoice::Lsf => Some(Role::Worker(required(
            mpi::jsrun(&variables)?,
            "lsf",
            "jsrun's JSM_NAMESPACE_RANK and JSM_NAMESPACE_SIZE",
        )?)),
        LauncherChoice::Mpi => {
            let found = mpi::open_mpi(&variables)?.map_or_else(|| mpi::pmi(&variables), |found| Ok(Some(found)))?;
            let what = "neither Open MPI's OMPI_COMM_WORLD_RANK nor MPICH's PMI_RANK";
            Some(Role::Worker(required(found, "mpi", what)?))
        }
    };
    let role = role.unwrap_or(Role::Launcher);
    check_workers(&role, workers)?;
    Ok(role)
}

fn required(found: Option<Candidate>, launcher: &str, what: &str) -> Result<WorkerRole> {
    found.map(|candidate| candidate.role).ok_or_else(|| {
        let verb = if what.starts_with("neither") { "is" } else { "are not" };
        LaunchError::usage(
            format!("--launcher {launcher}: {what} {verb} set"),
            "start it with that launcher, or say --launcher local to start workers from here",
        )
    })
}

/// A worker's role according to one launcher's variables.
struct Candidate {
    role: WorkerRole,
    /// Whether a variable has the local rank. Otherwise the local rank is derived.
    local_known: bool,
    /// The variables of rank and world size, for messages: `RANK=1 of WORLD_SIZE=4`.
    evidence: String,
}

fn auto(variables: &VariableReader<'_>) -> Result<Option<Role>> {
    if let Some(node) = torchrun::kubeflow_node(variables)? {
        return Ok(Some(Role::KubeflowLauncher(node)));
    }
    let found: Vec<Candidate> = [torchrun::detect, mpi::open_mpi, mpi::jsrun, slurm::detect, mpi::pmi]
        .into_iter()
        .filter_map(|detect| detect(variables).transpose())
        .collect::<Result<_>>()?;
    let Some(first) = found.first() else { return Ok(None) };
    // Torchrun's variables take precedence: srun or mpirun may start torchrun, but torchrun never starts srun or mpirun.
    if first.role.launcher != Launcher::Torchrun
        && let Some(other) = found.iter().skip(1).find(|other| !same_rank(first, other))
    {
        return Err(LaunchError::usage(
            format!(
                "{} and {} disagree about this process: {}, but {}",
                first.role.launcher, other.role.launcher, first.evidence, other.evidence
            ),
            format!(
                "say whose worker it is: --launcher {} or --launcher {}; or --launcher local to start workers from here",
                flag(first.role.launcher),
                flag(other.role.launcher)
            ),
        ));
    }
    Ok(found.into_iter().next().map(|candidate| Role::Worker(candidate.role)))
}

fn same_rank(a: &Candidate, b: &Candidate) -> bool {
    let global = |c: &Candidate| (c.role.rank, c.role.world_size);
    let local = |c: &Candidate| (c.role.local_rank, c.role.local_world_size);
    global(a) == global(b) && (!a.local_known || !b.local_known || local(a) == local(b))
}

fn flag(launcher: Launcher) -> &'static str {
    match launcher {
        Launcher::Builtin | Launcher::Torchrun | Launcher::Env => "env",
        Launcher::Slurm => "slurm",
        Launcher::OpenMpi | Launcher::Mpich => "mpi",
        Launcher::Jsrun => "lsf",
    }
}

/// Checks that the number of workers on the command line agrees with the launcher's number.
fn check_workers(role: &Role, workers: Option<(&str, usize)>) -> Result<()> {
    let Some((flag, asked)) = workers else { return Ok(()) };
    match role {
        Role::Worker(worker) if asked != worker.world_size && asked != worker.local_world_size => {
            Err(LaunchError::usage(
                format!(
                    "{flag} {asked}, but {} has started this process as {}",
                    worker.launcher,
                    match worker.world_size {
                        1 => "the only task of its allocation".to_owned(),
                        world_size => format!("rank {} of {world_size}", worker.rank),
                    }
                ),
                format!(
                    "leave {flag} out to be that worker, or say --launcher local to start {asked} workers from here"
                ),
            ))
        }
        Role::KubeflowLauncher(KubeflowNode { workers: Some(workers), .. }) if *workers != asked => {
            Err(LaunchError::usage(
                format!("{flag} {asked}, but PET_NPROC_PER_NODE={workers}"),
                format!("leave {flag} out, or set nprocPerNode of the job to {asked}"),
            ))
        }
        _ => Ok(()),
    }
}

impl fmt::Display for Role {
    /// Writes one line for the screen.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(w) => {
                write!(f, "started by {}: rank {} of {}", w.launcher, w.rank, w.world_size)?;
                write!(f, ", local rank {} of {}", w.local_rank, w.local_world_size)?;
                if let Some(node) = w.node_rank {
                    write!(f, ", node {node}")?;
                }
                match (&w.master_addr, w.master_port) {
                    (Some(host), Some(port)) => write!(f, ", rank 0 at {host}:{port}"),
                    (Some(host), None) => write!(f, ", rank 0 at {host}, port from the job's id"),
                    (None, _) => f.write_str(", MASTER_ADDR not set"),
                }
            }
            Self::KubeflowLauncher(node) => {
                write!(f, "started by Kubeflow: node {} of {}", node.node_rank, node.nodes)?;
                if let Some(workers) = node.workers {
                    write!(f, ", {workers} workers on it")?;
                }
                write!(f, ", node 0 at {}:{}", node.master_addr, node.master_port)
            }
            Self::Launcher => f.write_str("started by no launcher: workers start from here"),
        }
    }
}
