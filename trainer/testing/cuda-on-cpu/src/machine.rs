//! The GPUs that there are, from the environment, and their primary contexts.

use std::collections::HashSet;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::code::{Answer, CONTEXT_IS_DESTROYED, Code, INVALID_CONTEXT, INVALID_DEVICE, NO_DEVICE, NOT_INITIALIZED};
use crate::log::lock;
use crate::stream::Stream;

/// What GPUs do with each other's memory (`CUDA_ON_CPU_PEERS`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peers {
    /// They reach it.
    Works,
    /// The driver offers no access.
    None,
    /// The driver offers access, and what kernels write there gets lost.
    Lies,
}

/// What the environment asks for.
#[derive(Debug)]
struct Settings {
    gpus: usize,
    peers: Peers,
    memory: usize,
    capability: (i32, i32),
}

/// A variable that says something the library cannot read ends the process: a test with another machine than it asked for
/// would test something else.
fn setting<T>(name: &str, otherwise: T, parse: impl FnOnce(&str) -> Option<T>) -> T {
    match std::env::var(name) {
        Ok(text) if !text.is_empty() => parse(&text).unwrap_or_else(|| {
            eprintln!("cuda-on-cpu: {name}={text} cannot be read");
            std::process::abort()
        }),
        _ => otherwise,
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
            capability: setting("CUDA_ON_CPU_CAPABILITY", (8, 0), |text| {
                let (major, minor) = text.split_once('.')?;
                Some((major.parse().ok()?, minor.parse().ok()?))
            }),
        }
    }
}

/// A GPU, and its primary context.
#[derive(Debug)]
pub(crate) struct Device {
    /// As this process counts: `CUDA_VISIBLE_DEVICES` hides and reorders.
    pub(crate) index: usize,
    /// As the machine counts.
    pub(crate) physical: usize,
    /// How often the context is retained.
    pub(crate) retained: AtomicU32,
    /// Bytes of this process's allocations.
    pub(crate) used: AtomicUsize,
    /// Physical numbers of the GPUs whose memory kernels of this one may use.
    pub(crate) peers: Mutex<HashSet<usize>>,
    /// The error that has made the context unusable; 0 while there is none.
    pub(crate) fault: AtomicI32,
    /// All streams whose thread may still run.
    streams: Mutex<Vec<Weak<Stream>>>,
}

impl Device {
    /// `CUcontext` of its primary context.
    pub(crate) fn context(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// The context's error, which every call answers once there is one.
    pub(crate) fn healthy(&self) -> Answer {
        match self.fault.load(Ordering::Acquire) {
            0 => Ok(()),
            fault => Err(fault),
        }
    }

    /// Makes the context unusable, as an error on the device does.
    pub(crate) fn break_with(&self, fault: Code) {
        let _ = self.fault.compare_exchange(0, fault, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Retained, and without an error.
    pub(crate) fn usable(&self) -> Answer {
        match self.retained.load(Ordering::Acquire) {
            0 => Err(CONTEXT_IS_DESTROYED),
            _ => self.healthy(),
        }
    }

    pub(crate) fn add_stream(&self, stream: &Arc<Stream>) {
        let mut streams = lock(&self.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    /// Waits for what its streams have got; `blocking`: only for those that keep order with the null stream.
    pub(crate) fn synchronize(&self, blocking: bool) {
        let streams: Vec<_> = lock(&self.streams).iter().filter_map(Weak::upgrade).collect();
        for stream in streams.iter().filter(|stream| !blocking || stream.blocking) {
            stream.synchronize();
        }
    }

    /// "CPU as GPU A", …
    pub(crate) fn name(&self) -> String {
        let letter = char::from_u32('A' as u32 + self.physical as u32).filter(char::is_ascii_uppercase);
        match letter {
            Some(letter) => format!("CPU as GPU {letter}"),
            None => format!("CPU as GPU {}", self.physical),
        }
    }

    /// What identifies it in every process.
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
pub(crate) fn init() -> Answer {
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

/// `CUDA_VISIBLE_DEVICES`, of `gpus` GPUs: indices, or beginnings of UUIDs, up to the first that is none.
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

/// The machine, once `cuInit` has been called and answered well.
pub(crate) fn machine() -> Answer<&'static Machine> {
    MACHINE.get().filter(|machine| !machine.devices.is_empty()).ok_or(NOT_INITIALIZED)
}

impl Machine {
    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The GPU that `CUdevice` is.
    pub(crate) fn device(&self, device: i32) -> Answer<&Device> {
        usize::try_from(device).ok().and_then(|index| self.devices.get(index)).ok_or(INVALID_DEVICE)
    }

    /// The GPU whose primary context this is.
    pub(crate) fn of_context(&self, context: usize) -> Answer<&Device> {
        self.devices.iter().find(|device| device.context() == context).ok_or(INVALID_CONTEXT)
    }

    /// The GPU of that number in the machine, if this process sees it.
    pub(crate) fn of_physical(&self, physical: usize) -> Option<&Device> {
        self.devices.iter().find(|device| device.physical == physical)
    }

    pub(crate) fn peers(&self) -> Peers {
        self.settings.peers
    }

    /// Bytes of memory that each GPU has.
    pub(crate) fn memory(&self) -> usize {
        self.settings.memory
    }

    /// Compute capability.
    pub(crate) fn capability(&self) -> (i32, i32) {
        self.settings.capability
    }

    /// Bytes of shared memory that a block may have when its kernel asks for it (CUDA C++ Programming Guide, "Technical
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
