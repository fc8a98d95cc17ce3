//! The report's content, for `--json` and for the screen.

use std::path::PathBuf;

use serde::Serialize;

use super::{
    machine::{self, Cpu, Mpi},
    peers::{self, Peer},
};
use crate::device::{self, DeviceRequest, DeviceSet, HAS_CUDA, Headers, Library};
use comm::{
    DType, TransportKind,
    cuda::{
        DeviceBackend, NoRoute, RankLocation, Route, Topology,
        driver::{Driver, Gpu, NoDriver},
        layout::WireType,
        supports,
    },
};

/// A part of the machine that was found, or the places that were searched for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(super) enum FoundPart<T> {
    /// The part was found.
    Found(T),
    /// The part is missing.
    Missing {
        /// The places that were searched, and the errors.
        missing: String,
    },
}

impl<T> FoundPart<T> {
    /// Converts a result. The error becomes text.
    pub(super) fn of<E: std::fmt::Display>(result: Result<T, E>) -> Self {
        match result {
            Ok(found) => Self::Found(found),
            Err(error) => Self::Missing { missing: error.to_string() },
        }
    }
}

/// NVIDIA's driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct DriverFacts {
    /// The name by which `libcuda` was loaded.
    pub library: String,
    /// The newest CUDA version that the driver supports.
    pub cuda: String,
    /// Version of the kernel module, if the system reports one.
    pub version: Option<String>,
}

/// A GPU, and the result of writing and reading its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct GpuFacts {
    #[serde(flatten)]
    pub gpu: Gpu,
    /// `works`, or the error.
    pub memory_check: String,
}

/// A communication backend for gradients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct BackendFacts {
    /// The name for `--backend`.
    pub name: &'static str,
    /// Whether this build includes the backend.
    pub compiled: bool,
    /// The backend's use, or the reason why it is unavailable.
    pub note: String,
}

/// The devices and the backend of a run without `--cpus`, `--gpus` and `--backend`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct DefaultChoice {
    /// The device that computes.
    pub device: String,
    pub why: String,
    /// The backend that carries gradients between several processes.
    pub gradients: String,
}

/// Whether this build includes MPI.
const HAS_MPI: bool = cfg!(feature = "mpi");

/// The whole report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct DoctorReport {
    /// Version of this program.
    pub trainer: &'static str,
    /// Features of this build.
    pub features: Vec<&'static str>,
    pub cpu: Cpu,
    pub driver: FoundPart<DriverFacts>,
    /// The effect of `CUDA_VISIBLE_DEVICES`, if it is set.
    pub visible: Option<String>,
    pub gpus: Vec<GpuFacts>,
    pub nvrtc: FoundPart<Library>,
    pub headers: FoundPart<Headers>,
    /// Why the versions of driver and NVRTC are incompatible, and what to do. `None` if the versions are compatible.
    pub versions: Option<String>,
    /// Each ordered pair of GPUs.
    pub peers: Vec<Peer>,
    /// Check of a kernel that NVRTC compiles for GPU 0: `works`, the error, or the reason why the check did not run.
    pub compiler: String,
    /// Check of GPU memory shared between processes: `works`, the error, or the reason why the check did not run.
    pub ipc: String,
    pub nccl: FoundPart<Library>,
    pub mpi: FoundPart<Mpi>,
    pub backends: Vec<BackendFacts>,
    pub would_use: DefaultChoice,
}

impl DoctorReport {
    /// Examines the whole machine.
    pub(super) fn collect() -> Self {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let loaded = Driver::load();
        let gpus = loaded.as_ref().map(gpus).unwrap_or_default();
        let nccl = FoundPart::of(device::nccl());
        let peers = loaded.as_ref().map(|driver| peers::check_pairs(driver, gpus.len())).unwrap_or_default();
        let all: Vec<Gpu> = gpus.iter().map(|facts| facts.gpu.clone()).collect();
        let headers = device::headers();
        let nvrtc = device::nvrtc();
        let (ipc, compiler) = match (&loaded, all.first()) {
            (Ok(driver), Some(gpu)) => (
                peers::ipc(driver, gpu, all.get(1)),
                match &headers {
                    Ok(headers) => peers::check_compiled_kernel(driver, gpu, &headers.path),
                    Err(_) => "not tried: there are no headers".into(),
                },
            ),
            _ => ["not tried: there is no GPU"; 2].map(str::to_owned).into(),
        };
        let features = [("cuda", HAS_CUDA), ("mpi", HAS_MPI)];
        Self {
            trainer: env!("CARGO_PKG_VERSION"),
            features: features.into_iter().filter_map(|(name, has)| has.then_some(name)).collect(),
            cpu: Cpu::detect(),
            visible: device::visible_devices_note(visible.as_deref()),
            would_use: choice(&peers, &ipc, &nccl),
            peers,
            ipc,
            driver: FoundPart::of(loaded.as_ref().map(driver_facts).map_err(no_driver)),
            gpus,
            versions: loaded.as_ref().ok().zip(nvrtc.as_ref().ok()).and_then(versions),
            nvrtc: FoundPart::of(nvrtc),
            headers: FoundPart::of(headers.map_err(|error| error.tried.join(", "))),
            compiler,
            mpi: FoundPart::of(machine::mpi()),
            backends: backends(&nccl),
            nccl,
        }
    }
}

