//! The kernels for AVX-512 and AVX2: the generic loops of [`super::kernel`] with these instructions put in.

use std::arch::x86_64::*;

use super::kernel::{Isa, Outer, Simd, Tile, outer_any, tile};
use super::winograd_tile::{Transforms, grad_tile, input_tile, output_tile};

/// A vector type and the seven instructions that the kernels need of it.
macro_rules! simd {
    ($name:ident, $lanes:literal, $v:ty, $zero:path, $splat:path, $load:path, $store:path, $fma:path, $add:path, $sub:path, $max:path) => {
        struct $name;

        // SAFETY: used only by the functions below, which enable the instructions.
        unsafe impl Simd for $name {
            const LANES: usize = $lanes;
            type V = $v;
            #[inline(always)]
            unsafe fn zero() -> $v {
                // SAFETY: the instructions are enabled.
                unsafe { $zero() }
            }
            #[inline(always)]
            unsafe fn splat(from: *const f32) -> $v {
                // SAFETY: the instructions are enabled, the address is the caller's promise.
                unsafe { $splat(*from) }
            }
            #[inline(always)]
            unsafe fn load(from: *const f32) -> $v {
                // SAFETY: as in `splat`.
                unsafe { $load(from) }
            }
            #[inline(always)]
            unsafe fn store(to: *mut f32, v: $v) {
                // SAFETY: as in `splat`.
                unsafe { $store(to, v) }
            }
            #[inline(always)]
            unsafe fn fma(a: $v, b: $v, c: $v) -> $v {
                // SAFETY: the instructions are enabled.
                unsafe { $fma(a, b, c) }
            }
            #[inline(always)]
            unsafe fn add(a: $v, b: $v) -> $v {
                // SAFETY: the instructions are enabled.
                unsafe { $add(a, b) }
            }
            #[inline(always)]
            unsafe fn sub(a: $v, b: $v) -> $v {
                // SAFETY: the instructions are enabled.
                unsafe { $sub(a, b) }
            }
            #[inline(always)]
            unsafe fn relu(a: $v) -> $v {
                // SAFETY: the instructions are enabled. Of two unordered operands the second is the result.
                unsafe { $max($zero(), a) }
            }
        }
    };
}

simd!(
    Avx512,
    16,
    __m512,
    _mm512_setzero_ps,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_fmadd_ps,
    _mm512_add_ps,
    _mm512_sub_ps,
    _mm512_max_ps
);
simd!(
    Avx2,
    8,
    __m256,
    _mm256_setzero_ps,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_fmadd_ps,
    _mm256_add_ps,
    _mm256_sub_ps,
    _mm256_max_ps
);

#[target_feature(enable = "avx512f")]
unsafe fn tile_avx512(call: &Tile) {
    // SAFETY: the feature is enabled; the rest is the caller's promise.
    unsafe { tile::<Avx512, 12, 2>(call) }
}

#[target_feature(enable = "avx512f")]
unsafe fn outer_avx512(call: &Outer) {
    // SAFETY: the feature is enabled; the rest is the caller's promise.
    unsafe { outer_any::<Avx512, 2>(call) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn tile_avx2(call: &Tile) {
    // SAFETY: the features are enabled; the rest is the caller's promise.
    unsafe { tile::<Avx2, 6, 2>(call) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn outer_avx2(call: &Outer) {
    // SAFETY: the features are enabled; the rest is the caller's promise.
    unsafe { outer_any::<Avx2, 2>(call) }
}

macro_rules! transforms {
    ($features:literal, $simd:ty) => {{
        #[target_feature(enable = $features)]
        unsafe fn input(from: &[*const f32; 16], channels: usize, to: *mut f32, stride: usize) {
            // SAFETY: the features are enabled; the rest is the caller's promise.
            unsafe { input_tile::<$simd>(from, channels, to, stride) }
        }
        #[target_feature(enable = $features)]
        unsafe fn output(from: *const f32, stride: usize, channels: usize, to: &[*mut f32; 4]) {
            // SAFETY: as above.
            unsafe { output_tile::<$simd>(from, stride, channels, to) }
        }
        #[target_feature(enable = $features)]
        unsafe fn grad(from: &[*const f32; 4], channels: usize, to: *mut f32, stride: usize, panel: [usize; 2]) {
            // SAFETY: as above.
            unsafe { grad_tile::<$simd>(from, channels, to, stride, panel) }
        }
        Transforms { input, output, grad }
    }};
}

pub(super) static AVX512: Isa = Isa {
    name: "avx512",
    rows: 12,
    cols: 32,
    outer_rows: 8,
    tile: tile_avx512,
    outer: outer_avx512,
    winograd: transforms!("avx512f", Avx512),
};
pub(super) static AVX2: Isa = Isa {
    name: "avx2",
    rows: 6,
    cols: 16,
    outer_rows: 6,
    tile: tile_avx2,
    outer: outer_avx2,
    winograd: transforms!("avx2,fma", Avx2),
};
