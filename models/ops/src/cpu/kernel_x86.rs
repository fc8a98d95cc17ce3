//! The micro-kernels for AVX-512 and AVX2: the generic loops of [`super::micro_kernel`] with these instructions.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::transmute;

use half::bf16;

use super::group_kernel::{
    GroupKernels, GroupOuterArgs, GroupTileArgs, GroupTileKernel, group_copy, group_outer, group_tile,
};
use super::kernel::{MicroKernels, Operand, OuterArgs, TileArgs};
use super::micro_kernel::{Pairs, PartialStep, Products, Single, outer_any, pack_pairs, pack_rows, tile};
use super::vector::Simd;
use super::vector_x86::{Avx2, Avx512, Avx512Bf16, Avx512Bf16Half};
use super::winograd_channels::{OneTile, TwoTiles, Widened};
use super::winograd_tile::{
    Filters, StepLayout, Transforms, Winograd, filter_grads, filters, grad_steps, input_steps, input_tile, output_tile,
};

/// Defines the products of pairs of bf16 by AVX512-BF16.
macro_rules! dot_products {
    ($simd:ident, $v:ty, $steps:ty, $bf16:ty, $splat:path, $load:path, $dot:path) => {
        // SAFETY: used only by functions that enable the instructions.
        unsafe impl Products for $simd {
            type E = bf16;
            type S = $simd;
            type Steps = $steps;
            #[inline(always)]
            unsafe fn splat(from: *const bf16) -> $steps {
                // SAFETY: the instructions are enabled; the caller guarantees the address of two elements.
                unsafe { $splat(from.cast::<i32>().read_unaligned()) }
            }
            #[inline(always)]
            unsafe fn load(from: *const bf16) -> $steps {
                // SAFETY: as above, of two elements per lane.
                unsafe { $load(from.cast()) }
            }
            #[inline(always)]
            unsafe fn pack(rows: &[*const bf16], to: *mut bf16) {
                // SAFETY: guaranteed by the caller.
                unsafe { pack_pairs::<$simd>(rows, to) }
            }
            #[inline(always)]
            unsafe fn multiply_add(a: $steps, b: $steps, c: $v) -> $v {
                // SAFETY: the instructions are enabled. A vector of bf16 has the bits of one of integers.
                unsafe { $dot(c, transmute::<$steps, $bf16>(a), transmute::<$steps, $bf16>(b)) }
            }
        }

        // SAFETY: as above.
        unsafe impl PartialStep for $simd {
            #[inline(always)]
            unsafe fn splat_one(from: *const bf16) -> $steps {
                // SAFETY: the instructions are enabled; the caller guarantees the address of one element.
                unsafe { $splat((*from).to_bits().into()) }
            }
        }
    };
}

dot_products!(Avx512Bf16, __m512, __m512i, __m512bh, _mm512_set1_epi32, _mm512_loadu_si512, _mm512_dpbf16_ps);
dot_products!(Avx512Bf16Half, __m256, __m256i, __m256bh, _mm256_set1_epi32, _mm256_loadu_si256, _mm256_dpbf16_ps);

/// The products of two groups with 8 channels each. The lanes of the groups alternate, so one broadcast of 64 bits has a step of
/// both.
struct TwoGroups<P>(PhantomData<P>);

/// Products with vectors of 512 bits.
trait Wide: Products {
    /// Converts a vector of steps of 32 bits, one per lane.
    unsafe fn steps(bits: __m512) -> Self::Steps;
    /// [`Products::copy`] of two groups.
    unsafe fn copy_two(from: *const Self::E, to: *mut Self::E);
}

/// Alternates the steps of two groups.
#[inline(always)]
unsafe fn alternate(from: *const f32, to: *mut f32) {
    // SAFETY: the caller enables the instructions and guarantees the addresses of 16 floats.
    unsafe {
        let order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
        _mm512_storeu_ps(to, _mm512_permutexvar_ps(order, _mm512_loadu_ps(from)));
    }
}

/// Alternates the steps of two groups with 8 channels of bf16.
#[inline(always)]
unsafe fn alternate_bf16(from: *const bf16, to: *mut bf16) {
    // SAFETY: the caller enables the instructions and guarantees the addresses of 16 elements.
    unsafe {
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let steps = _mm256_permutexvar_epi32(order, _mm256_loadu_si256(from.cast()));
        _mm256_storeu_si256(to.cast(), steps);
    }
}

