//! The order of work that different threads give one GPU.

use burn::tensor::{Device, Tensor};

/// A place in the order of one thread's work on a device. Whatever another thread, or another stream, submits after it has
/// [followed](Self::follow) the mark comes after all that had been submitted when the mark was made.
///
/// cubecl gives each thread a stream, and makes a stream wait for another's when it first touches memory that the other has
/// *allocated* since they last met. Memory that was allocated before that and written, or written again in place, since is
/// not waited for. A mark is memory that is allocated for the purpose: new to whoever follows it.
#[derive(Debug)]
pub struct Mark(Box<Tensor<1>>);

impl Mark {
    /// After all that this thread has submitted to `device`.
    pub fn here(device: &Device) -> Self {
        Self(Box::new(Tensor::zeros([1], device)))
    }

    /// Has all that this thread submits from now on come after the mark. The thread itself does not wait.
    pub fn follow(&self) {
        // reads the mark's memory, on this thread's stream; what comes of it is dropped
        drop(self.0.as_ref().clone().add_scalar(1.0));
    }
}
