//! Casts between f32 and bf16. burn-flex's casts use one thread, and the compiler optimises them little.

use half::bf16;

use super::allocator::Buffer;
use super::element::Element;
use super::parallel::{VECTOR, elementwise};
use super::simd::multiversion;

/// Rounds to bf16, ties to even.
pub(crate) fn round(x: &[f32]) -> Buffer<bf16> {
    elementwise(x.len(), VECTOR, |range, y| round_piece(&x[range], y))
}

/// Widens to f32, which is exact.
pub(crate) fn widen(x: &[bf16]) -> Buffer {
    elementwise(x.len(), VECTOR, |range, y| widen_piece(&x[range], y))
}

multiversion!(fn round_piece(x: &[f32], y: &mut [bf16]) = round_body);
multiversion!(fn widen_piece(x: &[bf16], y: &mut [f32]) = widen_body);

#[inline(always)]
fn round_body(x: &[f32], y: &mut [bf16]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y = Element::from_f32(*x));
}

#[inline(always)]
fn widen_body(x: &[bf16], y: &mut [f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y = Element::to_f32(*x));
}
