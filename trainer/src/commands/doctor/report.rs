//! What was found, for `--json` and for the screen.

use std::path::PathBuf;

use serde::Serialize;

use super::{
    machine::{self, Cpu, Mpi},
    peers::{self, Peer},
};
use crate::{
    comm::cuda::driver::{Driver, Gpu, NoDriver},
    device::{self, HAS_CUDA, Headers, Library, Target, Wish},
};

/// Something that is there, or where it was looked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(super) enum Found<T> {
    /// It is there.
    There(T),
    /// It is not.
    Missing {
        /// Where it was looked for, and what was said.
        missing: String,
    },
}

impl<T> Found<T> {
    /// From a result, its error in words.
    pub(super) fn of<E: std::fmt::Display>(result: Result<T, E>) -> Self {
        match result {
            Ok(found) => Self::There(found),
            Err(error) => Self::Missing { missing: error.to_string() },
        }
    }
}

/// NVIDIA's driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct DriverFacts {
    /// The name that `libcuda` was loaded by.
    pub library: String,
    /// The newest CUDA that it serves.
    pub cuda: String,
    /// Version of the kernel module, where the system tells.
    pub version: Option<String>,
}

/// A GPU, and what came of writing and reading its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct GpuFacts {
    #[serde(flatten)]
    pub gpu: Gpu,
    /// `works`, or what went wrong.
    pub memory_check: String,
}

/// A way for gradients to travel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct BackendFacts {
    /// As `--backend` has it.
    pub name: &'static str,
    /// Whether this build has it.
    pub compiled: bool,
    /// What it is for, or what it lacks.
    pub note: String,
}

/// What a run without `--cpus`, `--gpus` and `--backend` uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Choice {
    /// What it computes on.
    pub device: String,
    pub why: String,
    /// How gradients travel where there are several processes.
    pub gradients: String,
}

/// Whether this build has MPI.
const HAS_MPI: bool = cfg!(feature = "mpi");

/// All of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Report {
    /// Version of this program.
    pub trainer: &'static str,
    /// Features of this build.
    pub features: Vec<&'static str>,
    pub cpu: Cpu,
    pub driver: Found<DriverFacts>,
    /// `CUDA_VISIBLE_DEVICES`, where it is set, in words.
    pub visible: Option<String>,
    pub gpus: Vec<GpuFacts>,
    pub nvrtc: Found<Library>,
    pub headers: Found<Headers>,
    /// Each ordered pair of GPUs.
    pub peers: Vec<Peer>,
    /// GPU memory shared between processes: `works`, or what went wrong, or why it was not tried.
    pub ipc: String,
    pub nccl: Found<Library>,
    pub mpi: Found<Mpi>,
    pub backends: Vec<BackendFacts>,
    pub would_use: Choice,
}

impl Report {
    /// Looks for everything.
    pub(super) fn collect() -> Self {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let loaded = Driver::load();
        let gpus = loaded.as_ref().map(gpus).unwrap_or_default();
        let nccl = Found::of(device::nccl());
        let peers = loaded.as_ref().map(|driver| peers::all(driver, gpus.len())).unwrap_or_default();
        let ipc = match &loaded {
            Ok(driver) if !gpus.is_empty() => peers::ipc(driver, 0),
            _ => "not tried: there is no GPU".into(),
        };
        let features = [("cuda", HAS_CUDA), ("mpi", HAS_MPI)];
        Self {
            trainer: env!("CARGO_PKG_VERSION"),
            features: features.into_iter().filter_map(|(name, has)| has.then_some(name)).collect(),
            cpu: Cpu::detect(),
            visible: device::hidden(visible.as_deref()),
            would_use: choice(&peers, &ipc, &nccl),
            peers,
            ipc,
            driver: Found::of(loaded.as_ref().map(driver_facts).map_err(no_driver)),
            gpus,
            nvrtc: Found::of(device::nvrtc()),
            headers: Found::of(device::headers().map_err(|error| error.tried.join(", "))),
            mpi: Found::of(machine::mpi()),
            backends: backends(&nccl),
            nccl,
        }
    }
}

/// Why there is no driver, in words.
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

