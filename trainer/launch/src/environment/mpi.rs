//! Open MPI, LSF's jsrun and the PMI family (MPICH, Intel MPI).

use super::variables::{VariableReader, check};
use super::{Candidate, Launcher, WorkerRole};
use crate::error::Result;

/// Reads Open MPI's variables. Returns `None` if none of them is set.
pub(super) fn open_mpi(variables: &VariableReader<'_>) -> Result<Option<Candidate>> {
    const NAMES: [&str; 4] =
        ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"];
    // Open MPI 4 and 5 set the job's id for PMIx, earlier versions for their own runtime
    let id = variables.owned("PMIX_NAMESPACE").or_else(|| variables.owned("OMPI_MCA_ess_base_jobid"));
    ranks(variables, NAMES, Launcher::OpenMpi, job_id("openmpi", id, variables))
}

/// Reads the variables of jsrun, which starts processes in jobs of IBM's LSF. Returns `None` if none of them is set.
pub(super) fn jsrun(variables: &VariableReader<'_>) -> Result<Option<Candidate>> {
    const NAMES: [&str; 4] =
        ["JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"];
    ranks(variables, NAMES, Launcher::Jsrun, job_id("lsf", variables.owned("LSB_JOBID"), variables))
}

/// Reads the variables of rank, world size, local rank and local world size.
fn ranks(
    variables: &VariableReader<'_>,
    names: [&str; 4],
    launcher: Launcher,
    job: Vec<String>,
) -> Result<Option<Candidate>> {
    let Some(because) = names.into_iter().find(|name| variables.text(name).is_some()) else { return Ok(None) };
    let mut numbers = [0; 4];
    for (number, name) in numbers.iter_mut().zip(names) {
        *number = variables.need(name, because)?;
    }
    candidate(variables, names, numbers, launcher, job).map(Some)
}

/// Makes the role of a rank from rank, world size, local rank and local world size; `names` are their variables.
fn candidate(
    variables: &VariableReader<'_>,
    names: [&str; 4],
    [rank, world_size, local_rank, local_world_size]: [usize; 4],
    launcher: Launcher,
    job: Vec<String>,
) -> Result<Candidate> {
    let role = WorkerRole {
        rank,
        local_rank,
        world_size,
        local_world_size,
        node_rank: (local_world_size == world_size).then_some(0),
        master_addr: master(variables, local_world_size == world_size),
        master_port: variables.port("MASTER_PORT")?,
        job,
        launcher,
    };
    check(&role, names)?;
    let evidence = format!("{}={rank} of {}={world_size}", names[0], names[1]);
    Ok(Candidate { role, local_known: true, evidence })
}

/// Reads PMI's variables. Returns `None` if none of them is set.
pub(super) fn pmi(variables: &VariableReader<'_>) -> Result<Option<Candidate>> {
    let Some(because) = ["PMI_RANK", "PMI_SIZE"].into_iter().find(|name| variables.text(name).is_some()) else {
        return Ok(None);
    };
    let (rank, world_size) = (variables.need("PMI_RANK", because)?, variables.need("PMI_SIZE", because)?);
    let local = match (variables.number("MPI_LOCALRANKID")?, variables.number("MPI_LOCALNRANKS")?) {
        (Some(rank), Some(world_size)) => Some((rank, world_size)),
        (None, None) => None,
        (Some(_), None) => return Err(variables.missing("MPI_LOCALNRANKS", "MPI_LOCALRANKID")),
        (None, Some(_)) => return Err(variables.missing("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    };
    // Without local ranks, assume that all ranks are on this host. MASTER_ADDR, if set, is still rank 0's address.
    let (local_rank, local_world_size) = local.unwrap_or((rank, world_size));
    let names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
    let job = job_id("pmi", variables.owned("PMI_JOBID"), variables);
    let found = candidate(variables, names, [rank, world_size, local_rank, local_world_size], Launcher::Mpich, job)?;
    Ok(Some(Candidate { local_known: local.is_some(), ..found }))
}

/// Returns the address of rank 0: `MASTER_ADDR`, or the loopback address if all ranks are on this host.
fn master(variables: &VariableReader<'_>, one_host: bool) -> Option<String> {
    variables.owned("MASTER_ADDR").or(one_host.then(|| "127.0.0.1".to_owned()))
}

/// Returns words that distinguish the job from others. Empty without an id and a port.
fn job_id(launcher: &str, id: Option<String>, variables: &VariableReader<'_>) -> Vec<String> {
    let (address, port) = (variables.owned("MASTER_ADDR"), variables.owned("MASTER_PORT"));
    if id.is_none() && port.is_none() {
        return Vec::new();
    }
    [Some(launcher.to_owned()), id, address, port].into_iter().flatten().collect()
}
