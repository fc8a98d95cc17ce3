//! Casts between f32 and bf16. burn-flex's casts use one thread, and the compiler optimises them little.

use half::bf16;

use super::allocator::Buffer;
use super::element::Element;
use super::multiversion::multiversion;
use super::parallel::{VECTOR, elementwise};

/// Rounds to bf16, ties to even.
pub(crate) fn round(x: &[f32]) -> Buffer<bf16> {
    elementwise(x.len(), VECTOR, |range, y| round_piece(&x[range], y))
}

/// Converts all elements to f32, which is exact.
pub(crate) fn widen_all<E: WidenTo<f32> + Sync>(x: &[E]) -> Buffer {
    elementwise(x.len(), VECTOR, |range, y| E::widen(&x[range], y))
}

/// An element type that converts to `T` without rounding.
pub(crate) trait WidenTo<T>: Sized {
    /// Copies elements.
    fn widen(from: &[Self], to: &mut [T]);

    /// Returns pointers to rows of `T` with the `len` elements of each row from `offset`, and the offset from these pointers.
    ///
    /// # Safety
    ///
    /// Each row points to `offset + len` elements.
    unsafe fn rows<'a>(
        from: &'a [*const Self],
        offset: usize,
        len: usize,
        room: &'a mut WideRows<T>,
    ) -> (&'a [*const T], usize);
}

/// Room for converted rows.
pub(crate) struct WideRows<T> {
    /// Allocated by the first conversion, since most element types need none.
    values: Option<Buffer<T>>,
    pointers: Vec<*const T>,
}

impl<T: Element> WideRows<T> {
    pub(crate) fn new() -> Self {
        Self { values: None, pointers: Vec::new() }
    }
}

impl<E: Copy> WidenTo<E> for E {
    fn widen(from: &[E], to: &mut [E]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
    }

    unsafe fn rows<'a>(
        from: &'a [*const E],
        offset: usize,
        _: usize,
        _: &'a mut WideRows<E>,
    ) -> (&'a [*const E], usize) {
        (from, offset)
    }
}

impl WidenTo<f32> for bf16 {
    fn widen(from: &[bf16], to: &mut [f32]) {
        widen_piece(from, to);
    }

    unsafe fn rows<'a>(
        from: &'a [*const bf16],
        offset: usize,
        len: usize,
        room: &'a mut WideRows<f32>,
    ) -> (&'a [*const f32], usize) {
        let needed = from.len() * len;
        let values = match room.values.take().filter(|values| values.len() >= needed) {
            Some(values) => room.values.insert(values),
            None => room.values.insert(Buffer::new(needed)),
        };
        room.pointers.clear();
        for (from, to) in from.iter().zip(values.chunks_exact_mut(len.max(1))) {
            // SAFETY: guaranteed by the caller.
            widen_piece(unsafe { std::slice::from_raw_parts(from.add(offset), len) }, to);
            room.pointers.push(to.as_ptr());
        }
        (&room.pointers, 0)
    }
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
