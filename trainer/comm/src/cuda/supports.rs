//! Whether the kernels can run a collective: a pure function, so that every refusal can be tested on any machine.

use super::layout::MAX_WORLD;
use super::topology::Topology;
use crate::DType;

/// Why the kernels cannot run a collective.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The kernels sum floats of at most 32 bits.
    #[error("the kernels carry f32, f16 and bf16, not {0}")]
    Type(DType),
    /// The kernels support 2 to 8 ranks.
    #[error("the kernels work with 2 to {most} ranks, not {0}", most = MAX_WORLD)]
    World(usize),
    /// Positions in the kernels have 32 bits.
    #[error("{0} bytes are more than the kernels can count")]
    Bytes(u64),
    /// GPU memory can be opened on one host only.
    #[error("the ranks are on {0} hosts, and GPU memory is shared within one")]
    Hosts(usize),
    /// Acquire and release at system scope need compute capability 7.0.
    #[error("rank {rank}'s GPU has compute capability {}.{}, and the kernels need 7.0", .capability.0, .capability.1)]
    Capability {
        /// The rank whose GPU is too old.
        rank: usize,
        /// Its compute capability.
        capability: (u32, u32),
    },
    /// The driver reports no access between these ranks' GPUs.
    #[error("rank {from}'s GPU has no access to the memory of rank {to}'s (cuDeviceCanAccessPeer)")]
    NoAccess {
        /// The rank that would read.
        from: usize,
        /// The owner of the memory.
        to: usize,
    },
}

impl Refusal {
    /// Returns what the user can do instead.
    pub fn hint(&self) -> &'static str {
        match self {
            Refusal::Type(_) | Refusal::Bytes(_) => "reduce such arrays on the CPU",
            Refusal::World(_) => "parallel.backend = \"nccl\" or \"auto\" works with more ranks",
            Refusal::Hosts(_) => "parallel.backend = \"nccl\" or \"auto\" works across hosts",
            Refusal::Capability { .. } => "parallel.backend = \"shm\" reduces on the CPU",
            Refusal::NoAccess { .. } => {
                "parallel.backend = \"nccl\" goes through the host between GPUs without peer access"
            }
        }
    }
}

/// Checks whether the kernels can reduce `bytes` bytes of `dtype` over `world_size` ranks of this topology.
///
/// # Errors
/// The first reason why not.
pub fn supports(dtype: DType, bytes: u64, world_size: usize, topology: &Topology) -> Result<(), Refusal> {
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(Refusal::Type(dtype));
    }
    if !(2..=MAX_WORLD).contains(&world_size) {
        return Err(Refusal::World(world_size));
    }
    // The ends of tensors are u32.
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
    use super::super::topology::RankLocation;
    use super::*;

    fn topology(gpus: &[(&str, u8)]) -> Topology {
        let location =
            |(host, gpu): &(&str, u8)| RankLocation { host: (*host).into(), gpu: [*gpu; 16], capability: (9, 0) };
        Topology { locations: gpus.iter().map(location).collect(), no_access: Vec::new() }
    }

    #[test]
    fn float_types_and_shared_gpus_are_supported() {
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
        // The same UUID on another host is another GPU.
        assert!(!topology(&[("a", 0), ("b", 0)]).shares_devices());
    }

    #[test]
    fn each_refusal_has_its_reason() {
        let two = topology(&[("a", 0), ("a", 1)]);
        let refused =
            |dtype, bytes, world_size, topology: &Topology| supports(dtype, bytes, world_size, topology).unwrap_err();
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
        // Every peer counts, not only the first.
        let mut blind = topology(&[("a", 0), ("a", 1), ("a", 2)]);
        blind.no_access = vec![(2, 1)];
        let refusal = refused(DType::F32, 8, 3, &blind);
        assert_eq!(
            text(refusal),
            "rank 2's GPU has no access to the memory of rank 1's (cuDeviceCanAccessPeer); parallel.backend = \"nccl\" goes \
                         through the host between GPUs without peer access"
        );
    }
}
