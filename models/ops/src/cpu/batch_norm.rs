//! Batch norm in training mode with an optional residual and an activation, on rows of channels.
//!
//! The forward pass reads the input twice: for the statistics, and to write `y = activation(x · scale + shift +
//! residual)`. The backward pass also reads its inputs twice: for the sums of `g` and `g · x̂`, and to write the
//! gradient. `g` is the gradient of the activation's input. The activation's derivative is computed from the recomputed
//! input (or from the output, for a ReLU with a residual). Nothing else is saved.
//!
//! Sums are computed over pieces of fixed size: in f32 within a piece, and in f64 and in order over the pieces. They
//! therefore do not depend on the number of threads. Squares are summed around a pivot, the first pixel, so that the
//! variance stays accurate if the mean is far from zero.
//!
//! Source: `torch.nn.functional.batch_norm`. Checked by `batch_norm` in `models/ops/tests/ops.rs` and `batch_norms` in `bf16.rs`,
//! shared statistics by `models/tests/shared_batch.rs`.

use super::activation::{ElementwiseFn, relu_grad, with_activation};
use super::allocator::Buffer;
use super::element::Element;
use super::multiversion::multiversion;
use super::parallel::{PIECE, SharedSlice, chunk, chunk_count, elementwise, for_each};
use crate::extension::Activation;
use crate::statistics::StatisticsReduce;

/// Elements per piece, whose sums are f32.
const SUM_PIECE: usize = 1 << 14;

/// Per-channel statistics and coefficients, which the backward pass needs.
#[derive(Debug)]
pub(crate) struct Stats {
    pub(crate) mean: Vec<f32>,
    /// Biased variance.
    variance: Vec<f32>,
    /// Values per channel, over all ranks that share the batch.
    count: f64,
    /// Reciprocal of the standard deviation.
    inv_std: Vec<f32>,
    /// Factor and summand that normalise, scale and shift.
    scale: Vec<f32>,
    shift: Vec<f32>,
}

impl Stats {
    fn new(mean: Vec<f32>, variance: Vec<f32>, count: f64, weight: &[f32], bias: &[f32], epsilon: f64) -> Self {
        let inv_std: Vec<f32> = variance.iter().map(|&v| (1.0 / (f64::from(v) + epsilon).sqrt()) as f32).collect();
        let scale: Vec<f32> = inv_std.iter().zip(weight).map(|(i, w)| i * w).collect();
        let shift = mean.iter().zip(&scale).zip(bias).map(|((m, s), b)| b - m * s).collect();
        Self { mean, variance, count, inv_std, scale, shift }
    }

    /// Computes the statistics of `x`, `[rows, channels]`, and, with `process_group`, of the other ranks' rows of the batch.
    /// `weight` and `bias` are `[channels]`.
    pub(crate) fn from_batch<E: Element>(
        x: &[E],
        weight: &[f32],
        bias: &[f32],
        epsilon: f64,
        process_group: Option<&dyn StatisticsReduce>,
    ) -> Self {
        let channels = weight.len();
        let pivot: Vec<f32> = x[..channels].iter().map(|x| x.to_f32()).collect();
        let [sum, squares] = sums(x.len(), channels, |range, sum, squares| moments(&x[range], &pivot, sum, squares));
        let count = (x.len() / channels) as f64;
        let Some(process_group) = process_group else {
            let shifted = |c: usize| sum[c] / count;
            let mean = (0..channels).map(|c| (f64::from(pivot[c]) + shifted(c)) as f32).collect();
            let variance =
                (0..channels).map(|c| (squares[c] / count - shifted(c) * shifted(c)).max(0.0) as f32).collect();
            return Self::new(mean, variance, count, weight, bias, epsilon);
        };
        // The ranks' pivots differ, so the exchanged sums are around zero. f64 represents squares of f32 exactly.
        let mut all: Vec<f64> = vec![count];
        let pivots = || pivot.iter().map(|&p| f64::from(p));
        all.extend(sum.iter().zip(pivots()).map(|(sum, p)| sum + count * p));
        all.extend(
            squares.iter().zip(&sum).zip(pivots()).map(|((squares, sum), p)| squares + p * (2.0 * sum + count * p)),
        );
        process_group.all_reduce_sum(&mut all);
        let (count, sums) = (all[0], &all[1..]);
        assert!(count > 1.0, "batch norm in training mode needs more than one value per channel");
        let mean = |c: usize| sums[c] / count;
        let variance =
            (0..channels).map(|c| (sums[channels + c] / count - mean(c) * mean(c)).max(0.0) as f32).collect();
        Self::new((0..channels).map(|c| mean(c) as f32).collect(), variance, count, weight, bias, epsilon)
    }