impl Wide for Single<Avx512> {
    #[inline(always)]
    unsafe fn steps(bits: __m512) -> __m512 {
        bits
    }
    #[inline(always)]
    unsafe fn copy_two(from: *const f32, to: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe { alternate(from, to) }
    }
}

impl Wide for Pairs<Avx512> {
    #[inline(always)]
    unsafe fn steps(bits: __m512) -> [__m512; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { Avx512::split(bits) }
    }
    #[inline(always)]
    unsafe fn copy_two(from: *const bf16, to: *mut bf16) {
        // SAFETY: guaranteed by the caller.
        unsafe { alternate_bf16(from, to) }
    }
}

impl Wide for Avx512Bf16 {
    #[inline(always)]
    unsafe fn steps(bits: __m512) -> __m512i {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_castps_si512(bits) }
    }
    #[inline(always)]
    unsafe fn copy_two(from: *const bf16, to: *mut bf16) {
        // SAFETY: guaranteed by the caller.
        unsafe { alternate_bf16(from, to) }
    }
}

// SAFETY: used only by functions that enable the instructions.
unsafe impl<P: Wide<S: Simd<V = __m512>>> Products for TwoGroups<P> {
    type E = P::E;
    type S = P::S;
    type Steps = P::Steps;
    const GROUPS: usize = 2;
    #[inline(always)]
    unsafe fn splat(from: *const P::E) -> P::Steps {
        // SAFETY: the instructions are enabled; the caller guarantees the address of two steps.
        unsafe { P::steps(_mm512_castpd_ps(_mm512_set1_pd(from.cast::<f64>().read_unaligned()))) }
    }
    #[inline(always)]
    unsafe fn load(from: *const P::E) -> P::Steps {
        // SAFETY: guaranteed by the caller.
        unsafe { P::load(from) }
    }
    #[inline(always)]
    unsafe fn pack(rows: &[*const P::E], to: *mut P::E) {
        // SAFETY: as in `splat`. A step of all lanes has the size of a vector.
        unsafe {
            P::pack(rows, to);
            alternate(to.cast(), to.cast());
        }
    }
    #[inline(always)]
    unsafe fn copy(from: *const P::E, to: *mut P::E) {
        // SAFETY: guaranteed by the caller.
        unsafe { P::copy_two(from, to) }
    }
    #[inline(always)]
    unsafe fn multiply_add(a: P::Steps, b: P::Steps, c: __m512) -> __m512 {
        // SAFETY: guaranteed by the caller.
        unsafe { P::multiply_add(a, b, c) }
    }
    #[inline(always)]
    unsafe fn by_group(sums: __m512) -> __m512 {
        // SAFETY: the instructions are enabled.
        unsafe {
            let order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
            _mm512_permutexvar_ps(order, sums)
        }
    }
}

/// The kernels for narrow groups: three tiles of `$rows` x `$cols` pixels, and outer products of `$many` or `$few` rows.
macro_rules! groups {
    // 32 registers.
    (32, $features:literal, $element:ty, $products:ty, $simd:ty) => {
        groups!($features, $element, $products, $simd, [1 x 16, 2 x 8, 4 x 4], 24 | 8)
    };
    (16, $features:literal, $element:ty, $products:ty, $simd:ty) => {
        groups!($features, $element, $products, $simd, [1 x 8, 2 x 4, 4 x 2], 12 | 4)
    };
    ($features:literal, $element:ty, $products:ty, $simd:ty, [$($rows:literal x $cols:literal),*],
     $many:literal | $few:literal) => {{
        #[target_feature(enable = $features)]
        unsafe fn outer(call: &GroupOuterArgs<$element>) {
            // SAFETY: the features are enabled; the caller guarantees the rest.
            unsafe { group_outer::<$products, $many, $few>(call) }
        }
        #[target_feature(enable = $features)]
        unsafe fn pack(rows: &[*const $element], offset: usize, available: usize, stride: usize, to: *mut $element) {
            // SAFETY: as above.
            unsafe { pack_rows::<$products>(rows, offset, available, stride, to) }
        }
        #[target_feature(enable = $features)]
        unsafe fn copy(from: *const $element, step: usize, count: usize, to: *mut $element) {
            // SAFETY: as above.
            unsafe { group_copy::<$products>(from, step, count, to) }
        }
        GroupKernels {
            lanes: <$simd as Simd>::LANES,
            groups: <$products as Products>::GROUPS,
            tiles: [$({
                #[target_feature(enable = $features)]
                unsafe fn tile(call: &GroupTileArgs<$element>) {
                    // SAFETY: as above.
                    unsafe { group_tile::<$products, $rows, $cols>(call) }
                }
                GroupTileKernel { size: [$rows, $cols], run: tile }
            }),*],
            outer,
            pack,
            copy,
        }
    }};
}