fn gpus(driver: &Driver) -> Vec<GpuFacts> {
    let facts = |index| driver.gpu(index).ok().map(|gpu| GpuFacts { gpu, memory_check: peers::alone(driver, index) });
    (0..driver.count().unwrap_or(0)).filter_map(facts).collect()
}

/// What `--backend` may name, and what becomes of it here.
fn backends(nccl: &Found<Library>) -> Vec<BackendFacts> {
    let row = |name, compiled, note: &str| BackendFacts { name, compiled, note: note.to_owned() };
    let nccl = match nccl {
        Found::There(_) => "",
        Found::Missing { .. } => "; its library is not here",
    };
    let gpu = |what: &str| match HAS_CUDA {
        true => what.to_owned(),
        false => "needs a build with --features cuda".to_owned(),
    };
    vec![
        row("shm", true, "CPUs of one host; `auto` takes it there"),
        row("tcp", true, "CPUs of any hosts; `auto` takes it between hosts"),
        BackendFacts {
            name: "cuda",
            compiled: HAS_CUDA,
            note: gpu("GPUs of one host, kernels of our own; `auto` takes it there"),
        },
        BackendFacts {
            name: "nccl",
            compiled: HAS_CUDA,
            note: gpu(&format!("GPUs of any hosts; `auto` takes it where the kernels cannot go{nccl}")),
        },
        BackendFacts {
            name: "mpi",
            compiled: HAS_MPI,
            note: if HAS_MPI { "processes that mpirun starts" } else { "needs a build with --features mpi" }.into(),
        },
    ]
}

fn choice(peers: &[Peer], ipc: &str, nccl: &Found<Library>) -> Choice {
    let on_cpu = |why: String| Choice {
        device: device::cpu().description,
        why,
        gradients: "shm inside a host, tcp between hosts".into(),
    };
    match Target::of(Wish::Best) {
        Ok(Target::Gpus(gpus)) => Choice {
            device: gpus.all.iter().map(device::describe).collect::<Vec<_>>().join("; "),
            why: "driver, GPU, NVRTC and CUDA's headers are there".into(),
            gradients: between_gpus(gpus.all.len(), peers, ipc, matches!(nccl, Found::There(_))),
        },
        Ok(Target::Cpu(Some(why))) => on_cpu(why),
        Ok(Target::Cpu(None)) => on_cpu("this build has no GPU backend (feature cuda)".into()),
        Err(failure) => on_cpu(failure.message),
    }
}

/// How gradients travel between `gpus` GPUs of this host, by what the checks have shown.
fn between_gpus(gpus: usize, peers: &[Peer], ipc: &str, nccl: bool) -> String {
    if gpus < 2 {
        return "there is one GPU: none travel, but with --oversubscribe".into();
    }
    let broken = peers.iter().find(|peer| peer.check != "works");
    let against = match (broken, ipc) {
        (None, "works") => return "cuda: every GPU reaches every other's memory, and processes share it".into(),
        (Some(peer), _) => format!("GPU {} does not reach GPU {}'s memory", peer.from, peer.to),
        (None, _) => "processes cannot share a GPU's memory".to_owned(),
    };
    match nccl {
        true => format!("nccl: {against}"),
        false => format!("none: {against}, and there is no NCCL; --backend tcp goes by way of the host"),
    }
}

/// The path of a file in the report.
pub(super) fn shown(path: Option<&PathBuf>) -> String {
    path.map_or_else(|| "unknown file".to_owned(), |path| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_go_where_the_checks_say_that_they_can() {
        let peer = |from, to, check: &str| Peer { from, to, driver_says: true, check: check.into() };
        let good = [peer(0, 1, "works"), peer(1, 0, "works")];
        let bad = [peer(0, 1, "works"), peer(1, 0, "3 of 4 values were read otherwise than written")];
        let says = |peers: &[Peer], ipc, nccl| between_gpus(2, peers, ipc, nccl);
        assert!(says(&good, "works", false).starts_with("cuda:"));
        assert_eq!(says(&bad, "works", true), "nccl: GPU 1 does not reach GPU 0's memory");
        assert!(says(&good, "cuIpcGetMemHandle: …", true).starts_with("nccl: processes"));
        assert!(says(&bad, "works", false).starts_with("none: "));
        assert!(between_gpus(1, &[], "works", true).contains("one GPU"));
    }
}
