//! Which GPU each rank has, on which host, and which GPUs can access each other's memory.

#[cfg(feature = "cuda")]
pub(super) use gather::{gather, nccl_everywhere};

/// The host and the GPU of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankLocation {
    /// Id of the host: the kernel's boot id and the PID namespace.
    pub host: String,
    /// UUID of the GPU. Unlike the GPU's index, the UUID is the same in every process.
    pub gpu: [u8; 16],
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
}

/// The locations of all ranks, and which of them can access each other's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// By rank.
    pub locations: Vec<RankLocation>,
    /// Pairs of ranks (reader, owner) for whose GPUs the driver reports no peer access. Access that the driver does report is
    /// tested before it is used.
    pub no_access: Vec<(usize, usize)>,
}

impl Topology {
    /// Returns whether several ranks share a GPU. On a shared GPU a kernel must not wait for another rank's kernel, since that
    /// kernel may start only after the waiting kernel has ended.
    pub fn shares_devices(&self) -> bool {
        let mut gpus: Vec<_> = self.locations.iter().map(|location| (&location.host, location.gpu)).collect();
        gpus.sort_unstable();
        gpus.windows(2).any(|pair| pair[0] == pair[1])
    }

    /// Returns the ranks of each host, in the order of the hosts' first ranks.
    pub fn hosts(&self) -> Vec<Vec<usize>> {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for (rank, location) in self.locations.iter().enumerate() {
            match hosts.iter_mut().find(|ranks| self.locations[ranks[0]].host == location.host) {
                Some(ranks) => ranks.push(rank),
                None => hosts.push(vec![rank]),
            }
        }
        hosts
    }
}

/// The exchange between ranks before they choose a route.
#[cfg(feature = "cuda")]
mod gather {
    use super::super::{driver::Context, nccl, window::agree};
    use super::{RankLocation, Topology};
    use crate::Communicator;
    use crate::error::{CommError, Result};
    use crate::host;

    /// Gathers the locations of all ranks, and the peer access that the driver reports.
    ///
    /// # Errors
    /// Every rank returns the error of the lowest rank whose driver failed.
    pub(in super::super) fn gather(gpu: &Context, comm: &Communicator) -> Result<Topology> {
        let failed = |error| gpu.failed(&error);
        let own = gpu.uuid().and_then(|uuid| Ok((uuid, gpu.compute_capability()?)));
        let (uuid, [major, minor]) = agree(own.map_err(failed), comm)?;
        let mut record = uuid.to_vec();
        record.extend([major as u8, minor as u8]);
        record.extend(host::shared_memory_domain().bytes());
        let records = comm.all_gather_v(&record)?;
        let mut rest = records.data.as_slice();
        let mut locations = Vec::with_capacity(comm.world_size());
        for count in &records.counts {
            let record = rest.split_off(..*count).unwrap_or_default();
            let (Some((gpu, [major, minor])), Some(host)) =
                (record.first_chunk::<18>().and_then(split), record.get(18..))
            else {
                return Err(CommError::setup("a rank describes its GPU in a way that this rank does not understand")
                    .hint("all ranks must run the same version of this program"));
            };
            let host = String::from_utf8_lossy(host).into_owned();
            locations.push(RankLocation { host, gpu, capability: (major.into(), minor.into()) });
        }
        let me = comm.rank();
        let neighbours: Vec<usize> =
            (0..locations.len()).filter(|rank| locations[*rank].host == locations[me].host).collect();
        let access = neighbours.iter().map(|rank| gpu.can_access(locations[*rank].gpu).map_err(failed));
        let access = agree(access.collect::<Result<Vec<_>>>(), comm)?;
        // A GPU that this process does not see may still be accessible. The test in `connect.rs` decides.
        let denied: Vec<i64> = neighbours
            .iter()
            .zip(access)
            .filter(|(_, access)| *access == Some(false))
            .map(|(rank, _)| *rank as i64)
            .collect();
        let all = comm.all_gather_v(&denied)?;
        let readers = all.counts.iter().enumerate().flat_map(|(rank, count)| std::iter::repeat_n(rank, *count));
        let no_access = readers.zip(all.data.iter().map(|owner| *owner as usize)).collect();
        Ok(Topology { locations, no_access })
    }

    fn split(record: &[u8; 18]) -> Option<([u8; 16], [u8; 2])> {
        Some((*record.first_chunk()?, *record.last_chunk()?))
    }

    /// Checks whether all ranks have NCCL. The inner error names the first rank without NCCL, and the reason.
    pub(in super::super) fn nccl_everywhere(comm: &Communicator) -> Result<std::result::Result<(), String>> {
        let own = nccl::Library::load().err().unwrap_or_default();
        Ok(match comm.first_failure(&own)? {
            None => Ok(()),
            Some((rank, cause)) => Err(format!("rank {rank}: {cause}")),
        })
    }
}
