//! Open MPI and the PMI family (MPICH, Intel MPI).

use super::named::{Named, check};
use super::{Candidate, Source, WorkerRole};
use crate::error::Result;

pub(super) fn open_mpi(variables: &Named<'_>) -> Result<Option<Candidate>> {
    const NAMES: [&str; 4] =
        ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"];
    let Some(because) = NAMES.into_iter().find(|name| variables.text(name).is_some()) else { return Ok(None) };
    let [rank, world, local_rank, local_world] = NAMES;
    let (rank, world) = (variables.need(rank, because)?, variables.need(world, because)?);
    let (local_rank, local_world) = (variables.need(local_rank, because)?, variables.need(local_world, because)?);
    // Open MPI 4 and 5 name the job for PMIx; versions before, for their own runtime
    let id = variables.owned("PMIX_NAMESPACE").or_else(|| variables.owned("OMPI_MCA_ess_base_jobid"));
    let role = WorkerRole {
        rank,
        local_rank,
        world,
        local_world,
        node_rank: (local_world == world).then_some(0),
        master_addr: master(variables, local_world == world),
        master_port: variables.port("MASTER_PORT")?,
        job: words("openmpi", id, variables),
        source: Source::OpenMpi,
    };
    check(&role, NAMES)?;
    let evidence = format!("OMPI_COMM_WORLD_RANK={rank} of OMPI_COMM_WORLD_SIZE={world}");
    Ok(Some(Candidate { role, local_known: true, evidence }))
}

pub(super) fn pmi(variables: &Named<'_>) -> Result<Option<Candidate>> {
    let Some(because) = ["PMI_RANK", "PMI_SIZE"].into_iter().find(|name| variables.text(name).is_some()) else {
        return Ok(None);
    };
    let (rank, world) = (variables.need("PMI_RANK", because)?, variables.need("PMI_SIZE", because)?);
    let local = match (variables.number("MPI_LOCALRANKID")?, variables.number("MPI_LOCALNRANKS")?) {
        (Some(rank), Some(world)) => Some((rank, world)),
        (None, None) => None,
        (Some(_), None) => return Err(variables.missing("MPI_LOCALNRANKS", "MPI_LOCALRANKID")),
        (None, Some(_)) => return Err(variables.missing("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    };
    // a PMI that does not count per host has started all ranks here, or somebody says where rank 0 is
    let (local_rank, local_world) = local.unwrap_or((rank, world));
    let role = WorkerRole {
        rank,
        local_rank,
        world,
        local_world,
        node_rank: (local_world == world).then_some(0),
        master_addr: master(variables, local_world == world),
        master_port: variables.port("MASTER_PORT")?,
        job: words("pmi", variables.owned("PMI_JOBID"), variables),
        source: Source::Mpich,
    };
    check(&role, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"])?;
    let evidence = format!("PMI_RANK={rank} of PMI_SIZE={world}");
    Ok(Some(Candidate { role, local_known: local.is_some(), evidence }))
}

fn master(variables: &Named<'_>, one_host: bool) -> Option<String> {
    variables.owned("MASTER_ADDR").or(one_host.then(|| "127.0.0.1".to_owned()))
}

/// What tells the job from others; nothing if neither an id nor a port does.
fn words(source: &str, id: Option<String>, variables: &Named<'_>) -> Vec<String> {
    let (address, port) = (variables.owned("MASTER_ADDR"), variables.owned("MASTER_PORT"));
    if id.is_none() && port.is_none() {
        return Vec::new();
    }
    [Some(source.to_owned()), id, address, port].into_iter().flatten().collect()
}
