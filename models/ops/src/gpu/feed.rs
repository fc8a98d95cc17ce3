//! Tables on the GPU for a graph's next runs: the graph's first kernel reads a run's inputs, the last one writes its results.
//!
//! A thread copies one word of 32 bits. Checked by `benches/gpu_check/graph.sh`: training by graphs equals training by single
//! launches.

use burn::backend::TensorMetadata;
use burn::tensor::{Bytes, DType, Shape};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros_client};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::counters::{counters, is_last_block};
use super::graph::{Values, read_words};
use super::rows::{THREADS_PER_BLOCK, all};
use super::update::is_finite;

/// Tensors of 32-bit values.
type Words = Sequence<Box<[u32]>>;

/// A tensor's part of a run's inputs or results, in words.
#[derive(CubeType, CubeLaunch)]
struct Part {
    length: usize,
    offset: usize,
    /// The part's first block, and the next part's first block.
    first: usize,
    next: usize,
    /// 1 for floats, 0 for integers.
    floats: u32,
}

/// Bits of a NaN.
const NAN: u32 = 0x7fc0_0000;

/// Returns whether the thread belongs to the part, and its word.
#[cube]
fn word_of(part: &Part) -> (bool, usize) {
    let block = CUBE_POS_X as usize;
    let at = (block - min(part.first, block)) * THREADS_PER_BLOCK + UNIT_POS as usize;
    (block >= part.first && block < part.next && at < part.length, at)
}

/// Copies the inputs of the next run from the table. The table's first word is the number of the run. After a failed run, all
/// float inputs are NaN. The loss is then NaN too, and the optimizer's kernels write nothing, so no later run changes the
/// weights.
#[cube(launch_unchecked)]
fn take_inputs(table: &[u32], failed: &[u32], to: &mut Words, parts: &Sequence<Part>, each: usize) {
    let run = table[0] as usize;
    #[unroll]
    for index in 0..comptime!(parts.len()) {
        let part = parts.index(index);
        let (inside, at) = word_of(part);
        if inside {
            let mut word = table[1 + run * each + part.offset + at];
            if failed[0] * part.floats == 1 {
                word = NAN.runtime();
            }
            to.index_mut(index)[at] = word;
        }
    }
}

/// Copies the results of a run to `ring`, and counts the run. A run whose loss is not finite has failed.
#[cube(launch_unchecked)]
fn keep_results(
    from: &Words,
    loss: &[f32],
    failed: &mut [u32],
    table: &mut [u32],
    ring: &mut [u32],
    counters: &mut [Atomic<u32>],
    parts: &Sequence<Part>,
    each: usize,
) {
    let run = table[0];
    #[unroll]
    for index in 0..comptime!(parts.len()) {
        let part = parts.index(index);
        let (inside, at) = word_of(part);
        if inside {
            ring[run as usize * each + part.offset + at] = from.index(index)[at];
        }
    }
    // The last block increments the number: all blocks have read it.
    if is_last_block(counters, 0usize, CUBE_COUNT_X as usize) && UNIT_POS == 0 {
        table[0] = run + 1;
        if !is_finite(loss[0]) {
            failed[0] = 1;
        }
    }
}

fn length(tensor: &CubeTensor) -> usize {
    tensor.shape().num_elements()
}

fn parts(tensors: &[CubeTensor]) -> (SequenceArg<Part>, CubeCount) {
    let floats = |tensor: &CubeTensor| u32::from(tensor.dtype == DType::F32);
    let (mut offset, mut first) = (0, 0);
    let part = |tensor: &CubeTensor| {
        let (length, next) = (length(tensor), first + length(tensor).div_ceil(THREADS_PER_BLOCK));
        let part = PartLaunch::new(length, offset, first, next, floats(tensor));
        (offset, first) = (offset + length, next);
        part
    };
    let parts = tensors.iter().map(part).collect();
    (parts, CubeCount::Static(first as u32, 1, 1))
}

/// See [`Feed`](crate::graph::Feed).
#[derive(Debug, Clone)]
pub(crate) struct Feed {
    inputs: Vec<CubeTensor>,
    /// The number of the next run, then the inputs of all runs.
    table: CubeTensor,
    /// The results of all runs.
    ring: CubeTensor,
    /// 1 if a run's loss was not finite.
    failed: CubeTensor,
    runs: usize,
    /// Words of a run's inputs and results.
    each: [usize; 2],
}

impl Feed {
    pub(crate) fn new(inputs: Vec<CubeTensor>, result_words: usize, runs: usize) -> Self {
        let like = inputs.first().expect("a step has inputs").clone();
        let each = [inputs.iter().map(length).sum(), result_words];
        let new = |words: usize| {
            let shape = Shape::from([words]);
            empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, DType::U32)
        };
        let failed = zeros_client(like.client.clone(), like.device.clone(), Shape::from([1]), DType::U32);
        Self { inputs, failed, table: new(1 + runs * each[0]), ring: new(runs * each[1]), runs, each }
    }

    pub(crate) fn write(&self, mut words: Vec<u32>) {
        assert!(words.len().is_multiple_of(self.each[0]) && words.len() <= self.runs * self.each[0], "inputs of runs");
        words.resize(self.runs * self.each[0], 0);
        words.insert(0, 0);
        self.table.client.write(&self.table.handle, Bytes::from_elems(words));
    }

    pub(crate) fn take_inputs(&self) {
        let (parts, blocks) = parts(&self.inputs);
        // SAFETY: the parts are those of the tensors, and the table has the inputs of all runs.
        unsafe {
            take_inputs::launch_unchecked(
                &self.table.client,
                blocks,
                CubeDim::new_1d(THREADS_PER_BLOCK as u32),
                all(&self.table),
                all(&self.failed),
                self.inputs.iter().map(all).collect(),
                parts,
                self.each[0],
            );
        }
    }

    pub(crate) fn keep_results(&self, results: &[CubeTensor], loss: &CubeTensor) {
        let (parts, blocks) = parts(results);
        assert_eq!(results.iter().map(length).sum::<usize>(), self.each[1], "the results of a run");
        let [zeros, _] = counters(&self.table);
        // SAFETY: the parts are those of the tensors, and the ring has room for the results of all runs.
        unsafe {
            keep_results::launch_unchecked(
                &self.table.client,
                blocks,
                CubeDim::new_1d(THREADS_PER_BLOCK as u32),
                results.iter().map(all).collect(),
                all(loss),
                all(&self.failed),
                all(&self.table),
                all(&self.ring),
                all(&zeros),
                parts,
                self.each[1],
            );
        }
    }

    /// Queues a copy of the results of the first `runs` runs.
    pub(crate) fn read(&self, runs: usize) -> Values {
        read_words(&self.ring, runs * self.each[1])
    }
}
