//! Selects the device that this process trains on: the CPU, or one of the GPUs that the process may use.
//!
//! All checks run before burn is used. A missing driver, GPU or compiler is an error with the names that were tried (`gpus.rs`,
//! `toolkit.rs`). burn's backend would panic instead. `assign.rs` assigns GPUs to processes.

mod assign;
mod configure;
mod gpus;
#[cfg(feature = "cuda")]
mod kernel_cache;
#[cfg(any(feature = "cuda", test))]
mod kernel_file;
#[cfg(feature = "cuda")]
mod kernel_log;
#[cfg(not(feature = "cuda"))]
mod stream_event;
mod toolkit;
mod versions;

#[cfg(feature = "cuda")]
pub use self::kernel_log::KernelCompileReporter;
use burn::tensor::Device;
#[cfg(feature = "cuda")]
pub use comm::cuda::StreamEvent;

#[cfg(not(feature = "cuda"))]
pub use self::stream_event::StreamEvent;
pub use self::{
    assign::{LocalRank, gpu_index},
    configure::configure,
    gpus::{Gpus, MissingCudaPart, count_gpus, find_gpus, visible_devices_note},
    toolkit::{Headers, Library, headers, nccl, nvrtc},
    versions::check_versions,
};
use crate::failure::Failure;
use crate::text;
use comm::cuda::driver::Gpu;
use ops::{CpuIsa, GpuConv};

/// Replaces the GPU builds' type: a build without the CUDA backend compiles and tunes no kernels.
#[cfg(not(feature = "cuda"))]
#[derive(Debug)]
pub struct KernelCompileReporter;

#[cfg(not(feature = "cuda"))]
impl KernelCompileReporter {
    /// Returns `None`.
    pub fn start(_: &Device, _: &'static str) -> Option<Self> {
        None
    }
}

/// Set if this build includes burn's CUDA backend.
pub const HAS_CUDA: bool = cfg!(feature = "cuda");

/// The devices that flags or `parallel.devices` request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceRequest {
    /// GPUs if this build and this machine have them, otherwise the CPU.
    Best,
    /// The CPU: `--cpus`.
    Cpu,
    /// This number of GPUs: `--gpus`.
    Gpus(usize),
}

/// The devices of a run's processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceSet {
    /// The CPU. Holds the reason why GPUs are unavailable, if they were preferred.
    Cpu(Option<String>),
    /// GPUs.
    Gpus(Gpus),
}

/// The device of a process, with its description.
#[derive(Debug, Clone)]
pub struct SelectedDevice {
    /// Selects the file of compiled kernels.
    #[cfg(feature = "cuda")]
    kernels: Option<kernel_cache::KernelCacheConfig>,
    /// Number of CPU threads that operations on this device use.
    pub threads: usize,
    /// Description for the start-up table, the summary and `env.json`.
    pub description: String,
    /// The GPU; `None` on the CPU.
    pub gpu: Option<Gpu>,
}

/// Returns the peak memory of this process so far (`VmHWM`) in bytes; `None` if the system does not report it.
pub fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// Returns the bytes of GPU memory that burn's allocator has reserved from the driver; `None` on the CPU. The allocator keeps
/// freed memory for reuse, so late in a run the value is close to the peak. The value excludes the driver's own memory
/// (context, compiled kernels).
pub fn reserved_bytes(device: &Device) -> Option<u64> {
    device.memory_pool_usage().map(|usage| usage.bytes_reserved)
}

/// Checks the environment variables that limit the CPU kernels' instruction set and choose a GPU's convolutions.
///
/// # Errors
/// A variable names an instruction set that this processor does not have, or unknown kernels.
pub fn check_kernels() -> Result<(), Failure> {
    CpuIsa::selected().map_err(|error| Failure::usage(&error, error.hint()))?;
    GpuConv::selected().map_err(|error| Failure::usage(&error, error.hint()))?;
    Ok(())
}

/// Returns the instructions that the CPU kernels use, as text.
pub fn cpu_kernels() -> &'static str {
    CpuIsa::selected().map_or("unknown", CpuIsa::description)
}

/// Describes the CPU as the device of a process that computes with this number of threads.
pub fn describe_cpu(threads: usize) -> String {
    format!("CPU, burn-flex, {}, {}", text::counted(threads as u64, "thread"), cpu_kernels())
}

/// Returns the CPU as a device of burn-flex.
pub fn cpu() -> SelectedDevice {
    configure();
    let threads = rayon::current_num_threads();
    let description = describe_cpu(threads);
    SelectedDevice {
        #[cfg(feature = "cuda")]
        kernels: None,
        threads,
        description,
        gpu: None,
    }
}

