//! The GPUs that the environment describes, and their primary contexts.

use std::collections::HashSet;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, OnceLock, Weak};

use parking_lot::Mutex;

use crate::cu_result::{
    CONTEXT_IS_DESTROYED, CuResult, DriverResult, INVALID_CONTEXT, INVALID_DEVICE, NO_DEVICE, NOT_INITIALIZED,
};
use crate::stream::Stream;

/// Access of GPUs to each other's memory (`CUDA_ON_CPU_PEERS`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peers {
    /// Access works.
    Works,
    /// The driver offers no access.
    None,
    /// The driver offers access, but what kernels write to a peer is lost.
    Lies,
}

/// The settings of the environment.
#[derive(Debug)]
struct Settings {
    gpus: usize,
    peers: Peers,
    memory: usize,
    capability: (i32, i32),
    ipc: bool,
    exclusive: bool,
    display: bool,
    strict: bool,
    nccl_stuck: bool,
    fault: Option<(String, CuResult)>,
}

/// Reads an environment variable. A value that cannot be parsed ends the process: a test on a different machine than the
/// one it asked for would test something else.
fn setting<T>(name: &str, default: T, parse: impl FnOnce(&str) -> Option<T>) -> T {
    match std::env::var(name) {
        Ok(text) if !text.is_empty() => parse(&text).unwrap_or_else(|| {
            eprintln!("cuda-on-cpu: {name}={text} cannot be read");
            std::process::abort()
        }),
        _ => default,
    }
}

impl Settings {
    fn read() -> Self {
        Self {
            gpus: setting("CUDA_ON_CPU_GPUS", 1, |text| text.parse().ok()),
            peers: setting("CUDA_ON_CPU_PEERS", Peers::Works, |text| match text {
                "works" => Some(Peers::Works),
                "none" => Some(Peers::None),
                "lies" => Some(Peers::Lies),
                _ => None,
            }),
            memory: setting("CUDA_ON_CPU_MEMORY", 4 << 30, |text| text.parse().ok()),
            capability: setting("CUDA_ON_CPU_CAPABILITY", (8, 0), version),
            ipc: setting("CUDA_ON_CPU_IPC", true, |text| match text {
                "works" => Some(true),
                "refused" => Some(false),
                _ => None,
            }),
            exclusive: setting("CUDA_ON_CPU_MODE", false, |text| match text {
                "default" => Some(false),
                "exclusive" => Some(true),
                _ => None,
            }),
            display: setting("CUDA_ON_CPU_DISPLAY", false, |text| match text {
                "no" => Some(false),
                "yes" => Some(true),
                _ => None,
            }),
            strict: setting("CUDA_ON_CPU_WAITS", false, |text| match text {
                "few" => Some(false),
                "all" => Some(true),
                _ => None,
            }),
            nccl_stuck: setting("CUDA_ON_CPU_NCCL", false, |text| match text {
                "works" | "no" | "dev" => Some(false),
                "stuck" => Some(true),
                _ => None,
            }),
            fault: setting("CUDA_ON_CPU_FAULT", None, |text| {
                let (kernel, code) = text.rsplit_once(':')?;
                Some(Some((kernel.to_owned(), code.parse().ok()?)))
            }),
        }
    }
}

