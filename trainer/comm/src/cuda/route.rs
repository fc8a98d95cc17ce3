//! The route of data between GPUs. All ranks choose the route once, from the same exchanged data, so all choose the same route.

use super::layout::{MAX_WORLD, WireType};
use super::supports::{Refusal, supports};
use super::topology::Topology;
#[cfg(feature = "cuda")]
use super::{layout::phase, protocol::Kernel};

/// The backend that the user asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceBackend {
    /// The kernels inside a host, NCCL between hosts, and host memory where neither works.
    Auto,
    /// The kernels. An error if they do not work.
    Kernels,
    /// NCCL. An error if it does not work.
    Nccl,
}

/// The route that is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// The kernels.
    Kernels {
        /// Whether ranks share a GPU. Then the host processes synchronize between steps, and kernels do not wait for each other.
        on_host: bool,
    },
    /// NCCL over all ranks.
    Nccl,
    /// The kernels inside each host. Between hosts, the ranks with the same local index sum their part.
    Hierarchical {
        /// Whether NCCL connects the hosts. Otherwise TCP does.
        nccl: bool,
    },
}

/// Why there is no route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoRoute {
    /// What the user asked for, and why it is not possible.
    pub cause: String,
    /// What the user can do.
    pub hint: String,
}

impl Route {
    /// Chooses the route for calls of at most `elements` elements. `nccl` is an error with the reason if any rank lacks NCCL.
    ///
    /// # Errors
    /// The backend that the user asked for does not work between these GPUs, or no route works.
    pub fn choose(
        backend: DeviceBackend,
        wire: WireType,
        elements: usize,
        topology: &Topology,
        nccl: Result<(), &str>,
    ) -> Result<Self, NoRoute> {
        let world_size = topology.locations.len();
        let bytes = elements as u64 * wire.size() as u64;
        let kernels = supports(wire.dtype(), bytes, world_size, topology);
        let shared = topology.shares_devices();
        let nccl = Self::nccl(topology, nccl);
        let no = |refusal: &Refusal| NoRoute { cause: refusal.to_string(), hint: refusal.hint().into() };
        match backend {
            DeviceBackend::Kernels => {
                kernels.map(|()| Self::Kernels { on_host: shared }).map_err(|refusal| no(&refusal))
            }
            DeviceBackend::Nccl => nccl.map_err(|cause| NoRoute {
                cause: format!("parallel.backend = \"nccl\": {cause}"),
                hint: match shared {
                    true => {
                        "use a GPU per rank, or leave parallel.backend at \"auto\": the kernels can share GPUs".into()
                    }
                    false => "install NCCL 2 (libnccl.so.2), or leave parallel.backend at \"auto\"".into(),
                },
            }),
            DeviceBackend::Auto => match kernels {
                Ok(()) => Ok(Self::Kernels { on_host: shared }),
                Err(_) if hierarchical(wire, bytes, topology) => Ok(Self::Hierarchical { nccl: nccl.is_ok() }),
                Err(refusal) => nccl.map_err(|cause| NoRoute {
                    cause: format!("{refusal}; {cause}"),
                    hint: "install NCCL 2 (libnccl.so.2), or use parallel.backend = \"shm\" or \"tcp\"".into(),
                }),
            },
        }
    }

    /// Returns the route over NCCL. `nccl` is an error with the reason if any rank lacks NCCL.
    ///
    /// # Errors
    /// NCCL is missing, or refuses these ranks.
    pub fn nccl(topology: &Topology, nccl: Result<(), &str>) -> Result<Self, String> {
        match nccl {
            Ok(()) if topology.shares_devices() => Err("several ranks share a GPU, which NCCL refuses".to_owned()),
            Ok(()) => Ok(Self::Nccl),
            Err(cause) => Err(cause.to_owned()),
        }
    }

    /// Returns whether the choice of the route depends on the presence of NCCL.
    pub fn may_need_nccl(backend: DeviceBackend, wire: WireType, elements: usize, topology: &Topology) -> bool {
        let choice = |nccl| Self::choose(backend, wire, elements, topology, nccl);
        choice(Ok(())) != choice(Err(""))
    }

    /// Describes the route for the user.
    pub fn describe(&self, topology: &Topology) -> String {
        let (world_size, hosts) = (topology.locations.len(), topology.hosts().len());
        match self {
            Self::Kernels { on_host: false } if topology.shares_devices() => {
                format!(
                    "all-reduce kernels, {world_size} ranks that share GPUs and synchronize on them: timings mean nothing"
                )
            }
            Self::Kernels { on_host: false } => {
                format!(
                    "all-reduce kernels over {world_size} GPUs of one host; one-shot for short arrays, two-shot for long ones"
                )
            }
            Self::Kernels { on_host: true } => {
                format!(
                    "all-reduce kernels, {world_size} ranks that share GPUs and synchronize on the host between steps: timings mean nothing"
                )
            }
            Self::Nccl => format!("NCCL over {world_size} GPUs"),
            Self::Hierarchical { nccl } => {
                let between = if *nccl { "NCCL" } else { "TCP" };
                format!("all-reduce kernels inside each of {hosts} hosts, {between} between them ({world_size} GPUs)")
            }
        }
    }
}

/// Returns whether all hosts have the same number of ranks, and the kernels can work inside each host.
fn hierarchical(wire: WireType, bytes: u64, topology: &Topology) -> bool {
    let hosts = topology.hosts();
    let each = hosts[0].len();
    let inside = |ranks: &Vec<usize>| {
        let own = Topology {
            locations: ranks.iter().map(|rank| topology.locations[*rank].clone()).collect(),
            no_access: topology
                .no_access
                .iter()
                .filter(|(a, b)| ranks.contains(a) && ranks.contains(b))
                .copied()
                .collect(),
        };
        ranks.len() == each && !own.shares_devices() && supports(wire.dtype(), bytes, each, &own).is_ok()
    };
    hosts.len() > 1 && (2..=MAX_WORLD).contains(&each) && hosts.iter().all(inside)
}

