//! The two micro-kernels of matrix products, for each instruction set.
//!
//! Both keep a tile of the result in registers and add outer products to it. They differ in the side that is contiguous
//! along the summed index:
//!
//! - [`Tile`]: `out[row][col] = Σ_tap Σ_k a[tap][row][k] · b[tap][k][col]`. `a` has one pointer per tap and row (an
//!   indirection buffer as in XNNPACK), so a convolution needs no im2col copy: padding points to zeros.
//! - [`Outer`]: `out[row][col] += Σ_k a[k][row] · b[k][col]`, the weight gradient, where the summed index is the pixel.
//!   `a` has one pointer per pixel.
//!
//! `b` is packed into panels of [`Isa::cols`] columns, padded with zeros. The order of summation is fixed, so results
//! do not depend on the number of threads. They differ between instruction sets by rounding, because fused
//! multiply-adds round once.

#[cfg(target_arch = "x86_64")]
use super::kernel_x86;
use super::level::{self, CpuIsa};
use super::winograd_tile::{Transforms, grad_tile, input_tile, output_tile};

/// Arguments of the tile micro-kernel.
pub(crate) struct Tile {
    /// `[taps][Isa::rows]` pointers.
    pub(crate) a: *const *const f32,
    /// Offset in floats from each pointer in `a` to the `depth` floats that are read.
    pub(crate) offset: usize,
    pub(crate) taps: usize,
    pub(crate) depth: usize,
    /// Packed panel `[taps · depth][Isa::cols]`.
    pub(crate) b: *const f32,
    /// One pointer per row, to column 0 of the output row.
    pub(crate) out: *const *mut f32,
    /// The panel's first column in an output row.
    pub(crate) column: usize,
    /// Number of rows and columns to store.
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Null, or `Isa::cols` floats to add.
    pub(crate) bias: *const f32,
    pub(crate) relu: bool,
}

/// Arguments of the outer-product micro-kernel.
pub(crate) struct Outer {
    /// `depth` pointers, one per pixel.
    pub(crate) a: *const *const f32,
    /// Offset in floats from each pointer in `a`.
    pub(crate) offset: usize,
    pub(crate) depth: usize,
    /// Packed panel `[depth][Isa::cols]`.
    pub(crate) b: *const f32,
    /// Rows of `Isa::cols` floats, `stride` floats apart, to which the products are added.
    pub(crate) out: *mut f32,
    pub(crate) stride: usize,
    /// At most [`Isa::outer_rows`].
    pub(crate) rows: usize,
}

/// An instruction set: the shapes of its register tiles, and its micro-kernels.
#[derive(Debug)]
pub(crate) struct Isa {
    #[cfg_attr(not(test), expect(dead_code, reason = "names the instruction set in a failing test"))]
    pub(crate) name: &'static str,
    /// Rows of a [`Tile`].
    pub(crate) rows: usize,
    /// Columns of a packed panel.
    pub(crate) cols: usize,
    /// Maximum number of rows of an [`Outer`].
    pub(crate) outer_rows: usize,
    /// Variants with fewer columns and the same number of rows, for the remaining columns of a matrix; widest first.
    pub(super) narrower: &'static [&'static Isa],
    pub(super) tile: unsafe fn(&Tile),
    pub(super) outer: unsafe fn(&Outer),
    pub(super) winograd: Transforms,
}

impl Isa {
    /// Computes a tile.
    ///
    /// # Safety
    ///
    /// All pointers of the call are valid as documented in [`Tile`].
    #[inline]
    pub(crate) unsafe fn tile(&self, call: &Tile) {
        // SAFETY: `of` gets only instruction sets of this processor; the caller guarantees the pointers.
        unsafe { (self.tile)(call) }
    }

    /// Adds outer products.
    ///
    /// # Safety
    ///
    /// All pointers of the call are valid as documented in [`Outer`].
    #[inline]
    pub(crate) unsafe fn outer(&self, call: &Outer) {
        // SAFETY: as in `tile`.
        unsafe { (self.outer)(call) }
    }

    /// Returns the micro-kernels of the selected instruction set.
    pub(crate) fn best() -> &'static Isa {
        Isa::of(level::selected())
    }

    fn of(level: CpuIsa) -> &'static Isa {
        match level {
            #[cfg(target_arch = "x86_64")]
            CpuIsa::Avx512Bf16 | CpuIsa::Avx512 => &kernel_x86::AVX512,
            #[cfg(target_arch = "x86_64")]
            CpuIsa::Avx2 => &kernel_x86::AVX2,
            _ => &PORTABLE,
        }
    }

    /// Returns the micro-kernels of all instruction sets up to the selected one.
    #[cfg(test)]
    pub(crate) fn supported() -> Vec<&'static Isa> {
        let sets = [CpuIsa::Portable, CpuIsa::Avx2, CpuIsa::Avx512];
        sets.into_iter().filter(|level| *level <= level::selected()).map(Isa::of).collect()
    }
}

