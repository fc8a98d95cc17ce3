//! Checks that write and read GPU memory: of one GPU, across GPUs, across processes.

use std::path::Path;

use serde::Serialize;

use super::child;
use comm::cuda::driver::{
    Driver, DriverError, Gpu,
    probe::{self, ProbeResult},
};

/// One GPU's access to another's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Peer {
    /// The GPU whose kernels access the other GPU's memory.
    pub from: usize,
    /// The GPU that owns the memory.
    pub to: usize,
    /// Whether the driver reports access.
    pub driver_says: bool,
    /// `works`, or the error.
    pub check: String,
}

/// Describes the result of a check.
fn words(result: Result<ProbeResult, DriverError>) -> String {
    match result {
        Ok(ProbeResult::Works) => "works".into(),
        Ok(ProbeResult::Wrong(count)) => {
            format!("{count} of {} values differ from the written ones", ProbeResult::OF)
        }
        Err(error) => error.to_string(),
    }
}

/// Checks one GPU's own memory.
pub(super) fn check_own_memory(driver: &Driver, gpu: usize) -> String {
    words(probe::alone(driver, gpu))
}

/// Checks every ordered pair of GPUs.
pub(super) fn check_pairs(driver: &Driver, gpus: usize) -> Vec<Peer> {
    let pairs = (0..gpus).flat_map(|from| (0..gpus).filter(move |to| *to != from).map(move |to| (from, to)));
    pairs
        .map(|(from, to)| {
            let driver_says = driver.can_access_peer(from, to).unwrap_or(false);
            // Try the access even if the driver reports no access: the attempt then fails with the driver's error.
            Peer { from, to, driver_says, check: words(probe::across(driver, from, to)) }
        })
        .collect()
}

/// Compiles a kernel for a GPU with NVRTC, loads and runs it.
pub(super) fn check_compiled_kernel(driver: &Driver, gpu: &Gpu, include: &Path) -> String {
    match probe::compiled(driver, gpu.index, gpu.compute, include) {
        Ok(outcome) => words(Ok(outcome)),
        Err(cause) => cause,
    }
}

/// Checks CUDA IPC: another process of this program opens memory of the GPU `owner`. The process uses the GPU `other` if
/// `other` can access `owner`, because ranks use different GPUs. Otherwise the process uses `owner` itself.
pub(super) fn ipc(driver: &Driver, owner: &Gpu, other: Option<&Gpu>) -> String {
    let reader = other.filter(|gpu| driver.can_access_peer(gpu.index, owner.index).unwrap_or(false));
    if owner.exclusive && reader.is_none() {
        return format!("not tried: GPU {} is for one process only (nvidia-smi -c DEFAULT)", owner.index);
    }
    match probe::ipc(driver, owner.index, |handle| ask(handle, reader.unwrap_or(owner).index)) {
        Ok(Ok(outcome)) => words(Ok(outcome)),
        Ok(Err(cause)) => format!("the other process: {cause}"),
        Err(error) => error.to_string(),
    }
}

fn ask(handle: &str, gpu: usize) -> Result<u32, String> {
    let answer = child::ask(&["--ipc-peer", handle, "--gpu", &gpu.to_string()])?;
    answer.parse().map_err(|_| format!("it said {answer}"))
}