/// Returns the phases of a launch before and after the sum of slots between hosts.
#[cfg(feature = "cuda")]
pub(super) fn phases_around_sum(kernel: Kernel) -> (u32, u32) {
    match kernel {
        Kernel::TwoShot => {
            (phase::PACK | phase::BARRIER_ENTER | phase::REDUCE, phase::BARRIER_EXIT | phase::GATHER | phase::COUNT)
        }
        // Without connected windows there is nothing to reduce inside a host: pack before the sum, gather after it.
        _ => (phase::PACK, phase::GATHER | phase::COUNT),
    }
}

#[cfg(test)]
mod tests {
    use super::super::topology::RankLocation;
    use super::*;

    const NONE: Result<(), &str> = Err("libnccl.so.2: not found");

    fn topology(gpus: &[(&str, u8)]) -> Topology {
        let location =
            |(host, gpu): &(&str, u8)| RankLocation { host: (*host).into(), gpu: [*gpu; 16], capability: (9, 0) };
        Topology { locations: gpus.iter().map(location).collect(), no_access: Vec::new() }
    }

    fn choose(backend: DeviceBackend, topology: &Topology, nccl: Result<(), &str>) -> Result<Route, String> {
        Route::choose(backend, WireType::F32, 1000, topology, nccl)
            .map_err(|no| format!("{}\nhint: {}", no.cause, no.hint))
    }

    #[test]
    fn auto_uses_kernels_in_a_host_and_nccl_between_hosts() {
        let one = topology(&[("a", 0), ("a", 1)]);
        for nccl in [Ok(()), NONE] {
            assert_eq!(choose(DeviceBackend::Auto, &one, nccl), Ok(Route::Kernels { on_host: false }));
        }
        assert_eq!(choose(DeviceBackend::Nccl, &one, Ok(())), Ok(Route::Nccl));
        let two = topology(&[("a", 0), ("a", 1), ("b", 0), ("b", 1)]);
        assert_eq!(choose(DeviceBackend::Auto, &two, Ok(())), Ok(Route::Hierarchical { nccl: true }));
        assert_eq!(choose(DeviceBackend::Auto, &two, NONE), Ok(Route::Hierarchical { nccl: false }));
        assert_eq!(choose(DeviceBackend::Nccl, &two, Ok(())), Ok(Route::Nccl));
        // One GPU per host, or different numbers of GPUs.
        for hosts in [topology(&[("a", 0), ("b", 0)]), topology(&[("a", 0), ("a", 1), ("b", 0)])] {
            assert_eq!(choose(DeviceBackend::Auto, &hosts, Ok(())), Ok(Route::Nccl));
        }
    }

    #[test]
    fn nccl_is_needed_only_if_the_route_may_use_it() {
        let one = topology(&[("a", 0), ("a", 1)]);
        let two = topology(&[("a", 0), ("a", 1), ("b", 0), ("b", 1)]);
        let needs = |backend, topology| Route::may_need_nccl(backend, WireType::F32, 1000, topology);
        assert!(
            !needs(DeviceBackend::Auto, &one)
                && !needs(DeviceBackend::Kernels, &one)
                && !needs(DeviceBackend::Kernels, &two)
        );
        assert!(needs(DeviceBackend::Nccl, &one) && needs(DeviceBackend::Auto, &two));
    }

    #[test]
    fn shared_gpus_synchronize_on_the_host() {
        let shared = topology(&[("a", 0), ("a", 0)]);
        assert_eq!(choose(DeviceBackend::Auto, &shared, Ok(())), Ok(Route::Kernels { on_host: true }));
        let route = choose(DeviceBackend::Auto, &shared, NONE).unwrap();
        assert!(route.describe(&shared).contains("timings mean nothing"));
        assert_eq!(
            choose(DeviceBackend::Nccl, &shared, Ok(())).unwrap_err(),
            "parallel.backend = \"nccl\": several ranks share a GPU, which NCCL refuses\nhint: use a GPU per rank, or leave \
                         parallel.backend at \"auto\": the kernels can share GPUs"
        );
    }

    #[test]
    fn backends_that_cannot_work_are_refused_with_a_hint() {
        let apart = topology(&[("a", 0), ("b", 0)]);
        assert_eq!(
            choose(DeviceBackend::Kernels, &apart, Ok(())).unwrap_err(),
            "the ranks are on 2 hosts, and GPU memory is shared within one\nhint: parallel.backend = \"nccl\" or \"auto\" works \
                         across hosts"
        );
        assert_eq!(
            choose(DeviceBackend::Nccl, &apart, NONE).unwrap_err(),
            "parallel.backend = \"nccl\": libnccl.so.2: not found\nhint: install NCCL 2 (libnccl.so.2), or leave \
             parallel.backend at \"auto\""
        );
        assert_eq!(
            choose(DeviceBackend::Auto, &apart, NONE).unwrap_err(),
            "the ranks are on 2 hosts, and GPU memory is shared within one; libnccl.so.2: not found\nhint: install NCCL 2 \
             (libnccl.so.2), or use parallel.backend = \"shm\" or \"tcp\""
        );
        let mut blind = topology(&[("a", 0), ("a", 1)]);
        blind.no_access = vec![(1, 0)];
        assert_eq!(choose(DeviceBackend::Auto, &blind, Ok(())), Ok(Route::Nccl));
    }
}
