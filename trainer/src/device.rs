//! Which device this process trains on.

use burn::tensor::Device;

/// The device of a process and what to call it on the screen.
#[derive(Debug, Clone)]
pub struct Selected {
    /// With autodiff.
    pub device: Device,
    /// Threads that its operations use.
    pub threads: usize,
    /// For the start-up table, the summary and `env.json`.
    pub description: String,
}

/// Most memory that this process has held so far (`VmHWM`), in bytes; `None` where the system does not say.
pub fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// The CPU through burn-flex: the only device of this build.
pub fn select() -> Selected {
    let threads = rayon::current_num_threads();
    let description = format!("CPU, burn-flex, {threads} threads");
    Selected { device: Device::flex().autodiff(), threads, description }
}
