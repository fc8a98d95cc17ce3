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

/// The CPU through burn-flex: the only device of this build.
pub fn select() -> Selected {
    let threads = rayon::current_num_threads();
    let description = format!("CPU, burn-flex, {threads} threads");
    Selected { device: Device::flex().autodiff(), threads, description }
}
