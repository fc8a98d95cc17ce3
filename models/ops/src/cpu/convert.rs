//! Casts between f32 and bf16. burn-flex's are single-threaded, and little optimised in this workspace's builds.

use half::bf16;

use super::allocator::Buffer;
use super::element::Element;
use super::parallel::{SharedSlice, chunk, chunk_count, for_each};
use super::simd::multiversion;

/// Elements per task.
const PIECE: usize = 1 << 16;

/// Rounds to bf16, ties to even.
pub(crate) fn round(x: &[f32]) -> Buffer<bf16> {
    map(x, round_piece)
}

/// Widens to f32, which is exact.
pub(crate) fn widen(x: &[bf16]) -> Buffer {
    map(x, widen_piece)
}

fn map<A: Element, B: Element>(x: &[A], piece: fn(&[A], &mut [B])) -> Buffer<B> {
    let mut y = Buffer::new(x.len());
    let target = SharedSlice::new(&mut y);
    let parts = chunk_count(x.len(), PIECE);
    for_each(parts, |index| {
        let range = chunk(x.len(), 16, parts, index);
        // SAFETY: each task has its own range.
        piece(&x[range.clone()], unsafe { target.slice(range) });
    });
    y
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