/// Describes why there is no driver.
pub(super) fn no_driver(error: &NoDriver) -> String {
    match error {
        NoDriver::NotLoaded(missing) => missing.to_string(),
        NoDriver::Refused { library, error } => format!("{library} is there, but {error}"),
    }
}

fn driver_facts(driver: &Driver) -> DriverFacts {
    let cuda =
        driver.cuda_version().map_or_else(|error| error.to_string(), |[major, minor]| format!("{major}.{minor}"));
    DriverFacts { library: driver.library.clone(), cuda, version: machine::kernel_module() }
}

/// Returns why the driver and NVRTC are incompatible, and what to do.
fn versions((driver, nvrtc): (&Driver, &Library)) -> Option<String> {
    let refused = device::check_versions(driver.cuda_version().ok()?, nvrtc).err()?;
    Some(format!("{}; {}", refused.cause, refused.hint))
}

fn gpus(driver: &Driver) -> Vec<GpuFacts> {
    let facts = |index| {
        driver.gpu(index).ok().map(|gpu| GpuFacts { gpu, memory_check: peers::check_own_memory(driver, index) })
    };
    (0..driver.count().unwrap_or(0)).filter_map(facts).collect()
}

/// Notes about the transports between CPUs, with shared memory and without.
const SHM: &str = "CPUs of one host; `auto` takes it there";
const NO_SHM: &str = "not available on this system: it needs Linux";
const TCP: &str = "CPUs of any hosts; `auto` takes it between hosts";
const TCP_ALWAYS: &str = "CPUs of any hosts; `auto` takes it";

/// Returns the backends that `--backend` accepts, and their use on this machine.
fn backends(nccl: &FoundPart<Library>) -> Vec<BackendFacts> {
    let row = |name, compiled, note: &str| BackendFacts { name, compiled, note: note.to_owned() };
    let nccl = match nccl {
        FoundPart::Found(_) => "",
        FoundPart::Missing { .. } => "; its library is not here",
    };
    let gpu = |what: &str| match HAS_CUDA {
        true => what.to_owned(),
        false => "needs a build with --features cuda".to_owned(),
    };
    vec![
        row("shm", TransportKind::HAS_SHM, if TransportKind::HAS_SHM { SHM } else { NO_SHM }),
        row("tcp", true, if TransportKind::HAS_SHM { TCP } else { TCP_ALWAYS }),
        BackendFacts {
            name: "cuda",
            compiled: HAS_CUDA,
            note: gpu("GPUs of one machine, custom kernels; `auto` chooses it there"),
        },
        BackendFacts {
            name: "nccl",
            compiled: HAS_CUDA,
            note: gpu(&format!("GPUs of any machines; `auto` chooses it where the custom kernels cannot run{nccl}")),
        },
        BackendFacts {
            name: "mpi",
            compiled: HAS_MPI,
            note: if HAS_MPI { "processes that mpirun starts" } else { "needs a build with --features mpi" }.into(),
        },
    ]
}

fn choice(peers: &[Peer], ipc: &str, nccl: &FoundPart<Library>) -> DefaultChoice {
    let on_cpu = |why: String| DefaultChoice {
        device: device::cpu().description,
        why,
        gradients: if TransportKind::HAS_SHM { "shm inside a host, tcp between hosts" } else { "tcp" }.into(),
    };
    match DeviceSet::of(DeviceRequest::Best) {
        Ok(DeviceSet::Gpus(gpus)) => DefaultChoice {
            device: gpus.all.iter().map(device::describe).collect::<Vec<_>>().join("; "),
            why: "driver, GPU, NVRTC and CUDA's headers are there".into(),
            gradients: between_gpus(&gpus.all, peers, ipc, matches!(nccl, FoundPart::Found(_))),
        },
        Ok(DeviceSet::Cpu(Some(why))) => on_cpu(why),
        Ok(DeviceSet::Cpu(None)) => on_cpu("this build has no GPU backend (feature cuda)".into()),
        Err(failure) => on_cpu(failure.message),
    }
}

