//! Winograd's transforms of one tile, one group of channels at a time.
//!
//! With the matrices of F(2x2, 3x3), a 4x4 input tile `d` becomes `Bᵀ d B`, a 4x4 tile `m` of products becomes the 2x2
//! output `Aᵀ m A`, and a 2x2 gradient `g` of the output becomes `A g Aᵀ`. All entries of the matrices are 0, 1 or −1,
//! so the transforms are additions, in f32. Position `ξ = 4 · row + column` of a transformed tile is at offset
//! `ξ · stride`. Filters `g` become `G g Gᵀ`, and their gradients come back as `Gᵀ s G`.
//!
//! Transformed tiles are rounded to the type of the products' operands. For the weight gradient, which sums over tiles, the
//! elements of a step's tiles are adjacent ([`Operand::STEP`]).

#![expect(clippy::needless_range_loop, reason = "the index is part of several addresses")]

use super::kernel::{MicroKernels, Operand};
use super::vector::{Lanes, Simd};
use super::winograd_channels::{Channels, MAX_LANES, half};

/// Positions of transformed steps of tiles: `ξ · stride + channel / cols · panel + channel % cols · STEP`.
pub(crate) struct StepLayout {
    pub(crate) stride: usize,
    pub(crate) cols: usize,
    pub(crate) panel: usize,
}

/// Positions of filters in the weights: column `c` and depth `d` at `c · stride[0] + d · stride[1]`.
pub(crate) struct Filters {
    pub(crate) stride: [usize; 2],
    /// Rotates the filters by 180 degrees.
    pub(crate) rotated: bool,
}

/// The kernels of Winograd's algorithm for images of `E`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Winograd<E: 'static> {
    /// Transformed tiles have the type of the images.
    Same(Transforms<E, E>),
    /// Transformed tiles are f32, and the other instruction set multiplies them. For sets that multiply bf16 in f32, and would
    /// convert every tile once per panel of columns.
    Widened(Transforms<E, f32>, &'static MicroKernels),
}

/// The transforms of one instruction set, for images of `E` and transformed tiles of `T`. Channel counts are multiples of
/// `T`'s [`Operand::STEP`] times 16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transforms<E: 'static, T: 'static> {
    /// From 16 pixels, row by row, to `to[ξ · stride + channel]`.
    pub(crate) input: unsafe fn(&[*const E; 16], usize, *mut T, usize),
    /// From `from[ξ · stride + channel]` to four pixels, with an optional bias and ReLU; null pointers are outside the
    /// image.
    pub(crate) output: unsafe fn(*const f32, usize, usize, &[*mut E; 4], *const f32, bool),
    /// From 16 pixels of each of a step's tiles.
    pub(crate) input_steps: unsafe fn(&[[*const E; 16]; 2], usize, *mut T, &StepLayout),
    /// From the four pixels of the gradient of each of a step's tiles.
    pub(crate) grad_steps: unsafe fn(&[[*const E; 4]; 2], usize, *mut T, &StepLayout),
    /// Number of columns of `filters` and `filter_grads`, which divides 16 and [`MicroKernels::cols`].
    pub(crate) lanes: usize,
    /// From one step of the depth to `to[ξ · stride + column · STEP + depth]`.
    pub(crate) filters: unsafe fn(*const f32, &Filters, *mut T, usize),
    /// From the sum of `from[part · part_len + ξ · stride + column]` over all parts, for `[parts, part_len, stride]`, to
    /// `to[column · filter_len]` and the following 8 floats.
    pub(crate) filter_grads: unsafe fn(*const f32, [usize; 3], *mut f32, usize),
}

/// Transforms the input tile's channels from `channel`.
///
/// # Safety
///
/// Pointers are valid as documented in [`Transforms`], and `C`'s instructions are available.
#[inline(always)]
unsafe fn input_channels<C: Channels>(tiles: &[[*const C::E; 16]; 2], channel: usize, to: *mut C::T, stride: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut rows = [[C::zero(); 4]; 4];
        for j in 0..4 {
            // Closures around instructions would not be inlined.
            let at = [j, 4 + j, 8 + j, 12 + j];
            let d = [
                C::load(tiles, at[0], channel),
                C::load(tiles, at[1], channel),
                C::load(tiles, at[2], channel),
                C::load(tiles, at[3], channel),
            ];
            rows[0][j] = C::sub(d[0], d[2]);
            rows[1][j] = C::add(d[1], d[2]);
            rows[2][j] = C::sub(d[2], d[1]);
            rows[3][j] = C::sub(d[1], d[3]);
        }
        for (i, r) in rows.iter().enumerate() {
            let to = to.add(4 * i * stride);
            C::store(to, C::sub(r[0], r[2]));
            C::store(to.add(stride), C::add(r[1], r[2]));
            C::store(to.add(2 * stride), C::sub(r[2], r[1]));
            C::store(to.add(3 * stride), C::sub(r[1], r[3]));
        }
    }
}