impl SelectedDevice {
    /// Returns the device, with autodiff. The first call on a GPU reads the compiled kernels of earlier runs. A launcher, which
    /// only checks the GPUs, does not call this function.
    pub fn device(&self) -> Device {
        configure();
        #[cfg(feature = "cuda")]
        if let (Some(gpu), Some(kernels)) = (&self.gpu, &self.kernels) {
            kernels.open();
            return Device::cuda(gpu.index).autodiff();
        }
        Device::flex().autodiff()
    }
}

impl DeviceSet {
    /// Resolves a device request for this build and machine. Does not allocate anything on a GPU yet.
    ///
    /// # Errors
    /// The request is for GPUs, and they are unavailable.
    pub fn of(request: DeviceRequest) -> Result<Self, Failure> {
        match request {
            DeviceRequest::Cpu => Ok(Self::Cpu(None)),
            DeviceRequest::Gpus(0) => {
                Err(Failure::usage("--gpus 0: a run needs at least one GPU", "use --gpus 1 or more, or --cpus N"))
            }
            DeviceRequest::Gpus(_) if !HAS_CUDA => Err(Failure::usage(
                "--gpus: this build has no GPU backend",
                "build one: cargo build --release --features cuda; or train on the CPU: --cpus N",
            )),
            DeviceRequest::Gpus(count) => match find_gpus() {
                Ok(gpus) => Ok(Self::Gpus(gpus)),
                Err(MissingCudaPart { cause, hint }) => Err(Failure::usage(format!("--gpus {count}: {cause}"), hint)),
            },
            DeviceRequest::Best if !HAS_CUDA => Ok(Self::Cpu(None)),
            DeviceRequest::Best => Ok(match find_gpus() {
                Ok(gpus) => Self::Gpus(gpus),
                Err(missing) => Self::Cpu(Some(missing.cause)),
            }),
        }
    }

    /// Returns whether the devices are GPUs.
    pub fn is_gpu(&self) -> bool {
        matches!(self, Self::Gpus(_))
    }

    /// Returns the device of the process with the local rank `local_rank`.
    ///
    /// # Errors
    /// There are fewer GPUs than processes.
    pub fn select(&self, local_rank: &LocalRank) -> Result<SelectedDevice, Failure> {
        match self {
            Self::Cpu(_) => Ok(cpu()),
            Self::Gpus(gpus) => {
                let index = gpu_index(local_rank, gpus.all.len()).map_err(|refusal| refusal.failure(gpus))?;
                Ok(gpu(gpus, index, local_rank))
            }
        }
    }

    /// Returns the devices of one process that uses `first.local_world_size` devices (mode `dp`).
    ///
    /// # Errors
    /// There are fewer GPUs than local ranks.
    pub fn all(&self, first: &LocalRank) -> Result<Vec<SelectedDevice>, Failure> {
        (0..first.local_world_size).map(|local_rank| self.select(&LocalRank { local_rank, ..*first })).collect()
    }
}

/// Selects one of the GPUs.
fn gpu(gpus: &Gpus, index: usize, local_rank: &LocalRank) -> SelectedDevice {
    let (gpu, oversubscribed) = (gpus.all[index].clone(), local_rank.oversubscribed(gpus.all.len()));
    let [major, minor] = gpus.cuda;
    let mut description = format!("{}, CUDA {major}.{minor}, burn-cuda", describe(&gpu));
    if oversubscribed {
        description.push_str(", shared by several processes: timings mean nothing");
    }
    SelectedDevice {
        #[cfg(feature = "cuda")]
        kernels: Some(kernel_cache::KernelCacheConfig::of(gpus, local_rank)),
        threads: rayon::current_num_threads(),
        description,
        gpu: Some(gpu),
    }
}

/// Returns whether each launch waits for its kernel: `CUDA_LAUNCH_BLOCKING=1`, as in PyTorch.
pub fn launches_block() -> bool {
    std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|value| value == "1")
}

/// Writes the kernels and tuning results of this process to a file in the user's cache, for later runs. A thread already does
/// this every two seconds, so call this function only at the end of the process.
pub fn save_kernels() {
    #[cfg(feature = "cuda")]
    kernel_cache::keep();
}

/// Describes a GPU.
pub fn describe(gpu: &Gpu) -> String {
    let [major, minor] = gpu.compute;
    let memory = text::bytes(gpu.memory_bytes);
    let display = if gpu.limits_kernels { ", drives a display: the driver ends long kernels" } else { "" };
    format!("GPU {} {} ({memory}, compute capability {major}.{minor}{display})", gpu.index, gpu.name)
}
