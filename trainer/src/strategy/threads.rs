//! The threads that compute a step.

use burn::tensor::Device;
use rayon::ThreadPool;

use crate::device::StreamEvent;

/// Runs `compute` on a thread of `pool`. Without a pool, runs it on the process's default pool if `device` is a CPU, and on the
/// calling thread if `device` is a GPU.
///
/// If a thread outside the pool starts a parallel loop, rayon hands the loop to the pool and blocks that thread. This costs two
/// context switches per operation.
pub(super) fn on_threads<R: Send>(pool: Option<&ThreadPool>, device: &Device, compute: impl FnOnce() -> R + Send) -> R {
    let Some(pool) = pool else {
        return if *device == Device::flex() { rayon::scope(|_| compute()) } else { compute() };
    };
    // Each thread has its own stream on a GPU, and weights and statistics are updated in place, so order the streams by events.
    let before = StreamEvent::record(device);
    let (result, after) = pool.install(|| {
        before.wait();
        (compute(), StreamEvent::record(device))
    });
    after.wait();
    result
}