    /// Uses given statistics, as in evaluation mode.
    pub(crate) fn from_running(mean: &[f32], variance: &[f32], weight: &[f32], bias: &[f32], epsilon: f64) -> Self {
        Self::new(mean.to_vec(), variance.to_vec(), 0.0, weight, bias, epsilon)
    }

    /// Returns the unbiased variance, which running statistics average.
    pub(crate) fn unbiased(&self) -> Vec<f32> {
        self.variance.iter().map(|&v| (f64::from(v) * self.count / (self.count - 1.0)) as f32).collect()
    }

    /// Computes `activation(x · scale + shift + residual)`.
    pub(crate) fn apply<E: Element>(&self, x: &[E], residual: Option<&[E]>, activation: Activation) -> Buffer<E> {
        elementwise(x.len(), self.mean.len(), |range, y| {
            normalise(&x[range.clone()], residual.map(|r| &r[range]), &self.scale, &self.shift, activation, y);
        })
    }
}

/// Gradients of input, weight, bias and residual.
pub(crate) struct Grads<E> {
    pub(crate) x: Buffer<E>,
    pub(crate) weight: Vec<f32>,
    pub(crate) bias: Vec<f32>,
    /// Gradient of ReLU's input, if ReLU follows the residual. Without ReLU, the residual's gradient is `dy`.
    pub(crate) residual: Option<Buffer<E>>,
}

/// How the activation's derivative is computed.
#[derive(Clone, Copy)]
pub(crate) enum DerivativeAt<'a, E> {
    /// From the activation's input, which is recomputed from the batch norm's input.
    Input(Activation),
    /// From ReLU's output.
    Output(&'a [E]),
}

/// Computes the gradients. The gradients of weight and bias are sums over the local rows: they are all-reduced later, with those of
/// all other parameters. The input's gradient depends on all ranks' rows through the statistics.
pub(crate) fn backward<E: Element>(
    stats: &Stats,
    x: &[E],
    dy: &[E],
    derivative_at: DerivativeAt<'_, E>,
    process_group: Option<&dyn StatisticsReduce>,
) -> Grads<E> {
    let channels = stats.mean.len();
    // Write the gradient of ReLU's input once, because the residual needs it too.
    let (masked, activation) = match derivative_at {
        DerivativeAt::Output(y) => (Some(relu_grad(y, dy)), Activation::Identity),
        DerivativeAt::Input(activation) => (None, activation),
    };
    let g = masked.as_deref().unwrap_or(dy);
    let [mut sum, mut product] = sums(x.len(), channels, |range, sum, product| {
        grad_sums(&x[range.clone()], &g[range], &stats.mean, &stats.scale, &stats.shift, activation, sum, product);
    });
    let count = stats.count;
    // dx = scale · (g − mean(g) − x̂ · mean(g · x̂)) = scale · g + slope · x + offset.
    let bias: Vec<f32> = sum.iter().map(|&s| s as f32).collect();
    let weight: Vec<f32> = (0..channels).map(|c| (product[c] * f64::from(stats.inv_std[c])) as f32).collect();
    if let Some(process_group) = process_group {
        let mut all = [sum.as_slice(), &product].concat();
        process_group.all_reduce_sum(&mut all);
        product = all.split_off(channels);
        sum = all;
    }
    let slope: Vec<f32> = (0..channels)
        .map(|c| {
            let inv_std = f64::from(stats.inv_std[c]);
            (-f64::from(stats.scale[c]) * product[c] * inv_std * inv_std / count) as f32
        })
        .collect();
    let offset: Vec<f32> = (0..channels)
        .map(|c| (-f64::from(stats.scale[c]) * sum[c] / count - f64::from(slope[c]) * f64::from(stats.mean[c])) as f32)
        .collect();

    let dx = elementwise(x.len(), channels, |range, dx| {
        grad_input(&x[range.clone()], &g[range], &stats.scale, &stats.shift, &slope, &offset, activation, dx);
    });
    Grads { x: dx, weight, bias, residual: masked }
}

