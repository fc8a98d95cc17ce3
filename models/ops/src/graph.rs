//! The launches of a training step, recorded once and launched again as one: a CUDA graph
//! (<https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs>, `torch.cuda.CUDAGraph`).
//!
//! A graph runs the same kernels on the same memory. So the step reads its inputs from tensors that a [`Feed`] fills in each run, and
//! updates its state in place: [`address`] shows whether it does.

use burn::tensor::{Device, Int, Tensor};

#[cfg(feature = "cuda")]
use crate::gpu::{feed as gpu_feed, graph as gpu};

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

/// A tensor that a graph reads: f32 or 32-bit integers, contiguous.
#[derive(Debug, Clone)]
pub enum GraphInput {
    /// f32.
    Floats(Tensor<1>),
    /// i32.
    Integers(Tensor<1, Int>),
}

/// The inputs and the results of a graph's next runs, on a GPU. The host writes the inputs of several runs at once, launches the graph as
/// often, and reads all results at once. A run begins with [`Feed::take_inputs`] and ends with [`Feed::keep_results`], which are
/// kernels of the graph.
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
    /// When an input is of another kind, or there is none.
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
    /// When there are more than there is room for, or not those of whole runs.
    pub fn write(&self, words: Vec<u32>) {
        #[cfg(feature = "cuda")]
        return self.feed.write(words);
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }

    /// Queues a kernel that copies the inputs of the next run to the tensors. After a run whose loss was not finite, inputs of floats are
    /// NaN, so that the optimizer's kernels leave the weights as they were before that run.
    pub fn take_inputs(&self) {
        #[cfg(feature = "cuda")]
        return self.feed.take_inputs();
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }

    /// Queues a kernel that keeps a run's results, contiguous f32 tensors, looks at its loss `[1]`, and counts the run.
    ///
    /// # Panics
    ///
    /// When there are more or less than a run has.
    pub fn keep_results(&self, results: &[&Tensor<1>], loss: &Tensor<1>) {
        #[cfg(feature = "cuda")]
        {
            let results: Vec<_> = results.iter().map(|tensor| gpu::floats(tensor)).collect();
            self.feed.keep_results(&results, &gpu::floats(loss));
        }
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }

    /// Queues a copy of the results of `runs` runs to the host, behind the work that was queued before. Does not wait for it.
    pub fn read(&self, runs: usize) -> Reading {
        #[cfg(feature = "cuda")]
        return Reading { values: self.feed.read(runs) };
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }
}

/// Values on their way from a GPU to the host.
#[derive(Debug)]
pub struct Reading {
    #[cfg(feature = "cuda")]
    values: gpu::Values,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

impl Reading {
    /// Waits for the results of all runs, one run behind the other.
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
