//! Orders the work that different threads submit to one device, in builds without CUDA.

use burn::tensor::Device;

/// Replaces `comm::cuda::StreamEvent`, which builds with the feature `cuda` use. A CPU runs an operation before the call
/// returns, so there is nothing to record and nothing to wait for.
#[derive(Debug)]
pub struct StreamEvent;

impl StreamEvent {
    /// Records an event after all work that this thread has submitted to `device`.
    pub fn record(_device: &Device) -> Self {
        Self
    }

    /// Orders this thread's later work after the event.
    pub fn wait(&self) {}
}
