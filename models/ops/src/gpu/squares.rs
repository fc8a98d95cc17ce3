//! The sum of squares of many tensors on a GPU, for the norm of all gradients.
//!
//! burn's `sum` tries several kernels at run time, and some of them add with atomics, in the order in which blocks end.
//! Ranks would then scale the same gradients by different factors and drift apart. Here, each block sums its share, and
//! the last one sums the blocks' sums, in an order that depends on the tensors' lengths alone.
//!
//! Checked by `gpu_check --ops` (`benches/gpu_check/updates.rs`).

use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::ops::numeric::empty_device_dtype;
use cubecl::prelude::*;

use super::counters::{counters, is_last_block};
use super::parameter_batch::{ParameterBlocks, ParameterLaunch, Tensors, thread_vector};
use super::rows::{THREADS_PER_BLOCK, all, reduce_block};
use super::storage::{storages_of, tensor_of_storage};

/// Writes each block's sum of squares to `partials`, from index `offset` on. `length` is the number of blocks of all launches;
/// the last of them adds up the partial sums and writes `total`.
#[cube(launch_unchecked)]
fn square_sums<N: Size>(
    values: &Tensors<N>,
    partials: &mut [f32],
    total: &mut [f32],
    counters: &mut [Atomic<u32>],
    blocks: &Sequence<ParameterBlocks>,
    offset: usize,
    length: usize,
) {
    let mut squares = Vector::<f32, N>::new(0.0);
    #[unroll]
    for index in 0..comptime!(blocks.len()) {
        let (inside, at) = thread_vector(blocks.index(index));
        if inside {
            let value = values.index(index)[at];
            squares = value * value;
        }
    }
    let mut sum = 0.0f32;
    #[unroll]
    for lane in 0..N::value() {
        sum += squares.extract(lane);
    }
    let sum = reduce_block(sum);
    if UNIT_POS == 0 {
        partials[offset + CUBE_POS_X as usize] = sum;
    }
    if is_last_block(counters, 0usize, length) {
        let mut sum = 0.0f32;
        let mut at = UNIT_POS as usize;
        while at < length {
            sum += partials[at];
            at += THREADS_PER_BLOCK;
        }
        let sum = reduce_block(sum);
        if UNIT_POS == 0 {
            total[0] = sum;
        }
    }
}

/// Returns the sum of squares, `[1]`, of flat f32 tensors on a GPU; `None` for others.
pub(crate) fn square_sum(values: &[&Tensor<1>]) -> Option<Tensor<1>> {
    let read = values.iter().map(|&value| Some((storages_of([value].into_iter())?, 0.0)));
    let launches: Vec<_> = ParameterLaunch::<1>::divide(read.collect::<Option<_>>()?).collect();
    let like = launches.first()?.tensor().clone();
    let new =
        |length: usize| empty_device_dtype(like.client.clone(), like.device.clone(), Shape::from([length]), DType::F32);
    let length = launches.iter().map(ParameterLaunch::blocks).sum();
    let (partials, total) = (new(length), new(1));
    let [zeros, _] = counters(&total);
    let mut offset = 0;
    for launch in &launches {
        let (blocks, grid) = launch.blocks_and_grid();
        // SAFETY: the kernel stays within each tensor's elements, every block has an element of `partials`, and `total` has one.
        unsafe {
            square_sums::launch_unchecked(
                &like.client,
                grid,
                CubeDim::new_1d(THREADS_PER_BLOCK as u32),
                launch.vector,
                launch.args(0),
                all(&partials),
                all(&total),
                all(&zeros),
                blocks,
                offset,
                length,
            );
        }
        offset += launch.blocks();
    }
    Some(tensor_of_storage(total))
}