/// Winograd's transforms from images of `$element` to tiles of `$tiles`, by channels of a tile `$tile` and of a step `$step`.
macro_rules! transforms {
    ($features:literal, $element:ty, $tiles:ty, $simd:ty, $tile:ty, $step:ty) => {{
        #[target_feature(enable = $features)]
        unsafe fn input(from: &[*const $element; 16], channels: usize, to: *mut $tiles, stride: usize) {
            // SAFETY: the features are enabled; the caller guarantees the rest.
            unsafe { input_tile::<$tile>(from, channels, to, stride) }
        }
        #[target_feature(enable = $features)]
        unsafe fn output(
            from: *const f32,
            stride: usize,
            channels: usize,
            to: &[*mut $element; 4],
            bias: *const f32,
            relu: bool,
        ) {
            // SAFETY: as above.
            unsafe { output_tile::<$simd, $element>(from, stride, channels, to, bias, relu) }
        }
        #[target_feature(enable = $features)]
        unsafe fn steps_of_input(
            from: &[[*const $element; 16]; 2],
            channels: usize,
            to: *mut $tiles,
            layout: &StepLayout,
        ) {
            // SAFETY: as above.
            unsafe { input_steps::<$step>(from, channels, to, layout) }
        }
        #[target_feature(enable = $features)]
        unsafe fn steps_of_grad(
            from: &[[*const $element; 4]; 2],
            channels: usize,
            to: *mut $tiles,
            layout: &StepLayout,
        ) {
            // SAFETY: as above.
            unsafe { grad_steps::<$step>(from, channels, to, layout) }
        }
        #[target_feature(enable = $features)]
        unsafe fn transformed_filters(from: *const f32, layout: &Filters, to: *mut $tiles, stride: usize) {
            // SAFETY: as above.
            unsafe { filters::<$simd, $step>(from, layout, to, stride) }
        }
        #[target_feature(enable = $features)]
        unsafe fn grads_of_filters(from: *const f32, strides: [usize; 3], to: *mut f32, filter_len: usize) {
            // SAFETY: as above.
            unsafe { filter_grads::<$simd>(from, strides, to, filter_len) }
        }
        Transforms {
            input,
            output,
            input_steps: steps_of_input,
            grad_steps: steps_of_grad,
            lanes: <$simd as Simd>::LANES,
            filters: transformed_filters,
            filter_grads: grads_of_filters,
        }
    }};
}

/// Defines the micro-kernels for products `$products` of `$element`. A register tile has `$rows` rows and `$vecs` vectors of
/// `$simd`. `$registers`: the number of vector registers.
macro_rules! isa {
    ($name:literal, $features:literal, $element:ty, $products:ty, $simd:ty, $winograd:expr, $registers:tt,
     $rows:literal x $vecs:literal, $outer_rows:literal, $narrower:expr) => {{
        #[target_feature(enable = $features)]
        unsafe fn tile_f32(call: &TileArgs<$element, f32>) {
            // SAFETY: the features are enabled; the caller guarantees the rest.
            unsafe { tile::<$products, f32, $rows, $vecs>(call) }
        }
        #[target_feature(enable = $features)]
        unsafe fn tile_bf16(call: &TileArgs<$element, bf16>) {
            // SAFETY: as above.
            unsafe { tile::<$products, bf16, $rows, $vecs>(call) }
        }
        #[target_feature(enable = $features)]
        unsafe fn outer(call: &OuterArgs<$element>) {
            // SAFETY: as above.
            unsafe { outer_any::<$products, $vecs>(call) }
        }
        #[target_feature(enable = $features)]
        unsafe fn pack(rows: &[*const $element], offset: usize, available: usize, stride: usize, to: *mut $element) {
            // SAFETY: as above.
            unsafe { pack_rows::<$products>(rows, offset, available, stride, to) }
        }
        MicroKernels {
            name: $name,
            rows: $rows,
            cols: $vecs * <$simd as Simd>::LANES,
            depth: <$element as Operand>::STEP,
            outer_rows: $outer_rows,
            narrower: $narrower,
            amx: None,
            tile_f32,
            tile_bf16,
            outer,
            pack,
            winograd: $winograd,
            groups: groups!($registers, $features, $element, $products, $simd),
            two_groups: None,
        }
    }};
}

