//! Vectors of AVX-512 and AVX2.

use std::arch::x86_64::*;
use std::mem::transmute;

use half::bf16;

use super::vector::Simd;

/// Defines a vector type by its instructions.
macro_rules! simd {
    ($(#[$doc:meta])* $name:ident: $lanes:literal $v:ty, $zero:path, $splat:path, $load:path, $store:path, $fma:path,
     $add:path, $sub:path, $max:path, $load_bf16:path, $store_bf16:path, $split:path, $join:path, $join_rounded:path) => {
        $(#[$doc])*
        pub(super) struct $name;

        // SAFETY: used only by functions that enable the instructions.
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
                unsafe { $splat(from.read_unaligned()) }
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
            unsafe fn load_bf16(from: *const bf16) -> $v {
                // SAFETY: as in `splat`.
                unsafe { $load_bf16(from) }
            }
            #[inline(always)]
            unsafe fn store_bf16(to: *mut bf16, v: $v) {
                // SAFETY: as in `splat`.
                unsafe { $store_bf16(to, v) }
            }
            #[inline(always)]
            unsafe fn split(pairs: $v) -> [$v; 2] {
                // SAFETY: the instructions are enabled.
                unsafe { $split(pairs) }
            }
            #[inline(always)]
            unsafe fn join(values: [$v; 2]) -> $v {
                // SAFETY: the instructions are enabled.
                unsafe { $join(values) }
            }
            #[inline(always)]
            unsafe fn join_rounded(values: [$v; 2]) -> $v {
                // SAFETY: the instructions are enabled.
                unsafe { $join_rounded(values) }
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

simd! {
    Avx512: 16 __m512, _mm512_setzero_ps, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_add_ps,
    _mm512_sub_ps, _mm512_max_ps, load_512, store_512, split_512,
    join_512, round_pairs_512
}
simd! {
    /// With AVX512-BF16, which converts to bf16.
    Avx512Bf16: 16 __m512, _mm512_setzero_ps, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_add_ps,
    _mm512_sub_ps, _mm512_max_ps, load_512, convert_512, split_512,
    join_512, convert_pairs_512
}
simd! {
    Avx2: 8 __m256, _mm256_setzero_ps, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, _mm256_add_ps,
    _mm256_sub_ps, _mm256_max_ps, load_256, store_256, split_256,
    join_256, round_pairs_256
}
simd! {
    /// Half the width of [`Avx512Bf16`].
    Avx512Bf16Half: 8 __m256, _mm256_setzero_ps, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps,
    _mm256_add_ps, _mm256_sub_ps, _mm256_max_ps, load_256, convert_256, split_256,
    join_256, convert_pairs_256
}

#[inline(always)]
unsafe fn load_512(from: *const bf16) -> __m512 {
    // SAFETY: the instructions are enabled; the caller guarantees the address.
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())))) }
}

#[inline(always)]
unsafe fn load_256(from: *const bf16) -> __m256 {
    // SAFETY: as above.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())))) }
}

#[inline(always)]
unsafe fn convert_512(to: *mut bf16, v: __m512) {
    // SAFETY: as above. A vector of bf16 has no arithmetic type.
    unsafe { _mm256_storeu_si256(to.cast(), transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v))) }
}

#[inline(always)]
unsafe fn convert_256(to: *mut bf16, v: __m256) {
    // SAFETY: as above.
    unsafe { _mm_storeu_si128(to.cast(), transmute::<__m128bh, __m128i>(_mm256_cvtneps_pbh(v))) }
}

#[inline(always)]
unsafe fn convert_pairs_512(values: [__m512; 2]) -> __m512 {
    // SAFETY: as above.
    unsafe {
        // The first vector's elements come first. Word `i` of the result is element `i / 2` of vector `i % 2`.
        let words = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(values[1], values[0]));
        let first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let order = _mm512_or_si512(first, _mm512_slli_epi32::<16>(_mm512_add_epi32(first, _mm512_set1_epi32(16))));
        _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, words))
    }
}