/// Computes two sums per channel over pieces of whole rows, in f64 and in order.
fn sums(
    len: usize,
    channels: usize,
    piece: impl Fn(std::ops::Range<usize>, &mut [f32], &mut [f32]) + Send + Sync,
) -> [Vec<f64>; 2] {
    let step = (SUM_PIECE / channels).max(1) * channels;
    let count = len.div_ceil(step);
    let mut partial = Buffer::zeroed(count * 2 * channels);
    let target = SharedSlice::new(&mut partial);
    // A task has several pieces, because a piece takes only a few microseconds.
    let tasks = chunk_count(len, PIECE);
    for_each(tasks, |task| {
        for index in chunk(count, 1, tasks, task) {
            // SAFETY: each piece has its own sums, and belongs to one task.
            let to = unsafe { target.slice(index * 2 * channels..(index + 1) * 2 * channels) };
            let (first, second) = to.split_at_mut(channels);
            piece(index * step..((index + 1) * step).min(len), first, second);
        }
    });
    let mut totals = [vec![0.0; channels], vec![0.0; channels]];
    for partial in partial.chunks_exact(2 * channels) {
        for (totals, partial) in totals.iter_mut().zip(partial.chunks_exact(channels)) {
            totals.iter_mut().zip(partial).for_each(|(total, &partial)| *total += f64::from(partial));
        }
    }
    totals
}

multiversion!(fn moments<E: Element>(x: &[E], pivot: &[f32], sum: &mut [f32], squares: &mut [f32]) = moments_body);

#[inline(always)]
fn moments_body<E: Element>(x: &[E], pivot: &[f32], sum: &mut [f32], squares: &mut [f32]) {
    let channels = pivot.len();
    let (sum, squares) = (&mut sum[..channels], &mut squares[..channels]);
    for x in x.chunks_exact(channels) {
        for c in 0..channels {
            let d = x[c].to_f32() - pivot[c];
            sum[c] += d;
            squares[c] += d * d;
        }
    }
}

multiversion!(fn normalise<E: Element>(
    x: &[E], residual: Option<&[E]>, scale: &[f32], shift: &[f32], activation: Activation, y: &mut [E]
) = normalise_body);

#[inline(always)]
fn normalise_body<E: Element>(
    x: &[E],
    residual: Option<&[E]>,
    scale: &[f32],
    shift: &[f32],
    activation: Activation,
    y: &mut [E],
) {
    let channels = scale.len();
    let shift = &shift[..channels];
    with_activation!(activation, K => match residual {
        None => {
            for (y, x) in y.chunks_exact_mut(channels).zip(x.chunks_exact(channels)) {
                for c in 0..channels {
                    y[c] = E::from_f32(K::value(x[c].to_f32() * scale[c] + shift[c]));
                }
            }
        }
        Some(residual) => {
            let rows = y.chunks_exact_mut(channels).zip(x.chunks_exact(channels));
            for ((y, x), r) in rows.zip(residual.chunks_exact(channels)) {
                for c in 0..channels {
                    y[c] = E::from_f32(K::value(x[c].to_f32() * scale[c] + shift[c] + r[c].to_f32()));
                }
            }
        }
    });
}

multiversion!(fn grad_sums<E: Element>(
    x: &[E], g: &[E], mean: &[f32], scale: &[f32], shift: &[f32], activation: Activation, sum: &mut [f32],
    product: &mut [f32]
) = grad_sums_body);

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one slice per tensor")]
fn grad_sums_body<E: Element>(
    x: &[E],
    g: &[E],
    mean: &[f32],
    scale: &[f32],
    shift: &[f32],
    activation: Activation,
    sum: &mut [f32],
    product: &mut [f32],
) {
    let channels = mean.len();
    let (scale, shift) = (&scale[..channels], &shift[..channels]);
    let (sum, product) = (&mut sum[..channels], &mut product[..channels]);
    with_activation!(activation, K => {
        for (x, g) in x.chunks_exact(channels).zip(g.chunks_exact(channels)) {
            for c in 0..channels {
                let x = x[c].to_f32();
                let g = K::grad(x * scale[c] + shift[c], g[c].to_f32());
                sum[c] += g;
                product[c] += g * (x - mean[c]);
            }
        }
    });
}

multiversion!(fn grad_input<E: Element>(
    x: &[E], g: &[E], scale: &[f32], shift: &[f32], slope: &[f32], offset: &[f32], activation: Activation,
    dx: &mut [E]
) = grad_input_body);

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one slice per tensor")]
fn grad_input_body<E: Element>(
    x: &[E],
    g: &[E],
    scale: &[f32],
    shift: &[f32],
    slope: &[f32],
    offset: &[f32],
    activation: Activation,
    dx: &mut [E],
) {
    let channels = scale.len();
    let (shift, slope, offset) = (&shift[..channels], &slope[..channels], &offset[..channels]);
    with_activation!(activation, K => {
        let rows = x.chunks_exact(channels).zip(g.chunks_exact(channels));
        for (dx, (x, g)) in dx.chunks_exact_mut(channels).zip(rows) {
            for c in 0..channels {
                let x = x[c].to_f32();
                let g = K::grad(x * scale[c] + shift[c], g[c].to_f32());
                dx[c] = E::from_f32(scale[c] * g + slope[c] * x + offset[c]);
            }
        }
    });
}
