//! Who started this process: a pure function from the environment's variables to a [`Role`].
//!
//! | started by | recognised by | becomes |
//! |---|---|---|
//! | this program | `TRAINER_WORKER` | worker |
//! | torchrun and its like | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` | worker |
//! | Open MPI | `OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}` | worker |
//! | Slurm's srun | `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID` | worker |
//! | MPICH, Intel MPI | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | worker |
//! | Kubeflow | `PET_NNODES`, `PET_NODE_RANK`, `PET_NPROC_PER_NODE` | a node's launcher |
//! | a shell | none of these | launcher |
//!
//! Kubeflow's `RANK` is the pod's index: `RANK` and `WORLD_SIZE` count processes only where `LOCAL_RANK` is set too. What
//! contradicts itself is refused: a job that waits for ranks that nobody starts, or in which two processes are rank 0,
//! would fail later and worse.

mod mpi;
mod named;
mod slurm;
#[cfg(test)]
mod tests;
mod torchrun;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

pub use slurm::first_host;

use super::error::{LaunchError, Result};
use named::Named;

/// Marks a worker of this program's own launcher; its value is the launcher's process id.
pub const WORKER: &str = "TRAINER_WORKER";

/// Variables by name.
pub type Variables = BTreeMap<String, String>;

/// The variables of this process. A name or value that is not UTF-8 is no launcher's.
pub fn variables() -> Variables {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// `--launcher`: whose variables count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Launcher {
    /// Whoever is found; contradictions are refused.
    #[default]
    Auto,
    /// Nobody's: this process starts workers itself, or is the only one.
    Local,
    /// `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, as torchrun sets them, and Kubeflow's `PET_*`.
    Env,
    /// Slurm's.
    Slurm,
    /// Open MPI's, or else MPICH's.
    Mpi,
}

impl FromStr for Launcher {
    type Err = LaunchError;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "auto" => Self::Auto,
            "local" => Self::Local,
            "env" => Self::Env,
            "slurm" => Self::Slurm,
            "mpi" => Self::Mpi,
            _ => {
                return Err(LaunchError::usage(
                    format!("--launcher {text}: there is no such launcher"),
                    "one of auto, local, env, slurm, mpi",
                ));
            }
        })
    }
}

/// What the command line says about it.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// `--launcher`.
    pub launcher: Launcher,
    /// The flag that asks for a number of workers, and the number: `("--cpus", 4)`.
    pub workers: Option<(&'static str, usize)>,
}

/// What this process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// One rank of a job that somebody has started.
    Worker(WorkerRole),
    /// Nobody's worker: it starts workers, or works alone.
    Local(LocalRole),
}

/// One rank of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerRole {
    /// 0 to `world` - 1.
    pub rank: usize,
    /// 0 to `local_world` - 1, on this host.
    pub local_rank: usize,
    /// Ranks of the job.
    pub world: usize,
    /// Ranks on this host.
    pub local_world: usize,
    /// Index of this host in the job; MPI does not tell.
    pub node_rank: Option<usize>,
    /// Host of rank 0 (of the store, with a launcher of this program); none where nobody said.
    pub master_addr: Option<String>,
    /// Port of the store; none: to be derived from `job`, as nobody said or the port is in use by the launcher itself.
    pub master_port: Option<u16>,
    /// Words that tell this job from others: source, its id. Empty where there are none.
    pub job: Vec<String>,
    /// Whose worker it is.
    pub source: Source,
}

/// Who starts workers on this node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LocalRole {
    /// Set where somebody starts one process a node and leaves the workers to it.
    pub share: Option<NodeShare>,
}

/// A node's place in a job, as Kubeflow gives it to pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeShare {
    /// Nodes of the job.
    pub nodes: usize,
    /// Index of this node.
    pub node_rank: usize,
    /// Workers on this node; none: `auto`, the command line or the number of devices decides.
    pub workers: Option<usize>,
    /// Host of node 0.
    pub master_addr: String,
    /// Port on it.
    pub master_port: u16,
}

/// Whose variables made a process a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// This program's launcher.
    Own,
    /// torchrun, known by `TORCHELASTIC_RUN_ID`.
    Torchrun,
    /// Somebody who sets the same variables as torchrun.
    Env,
    /// Slurm's srun.
    Slurm,
    /// Open MPI's mpirun.
    OpenMpi,
    /// MPICH's or Intel MPI's mpiexec.
    Mpich,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Own => "this program's launcher",
            Self::Torchrun => "torchrun",
            Self::Env => "RANK, WORLD_SIZE and LOCAL_RANK",
            Self::Slurm => "Slurm",
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH (PMI)",
        })
    }
}