/// Prefetches a cache line. The address may be invalid.
#[inline(always)]
pub(super) fn prefetch(address: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint and accesses no memory; the instruction is part of the architecture's baseline.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Vector operations of the micro-kernels.
///
/// # Safety
///
/// The methods may use instructions of the type's instruction set, and read or write `LANES` floats.
pub(super) unsafe trait Simd {
    const LANES: usize;
    type V: Copy;
    unsafe fn zero() -> Self::V;
    unsafe fn splat(from: *const f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    /// `a · b + c`
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// NaN stays NaN.
    unsafe fn relu(a: Self::V) -> Self::V;
}

/// Micro-kernel of [`Tile`].
///
/// # Safety
///
/// As for [`Isa::tile`], with `S`'s instructions available, `ROWS = Isa::rows` and `VECS · LANES = Isa::cols`.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "with iterators the compiler keeps the tile in memory")]
pub(super) unsafe fn tile<S: Simd, const ROWS: usize, const VECS: usize>(call: &Tile) {
    // SAFETY: `Tile` documents every address as valid.
    unsafe {
        let mut acc = [[S::zero(); VECS]; ROWS];
        let mut b = call.b;
        for tap in 0..call.taps {
            let mut a = [std::ptr::null::<f32>(); ROWS];
            for (row, pointer) in a.iter_mut().enumerate() {
                *pointer = (*call.a.add(tap * ROWS + row)).add(call.offset);
            }
            for k in 0..call.depth {
                let mut vb = [S::zero(); VECS];
                for (j, v) in vb.iter_mut().enumerate() {
                    *v = S::load(b.add(j * S::LANES));
                }
                for row in 0..ROWS {
                    let va = S::splat(a[row].add(k));
                    for j in 0..VECS {
                        acc[row][j] = S::fma(va, vb[j], acc[row][j]);
                    }
                }
                b = b.add(VECS * S::LANES);
            }
        }
        for row in 0..ROWS {
            if row < call.rows {
                let mut values = acc[row];
                if !call.bias.is_null() {
                    for j in 0..VECS {
                        values[j] = S::add(values[j], S::load(call.bias.add(j * S::LANES)));
                    }
                }
                if call.relu {
                    for j in 0..VECS {
                        values[j] = S::relu(values[j]);
                    }
                }
                let out = (*call.out.add(row)).add(call.column);
                if call.cols == VECS * S::LANES {
                    for j in 0..VECS {
                        S::store(out.add(j * S::LANES), values[j]);
                    }
                } else {
                    let mut edge = [0.0_f32; 64];
                    for j in 0..VECS {
                        S::store(edge.as_mut_ptr().add(j * S::LANES), values[j]);
                    }
                    std::ptr::copy_nonoverlapping(edge.as_ptr(), out, call.cols);
                }
            }
        }
    }
}

/// Micro-kernel of [`Outer`] for a fixed number of rows.
///
/// # Safety
///
/// As for [`Isa::outer`], with `S`'s instructions available and `call.rows = ROWS`.
#[inline(always)]
unsafe fn outer<S: Simd, const ROWS: usize, const VECS: usize>(call: &Outer) {
    // SAFETY: `Outer` documents every address as valid.
    unsafe {
        let mut acc = [[S::zero(); VECS]; ROWS];
        let mut b = call.b;
        for k in 0..call.depth {
            let a = (*call.a.add(k)).add(call.offset);
            let mut vb = [S::zero(); VECS];
            for (j, v) in vb.iter_mut().enumerate() {
                *v = S::load(b.add(j * S::LANES));
            }
            for (row, acc) in acc.iter_mut().enumerate() {
                let va = S::splat(a.add(row));
                for j in 0..VECS {
                    acc[j] = S::fma(va, vb[j], acc[j]);
                }
            }
            b = b.add(VECS * S::LANES);
        }
        for (row, acc) in acc.iter().enumerate() {
            for (j, v) in acc.iter().enumerate() {
                let out = call.out.add(row * call.stride + j * S::LANES);
                S::store(out, S::add(S::load(out), *v));
            }
        }
    }
}

/// Micro-kernel of [`Outer`] for any number of rows.
///
/// # Safety
///
/// As for [`Isa::outer`], with `S`'s instructions available.
#[inline(always)]
pub(super) unsafe fn outer_any<S: Simd, const VECS: usize>(call: &Outer) {
    // SAFETY: guaranteed by the caller, and `ROWS` equals `call.rows`.
    unsafe {
        match call.rows {
            8 => outer::<S, 8, VECS>(call),
            7 => outer::<S, 7, VECS>(call),
            6 => outer::<S, 6, VECS>(call),
            5 => outer::<S, 5, VECS>(call),
            4 => outer::<S, 4, VECS>(call),
            3 => outer::<S, 3, VECS>(call),
            2 => outer::<S, 2, VECS>(call),
            _ => outer::<S, 1, VECS>(call),
        }
    }
}

/// Eight floats in plain Rust, which the compiler vectorises.
struct Portable;

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
        [unsafe { *from }; 8]
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

static PORTABLE: Isa = Isa {
    name: "portable",
    rows: 4,
    cols: 8,
    outer_rows: 4,
    narrower: &[],
    // SAFETY of both: plain Rust.
    tile: tile::<Portable, 4, 1>,
    outer: outer_any::<Portable, 1>,
    winograd: Transforms {
        input: input_tile::<Portable>,
        output: output_tile::<Portable>,
        grad: grad_tile::<Portable>,
    },
};