/// Parses `13.2`.
fn version(text: &str) -> Option<(i32, i32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Returns the newest CUDA version that the driver supports. A program may ask before `cuInit`.
pub(crate) fn driver() -> (i32, i32) {
    static DRIVER: LazyLock<(i32, i32)> = LazyLock::new(|| setting("CUDA_ON_CPU_DRIVER", (13, 2), version));
    *DRIVER
}

/// Ends the process if the driver is older than the version that a function came with. A real driver's library lacks the
/// function, and a program that binds to it ends too.
pub(crate) fn require_driver(since: (i32, i32), function: &str) {
    let (major, minor) = driver();
    if (major, minor) < since {
        eprintln!("cuda-on-cpu: the driver of CUDA {major}.{minor} has no {function}");
        std::process::abort()
    }
}

/// A GPU and its primary context.
#[derive(Debug)]
pub(crate) struct Device {
    /// Index in this process: `CUDA_VISIBLE_DEVICES` hides and reorders GPUs.
    pub(crate) index: usize,
    /// Index in the machine.
    pub(crate) physical: usize,
    /// Reference count of the primary context.
    pub(crate) retained: AtomicU32,
    /// Bytes of this process's allocations.
    pub(crate) used: AtomicUsize,
    /// Physical indices of the GPUs whose memory this GPU's kernels may access.
    pub(crate) peers: Mutex<HashSet<usize>>,
    /// The sticky error that made the context unusable; 0 if there is none.
    pub(crate) fault: AtomicI32,
    /// All streams whose threads may still run.
    streams: Mutex<Vec<Weak<Stream>>>,
}

impl Device {
    /// Returns the `CUcontext` of the primary context.
    pub(crate) fn context(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Returns the sticky error of the context, if there is one. Every later call then returns this error.
    pub(crate) fn check_fault(&self) -> DriverResult {
        match self.fault.load(Ordering::Acquire) {
            0 => Ok(()),
            fault => Err(fault),
        }
    }

    /// Makes the context unusable, as an error on a real device does. The first error stays.
    pub(crate) fn set_fault(&self, fault: CuResult) {
        let _ = self.fault.compare_exchange(0, fault, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Checks that the context is retained and has no error.
    pub(crate) fn usable(&self) -> DriverResult {
        match self.retained.load(Ordering::Acquire) {
            0 => Err(CONTEXT_IS_DESTROYED),
            _ => self.check_fault(),
        }
    }

    pub(crate) fn add_stream(&self, stream: &Arc<Stream>) {
        let mut streams = self.streams.lock();
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    /// Waits for all work that was submitted to the GPU's streams. With `blocking`, only waits for the streams that
    /// synchronize with the null stream.
    pub(crate) fn synchronize(&self, blocking: bool) {
        let streams: Vec<_> = self.streams.lock().iter().filter_map(Weak::upgrade).collect();
        for stream in streams.iter().filter(|stream| !blocking || stream.blocking) {
            stream.synchronize();
        }
    }

    /// Returns the name: "CPU as GPU A", …
    pub(crate) fn name(&self) -> String {
        let letter = char::from_u32('A' as u32 + self.physical as u32).filter(char::is_ascii_uppercase);
        match letter {
            Some(letter) => format!("CPU as GPU {letter}"),
            None => format!("CPU as GPU {}", self.physical),
        }
    }

    /// Returns the UUID, which is the same in every process.
    pub(crate) fn uuid(&self) -> [u8; 16] {
        uuid(self.physical)
    }
}

fn uuid(physical: usize) -> [u8; 16] {
    [0x10u8.wrapping_add(physical as u8); 16]
}

/// All GPUs.
#[derive(Debug)]
pub(crate) struct Machine {
    settings: Settings,
    devices: Vec<Device>,
}

static MACHINE: OnceLock<Machine> = OnceLock::new();

/// `cuInit`.
pub(crate) fn init() -> DriverResult {
    let code = setting("CUDA_ON_CPU_INIT", 0, |text| text.parse().ok());
    if code != 0 {
        return Err(code);
    }
    let machine = MACHINE.get_or_init(|| {
        let settings = Settings::read();
        let devices = visible(settings.gpus).into_iter().enumerate().map(|(index, physical)| Device {
            index,
            physical,
            retained: AtomicU32::new(0),
            used: AtomicUsize::new(0),
            peers: Mutex::default(),
            fault: AtomicI32::new(0),
            streams: Mutex::default(),
        });
        Machine { devices: devices.collect(), settings }
    });
    if machine.devices.is_empty() { Err(NO_DEVICE) } else { Ok(()) }
}

/// Applies `CUDA_VISIBLE_DEVICES` to `gpus` GPUs: indices or prefixes of UUIDs. The list ends at the first invalid entry, as
/// with the real driver.
fn visible(gpus: usize) -> Vec<usize> {
    let Ok(list) = std::env::var("CUDA_VISIBLE_DEVICES") else { return (0..gpus).collect() };
    let by_uuid = |text: &str| {
        let text = text.strip_prefix("GPU-")?.replace('-', "").to_lowercase();
        (0..gpus).find(|gpu| {
            let hex: String = uuid(*gpu).iter().map(|byte| format!("{byte:02x}")).collect();
            hex.starts_with(&text)
        })
    };
    let number = |text: &str| text.parse().ok().filter(|gpu| *gpu < gpus).or_else(|| by_uuid(text));
    list.split(',').map_while(|text| number(text.trim())).collect()
}

/// Returns the machine after a successful `cuInit`.
pub(crate) fn machine() -> DriverResult<&'static Machine> {
    MACHINE.get().filter(|machine| !machine.devices.is_empty()).ok_or(NOT_INITIALIZED)
}

impl Machine {
    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Returns the GPU of a `CUdevice`.
    pub(crate) fn device(&self, device: i32) -> DriverResult<&Device> {
        usize::try_from(device).ok().and_then(|index| self.devices.get(index)).ok_or(INVALID_DEVICE)
    }

    /// Returns the GPU of a primary context.
    pub(crate) fn of_context(&self, context: usize) -> DriverResult<&Device> {
        self.devices.iter().find(|device| device.context() == context).ok_or(INVALID_CONTEXT)
    }

    /// Returns the GPU with this physical index, if this process sees the GPU.
    pub(crate) fn of_physical(&self, physical: usize) -> Option<&Device> {
        self.devices.iter().find(|device| device.physical == physical)
    }

    pub(crate) fn peers(&self) -> Peers {
        self.settings.peers
    }

    /// Returns whether processes may share a GPU's memory.
    pub(crate) fn ipc(&self) -> bool {
        self.settings.ipc
    }

    /// Returns whether a GPU is for one process only.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.settings.exclusive
    }

    /// Returns whether GPUs drive a display, and so limit the time of kernels.
    pub(crate) fn has_display(&self) -> bool {
        self.settings.display
    }

    /// Returns whether `ncclCommInitRank` hangs.
    pub(crate) fn is_nccl_stuck(&self) -> bool {
        self.settings.nccl_stuck
    }

    /// With `CUDA_ON_CPU_WAITS=all`, waits for all work of this process on a GPU.
    pub(crate) fn wait_if_strict(&self, device: &Device) {
        if self.settings.strict {
            device.synchronize(false);
        }
    }

    /// Returns the error that running a kernel leaves behind, if any.
    pub(crate) fn fault_of(&self, kernel: &str) -> Option<CuResult> {
        self.settings.fault.as_ref().filter(|(name, _)| kernel.contains(name)).map(|(_, code)| *code)
    }

    /// Returns the bytes of memory per GPU.
    pub(crate) fn memory(&self) -> usize {
        self.settings.memory
    }

    /// Returns the compute capability.
    pub(crate) fn capability(&self) -> (i32, i32) {
        self.settings.capability
    }

    /// Returns the largest shared memory per block, in bytes, that a kernel may opt in to (CUDA C++ Programming Guide, "Technical
    /// Specifications per Compute Capability").
    pub(crate) fn shared_optin(&self) -> i32 {
        match self.settings.capability {
            (7, 5) => 64 << 10,
            (7, _) => 96 << 10,
            (8, 0 | 7) => 163 << 10,
            (8, _) | (12, _) => 99 << 10,
            (9.., _) => 227 << 10,
            _ => 48 << 10,
        }
    }
}
