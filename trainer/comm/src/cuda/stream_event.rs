//! Order between the work that different threads submit to one GPU.

use burn::tensor::{Device, Tensor};

/// A point in the order of one thread's work on a device, like a `torch.cuda.Event`. Work that another thread, or another
/// stream, submits after it has [waited for](Self::wait) the event runs after all work that was submitted before the event
/// was recorded.
///
/// Each thread has its own stream in cubecl. cubecl makes a stream wait for another stream when it first touches memory that
/// the other stream has *allocated* since the two were last synchronized. cubecl does not wait for memory that was allocated
/// earlier and written, or written again in place, since then. Recording an event therefore allocates memory: every stream
/// that waits for the event sees this memory for the first time.
#[derive(Debug)]
pub struct StreamEvent(Box<Tensor<1>>);

impl StreamEvent {
    /// Records an event behind all work that this thread has submitted to `device`.
    pub fn record(device: &Device) -> Self {
        Self(Box::new(Tensor::zeros([1], device)))
    }

    /// Orders this thread's later work after the event. The thread itself does not wait.
    pub fn wait(&self) {
        // Reads the event's memory on this thread's stream. The result is dropped.
        drop(self.0.as_ref().clone().add_scalar(1.0));
    }
}
