//! The launches of a training step, recorded once and launched again as one: a CUDA graph
//! (<https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs>, `torch.cuda.CUDAGraph`).
//!
//! A graph runs the same kernels on the same memory. So the step reads its inputs from tensors that [`fn@write`] and
//! [`write_integers`] fill before each run, and updates its state in place: [`address`] shows whether it does.

use burn::tensor::{Device, Int, Tensor};

#[cfg(feature = "cuda")]
use crate::gpu::graph as gpu;

/// A recorded sequence of launches. The memory that it uses is kept from other tensors as long as it exists.
#[derive(Debug, Clone)]
pub struct Graph {
    #[cfg(feature = "cuda")]
    graph: gpu::Recorded,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

/// Returns true if launches on the device can be recorded: on NVIDIA GPUs.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn can_record(device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    return gpu::client(device).is_some();
    #[cfg(not(feature = "cuda"))]
    false
}

/// Prepares a recording. What runs from here to [`record`] runs as usual, and leaves behind the memory that the same launches need
/// while they are recorded.
///
/// # Errors
/// The device cannot record, or a recording is under way.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn prepare(device: &Device) -> Result<(), String> {
    #[cfg(feature = "cuda")]
    return gpu::prepare(device);
    #[cfg(not(feature = "cuda"))]
    Err(NO_KERNELS.into())
}

/// Ends what [`prepare`] has begun, without a graph.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn cancel(device: &Device) {
    #[cfg(feature = "cuda")]
    gpu::cancel(device);
}

/// Records the launches of `step`, none of which runs, and returns the graph with the result of `step`, whose tensors get their
/// values when the graph runs.
///
/// # Errors
/// `step` did what a graph cannot do, such as copying from the host or allocating memory. What it would have written cannot be read
/// then.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn record<T>(device: &Device, step: impl FnOnce() -> T) -> Result<(Graph, T), String> {
    #[cfg(feature = "cuda")]
    return gpu::record(device, step).map(|(graph, result)| (Graph { graph }, result));
    #[cfg(not(feature = "cuda"))]
    Err(NO_KERNELS.into())
}

impl Graph {
    /// Launches the graph, behind all work that was queued before. Does not wait for its end.
    ///
    /// The graph uses the memory that it was recorded with, whichever tensors the program has by now.
    ///
    /// # Errors
    /// The driver refuses the launch.
    pub fn launch(&self) -> Result<(), String> {
        #[cfg(feature = "cuda")]
        return self.graph.launch();
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }
}

/// Replaces the values of a contiguous f32 tensor on a GPU, in its memory.
///
/// # Panics
///
/// When the number of values differs, or the tensor is of another kind.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn write(tensor: &Tensor<1>, values: Vec<f32>) {
    #[cfg(feature = "cuda")]
    return gpu::write(gpu::floats(tensor), values);
    #[cfg(not(feature = "cuda"))]
    panic!("{NO_KERNELS}");
}

/// [`fn@write`] for 32-bit integers.
///
/// # Panics
///
/// As [`fn@write`].
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn write_integers(tensor: &Tensor<1, Int>, values: Vec<i32>) {
    #[cfg(feature = "cuda")]
    return gpu::write(gpu::integers(tensor), values);
    #[cfg(not(feature = "cuda"))]
    panic!("{NO_KERNELS}");
}

/// Values on their way from a GPU to the host.
#[derive(Debug)]
pub struct Reading {
    #[cfg(feature = "cuda")]
    values: gpu::Values,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

/// Queues copies of contiguous f32 tensors to the host, behind the work that was queued before. Does not wait for them.
///
/// # Panics
///
/// When a tensor is of another kind.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn read(tensors: &[&Tensor<1>]) -> Reading {
    #[cfg(feature = "cuda")]
    return Reading { values: gpu::read(tensors) };
    #[cfg(not(feature = "cuda"))]
    panic!("{NO_KERNELS}");
}

impl Reading {
    /// Waits for the values of each tensor.
    ///
    /// # Errors
    /// The work that computes them has failed.
    pub fn wait(self) -> Result<Vec<Vec<f32>>, String> {
        #[cfg(feature = "cuda")]
        return self.values.wait();
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }
}

/// Returns what identifies the memory of a tensor on a GPU as long as the tensor exists; `None` for other tensors.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn address(tensor: &Tensor<1>) -> Option<[u64; 2]> {
    #[cfg(feature = "cuda")]
    return gpu::address(tensor);
    #[cfg(not(feature = "cuda"))]
    None
}

/// Returns what identifies the memory of the bf16 copies that the optimizer keeps of weights, on this thread.
pub fn addresses_of_copies() -> Vec<[u64; 2]> {
    #[cfg(feature = "cuda")]
    return crate::gpu::copies::places();
    #[cfg(not(feature = "cuda"))]
    Vec::new()
}

#[cfg(not(feature = "cuda"))]
const NO_KERNELS: &str = "this program is built without GPU kernels";
