//! The two micro-kernels of matrix products, for each element type and instruction set.
//!
//! Both keep a tile of the result in registers and add outer products to it. They differ in the side that is contiguous
//! along the summed index:
//!
//! - Tile ([`TileArgs`]): `out[row][col] = Σ_tap Σ_k a[tap][row][k] · b[tap][k][col]`. `a` has one pointer per tap and row (an
//!   indirection buffer as in XNNPACK), so a convolution needs no im2col copy: padding points to zeros.
//! - Outer product ([`OuterArgs`]): `out[row][col] += Σ_k a[k][row] · b[k][col]`, the weight gradient, where the summed index is
//!   the pixel. `a` has one pointer per pixel.
//!
//! Sums are f32. Operands are f32 or bf16. AVX512-BF16 adds two products of bf16 per lane, so bf16 operands are stored in
//! *steps*: pairs that are adjacent along the summed index. Without these instructions, pairs are widened to f32.
//!
//! `b` is packed into panels of [`MicroKernels::cols`] columns, padded with zeros. The order of summation is fixed, so results
//! do not depend on the number of threads. They differ between instruction sets by rounding, because fused
//! multiply-adds round once.

use half::bf16;

use super::allocator::Buffer;
use super::convert::WidenTo;
use super::cpu_isa::{self, CpuIsa};
use super::group_kernel::{GroupKernels, GroupTileKernel, group_copy, group_outer, group_tile};
use super::micro_kernel::{Pairs, Single, outer_any, pack_rows, tile};
use super::vector::{Lanes, Portable};
use super::winograd_channels::Widened;
use super::winograd_tile::{
    Transforms, Winograd, filter_grads, filters, grad_steps, input_steps, input_tile, output_tile,
};
#[cfg(target_arch = "x86_64")]
use super::{kernel_amx, kernel_x86};

/// Arguments of the tile micro-kernel, for operands `E` and results `O`.
pub(crate) struct TileArgs<E, O = E> {
    /// `[taps][MicroKernels::rows]` pointers.
    pub(crate) a: *const *const E,
    /// Offset in elements from each pointer in `a` to the `depth` elements that are read.
    pub(crate) offset: usize,
    pub(crate) taps: usize,
    pub(crate) depth: usize,
    /// Packed panel `[taps][depth / STEP][MicroKernels::cols][STEP]`. The depth is rounded up to [`MicroKernels::depth`], and the
    /// rest is zero.
    pub(crate) b: *const E,
    /// One pointer per row, to column 0 of the output row.
    pub(crate) out: *const *mut O,
    /// The panel's first column in an output row.
    pub(crate) column: usize,
    /// Number of rows and columns to store.
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Null, or `MicroKernels::cols` floats to add.
    pub(crate) bias: *const f32,
    pub(crate) relu: bool,
}

/// Arguments of the outer-product micro-kernel.
pub(crate) struct OuterArgs<E> {
    /// `depth` pointers, one per step of pixels, to `[row][STEP]`.
    pub(crate) a: *const *const E,
    /// Offset in rows from each pointer in `a`.
    pub(crate) offset: usize,
    /// Number of steps.
    pub(crate) depth: usize,
    /// Packed panel `[depth][MicroKernels::cols][STEP]`.
    pub(crate) b: *const E,
    /// Rows of `MicroKernels::cols` floats, `stride` floats apart, to which the products are added.
    pub(crate) out: *mut f32,
    pub(crate) stride: usize,
    /// At most [`MicroKernels::outer_rows`].
    pub(crate) rows: usize,
}

/// Arguments of the product with AMX tile registers: `sums[row][col] += Σ_k rows[row][k] · columns[k][col]`.
pub(crate) struct AmxProductArgs<E> {
    /// `[depth / MicroKernels::depth][MicroKernels::rows][MicroKernels::depth]`.
    pub(crate) rows: *const E,
    /// Packed panel `[depth / STEP][16 · blocks][STEP]`.
    pub(crate) columns: *const E,
    /// A multiple of [`MicroKernels::depth`].
    pub(crate) depth: usize,
    /// [`MicroKernels::rows`] rows of `16 · blocks` floats, `stride` floats apart.
    pub(crate) sums: *mut f32,
    pub(crate) stride: usize,
    /// 1 or 2.
    pub(crate) blocks: usize,
}