/// Decides what this process is.
///
/// # Errors
/// Variables are half set, no numbers, out of range, or contradict each other or the command line.
pub fn detect(variables: &Variables, request: &Request) -> Result<Role> {
    let variables = Named(variables);
    if variables.text(WORKER).is_some() {
        return torchrun::own(&variables).map(Role::Worker);
    }
    let role = match request.launcher {
        Launcher::Local => return Ok(Role::Local(LocalRole::default())),
        Launcher::Auto => auto(&variables)?,
        Launcher::Env => Some(match torchrun::share(&variables)? {
            Some(share) => Role::Local(LocalRole { share: Some(share) }),
            None => Role::Worker(required(torchrun::detect(&variables)?, "env", "RANK, WORLD_SIZE and LOCAL_RANK")?),
        }),
        Launcher::Slurm => Some(Role::Worker(required(
            slurm::detect(&variables)?,
            "slurm",
            "SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID",
        )?)),
        Launcher::Mpi => {
            let found = mpi::open_mpi(&variables)?.map_or_else(|| mpi::pmi(&variables), |found| Ok(Some(found)))?;
            let what = "neither Open MPI's OMPI_COMM_WORLD_RANK nor MPICH's PMI_RANK";
            Some(Role::Worker(required(found, "mpi", what)?))
        }
    };
    let role = role.unwrap_or_default();
    fits(&role, request)?;
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

/// A role, and how sure its local rank is.
struct Candidate {
    role: WorkerRole,
    /// Whether the launcher said the local rank; otherwise it is derived.
    local_known: bool,
    /// Where its rank and world come from, for messages: `RANK=1 of WORLD_SIZE=4`.
    evidence: String,
}

fn auto(variables: &Named<'_>) -> Result<Option<Role>> {
    if let Some(share) = torchrun::share(variables)? {
        return Ok(Some(Role::Local(LocalRole { share: Some(share) })));
    }
    let found: Vec<Candidate> =
        [torchrun::detect(variables)?, mpi::open_mpi(variables)?, slurm::detect(variables)?, mpi::pmi(variables)?]
            .into_iter()
            .flatten()
            .collect();
    let Some(first) = found.first() else { return Ok(None) };
    // torchrun says who it is, and it is torchrun that srun or mpirun starts, not the other way round
    if first.role.source != Source::Torchrun
        && let Some(other) = found.iter().skip(1).find(|other| !agree(first, other))
    {
        return Err(LaunchError::usage(
            format!(
                "{} and {} disagree about this process: {}, but {}",
                first.role.source, other.role.source, first.evidence, other.evidence
            ),
            format!(
                "say whose worker it is: --launcher {} or --launcher {}; or --launcher local to start workers from here",
                flag(first.role.source),
                flag(other.role.source)
            ),
        ));
    }
    Ok(found.into_iter().next().map(|candidate| Role::Worker(candidate.role)))
}

fn agree(a: &Candidate, b: &Candidate) -> bool {
    let place = |c: &Candidate| (c.role.rank, c.role.world);
    let local = |c: &Candidate| (c.role.local_rank, c.role.local_world);
    place(a) == place(b) && (!a.local_known || !b.local_known || local(a) == local(b))
}

fn flag(source: Source) -> &'static str {
    match source {
        Source::Own | Source::Torchrun | Source::Env => "env",
        Source::Slurm => "slurm",
        Source::OpenMpi | Source::Mpich => "mpi",
    }
}

/// Whether the number of workers that the command line asks for is the one that is there.
fn fits(role: &Role, request: &Request) -> Result<()> {
    let Some((flag, asked)) = request.workers else { return Ok(()) };
    match role {
        Role::Worker(worker) if asked != worker.world && asked != worker.local_world => Err(LaunchError::usage(
            format!(
                "{flag} {asked}, but {} has started this process as {}",
                worker.source,
                match worker.world {
                    1 => "the only task of its allocation".to_owned(),
                    world => format!("rank {} of {world}", worker.rank),
                }
            ),
            format!("leave {flag} out to be that worker, or say --launcher local to start {asked} workers from here"),
        )),
        Role::Local(LocalRole { share: Some(NodeShare { workers: Some(workers), .. }) }) if *workers != asked => {
            Err(LaunchError::usage(
                format!("{flag} {asked}, but PET_NPROC_PER_NODE={workers}"),
                format!("leave {flag} out, or set nprocPerNode of the job to {asked}"),
            ))
        }
        _ => Ok(()),
    }
}

impl Default for Role {
    fn default() -> Self {
        Self::Local(LocalRole::default())
    }
}

impl fmt::Display for Role {
    /// One line for the screen.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(w) => {
                write!(f, "started by {}: rank {} of {}", w.source, w.rank, w.world)?;
                write!(f, ", local rank {} of {}", w.local_rank, w.local_world)?;
                if let Some(node) = w.node_rank {
                    write!(f, ", node {node}")?;
                }
                match (&w.master_addr, w.master_port) {
                    (Some(host), Some(port)) => write!(f, ", rank 0 at {host}:{port}"),
                    (Some(host), None) => write!(f, ", rank 0 at {host}, port from the job's id"),
                    (None, _) => f.write_str(", MASTER_ADDR not set"),
                }
            }
            Self::Local(LocalRole { share: Some(share) }) => {
                write!(f, "started by Kubeflow: node {} of {}", share.node_rank, share.nodes)?;
                if let Some(workers) = share.workers {
                    write!(f, ", {workers} workers on it")?;
                }
                write!(f, ", node 0 at {}:{}", share.master_addr, share.master_port)
            }
            Self::Local(LocalRole { share: None }) => f.write_str("started by no launcher: workers start from here"),
        }
    }
}
