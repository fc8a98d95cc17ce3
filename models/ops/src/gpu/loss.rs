//! The training loss and its gradient: one launch, whose last block adds up the rows' losses.
//!
//! Logits are `[rows][classes]`. 32 threads share a row, and a block has 8 rows. Checked by `gpu_check --ops`
//! (`benches/gpu_check/batches.rs`).

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::counters::{counters, is_last_block};
use super::rows::{Rows, THREADS_PER_BLOCK, all, reduce_block, reduce_row};

/// Threads that share a row of logits.
const LANES: usize = 32;

/// Writes each row's loss, times `scale`, their sum, and the gradient of the sum.
#[cube(launch_unchecked)]
fn cross_entropy_rows(
    logits: &[f32],
    targets: &[f32],
    gradient: &mut [f32],
    losses: &mut [f32],
    loss: &mut [f32],
    counters: &mut [Atomic<u32>],
    rows: usize,
    classes: usize,
    pitch: usize,
    target_pitch: usize,
    gradient_pitch: usize,
    scale: f32,
) {
    let lane = UNIT_POS_X as usize;
    let row = CUBE_POS_X as usize * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    // A thread without a row takes part in the reductions too: all threads of a block must reach their barriers.
    let mut end = 0usize;
    if row < rows {
        end += classes;
    }
    let mut top = f32::new(f32::MIN);
    let mut at = lane;
    while at < end {
        let x = logits[row * pitch + at];
        top = max(top, x);
        at += LANES;
    }
    let largest = reduce_row(top, true);
    let mut total = 0.0f32;
    let mut mass = 0.0f32;
    let mut dot = 0.0f32;
    let mut at = lane;
    while at < end {
        let x = logits[row * pitch + at] - largest;
        let t = targets[row * target_pitch + at];
        total += x.exp();
        mass += t;
        dot += t * x;
        at += LANES;
    }
    let total = reduce_row(total, false);
    let mass = reduce_row(mass, false);
    let dot = reduce_row(dot, false);
    let mut at = lane;
    while at < end {
        let part = (logits[row * pitch + at] - largest).exp() / total;
        gradient[row * gradient_pitch + at] = (part * mass - targets[row * target_pitch + at]) * scale;
        at += LANES;
    }
    if lane == 0 && row < rows {
        losses[row] = (mass * total.ln() - dot) * scale;
    }
    if is_last_block(counters, 0usize, CUBE_COUNT_X as usize) {
        let mut sum = 0.0f32;
        let mut at = UNIT_POS as usize;
        while at < rows {
            sum += losses[at];
            at += THREADS_PER_BLOCK;
        }
        let sum = reduce_block(sum);
        if UNIT_POS == 0 {
            loss[0] = sum;
        }
    }
}

/// See [`HeadKernels::cross_entropy_forward`](crate::HeadKernels::cross_entropy_forward).
pub(super) fn cross_entropy(logits: CubeTensor, targets: CubeTensor, scale: f32) -> [CubeTensor; 2] {
    let (logits, targets) = (Rows::new(logits), Rows::new(targets));
    let (gradient, rows) = (logits.empty_like(), logits.rows());
    let height = THREADS_PER_BLOCK / LANES;
    let client = logits.client();
    let losses = logits.empty_values(rows);
    let loss = logits.empty_values(1);
    let [zeros, _] = counters(&loss);
    // SAFETY: a row's threads stay within its elements, `losses` has one for each row, and `loss` has one.
    unsafe {
        cross_entropy_rows::launch_unchecked(
            client,
            CubeCount::Static(rows.div_ceil(height) as u32, 1, 1),
            CubeDim::new_2d(LANES as u32, height as u32),
            logits.arg(),
            targets.arg(),
            gradient.arg(),
            all(&losses),
            all(&loss),
            all(&zeros),
            rows,
            logits.columns(),
            logits.pitch(1),
            targets.pitch(1),
            gradient.pitch(1),
            scale,
        );
    }
    [loss, gradient.into_tensor()]
}