/// Arguments of the kernel with AMX tile registers for adjacent register tiles:
/// `out[row][col] = Σ_tap Σ_k rows[row][tap + k] · columns[tap][k][col]`.
pub(crate) struct AmxTileArgs<'a, E> {
    /// As many rows as `out` has, rounded up to whole register tiles, `row_len` elements apart.
    pub(crate) rows: *const E,
    pub(crate) row_len: usize,
    /// Offset in elements of each tap.
    pub(crate) taps: &'a [usize],
    /// Elements of a tap, a multiple of [`MicroKernels::depth`].
    pub(crate) depth: usize,
    /// Packed panel `[taps][depth / STEP][16 · blocks][STEP]`.
    pub(crate) columns: *const E,
    /// 1 or 2.
    pub(crate) blocks: usize,
    /// One pointer per row, to column 0 of the output row; null where a row is not stored.
    pub(crate) out: &'a [*mut E],
    /// The panel's first column in an output row, and the number of columns to store.
    pub(crate) column: usize,
    pub(crate) cols: usize,
    /// Null, or `16 · blocks` floats to add.
    pub(crate) bias: *const f32,
    pub(crate) relu: bool,
}

/// The kernels that only instruction sets with AMX have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AmxKernels<E: 'static> {
    /// The set for products that do not fill AMX tile registers.
    pub(super) vectors: &'static MicroKernels<E>,
    /// Rounds to the element type.
    pub(super) round: fn(&[f32]) -> Buffer<E>,
    /// Transposes a square of [`MicroKernels::depth`] rows and columns. Arguments: one pointer per row, the offset in elements from
    /// each pointer, the number of elements that can be read there (the rest is zero), the target, and the target's row stride.
    pub(super) transpose: unsafe fn(&[*const E], usize, usize, *mut E, usize),
    /// Prepares this thread's AMX tile registers for `tiles` and `product`.
    pub(super) begin: fn(),
    /// Releases this thread's AMX tile registers: the system would save registers in use at every context switch.
    pub(super) end: fn(),
    pub(super) tiles: unsafe fn(&AmxTileArgs<E>),
    pub(super) product: unsafe fn(&AmxProductArgs<E>),
}

/// Elements from which a row of bf16 is converted to f32 once, where products are computed in f32. Shorter rows are converted in
/// each register tile, which takes less time than the copy.
const CONVERT_FROM: usize = 16;
/// Channels of a source below which the whole source is converted to f32 instead: the copy is small, and the windows of a kernel
/// overlap.
const WHOLE_SOURCE_BELOW: usize = 16;

/// An element type of matrix products.
pub(crate) trait Operand: Lanes + WidenTo<f32> {
    /// Number of products that one instruction adds to a sum.
    const STEP: usize;

    /// Returns the micro-kernel that stores this type.
    fn tile_of<E: Operand>(isa: &MicroKernels<E>) -> unsafe fn(&TileArgs<E, Self>);

    /// Returns the micro-kernels of an instruction set.
    fn for_isa(isa: CpuIsa) -> &'static MicroKernels<Self>;
}

