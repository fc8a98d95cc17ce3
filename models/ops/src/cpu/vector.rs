//! Vectors of f32, the arithmetic of all kernels, and the elements in memory that they are loaded from and stored to.

use half::bf16;

use super::element::Element;

/// Vector operations of the micro-kernels.
///
/// # Safety
///
/// The methods may use instructions of the type's instruction set, and read or write `LANES` elements at addresses that
/// need no alignment.
pub(crate) unsafe trait Simd {
    const LANES: usize;
    type V: Copy;
    unsafe fn zero() -> Self::V;
    unsafe fn splat(from: *const f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    unsafe fn load_bf16(from: *const bf16) -> Self::V;
    /// Rounds to the nearest value, ties to even. NaN stays NaN.
    unsafe fn store_bf16(to: *mut bf16, v: Self::V);
    /// Splits lanes of two bf16 each into the first and the second of each lane.
    unsafe fn split(pairs: Self::V) -> [Self::V; 2];
    /// The inverse of [`Self::split`], for values that are exact in bf16.
    unsafe fn join(values: [Self::V; 2]) -> Self::V;
    /// [`Self::join`] of any values, rounded as by [`Self::store_bf16`].
    unsafe fn join_rounded(values: [Self::V; 2]) -> Self::V;
    /// `a · b + c`
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// NaN stays NaN.
    unsafe fn relu(a: Self::V) -> Self::V;
}

/// An element that every [`Simd`] loads and stores.
pub(crate) trait Lanes: Element {
    /// # Safety
    ///
    /// As for [`Simd::store`].
    unsafe fn store<S: Simd>(to: *mut Self, v: S::V);
}

impl Lanes for f32 {
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, v: S::V) {
        // SAFETY: guaranteed by the caller.
        unsafe { S::store(to, v) }
    }
}

impl Lanes for bf16 {
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, v: S::V) {
        // SAFETY: guaranteed by the caller.
        unsafe { S::store_bf16(to, v) }
    }
}

/// Eight floats in plain Rust, which the compiler vectorises.
pub(super) struct Portable;

// SAFETY: plain Rust on every processor.
unsafe impl Simd for Portable {
    const LANES: usize = 8;
    type V = [f32; 8];
    #[inline(always)]
    unsafe fn zero() -> [f32; 8] {
        [0.0; 8]
    }
    #[inline(always)]
    unsafe fn splat(from: *const f32) -> [f32; 8] {
        // SAFETY: guaranteed by the caller.
        [unsafe { from.read_unaligned() }; 8]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 8] {
        // SAFETY: guaranteed by the caller.
        unsafe { from.cast::<[f32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: [f32; 8]) {
        // SAFETY: guaranteed by the caller.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> [f32; 8] {
        // SAFETY: guaranteed by the caller.
        unsafe { from.cast::<[bf16; 8]>().read_unaligned() }.map(Element::to_f32)
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut bf16, v: [f32; 8]) {
        // SAFETY: guaranteed by the caller.
        unsafe { to.cast::<[bf16; 8]>().write_unaligned(v.map(Element::from_f32)) }
    }
    #[inline(always)]
    unsafe fn split(pairs: [f32; 8]) -> [[f32; 8]; 2] {
        let bits = pairs.map(f32::to_bits);
        [bits.map(|bits| f32::from_bits(bits << 16)), bits.map(|bits| f32::from_bits(bits & 0xffff_0000))]
    }
    #[inline(always)]
    unsafe fn join([first, second]: [[f32; 8]; 2]) -> [f32; 8] {
        std::array::from_fn(|i| f32::from_bits(first[i].to_bits() >> 16 | second[i].to_bits()))
    }
    #[inline(always)]
    unsafe fn join_rounded([first, second]: [[f32; 8]; 2]) -> [f32; 8] {
        let bits = |v: f32| u32::from(<bf16 as Element>::from_f32(v).to_bits());
        std::array::from_fn(|i| f32::from_bits(bits(first[i]) | bits(second[i]) << 16))
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn relu(a: [f32; 8]) -> [f32; 8] {
        a.map(|v| if v < 0.0 { 0.0 } else { v })
    }
}
