//! The launches of a training step, captured once and launched again as one: a CUDA graph
//! (<https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs>, `torch.cuda.CUDAGraph`).
//!
//! A graph runs the same kernels on the same memory. So the step reads its inputs from tensors that a [`Feed`] fills in each run,
//! and must update its state in place: [`address`] shows whether a tensor still has the same memory.

use burn::tensor::{Device, Int, Tensor};

#[cfg(feature = "cuda")]
use crate::gpu::{feed as gpu_feed, graph as gpu};

/// A captured sequence of launches. As long as the graph exists, other tensors do not get its memory.
#[derive(Debug, Clone)]
pub struct Graph {
    #[cfg(feature = "cuda")]
    graph: gpu::CapturedGraph,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

/// Returns true if launches on the device can be captured: on NVIDIA GPUs.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn can_capture(device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    return gpu::client(device).is_some();
    #[cfg(not(feature = "cuda"))]
    false
}

/// Prepares a capture. Work between this call and [`capture`] runs as usual (a warm-up). Its memory stays reserved for the same
/// launches when they are captured, because a capture cannot allocate.
///
/// # Errors
/// The device cannot capture, or a capture is under way.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn prepare(device: &Device) -> Result<(), String> {
    #[cfg(feature = "cuda")]
    return gpu::prepare(device);
    #[cfg(not(feature = "cuda"))]
    Err(NO_KERNELS.into())
}

/// Ends a capture that [`prepare`] has begun, without a graph.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn cancel(device: &Device) {
    #[cfg(feature = "cuda")]
    gpu::cancel(device);
}

/// Captures the launches of `step` without running them. Returns the graph and the result of `step`, whose tensors get their
/// values when the graph runs. A copy from the host is captured with its present data: each launch copies the same data.
///
/// # Errors
/// `step` contains an operation that a graph cannot capture, such as an allocation. The tensors of `step` then cannot be read.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn capture<T>(device: &Device, step: impl FnOnce() -> T) -> Result<(Graph, T), String> {
    #[cfg(feature = "cuda")]
    return gpu::capture(device, step).map(|(graph, result)| (Graph { graph }, result));
    #[cfg(not(feature = "cuda"))]
    Err(NO_KERNELS.into())
}

impl Graph {
    /// Launches the graph, behind all work that was queued before. Does not wait for its end.
    ///
    /// The graph always uses the memory with which it was captured, even if the program has replaced the tensors since.
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

/// A tensor that a graph reads: f32 or 32-bit integers, contiguous.
#[derive(Debug, Clone)]
pub enum GraphInput {
    /// f32.
    Floats(Tensor<1>),
    /// i32.
    Integers(Tensor<1, Int>),
}

/// The inputs and the results of a graph's next runs, on a GPU. The host writes the inputs of several runs at once, launches the
/// graph once per run, and then reads all results at once. A run begins with [`Feed::take_inputs`] and ends with
/// [`Feed::keep_results`], which are kernels of the graph.
#[derive(Debug, Clone)]
pub struct Feed {
    #[cfg(feature = "cuda")]
    feed: gpu_feed::Feed,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
impl Feed {
    /// Makes room for the inputs and results of `runs` runs. A run has `result_words` results.
    ///
    /// # Panics
    ///
    /// When an input is not a tensor of 32-bit values on a GPU, or there is no input.
    pub fn new(inputs: &[GraphInput], result_words: usize, runs: usize) -> Self {
        #[cfg(feature = "cuda")]
        {
            let tensor = |input: &GraphInput| match input {
                GraphInput::Floats(tensor) => gpu::floats(tensor),
                GraphInput::Integers(tensor) => gpu::integers(tensor),
            };
            Self { feed: gpu_feed::Feed::new(inputs.iter().map(tensor).collect(), result_words, runs) }
        }
        #[cfg(not(feature = "cuda"))]
        panic!("{NO_KERNELS}");
    }

    /// Writes the inputs of the next runs: for each run the bits of all inputs, in order.
    ///
    /// # Panics
    ///
    /// When there are more inputs than [`Feed::new`] made room for, or a run is incomplete.
    pub fn write(&self, words: Vec<u32>) {
        #[cfg(feature = "cuda")]
        return self.feed.write(words);
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }

    /// Queues a kernel that copies the inputs of the next run to the tensors. After a run whose loss was not finite, float inputs
    /// are NaN, so that the optimizer's kernels leave the weights as they were before that run.
    pub fn take_inputs(&self) {
        #[cfg(feature = "cuda")]
        return self.feed.take_inputs();
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }

    /// Queues a kernel that stores a run's results (contiguous f32 tensors), checks that its loss `[1]` is finite, and counts
    /// the run.
    ///
    /// # Panics
    ///
    /// When the results do not have `result_words` values.
    pub fn keep_results(&self, results: &[&Tensor<1>], loss: &Tensor<1>) {
        #[cfg(feature = "cuda")]
        {
            let results: Vec<_> = results.iter().map(|tensor| gpu::floats(tensor)).collect();
            self.feed.keep_results(&results, &gpu::floats(loss));
        }
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }

    /// Queues a copy of the results of `runs` runs to the host, after the work that is queued already. Does not wait for it.
    pub fn read(&self, runs: usize) -> PendingRead {
        #[cfg(feature = "cuda")]
        return PendingRead { values: self.feed.read(runs) };
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }
}

/// A copy of values from a GPU to the host that may be in progress.
#[derive(Debug)]
pub struct PendingRead {
    #[cfg(feature = "cuda")]
    values: gpu::Values,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

impl PendingRead {
    /// Waits for the results of all runs, and returns them in the order of the runs.
    ///
    /// # Errors
    /// The work that computes them has failed.
    pub fn wait(self) -> Result<Vec<f32>, String> {
        #[cfg(feature = "cuda")]
        return self.values.wait();
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }
}

/// Returns an id of a tensor's memory on a GPU, unique as long as the tensor exists; `None` for other tensors.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there are no GPU kernels"))]
pub fn address(tensor: &Tensor<1>) -> Option<[u64; 2]> {
    #[cfg(feature = "cuda")]
    return gpu::address(tensor);
    #[cfg(not(feature = "cuda"))]
    None
}

/// Returns the ids ([`address`]) of the memory of this thread's bf16 copies of weights, which the optimizer keeps.
pub fn bf16_copy_addresses() -> Vec<[u64; 2]> {
    #[cfg(feature = "cuda")]
    return crate::gpu::bf16_weights::memory_ids();
    #[cfg(not(feature = "cuda"))]
    Vec::new()
}

#[cfg(not(feature = "cuda"))]
const NO_KERNELS: &str = "this program is built without GPU kernels";