/// The micro-kernels of one instruction set for operands `E`, and the shapes of its register tiles. Variables of this type are
/// called `isa`.
#[derive(Debug)]
pub(crate) struct MicroKernels<E: 'static = f32> {
    #[cfg_attr(not(test), expect(dead_code, reason = "names the instruction set in a failing test"))]
    pub(crate) name: &'static str,
    /// Rows of a register tile ([`TileArgs`]).
    pub(crate) rows: usize,
    /// Columns of a packed panel.
    pub(crate) cols: usize,
    /// Elements of a tap in packed weights are a multiple of this number.
    pub(crate) depth: usize,
    /// Maximum number of rows of an outer product ([`OuterArgs`]).
    pub(crate) outer_rows: usize,
    /// Variants with fewer columns and the same number of rows, for the remaining columns of a matrix; widest first.
    pub(super) narrower: &'static [&'static MicroKernels<E>],
    /// Only for instruction sets with AMX. Products then take less time than the transforms of Winograd's algorithm.
    pub(super) amx: Option<AmxKernels<E>>,
    /// The tile micro-kernels ([`TileArgs`]), by the type that they store.
    pub(super) tile_f32: unsafe fn(&TileArgs<E, f32>),
    pub(super) tile_bf16: unsafe fn(&TileArgs<E, bf16>),
    pub(super) outer: unsafe fn(&OuterArgs<E>),
    pub(super) pack: unsafe fn(&[*const E], usize, usize, usize, *mut E),
    pub(super) winograd: Winograd<E>,
    pub(super) groups: GroupKernels<E>,
    /// For two groups of [`Self::cols`] channels at a time, where vectors have room for them.
    pub(super) two_groups: Option<GroupKernels<E>>,
}

impl<E: Operand> MicroKernels<E> {
    /// Returns the micro-kernels of the selected instruction set.
    pub(crate) fn best() -> &'static MicroKernels<E> {
        E::for_isa(cpu_isa::selected())
    }

    /// Returns the micro-kernels of all instruction sets that this processor has.
    #[cfg(test)]
    pub(crate) fn supported() -> Vec<&'static MicroKernels<E>> {
        CpuIsa::ALL.into_iter().filter(|isa| *isa <= CpuIsa::detected()).map(E::for_isa).collect()
    }

    /// Returns the f32 micro-kernels with the same number of columns, if products of `E` are computed in f32.
    pub(crate) fn widened(&self) -> Option<&'static MicroKernels> {
        match self.winograd {
            Winograd::Same(_) => None,
            Winograd::Widened(_, isa) => Some(isa),
        }
    }

    /// Returns [`Self::widened`] if the whole source of a convolution of `taps` taps is converted before the products, since its
    /// pixels are short and in the windows of many results.
    pub(crate) fn widened_source(&self, channels: usize, taps: usize) -> Option<&'static MicroKernels> {
        self.widened().filter(|_| taps > 1 && channels < WHOLE_SOURCE_BELOW)
    }

    /// Returns [`Self::widened`] if rows of `depth` elements are long enough to be converted before the products.
    pub(crate) fn widened_for(&self, depth: usize) -> Option<&'static MicroKernels> {
        self.widened().filter(|_| depth >= CONVERT_FROM)
    }

    /// Computes a tile, rounded to `O`.
    ///
    /// # Safety
    ///
    /// All pointers of the call are valid as documented in [`TileArgs`].
    #[inline]
    pub(crate) unsafe fn tile<O: Operand>(&self, call: &TileArgs<E, O>) {
        // SAFETY: `for_isa` gets only instruction sets of this processor; the caller guarantees the pointers.
        unsafe { O::tile_of(self)(call) }
    }

    /// Adds outer products.
    ///
    /// # Safety
    ///
    /// All pointers of the call are valid as documented in [`OuterArgs`].
    #[inline]
    pub(crate) unsafe fn outer(&self, call: &OuterArgs<E>) {
        // SAFETY: as in `tile`.
        unsafe { (self.outer)(call) }
    }

    /// Packs `stride` elements of each row for [`OuterArgs`]: `[rows / STEP][stride][STEP]`. Elements from `available` are zero.
    /// Fast where at least `stride` are available, and `stride` is [`Self::cols`].
    ///
    /// # Safety
    ///
    /// Each row points to `offset + available` elements.
    pub(crate) unsafe fn pack(&self, rows: &[*const E], offset: usize, available: usize, stride: usize, to: &mut [E]) {
        assert!(rows.len().is_multiple_of(E::STEP) && to.len() >= rows.len() * stride);
        // SAFETY: as in `tile`; the target is long enough.
        unsafe { (self.pack)(rows, offset, available, stride, to.as_mut_ptr()) };
    }
}

