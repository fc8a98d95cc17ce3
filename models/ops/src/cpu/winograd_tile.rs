//! Winograd's transforms of one tile, one vector of channels at a time.
//!
//! With the matrices of F(2x2, 3x3), a 4x4 input tile `d` becomes `Bᵀ d B`, a 4x4 tile `m` of products becomes the 2x2
//! output `Aᵀ m A`, and a 2x2 gradient `g` of the output becomes `A g Aᵀ`. All entries of the matrices are 0, 1 or −1,
//! so the transforms are additions. Position `ξ = 4 · row + column` of a transformed tile is at offset `ξ · stride`.

use super::vector::{Lanes, Simd};

/// The transforms of one instruction set. Channel counts are multiples of 16.
#[derive(Debug)]
pub(crate) struct Transforms<E> {
    /// From 16 pixels, row by row, to `to[ξ · stride + channel]`.
    pub(crate) input: unsafe fn(&[*const E; 16], usize, *mut E, usize),
    /// From `from[ξ · stride + channel]` to four pixels; null pointers are outside the image.
    pub(crate) output: unsafe fn(*const f32, usize, usize, &[*mut E; 4]),
    /// From four pixels to panels: `to[ξ · stride + channel / cols · panel_len + channel % cols]` for
    /// `[cols, panel_len]`.
    pub(crate) grad: unsafe fn(&[*const E; 4], usize, *mut E, usize, [usize; 2]),
}

/// Transforms an input tile.
///
/// # Safety
///
/// Pointers are valid as documented in [`Transforms::input`], and `S`'s instructions are available.
#[inline(always)]
pub(super) unsafe fn input_tile<S: Simd, E: Lanes>(from: &[*const E; 16], channels: usize, to: *mut E, stride: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for c in (0..channels).step_by(S::LANES) {
            let zero = S::zero();
            let mut rows = [[zero; 4]; 4];
            for j in 0..4 {
                let at = |i: usize| from[4 * i + j].add(c);
                let d = [E::load::<S>(at(0)), E::load::<S>(at(1)), E::load::<S>(at(2)), E::load::<S>(at(3))];
                rows[0][j] = S::sub(d[0], d[2]);
                rows[1][j] = S::add(d[1], d[2]);
                rows[2][j] = S::sub(d[2], d[1]);
                rows[3][j] = S::sub(d[1], d[3]);
            }
            for (i, r) in rows.iter().enumerate() {
                let to = to.add(4 * i * stride + c);
                E::store::<S>(to, S::sub(r[0], r[2]));
                E::store::<S>(to.add(stride), S::add(r[1], r[2]));
                E::store::<S>(to.add(2 * stride), S::sub(r[2], r[1]));
                E::store::<S>(to.add(3 * stride), S::sub(r[1], r[3]));
            }
        }
    }
}

/// Transforms a tile of products to an output tile.
///
/// # Safety
///
/// Pointers are valid as documented in [`Transforms::output`], and `S`'s instructions are available.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "the index is part of several addresses")]
pub(super) unsafe fn output_tile<S: Simd, E: Lanes>(
    from: *const f32,
    stride: usize,
    channels: usize,
    to: &[*mut E; 4],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for c in (0..channels).step_by(S::LANES) {
            let zero = S::zero();
            let mut rows = [[zero; 4]; 2];
            for j in 0..4 {
                let at = |i: usize| from.add((4 * i + j) * stride + c);
                let m = [S::load(at(0)), S::load(at(1)), S::load(at(2)), S::load(at(3))];
                rows[0][j] = S::add(S::add(m[0], m[1]), m[2]);
                rows[1][j] = S::sub(S::sub(m[1], m[2]), m[3]);
            }
            for (i, r) in rows.iter().enumerate() {
                if !to[2 * i].is_null() {
                    E::store::<S>(to[2 * i].add(c), S::add(S::add(r[0], r[1]), r[2]));
                }
                if !to[2 * i + 1].is_null() {
                    E::store::<S>(to[2 * i + 1].add(c), S::sub(S::sub(r[1], r[2]), r[3]));
                }
            }
        }
    }
}

/// Transforms a tile of the output's gradient.
///
/// # Safety
///
/// Pointers are valid as documented in [`Transforms::grad`], and `S`'s instructions are available.
#[inline(always)]
pub(super) unsafe fn grad_tile<S: Simd, E: Lanes>(
    from: &[*const E; 4],
    channels: usize,
    to: *mut E,
    stride: usize,
    [cols, panel_len]: [usize; 2],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for c in (0..channels).step_by(S::LANES) {
            let to = to.add(c / cols * panel_len + c % cols);
            let zero = S::zero();
            let mut rows = [[zero; 2]; 4];
            for j in 0..2 {
                let (top, bottom) = (E::load::<S>(from[j].add(c)), E::load::<S>(from[2 + j].add(c)));
                rows[0][j] = top;
                rows[1][j] = S::add(top, bottom);
                rows[2][j] = S::sub(top, bottom);
                rows[3][j] = S::sub(zero, bottom);
            }
            for (i, r) in rows.iter().enumerate() {
                let to = to.add(4 * i * stride);
                E::store::<S>(to, r[0]);
                E::store::<S>(to.add(stride), S::add(r[0], r[1]));
                E::store::<S>(to.add(2 * stride), S::sub(r[0], r[1]));
                E::store::<S>(to.add(3 * stride), S::sub(zero, r[1]));
            }
        }
    }
}