/// [`Transforms::input`].
///
/// # Safety
///
/// As for [`input_channels`].
#[inline(always)]
pub(super) unsafe fn input_tile<C: Channels>(from: &[*const C::E; 16], channels: usize, to: *mut C::T, stride: usize) {
    for channel in (0..channels).step_by(C::COUNT) {
        // SAFETY: guaranteed by the caller. The second tile is not read.
        unsafe { input_channels::<C>(&[*from; 2], channel, to.add(channel), stride) };
    }
}

/// [`Transforms::input_steps`].
///
/// # Safety
///
/// As for [`input_channels`].
#[inline(always)]
pub(super) unsafe fn input_steps<C: Channels>(
    from: &[[*const C::E; 16]; 2],
    channels: usize,
    to: *mut C::T,
    layout: &StepLayout,
) {
    for (panel, first) in (0..channels).step_by(layout.cols).enumerate() {
        for c in (0..layout.cols.min(channels - first)).step_by(C::COUNT) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let to = to.add(panel * layout.panel + c * C::T::STEP);
                input_channels::<C>(from, first + c, to, layout.stride);
            }
        }
    }
}

/// Transforms the channels from `channel` of the four pixels of a gradient.
///
/// # Safety
///
/// As for [`input_channels`].
#[inline(always)]
unsafe fn grad_channels<C: Channels>(tiles: &[[*const C::E; 4]; 2], channel: usize, to: *mut C::T, stride: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let zero = C::zero();
        let mut rows = [[zero; 2]; 4];
        for j in 0..2 {
            let (top, bottom) = (C::load(tiles, j, channel), C::load(tiles, 2 + j, channel));
            rows[0][j] = top;
            rows[1][j] = C::add(top, bottom);
            rows[2][j] = C::sub(top, bottom);
            rows[3][j] = C::sub(zero, bottom);
        }
        for (i, r) in rows.iter().enumerate() {
            let to = to.add(4 * i * stride);
            C::store(to, r[0]);
            C::store(to.add(stride), C::add(r[0], r[1]));
            C::store(to.add(2 * stride), C::sub(r[0], r[1]));
            C::store(to.add(3 * stride), C::sub(zero, r[1]));
        }
    }
}

/// [`Transforms::grad_steps`].
///
/// # Safety
///
/// As for [`input_channels`].
#[inline(always)]
pub(super) unsafe fn grad_steps<C: Channels>(
    from: &[[*const C::E; 4]; 2],
    channels: usize,
    to: *mut C::T,
    layout: &StepLayout,
) {
    for (panel, first) in (0..channels).step_by(layout.cols).enumerate() {
        for c in (0..layout.cols.min(channels - first)).step_by(C::COUNT) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let to = to.add(panel * layout.panel + c * C::T::STEP);
                grad_channels::<C>(from, first + c, to, layout.stride);
            }
        }
    }
}

/// [`Transforms::output`].
///
/// # Safety
///
/// Pointers are valid as documented in [`Transforms::output`], and `S`'s instructions are available.
#[inline(always)]
pub(super) unsafe fn output_tile<S: Simd, E: Lanes>(
    from: *const f32,
    stride: usize,
    channels: usize,
    to: &[*mut E; 4],
    bias: *const f32,
    relu: bool,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for c in (0..channels).step_by(S::LANES) {
            let mut rows = [[S::zero(); 4]; 2];
            for j in 0..4 {
                let at = |i: usize| from.add((4 * i + j) * stride + c);
                let m = [S::load(at(0)), S::load(at(1)), S::load(at(2)), S::load(at(3))];
                rows[0][j] = S::add(S::add(m[0], m[1]), m[2]);
                rows[1][j] = S::sub(S::sub(m[1], m[2]), m[3]);
            }
            for (i, r) in rows.iter().enumerate() {
                let sums = [S::add(S::add(r[0], r[1]), r[2]), S::sub(S::sub(r[1], r[2]), r[3])];
                for (mut v, to) in sums.into_iter().zip(&to[2 * i..]) {
                    if to.is_null() {
                        continue;
                    }
                    if !bias.is_null() {
                        v = S::add(v, S::load(bias.add(c)));
                    }
                    if relu {
                        v = S::relu(v);
                    }
                    E::store::<S>(to.add(c), v);
                }
            }
        }
    }
}