impl Operand for f32 {
    const STEP: usize = 1;

    fn tile_of<E: Operand>(isa: &MicroKernels<E>) -> unsafe fn(&TileArgs<E, f32>) {
        isa.tile_f32
    }

    fn for_isa(isa: CpuIsa) -> &'static MicroKernels {
        match isa {
            #[cfg(target_arch = "x86_64")]
            CpuIsa::AmxBf16 | CpuIsa::Avx512Bf16 | CpuIsa::Avx512 => &kernel_x86::AVX512,
            #[cfg(target_arch = "x86_64")]
            CpuIsa::Avx2 => &kernel_x86::AVX2,
            _ => &PORTABLE,
        }
    }
}

impl Operand for bf16 {
    const STEP: usize = 2;

    fn tile_of<E: Operand>(isa: &MicroKernels<E>) -> unsafe fn(&TileArgs<E, bf16>) {
        isa.tile_bf16
    }

    fn for_isa(isa: CpuIsa) -> &'static MicroKernels<bf16> {
        match isa {
            #[cfg(target_arch = "x86_64")]
            CpuIsa::AmxBf16 => &kernel_amx::AMX_BF16,
            #[cfg(target_arch = "x86_64")]
            CpuIsa::Avx512Bf16 => &kernel_x86::AVX512_BF16,
            #[cfg(target_arch = "x86_64")]
            CpuIsa::Avx512 => &kernel_x86::AVX512_PAIRS,
            #[cfg(target_arch = "x86_64")]
            CpuIsa::Avx2 => &kernel_x86::AVX2_PAIRS,
            _ => &PORTABLE_PAIRS,
        }
    }
}

/// Prefetches a cache line. The address may be invalid.
#[inline(always)]
pub(super) fn prefetch<E>(address: *const E) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint and accesses no memory; the instruction is part of the architecture's baseline.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// The portable set for products `$products` of `$element`, and the channels of Winograd's transforms. Plain Rust is safe on
/// every processor.
macro_rules! portable {
    ($element:ty, $products:ty, $winograd:ident, $channels:ty $(, $wide:expr)?) => {
        MicroKernels {
            name: "portable",
            rows: 4,
            cols: 8,
            depth: <$element as Operand>::STEP,
            outer_rows: 4,
            narrower: &[],
            amx: None,
            tile_f32: tile::<$products, f32, 4, 1>,
            tile_bf16: tile::<$products, bf16, 4, 1>,
            outer: outer_any::<$products, 1>,
            pack: pack_rows::<$products>,
            winograd: Winograd::$winograd(
                Transforms {
                    input: input_tile::<$channels>,
                    output: output_tile::<Portable, $element>,
                    input_steps: input_steps::<$channels>,
                    grad_steps: grad_steps::<$channels>,
                    lanes: 8,
                    filters: filters::<Portable, $channels>,
                    filter_grads: filter_grads::<Portable>,
                }
                $(, $wide)?
            ),
            groups: GroupKernels {
                lanes: 8,
                groups: 1,
                tiles: [
                    GroupTileKernel { size: [1, 4], run: group_tile::<$products, 1, 4> },
                    GroupTileKernel { size: [2, 2], run: group_tile::<$products, 2, 2> },
                    GroupTileKernel { size: [4, 1], run: group_tile::<$products, 4, 1> },
                ],
                outer: group_outer::<$products, 4, 4>,
                pack: pack_rows::<$products>,
                copy: group_copy::<$products>,
            },
            two_groups: None,
        }
    };
}

static PORTABLE: MicroKernels = portable!(f32, Single<Portable>, Same, Single<Portable>);
static PORTABLE_PAIRS: MicroKernels<bf16> = portable!(bf16, Pairs<Portable>, Widened, Widened<Portable>, &PORTABLE);
