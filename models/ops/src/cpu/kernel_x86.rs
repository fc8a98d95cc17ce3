//! The micro-kernels for AVX-512 and AVX2: the generic loops of [`super::kernel`] with these instructions.

use std::arch::x86_64::*;

use super::kernel::{Isa, Outer, Simd, Tile, outer_any, tile};
use super::winograd_tile::{Transforms, grad_tile, input_tile, output_tile};

/// Defines a vector type by its instructions.
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
                // SAFETY: the instructions are enabled; the caller guarantees the address.
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
                // SAFETY: the instructions are enabled. For NaN the result is the second operand, so NaN stays NaN.
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

/// Micro-kernels for a register tile of `$rows` rows and `$vecs` vectors.
macro_rules! tiles {
    ($features:literal, $simd:ty, $rows:literal, $vecs:literal) => {{
        #[target_feature(enable = $features)]
        unsafe fn tile_of(call: &Tile) {
            // SAFETY: the features are enabled; the caller guarantees the rest.
            unsafe { tile::<$simd, $rows, $vecs>(call) }
        }
        #[target_feature(enable = $features)]
        unsafe fn outer_of(call: &Outer) {
            // SAFETY: as above.
            unsafe { outer_any::<$simd, $vecs>(call) }
        }
        (tile_of as unsafe fn(&Tile), outer_of as unsafe fn(&Outer))
    }};
}

macro_rules! transforms {
    ($features:literal, $simd:ty) => {{
        #[target_feature(enable = $features)]
        unsafe fn input(from: &[*const f32; 16], channels: usize, to: *mut f32, stride: usize) {
            // SAFETY: the features are enabled; the caller guarantees the rest.
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

/// A set with `$rows` rows and `$cols` columns.
macro_rules! isa {
    ($name:literal, $features:literal, $simd:ty, $rows:literal x $vecs:literal, $outer_rows:literal, $narrower:expr) => {{
        const TILES: (unsafe fn(&Tile), unsafe fn(&Outer)) = tiles!($features, $simd, $rows, $vecs);
        Isa {
            name: $name,
            rows: $rows,
            cols: $vecs * <$simd>::LANES,
            outer_rows: $outer_rows,
            narrower: $narrower,
            tile: TILES.0,
            outer: TILES.1,
            winograd: transforms!($features, $simd),
        }
    }};
}

pub(super) static AVX512: Isa = isa!("avx512", "avx512f,avx512vl", Avx512, 12 x 2, 8, &[&AVX512_16, &AVX512_8]);
static AVX512_16: Isa = isa!("avx512", "avx512f,avx512vl", Avx512, 12 x 1, 8, &[]);
/// Vectors of half the width, with all of AVX-512's registers.
static AVX512_8: Isa = isa!("avx512", "avx512f,avx512vl,avx2,fma", Avx2, 12 x 1, 8, &[]);
pub(super) static AVX2: Isa = isa!("avx2", "avx2,fma", Avx2, 6 x 2, 6, &[&AVX2_8]);
static AVX2_8: Isa = isa!("avx2", "avx2,fma", Avx2, 6 x 1, 6, &[]);