/// [`Transforms::filters`] of `S::LANES` columns.
///
/// # Safety
///
/// Pointers are valid as documented in [`Transforms::filters`], and `S`'s instructions are available.
#[inline(always)]
pub(super) unsafe fn filters<S: Simd, C: Channels>(from: *const f32, filters: &Filters, to: *mut C::T, stride: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut gathered = [[[0.0_f32; MAX_LANES]; 2]; 9];
        for d in 0..C::T::STEP {
            for column in 0..S::LANES {
                let from = from.add(column * filters.stride[0] + d * filters.stride[1]);
                for i in 0..9 {
                    gathered[if filters.rotated { 8 - i } else { i }][d][column] = *from.add(i);
                }
            }
        }
        let mut columns = [[C::zero(); 4]; 3];
        for j in 0..3 {
            let g = [&gathered[j], &gathered[3 + j], &gathered[6 + j]];
            let g = [C::load_floats(g[0]), C::load_floats(g[1]), C::load_floats(g[2])];
            columns[j] = filter_axis::<C>(g);
        }
        for i in 0..4 {
            let row = filter_axis::<C>([columns[0][i], columns[1][i], columns[2][i]]);
            for (j, v) in row.iter().enumerate() {
                C::store(to.add((4 * i + j) * stride), *v);
            }
        }
    }
}

/// Multiplies by `G`: `g[0], (g[0] + g[2]) / 2 ± g[1] / 2, g[2]`.
#[inline(always)]
unsafe fn filter_axis<C: Channels>(g: [C::V; 3]) -> [C::V; 4] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (sum, middle) = (C::half(C::add(g[0], g[2])), C::half(g[1]));
        [g[0], C::add(sum, middle), C::sub(sum, middle), g[2]]
    }
}

/// [`Transforms::filter_grads`] of `S::LANES` columns.
///
/// # Safety
///
/// Pointers are valid as documented in [`Transforms::filter_grads`], and `S`'s instructions are available.
#[inline(always)]
pub(super) unsafe fn filter_grads<S: Simd>(
    from: *const f32,
    [parts, part_len, stride]: [usize; 3],
    to: *mut f32,
    filter_len: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut s = [S::zero(); 16];
        for (xi, s) in s.iter_mut().enumerate() {
            for part in 0..parts {
                *s = S::add(*s, S::load(from.add(part * part_len + xi * stride)));
            }
        }
        let mut halves = [[S::zero(); 3]; 4];
        for j in 0..4 {
            halves[j] = filter_grad_axis::<S>([s[j], s[4 + j], s[8 + j], s[12 + j]]);
        }
        let mut grads = [[0.0_f32; MAX_LANES]; 9];
        for i in 0..3 {
            let row = filter_grad_axis::<S>([halves[0][i], halves[1][i], halves[2][i], halves[3][i]]);
            for (j, v) in row.iter().enumerate() {
                S::store(grads[3 * i + j].as_mut_ptr(), *v);
            }
        }
        for column in 0..S::LANES {
            for (i, grads) in grads.iter().enumerate() {
                *to.add(column * filter_len + i) = grads[column];
            }
        }
    }
}

/// Multiplies by `Gᵀ`: `s[0] + (s[1] + s[2]) / 2, (s[1] − s[2]) / 2, (s[1] + s[2]) / 2 + s[3]`.
#[inline(always)]
unsafe fn filter_grad_axis<S: Simd>(s: [S::V; 4]) -> [S::V; 3] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let sum = half::<S>(S::add(s[1], s[2]));
        [S::add(s[0], sum), half::<S>(S::sub(s[1], s[2])), S::add(sum, s[3])]
    }
}