/// Describes the route of the gradients with one rank on each GPU of this machine. Chooses as a group of ranks does: first from the
/// driver's answers. If a check of the access (`peers`, `ipc`) contradicts the driver, the next route is taken.
fn between_gpus(gpus: &[Gpu], peers: &[Peer], ipc: &str, nccl: bool) -> String {
    if gpus.len() < 2 {
        return "one GPU: no exchange, except with --oversubscribe".into();
    }
    let location = |(index, gpu): (usize, &Gpu)| {
        let [major, minor] = gpu.compute;
        RankLocation { host: String::new(), gpu: (index as u128).to_le_bytes(), capability: (major, minor) }
    };
    let topology = Topology {
        locations: gpus.iter().enumerate().map(location).collect(),
        no_access: peers.iter().filter(|peer| !peer.driver_says).map(|peer| (peer.from, peer.to)).collect(),
    };
    let nccl = if nccl { Ok(()) } else { Err("there is no NCCL here") };
    let route = match Route::choose(DeviceBackend::Auto, WireType::F32, 1, &topology, nccl) {
        Ok(route) => route,
        Err(NoRoute { cause, .. }) => return format!("shm: through the host's memory, as {cause}"),
    };
    let (broken, says) = (peers.iter().find(|peer| peer.check != "works"), route.describe(&topology));
    let instead = |cause: &str| match Route::nccl(&topology, nccl) {
        Ok(route) => format!("nccl: {}, as {cause}", route.describe(&topology)),
        Err(missing) => format!("shm: through the host's memory, as {cause}; {missing}"),
    };
    match (&route, broken) {
        (Route::Nccl, _) => match supports(DType::F32, 4, gpus.len(), &topology) {
            Ok(()) => format!("nccl: {says}"),
            Err(refusal) => format!("nccl: {says}, as {refusal}"),
        },
        (_, Some(Peer { from, to, .. })) => {
            instead(&format!("the driver says that GPU {from} reaches GPU {to}'s memory, and it does not"))
        }
        (_, None) if ipc != "works" => instead("processes cannot share a GPU's memory"),
        (_, None) => format!("cuda: {says}"),
    }
}

/// Returns the path of a file as the report shows it.
pub(super) fn shown(path: Option<&PathBuf>) -> String {
    path.map_or_else(|| "unknown file".to_owned(), |path| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reported_route_follows_the_checks_not_the_driver() {
        let peer = |from, to, driver_says, check: &str| Peer { from, to, driver_says, check: check.into() };
        let good = [peer(0, 1, true, "works"), peer(1, 0, true, "works")];
        let blind = [peer(0, 1, true, "works"), peer(1, 0, false, "no access")];
        let liar = [peer(0, 1, true, "works"), peer(1, 0, true, "3 of 4 values differ from the written ones")];
        let gpus = |count: usize, compute| {
            let gpu = |index| {
                let (name, uuid) = (String::from("GPU"), format!("GPU-{index}"));
                let (exclusive, limits_kernels) = (false, false);
                Gpu { index, name, memory_bytes: 1 << 30, compute, multiprocessors: 4, uuid, exclusive, limits_kernels }
            };
            (0..count).map(gpu).collect::<Vec<_>>()
        };
        let says = |peers: &[Peer], ipc, nccl| between_gpus(&gpus(2, [9, 0]), peers, ipc, nccl);
        assert!(says(&good, "works", false).starts_with("cuda: all-reduce kernels over 2 GPUs"));
        let over = says(&blind, "works", true);
        assert!(
            over.starts_with("nccl: NCCL over 2 GPUs, as rank 1's GPU has no access to the memory of rank 0's"),
            "{over}"
        );
        assert!(
            says(&blind, "works", false).starts_with("shm: through the host's memory, as rank 1's GPU has no access")
        );
        let lied = "the driver says that GPU 1 reaches GPU 0's memory, and it does not";
        assert_eq!(says(&liar, "works", true), format!("nccl: NCCL over 2 GPUs, as {lied}"));
        let (here, none) = ("shm: through the host's memory, as", "there is no NCCL here");
        assert_eq!(says(&liar, "works", false), format!("{here} {lied}; {none}"));
        let shared = "processes cannot share a GPU's memory";
        assert_eq!(says(&good, "cuIpcGetMemHandle: …", true), format!("nccl: NCCL over 2 GPUs, as {shared}"));
        assert_eq!(says(&good, "cuIpcGetMemHandle: …", false), format!("{here} {shared}; {none}"));
        let old = between_gpus(&gpus(2, [6, 1]), &good, "works", true);
        assert!(old.ends_with("rank 0's GPU has compute capability 6.1, and the kernels need 7.0"), "{old}");
        assert!(
            between_gpus(&gpus(9, [9, 0]), &[], "works", true).ends_with("the kernels work with 2 to 8 ranks, not 9")
        );
        assert!(between_gpus(&gpus(1, [9, 0]), &[], "works", true).contains("one GPU"));
    }
}
