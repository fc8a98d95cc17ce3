//! The sum of squares of many tensors on a GPU, which the norm of all gradients is made of.
//!
//! burn's `sum` tries several kernels at run time, and some of them add with atomics, in the order in which blocks end.
//! Ranks would then scale the same gradients by different factors and drift apart. Here, each block sums its share, and
//! one block sums the blocks' sums, in an order that depends on the tensors' lengths alone.

use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::ops::numeric::empty_device_dtype;
use cubecl::prelude::*;

use super::parameter_batch::{Batch, ParameterBlocks, Tensors, thread_vector};
use super::rows::{UNITS, all, reduce_row};
use super::update::{tensor_of, tensors};

/// Writes each block's sum of squares to `partials`, from index `offset`.
#[cube(launch_unchecked)]
fn partial_squares<N: Size>(
    values: &Tensors<N>,
    partials: &mut [f32],
    shares: &Sequence<ParameterBlocks>,
    offset: usize,
) {
    let mut squares = Vector::<f32, N>::new(0.0);
    #[unroll]
    for index in 0..comptime!(shares.len()) {
        let (inside, at) = thread_vector(shares.index(index));
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
    let sum = reduce_row(sum, false);
    if UNIT_POS == 0 {
        partials[offset + CUBE_POS_X as usize] = sum;
    }
}

/// Sums `partials` in one block.
#[cube(launch_unchecked)]
pub(super) fn sum_partials(partials: &[f32], total: &mut [f32], length: usize) {
    let mut sum = 0.0f32;
    let mut at = UNIT_POS as usize;
    while at < length {
        sum += partials[at];
        at += CUBE_DIM_X as usize;
    }
    let sum = reduce_row(sum, false);
    if UNIT_POS == 0 {
        total[0] = sum;
    }
}

/// Returns the sum of squares, `[1]`, of flat f32 tensors on a GPU; `None` for others.
pub(crate) fn square_sum(values: &[&Tensor<1>]) -> Option<Tensor<1>> {
    let read = values.iter().map(|&value| Some((tensors([value].into_iter())?, 0.0)));
    let passes: Vec<_> = Batch::<1>::all(read.collect::<Option<_>>()?).collect();
    let like = passes.first()?.tensor().clone();
    let new =
        |length: usize| empty_device_dtype(like.client.clone(), like.device.clone(), Shape::from([length]), DType::F32);
    let length = passes.iter().map(Batch::blocks).sum();
    let (partials, total) = (new(length), new(1));
    let mut offset = 0;
    for pass in &passes {
        let (shares, blocks) = pass.shares();
        // SAFETY: the kernel stays within each tensor's elements, and every block has an element of `partials`.
        unsafe {
            partial_squares::launch_unchecked(
                &like.client,
                blocks,
                CubeDim::new_1d(UNITS as u32),
                pass.vector,
                pass.args(0),
                all(&partials),
                shares,
                offset,
            );
        }
        offset += pass.blocks();
    }
    // SAFETY: `partials` has `length` elements, and `total` has one.
    unsafe {
        sum_partials::launch_unchecked(
            &like.client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            all(&partials),
            all(&total),
            length,
        );
    }
    Some(tensor_of(total))
}