/// An [`isa!`] for f32.
macro_rules! single {
    ($name:literal, $features:literal, $simd:ty, $($shape:tt)*) => {
        isa!(
            $name, $features, f32, Single<$simd>, $simd,
            Winograd::Same(transforms!($features, f32, f32, $simd, Single<$simd>, Single<$simd>)), $($shape)*
        )
    };
}

pub(super) static AVX512: MicroKernels =
    single!("avx512", "avx512f,avx512vl", Avx512, 32, 12 x 2, 8, &[&AVX512_16, &AVX512_8]);
static AVX512_16: MicroKernels = single!("avx512", "avx512f,avx512vl", Avx512, 32, 12 x 1, 8, &[]);
/// Vectors of half the width, with all of AVX-512's registers.
static AVX512_8: MicroKernels = MicroKernels {
    two_groups: Some(groups!(32, "avx512f,avx512vl", f32, TwoGroups<Single<Avx512>>, Avx512)),
    ..single!("avx512", "avx512f,avx512vl,avx2,fma", Avx2, 32, 12 x 1, 8, &[])
};
pub(super) static AVX2: MicroKernels = single!("avx2", "avx2,fma", Avx2, 16, 6 x 2, 6, &[&AVX2_8]);
static AVX2_8: MicroKernels = single!("avx2", "avx2,fma", Avx2, 16, 6 x 1, 6, &[]);

/// An [`isa!`] for bf16 with products of AVX512-BF16.
macro_rules! dot {
    ($simd:ty, $($shape:tt)*) => {
        dot!("avx512f,avx512vl,avx512bw,avx512bf16,avx2,fma", $simd, $($shape)*)
    };
    ($features:literal, $simd:ty, $($shape:tt)*) => {
        isa!(
            "avx512_bf16", $features, bf16, $simd, $simd,
            Winograd::Same(transforms!($features, bf16, bf16, $simd, OneTile<$simd>, TwoTiles<$simd>)), $($shape)*
        )
    };
}

pub(super) static AVX512_BF16: MicroKernels<bf16> = dot!(Avx512Bf16, 32, 12 x 2, 8, &[&AVX512_BF16_16, &AVX512_BF16_8]);
pub(super) static AVX512_BF16_16: MicroKernels<bf16> = dot!(Avx512Bf16, 32, 12 x 1, 8, &[&AVX512_BF16_8]);
static AVX512_BF16_8: MicroKernels<bf16> = MicroKernels {
    two_groups: Some(groups!(32, "avx512f,avx512vl,avx512bw,avx512bf16", bf16, TwoGroups<Avx512Bf16>, Avx512Bf16)),
    ..dot!(Avx512Bf16Half, 32, 12 x 1, 8, &[])
};

/// An [`isa!`] for bf16 with products in f32, as those of the set `$wide`.
macro_rules! pairs {
    ($name:literal, $features:literal, $simd:ty, $wide:expr, $($shape:tt)*) => {
        isa!(
            $name, $features, bf16, Pairs<$simd>, $simd,
            Winograd::Widened(transforms!($features, bf16, f32, $simd, Widened<$simd>, Widened<$simd>), $wide), $($shape)*
        )
    };
}

pub(super) static AVX512_PAIRS: MicroKernels<bf16> =
    pairs!("avx512", "avx512f,avx512vl", Avx512, &AVX512, 32, 12 x 2, 8, &[&AVX512_PAIRS_16, &AVX512_PAIRS_8]);
static AVX512_PAIRS_16: MicroKernels<bf16> =
    pairs!("avx512", "avx512f,avx512vl", Avx512, &AVX512_16, 32, 12 x 1, 8, &[&AVX512_PAIRS_8]);
static AVX512_PAIRS_8: MicroKernels<bf16> = MicroKernels {
    two_groups: Some(groups!(32, "avx512f,avx512vl", bf16, TwoGroups<Pairs<Avx512>>, Avx512)),
    ..pairs!("avx512", "avx512f,avx512vl,avx2,fma", Avx2, &AVX512_8, 32, 12 x 1, 8, &[])
};
/// With two vectors of both halves of the pairs, fewer registers are left for sums than in f32.
pub(super) static AVX2_PAIRS: MicroKernels<bf16> =
    pairs!("avx2", "avx2,fma", Avx2, &AVX2, 16, 4 x 2, 4, &[&AVX2_PAIRS_8]);
static AVX2_PAIRS_8: MicroKernels<bf16> = pairs!("avx2", "avx2,fma", Avx2, &AVX2_8, 16, 4 x 1, 4, &[]);
