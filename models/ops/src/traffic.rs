//! Memory traffic of the custom kernels on a GPU, for measurements.

/// Kernels that a thread has launched, and the memory that they read and write.
#[derive(Debug, Clone, Copy, Default)]
pub struct Traffic {
    /// Bytes of all arguments of the custom kernels. Each tensor counts once per launch: as if caches served all further reads of a
    /// launch, and also where the kernel both reads and writes the tensor. Partial sums count, counters and the data set do not.
    pub bytes: usize,
    /// Number of launches.
    pub kernels: usize,
    /// Launches of burn's kernels, whose bytes are not known.
    pub others: usize,
}

/// Runs `work` and counts the launches of the calling thread. At most one thread may count at a time.
pub fn count<T>(work: impl FnOnce() -> T) -> (T, Traffic) {
    crate::gpu::traffic::count(work)
}