#[inline(always)]
unsafe fn convert_pairs_256(values: [__m256; 2]) -> __m256 {
    // SAFETY: as above.
    unsafe {
        let first = _mm256_cvtepu16_epi32(transmute::<__m128bh, __m128i>(_mm256_cvtneps_pbh(values[0])));
        let second = _mm256_cvtepu16_epi32(transmute::<__m128bh, __m128i>(_mm256_cvtneps_pbh(values[1])));
        _mm256_castsi256_ps(_mm256_or_si256(first, _mm256_slli_epi32::<16>(second)))
    }
}

/// Rounds the upper half of each lane as [`super::element::Element::from_f32`]. The lower half has no meaning.
#[inline(always)]
unsafe fn round_512(v: __m512) -> __m512i {
    // SAFETY: the instructions are enabled.
    unsafe {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000))
    }
}

#[inline(always)]
unsafe fn store_512(to: *mut bf16, v: __m512) {
    // SAFETY: the instructions are enabled; the caller guarantees the address.
    unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(round_512(v)))) }
}

#[inline(always)]
unsafe fn round_pairs_512(values: [__m512; 2]) -> __m512 {
    // SAFETY: the instructions are enabled.
    unsafe {
        let second = _mm512_and_si512(round_512(values[1]), _mm512_set1_epi32(0xffff_0000_u32 as i32));
        join_512([_mm512_castsi512_ps(round_512(values[0])), _mm512_castsi512_ps(second)])
    }
}

/// Rounds the upper half of each lane as [`super::element::Element::from_f32`]. The lower half has no meaning.
#[inline(always)]
unsafe fn round_256(v: __m256) -> __m256i {
    // SAFETY: the instructions are enabled.
    unsafe {
        let bits = _mm256_castps_si256(v);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
        _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v)))
    }
}

#[inline(always)]
unsafe fn store_256(to: *mut bf16, v: __m256) {
    // SAFETY: the instructions are enabled; the caller guarantees the address.
    unsafe {
        let bits = _mm256_srli_epi32::<16>(round_256(v));
        let halves = (_mm256_castsi256_si128(bits), _mm256_extracti128_si256::<1>(bits));
        _mm_storeu_si128(to.cast(), _mm_packus_epi32(halves.0, halves.1));
    }
}

#[inline(always)]
unsafe fn round_pairs_256(values: [__m256; 2]) -> __m256 {
    // SAFETY: the instructions are enabled.
    unsafe {
        let second = _mm256_and_si256(round_256(values[1]), _mm256_set1_epi32(0xffff_0000_u32 as i32));
        join_256([_mm256_castsi256_ps(round_256(values[0])), _mm256_castsi256_ps(second)])
    }
}

#[inline(always)]
unsafe fn split_512(pairs: __m512) -> [__m512; 2] {
    // SAFETY: the instructions are enabled.
    unsafe {
        let bits = _mm512_castps_si512(pairs);
        let second = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)), _mm512_castsi512_ps(second)]
    }
}

#[inline(always)]
unsafe fn split_256(pairs: __m256) -> [__m256; 2] {
    // SAFETY: the instructions are enabled.
    unsafe {
        let bits = _mm256_castps_si256(pairs);
        let second = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff_0000_u32 as i32));
        [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)), _mm256_castsi256_ps(second)]
    }
}

#[inline(always)]
unsafe fn join_512([first, second]: [__m512; 2]) -> __m512 {
    // SAFETY: the instructions are enabled.
    unsafe {
        let first = _mm512_srli_epi32::<16>(_mm512_castps_si512(first));
        _mm512_castsi512_ps(_mm512_or_si512(first, _mm512_castps_si512(second)))
    }
}

#[inline(always)]
unsafe fn join_256([first, second]: [__m256; 2]) -> __m256 {
    // SAFETY: the instructions are enabled.
    unsafe {
        let first = _mm256_srli_epi32::<16>(_mm256_castps_si256(first));
        _mm256_castsi256_ps(_mm256_or_si256(first, _mm256_castps_si256(second)))
    }
}
