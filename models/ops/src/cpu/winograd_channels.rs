//! The channels that Winograd's transforms handle at once, for each element type.
//!
//! Loading and storing bf16 costs as much as the additions of a transform. So vectors are filled with pairs of bf16: two
//! channels of a tile, or, where the elements of two tiles become adjacent, the same channel of both. Where products of bf16
//! would be computed in f32, the transforms store f32.

use std::marker::PhantomData;

use half::bf16;

use super::kernel::Operand;
use super::micro_kernel::Single;
use super::vector::Simd;

/// Largest number of lanes of a vector.
pub(super) const MAX_LANES: usize = 16;

/// Adjacent channels of a tile, or of a step's tiles, as vectors.
///
/// # Safety
///
/// As for [`Simd`].
pub(super) unsafe trait Channels {
    /// Elements of images.
    type E: Operand;
    /// Elements of transformed tiles.
    type T: Operand;
    type V: Copy;
    /// Number of channels.
    const COUNT: usize;
    /// Loads the channels from `channel` of a pixel of each tile.
    unsafe fn load<const N: usize>(tiles: &[[*const Self::E; N]; 2], pixel: usize, channel: usize) -> Self::V;
    /// Rounds and stores the channels.
    unsafe fn store(to: *mut Self::T, v: Self::V);
    unsafe fn zero() -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// Multiplies by one half.
    unsafe fn half(v: Self::V) -> Self::V;
    /// Loads one vector of floats per tile.
    unsafe fn load_floats(from: &[[f32; MAX_LANES]; 2]) -> Self::V;
}

/// bf16 channels of one tile, widened to f32.
pub(super) struct Widened<S>(PhantomData<S>);

/// Implements channels whose transformed tiles are f32.
macro_rules! floats {
    ($name:ident, $element:ty, $load:ident) => {
        // SAFETY: the instructions are `S`'s.
        unsafe impl<S: Simd> Channels for $name<S> {
            type E = $element;
            type T = f32;
            type V = S::V;
            const COUNT: usize = S::LANES;
            #[inline(always)]
            unsafe fn load<const N: usize>(
                [tile, _]: &[[*const $element; N]; 2],
                pixel: usize,
                channel: usize,
            ) -> S::V {
                // SAFETY: guaranteed by the caller.
                unsafe { S::$load(tile[pixel].add(channel)) }
            }
            #[inline(always)]
            unsafe fn store(to: *mut f32, v: S::V) {
                // SAFETY: guaranteed by the caller.
                unsafe { S::store(to, v) }
            }
            #[inline(always)]
            unsafe fn zero() -> S::V {
                // SAFETY: guaranteed by the caller.
                unsafe { S::zero() }
            }
            #[inline(always)]
            unsafe fn add(a: S::V, b: S::V) -> S::V {
                // SAFETY: guaranteed by the caller.
                unsafe { S::add(a, b) }
            }
            #[inline(always)]
            unsafe fn sub(a: S::V, b: S::V) -> S::V {
                // SAFETY: guaranteed by the caller.
                unsafe { S::sub(a, b) }
            }
            #[inline(always)]
            unsafe fn half(v: S::V) -> S::V {
                // SAFETY: guaranteed by the caller.
                unsafe { half::<S>(v) }
            }
            #[inline(always)]
            unsafe fn load_floats([from, _]: &[[f32; MAX_LANES]; 2]) -> S::V {
                // SAFETY: guaranteed by the caller.
                unsafe { S::load(from.as_ptr()) }
            }
        }
    };
}

floats!(Single, f32, load);
floats!(Widened, bf16, load_bf16);

/// bf16 channels of one tile, split into those at even and odd positions.
pub(super) struct OneTile<S>(PhantomData<S>);

/// bf16 channels of both tiles of a step.
pub(super) struct TwoTiles<S>(PhantomData<S>);

/// Implements the methods that both kinds of bf16 channels share.
macro_rules! pairs {
    ($name:ident, $count:expr, |$tiles:ident, $pixel:ident, $channel:ident| $load:expr) => {
        // SAFETY: the instructions are `S`'s.
        unsafe impl<S: Simd> Channels for $name<S> {
            type E = bf16;
            type T = bf16;
            type V = [S::V; 2];
            const COUNT: usize = $count;
            #[inline(always)]
            unsafe fn load<const N: usize>(
                $tiles: &[[*const bf16; N]; 2],
                $pixel: usize,
                $channel: usize,
            ) -> [S::V; 2] {
                // SAFETY: guaranteed by the caller.
                unsafe { $load }
            }
            #[inline(always)]
            unsafe fn store(to: *mut bf16, v: [S::V; 2]) {
                // SAFETY: guaranteed by the caller.
                unsafe { S::store(to.cast(), S::join_rounded(v)) }
            }
            #[inline(always)]
            unsafe fn zero() -> [S::V; 2] {
                // SAFETY: guaranteed by the caller.
                unsafe { [S::zero(); 2] }
            }
            #[inline(always)]
            unsafe fn add(a: [S::V; 2], b: [S::V; 2]) -> [S::V; 2] {
                // SAFETY: guaranteed by the caller.
                unsafe { [S::add(a[0], b[0]), S::add(a[1], b[1])] }
            }
            #[inline(always)]
            unsafe fn sub(a: [S::V; 2], b: [S::V; 2]) -> [S::V; 2] {
                // SAFETY: guaranteed by the caller.
                unsafe { [S::sub(a[0], b[0]), S::sub(a[1], b[1])] }
            }
            #[inline(always)]
            unsafe fn half(v: [S::V; 2]) -> [S::V; 2] {
                // SAFETY: guaranteed by the caller.
                unsafe { [half::<S>(v[0]), half::<S>(v[1])] }
            }
            #[inline(always)]
            unsafe fn load_floats(from: &[[f32; MAX_LANES]; 2]) -> [S::V; 2] {
                // SAFETY: guaranteed by the caller.
                unsafe { [S::load(from[0].as_ptr()), S::load(from[1].as_ptr())] }
            }
        }
    };
}

pairs!(OneTile, 2 * S::LANES, |tiles, pixel, channel| S::split(S::load(tiles[0][pixel].add(channel).cast())));
pairs!(TwoTiles, S::LANES, |tiles, pixel, channel| [
    S::load_bf16(tiles[0][pixel].add(channel)),
    S::load_bf16(tiles[1][pixel].add(channel)),
]);

/// Multiplies by one half.
///
/// # Safety
///
/// `S`'s instructions are available.
#[inline(always)]
pub(super) unsafe fn half<S: Simd>(v: S::V) -> S::V {
    // SAFETY: guaranteed by the caller.
    unsafe { S::fma(v, S::splat(&0.5), S::zero()) }
}
