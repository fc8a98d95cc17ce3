//! Which device this process trains on: the CPU, or one of the GPUs that it may use.
//!
//! Everything is looked at before burn is: a driver, a GPU or a compiler that is missing is an error with the names that
//! were tried (`gpus.rs`, `toolkit.rs`), where burn's backend would panic. Who gets which GPU is in `assign.rs`.

mod assign;
#[cfg(feature = "cuda")]
mod cache;
mod gpus;
#[cfg(not(feature = "cuda"))]
mod stream_event;
mod toolkit;

use burn::tensor::Device;
#[cfg(feature = "cuda")]
pub use comm::cuda::StreamEvent;

#[cfg(not(feature = "cuda"))]
pub use self::stream_event::StreamEvent;
pub use self::{
    assign::{LocalRank, gpu_index},
    gpus::{Gpus, Missing, find, hidden},
    toolkit::{Headers, Library, headers, nccl, nvrtc},
};
use crate::failure::Failure;
use crate::text;
use comm::cuda::driver::Gpu;

/// Whether this build has burn's CUDA backend.
pub const HAS_CUDA: bool = cfg!(feature = "cuda");

/// What the command line asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceRequest {
    /// GPUs where this build and this machine have them, else the CPU.
    Best,
    /// The CPU: `--cpus`.
    Cpu,
    /// That many GPUs: `--gpus`.
    Gpus(usize),
}

/// What the processes of a run compute on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceSet {
    /// The CPU. Where GPUs would have been better: why not.
    Cpu(Option<String>),
    /// GPUs.
    Gpus(Gpus),
}

/// The device of a process and what to call it on the screen.
#[derive(Debug, Clone)]
pub struct Selected {
    /// With autodiff.
    pub device: Device,
    /// Threads that its operations use.
    pub threads: usize,
    /// For the start-up table, the summary and `env.json`.
    pub description: String,
    /// The GPU, where it is one.
    pub gpu: Option<Gpu>,
}

/// Most memory that this process has held so far (`VmHWM`), in bytes; `None` where the system does not say.
pub fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// Bytes of a GPU's memory that burn's allocator has taken from the driver: it keeps what it once had for reuse, so late in
/// a run this is close to the most it needed. The driver's own share (context, compiled kernels) is not in it. `None` on the
/// CPU.
pub fn held_bytes(device: &Device) -> Option<u64> {
    device.memory_pool_usage().map(|usage| usage.bytes_reserved)
}

/// The CPU through burn-flex.
pub fn cpu() -> Selected {
    let threads = rayon::current_num_threads();
    let description = format!("CPU, burn-flex, {threads} threads");
    Selected { device: Device::flex().autodiff(), threads, description, gpu: None }
}

impl DeviceSet {
    /// What a wish comes to in this build and on this machine. Nothing of a GPU is taken yet.
    ///
    /// # Errors
    /// GPUs are asked for and cannot be had.
    pub fn of(wish: DeviceRequest) -> Result<Self, Failure> {
        match wish {
            DeviceRequest::Cpu => Ok(Self::Cpu(None)),
            DeviceRequest::Gpus(0) => {
                Err(Failure::usage("--gpus 0: nobody would train", "ask for at least one: --gpus 1"))
            }
            DeviceRequest::Gpus(_) if !HAS_CUDA => Err(Failure::usage(
                "--gpus: this build has no GPU backend",
                "build one: cargo build --release --features cuda; or train on the CPU: --cpus N",
            )),
            DeviceRequest::Gpus(count) => match find() {
                Ok(gpus) => Ok(Self::Gpus(gpus)),
                Err(Missing { cause, hint }) => Err(Failure::usage(format!("--gpus {count}: {cause}"), hint)),
            },
            DeviceRequest::Best if !HAS_CUDA => Ok(Self::Cpu(None)),
            DeviceRequest::Best => Ok(match find() {
                Ok(gpus) => Self::Gpus(gpus),
                Err(missing) => Self::Cpu(Some(missing.cause)),
            }),
        }
    }

    /// Whether it is GPUs.
    pub fn is_gpu(&self) -> bool {
        matches!(self, Self::Gpus(_))
    }

    /// The device of the process in `seat`.
    ///
    /// # Errors
    /// There are fewer GPUs than processes.
    pub fn select(&self, seat: &LocalRank) -> Result<Selected, Failure> {
        match self {
            Self::Cpu(_) => Ok(cpu()),
            Self::Gpus(gpus) => {
                let index = gpu_index(seat, gpus.all.len()).map_err(|refusal| refusal.failure(gpus))?;
                Ok(gpu(gpus, index, seat.crowded(gpus.all.len())))
            }
        }
    }
}

impl DeviceSet {
    /// The devices of one process that has as many as there are places in `seat`'s host.
    ///
    /// # Errors
    /// There are fewer GPUs than that.
    pub fn all(&self, seat: &LocalRank) -> Result<Vec<Selected>, Failure> {
        (0..seat.local_world).map(|local_rank| self.select(&LocalRank { local_rank, ..*seat })).collect()
    }
}

/// One of the GPUs. `crowded` where it has several processes.
fn gpu(gpus: &Gpus, index: usize, crowded: bool) -> Selected {
    let gpu = gpus.all[index].clone();
    let [major, minor] = gpus.cuda;
    let mut description = format!("{}, CUDA {major}.{minor}, burn-cuda", describe(&gpu));
    if crowded {
        description.push_str(", shared by several processes: timings mean nothing");
    }
    Selected { device: cuda(index), threads: rayon::current_num_threads(), description, gpu: Some(gpu) }
}

/// A GPU in words.
pub fn describe(gpu: &Gpu) -> String {
    let [major, minor] = gpu.compute;
    let memory = text::bytes(gpu.memory_bytes);
    format!("GPU {} {} ({memory}, compute capability {major}.{minor})", gpu.index, gpu.name)
}

/// burn's device for a GPU, with autodiff.
#[cfg(feature = "cuda")]
pub fn cuda(index: usize) -> Device {
    cache::keep();
    Device::cuda(index).autodiff()
}

/// A build without the backend never gets here: [`DeviceSet::of`] gives it no GPUs.
#[cfg(not(feature = "cuda"))]
fn cuda(_: usize) -> Device {
    unreachable!("a build without the CUDA backend has selected a GPU")
}
