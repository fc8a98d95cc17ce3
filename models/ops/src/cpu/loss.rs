//! Cross-entropy and its gradient, row by row.
//!
//! Checked by `loss` in `models/ops/tests/ops.rs`.

use super::allocator::Buffer;
use super::parallel::{SharedSlice, for_each};

/// Computes the loss of [`cross_entropy`](crate::cross_entropy) and its gradient with respect to the logits. Sums are f64 and in
/// the order of the rows, so the number of threads does not change a bit.
///
/// # Shapes
/// `logits`, `targets` and the gradient are row-major `[B, classes]`.
pub(crate) fn cross_entropy(logits: &[f32], targets: &[f32], classes: usize, scale: f32) -> (f32, Buffer) {
    /// Values per task. A smaller task is not worth another thread.
    const TASK: usize = 4096;
    let mut gradient = Buffer::new(logits.len());
    let rows = logits.len().checked_div(classes).unwrap_or(0);
    let per_task = (TASK / classes.max(1)).max(1);
    let tasks = rows.div_ceil(per_task);
    let mut losses = vec![0.0f64; tasks];
    let (into, sums) = (SharedSlice::new(&mut gradient), SharedSlice::new(&mut losses));
    for_each(tasks, |task| {
        let values = task * per_task * classes..((task + 1) * per_task).min(rows) * classes;
        // SAFETY: each task has its own rows and its own sum.
        let (gradient, sum) = unsafe { (into.slice(values.clone()), sums.slice(task..task + 1)) };
        let rows = logits[values.clone()].chunks_exact(classes).zip(targets[values].chunks_exact(classes));
        sum[0] = rows.zip(gradient.chunks_exact_mut(classes)).map(|((x, t), dx)| row(x, t, scale, dx)).sum();
    });
    ((losses.iter().sum::<f64>() * f64::from(scale)) as f32, gradient)
}

/// Writes the gradient of a row and returns its loss, without `scale`.
fn row(logits: &[f32], targets: &[f32], scale: f32, gradient: &mut [f32]) -> f64 {
    // The largest logit is subtracted so that no exponential overflows.
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (mut total, mut mass, mut dot) = (0.0, 0.0, 0.0);
    for ((dx, &x), &t) in gradient.iter_mut().zip(logits).zip(targets) {
        let e = (x - max).exp();
        *dx = e;
        total += f64::from(e);
        mass += f64::from(t);
        dot += f64::from(t) * f64::from(x - max);
    }
    let factor = mass / total;
    for (dx, &t) in gradient.iter_mut().zip(targets) {
        *dx = ((f64::from(*dx) * factor - f64::from(t)) * f64::from(scale)) as f32;
    }
    mass * f64::ln(total) - dot
}
