//! Whether the kernels can do a job: a pure function, so that every refusal can be tested anywhere.

use std::fmt;

use super::layout::MAX_WORLD;
use crate::DType;

/// What a rank says of its location, for all to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankLocation {
    /// The host: one kernel boot, one view of its devices.
    pub host: String,
    /// Identifies the GPU, whatever index processes give it.
    pub gpu: [u8; 16],
    /// Compute capability.
    pub capability: (u32, u32),
}

/// Where ranks are, and which of them reach each other's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// By rank.
    pub locations: Vec<RankLocation>,
    /// Pairs of ranks (reader, owner) between whose GPUs the driver offers no peer access. What it does offer is tried out
    /// before it is used.
    pub no_access: Vec<(usize, usize)>,
}

impl Topology {
    /// Whether several ranks have one GPU: then a kernel must not wait for another rank's, which may run only after it.
    pub fn shares_devices(&self) -> bool {
        let mut gpus: Vec<_> = self.locations.iter().map(|location| (&location.host, location.gpu)).collect();
        gpus.sort_unstable();
        gpus.windows(2).any(|pair| pair[0] == pair[1])
    }

    /// Ranks of each host, in the order of their first ranks.
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

/// Why the kernels cannot do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// They sum floats of at most 32 bits.
    Type(DType),
    /// They know 2 to 8 ranks.
    World(usize),
    /// Their positions are 32 bits wide.
    Bytes(u64),
    /// Memory can be opened on one host only.
    Hosts(usize),
    /// Acquire and release at system scope came with capability 7.0.
    Capability {
        /// The rank whose GPU is too old.
        rank: usize,
        /// What it has.
        capability: (u32, u32),
    },
    /// The driver offers no access between these ranks' GPUs.
    NoAccess {
        /// The rank that would read.
        from: usize,
        /// The owner of the memory.
        to: usize,
    },
}

impl Refusal {
    /// What to do instead.
    pub fn hint(&self) -> &'static str {
        match self {
            Refusal::Type(_) | Refusal::Bytes(_) => "such arrays are for the host's collectives",
            Refusal::World(_) | Refusal::Hosts(_) => "parallel.backend = \"nccl\", or \"auto\", goes beyond a host",
            Refusal::Capability { .. } => "parallel.backend = \"shm\" reduces on the CPU",
            Refusal::NoAccess { .. } => {
                "parallel.backend = \"nccl\" goes through the host where GPUs do not see each other"
            }
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Type(dtype) => write!(f, "the kernels carry f32, f16 and bf16, not {dtype}"),
            Refusal::World(world) => write!(f, "the kernels work with 2 to {MAX_WORLD} ranks, not {world}"),
            Refusal::Bytes(bytes) => write!(f, "{bytes} bytes are more than the kernels can count"),
            Refusal::Hosts(hosts) => write!(f, "the ranks are on {hosts} hosts, and GPU memory is shared within one"),
            Refusal::Capability { rank, capability: (major, minor) } => {
                write!(f, "rank {rank}'s GPU has compute capability {major}.{minor}, and the kernels need 7.0")
            }
            Refusal::NoAccess { from, to } => {
                write!(f, "rank {from}'s GPU has no access to the memory of rank {to}'s (cuDeviceCanAccessPeer)")
            }
        }
    }
}

/// Whether the kernels can reduce `bytes` bytes of `dtype` over `world` ranks placed so.
///
/// # Errors
/// The first reason against it.
pub fn supports(dtype: DType, bytes: u64, world: usize, topology: &Topology) -> Result<(), Refusal> {
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(Refusal::Type(dtype));
    }
    if !(2..=MAX_WORLD).contains(&world) {
        return Err(Refusal::World(world));
    }
    // ends of tensors are u32
    if bytes / dtype.size() as u64 > u64::from(u32::MAX) {
        return Err(Refusal::Bytes(bytes));
    }
    let hosts = topology.hosts().len();
    if hosts > 1 {
        return Err(Refusal::Hosts(hosts));
    }
    let old = topology.locations.iter().position(|location| location.capability < (7, 0));
    if let Some(rank) = old {
        return Err(Refusal::Capability { rank, capability: topology.locations[rank].capability });
    }
    match topology.no_access.first() {
        Some(&(from, to)) => Err(Refusal::NoAccess { from, to }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(gpus: &[(&str, u8)]) -> Topology {
        let location =
            |(host, gpu): &(&str, u8)| RankLocation { host: (*host).into(), gpu: [*gpu; 16], capability: (9, 0) };
        Topology { locations: gpus.iter().map(location).collect(), no_access: Vec::new() }
    }

    #[test]
    fn what_the_kernels_can_do() {
        let four = topology(&[("a", 0), ("a", 1), ("a", 2), ("a", 3)]);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for bytes in [0, 2, 1 << 20, 16 << 30] {
                let bytes = bytes.min(u64::from(u32::MAX) * dtype.size() as u64);
                assert_eq!(supports(dtype, bytes, 4, &four), Ok(()));
            }
        }
        assert!(!four.shares_devices());
        let shared = topology(&[("a", 0), ("a", 0)]);
        assert!(shared.shares_devices());
        assert_eq!(supports(DType::F32, 4, 2, &shared), Ok(()));
        // the same number on another host is another GPU
        assert!(!topology(&[("a", 0), ("b", 0)]).shares_devices());
    }

    #[test]
    fn what_they_refuse_and_why() {
        let two = topology(&[("a", 0), ("a", 1)]);
        let refused = |dtype, bytes, world, topology: &Topology| supports(dtype, bytes, world, topology).unwrap_err();
        let text = |refusal: Refusal| format!("{refusal}; {}", refusal.hint());
        assert_eq!(refused(DType::I64, 8, 2, &two), Refusal::Type(DType::I64));
        assert_eq!(refused(DType::F32, 8, 1, &two), Refusal::World(1));
        assert_eq!(refused(DType::F32, 8, 9, &two), Refusal::World(9));
        assert_eq!(refused(DType::F32, 4 << 32, 2, &two), Refusal::Bytes(4 << 32));
        let apart = topology(&[("a", 0), ("b", 0), ("a", 1)]);
        assert_eq!(refused(DType::F32, 8, 3, &apart), Refusal::Hosts(2));
        assert_eq!(apart.hosts(), [vec![0, 2], vec![1]]);
        let mut old = two.clone();
        old.locations[1].capability = (6, 1);
        assert_eq!(refused(DType::F32, 8, 2, &old), Refusal::Capability { rank: 1, capability: (6, 1) });
        // not only the first peer counts
        let mut blind = topology(&[("a", 0), ("a", 1), ("a", 2)]);
        blind.no_access = vec![(2, 1)];
        let refusal = refused(DType::F32, 8, 3, &blind);
        assert_eq!(
            text(refusal),
            "rank 2's GPU has no access to the memory of rank 1's (cuDeviceCanAccessPeer); parallel.backend = \"nccl\" goes \
             through the host where GPUs do not see each other"
        );
    }
}
