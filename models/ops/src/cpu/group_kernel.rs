//! The micro-kernels of grouped convolutions whose groups are at most a vector wide.
//!
//! The tile of [`super::micro_kernel`] reads each row through a pointer. For a tile one vector wide, it would load an address for
//! every product. Here the pixels of a group are adjacent in memory ([`super::group_conv`] copies them), so an address is a
//! register plus a constant.
//!
//! Groups of half a vector's channels are computed two at a time, if a processor can broadcast the same channel of both to
//! alternating lanes. Their channels alternate in source pixels, weights and sums.

use super::kernel::Operand;
use super::micro_kernel::Products;
use super::vector::{Lanes, Simd};

/// Arguments of the tile micro-kernel: `out[row][col][..] = Σ_tap Σ_k x[tap][row][col][k] · w[tap][k][..]`.
///
/// Source pixels have `LANES` elements each. With several groups in a vector, they are one group here: their elements alternate in
/// units of `STEP`.
pub(crate) struct GroupTileArgs<E> {
    /// The pixel that the tile's first pixel reads at offset 0.
    pub(crate) x: *const E,
    /// Elements between the source pixels of adjacent rows of the tile. Those of adjacent columns are adjacent.
    pub(crate) x_row: usize,
    /// Offset in elements of each tap.
    pub(crate) offsets: *const usize,
    pub(crate) taps: usize,
    /// Steps per tap: channels of a group over [`Operand::STEP`], rounded up.
    pub(crate) steps: usize,
    /// Weights `[taps][steps][LANES][STEP]`.
    pub(crate) w: *const E,
    /// The first channel of the tile's first pixel.
    pub(crate) out: *mut E,
    /// Elements between the results of adjacent rows and columns.
    pub(crate) out_stride: [usize; 2],
    /// Rows and columns to store.
    pub(crate) size: [usize; 2],
    /// Channels to store.
    pub(crate) channels: usize,
    /// Null, or `LANES` floats to add.
    pub(crate) bias: *const f32,
    pub(crate) relu: bool,
}

/// Arguments of the outer-product micro-kernel: `sums[row][..] += Σ_line Σ_step x[line][step][row] · dy[line][step][..]`.
pub(crate) struct GroupOuterArgs<E> {
    /// `[line][step][rows][groups][STEP]`, overlapping.
    pub(crate) x: *const E,
    /// Elements between lines, and between steps.
    pub(crate) x_stride: [usize; 2],
    /// `[line][step][LANES][STEP]`.
    pub(crate) dy: *const E,
    pub(crate) lines: usize,
    pub(crate) steps: usize,
    /// `[rows][LANES]`.
    pub(crate) sums: *mut f32,
    /// A multiple of a group's lanes.
    pub(crate) rows: usize,
}

/// A tile micro-kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupTileKernel<E> {
    /// Rows and columns of pixels.
    pub(crate) size: [usize; 2],
    pub(super) run: unsafe fn(&GroupTileArgs<E>),
}

/// The micro-kernels of an instruction set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupKernels<E> {
    /// Lanes of a vector.
    pub(crate) lanes: usize,
    /// Number of groups that share a vector. A group has at most `lanes / groups` channels.
    pub(crate) groups: usize,
    /// Tiles for wide, narrow and very narrow images.
    pub(crate) tiles: [GroupTileKernel<E>; 3],
    pub(super) outer: unsafe fn(&GroupOuterArgs<E>),
    pub(super) pack: unsafe fn(&[*const E], usize, usize, usize, *mut E),
    pub(super) copy: unsafe fn(*const E, usize, usize, *mut E),
}

impl<E> GroupTileKernel<E> {
    /// Computes a tile.
    ///
    /// # Safety
    ///
    /// The processor has the kernel's instructions. For every pixel of the kernel's `size`, `x` plus each offset is inside the
    /// source. `w` is as documented. `out` is valid for the pixels and channels to store.
    #[inline]
    pub(crate) unsafe fn run(&self, call: &GroupTileArgs<E>) {
        // SAFETY: guaranteed by the caller.
        unsafe { (self.run)(call) }
    }
}

impl<E> GroupKernels<E> {
    /// Adds outer products.
    ///
    /// # Safety
    ///
    /// The processor has the kernel's instructions, and all addresses of [`GroupOuterArgs`] are valid.
    #[inline]
    pub(crate) unsafe fn outer(&self, call: &GroupOuterArgs<E>) {
        // SAFETY: guaranteed by the caller.
        unsafe { (self.outer)(call) }
    }

    /// Packs the channels of a vector's groups, from `offset` on, as [`MicroKernels::pack`](super::kernel::MicroKernels::pack).
    ///
    /// # Safety
    ///
    /// The processor has the kernel's instructions. Each row points to `offset + available` elements.
    pub(crate) unsafe fn pack(&self, rows: &[*const E], offset: usize, available: usize, to: &mut [E]) {
        assert!(to.len() >= rows.len() * self.lanes);
        // SAFETY: guaranteed by the caller; the target is long enough.
        unsafe { (self.pack)(rows, offset, available, self.lanes, to.as_mut_ptr()) }
    }

    /// Copies pixels of a vector's groups that are `stride` elements apart, and alternates their elements. The length of `to`
    /// determines the number of pixels.
    ///
    /// # Safety
    ///
    /// The processor has the kernel's instructions. The source has all pixels.
    pub(crate) unsafe fn copy(&self, from: *const E, stride: usize, to: &mut [E]) {
        // SAFETY: guaranteed by the caller; the target has as many pixels.
        unsafe { (self.copy)(from, stride, to.len() / self.lanes, to.as_mut_ptr()) }
    }
}

/// Micro-kernel of [`GroupTileArgs`].
///
/// # Safety
///
/// As for [`GroupTileKernel::run`], with `ROWS` and `COLS` as its size.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "with iterators the compiler keeps the tile in memory")]
pub(super) unsafe fn group_tile<P: Products, const ROWS: usize, const COLS: usize>(call: &GroupTileArgs<P::E>) {
    // SAFETY: `GroupTileArgs` documents every address as valid.
    unsafe {
        let (lanes, step) = (P::S::LANES, P::E::STEP);
        let mut acc = [[P::S::zero(); COLS]; ROWS];
        let mut w = call.w;
        for tap in 0..call.taps {
            let mut from = call.x.add(*call.offsets.add(tap));
            for _ in 0..call.steps {
                let vw = P::load(w);
                for row in 0..ROWS {
                    let from = from.add(row * call.x_row);
                    for col in 0..COLS {
                        acc[row][col] = P::multiply_add(P::splat(from.add(col * lanes)), vw, acc[row][col]);
                    }
                }
                from = from.add(step * P::GROUPS);
                w = w.add(lanes * step);
            }
        }
        for row in 0..ROWS {
            for col in 0..COLS {
                if row < call.size[0] && col < call.size[1] {
                    let mut value = P::by_group(acc[row][col]);
                    if !call.bias.is_null() {
                        value = P::S::add(value, P::S::load(call.bias));
                    }
                    if call.relu {
                        value = P::S::relu(value);
                    }
                    let out = call.out.add(row * call.out_stride[0] + col * call.out_stride[1]);
                    if call.channels == lanes {
                        P::E::store::<P::S>(out, value);
                    } else {
                        let mut edge = [<P::E as bytemuck::Zeroable>::zeroed(); 16];
                        P::E::store::<P::S>(edge.as_mut_ptr(), value);
                        std::ptr::copy_nonoverlapping(edge.as_ptr(), out, call.channels);
                    }
                }
            }
        }
    }
}

/// Copies pixels as [`GroupKernels::copy`].
///
/// # Safety
///
/// As for [`GroupKernels::copy`], and the target has `count` pixels.
#[inline(always)]
pub(super) unsafe fn group_copy<P: Products>(from: *const P::E, stride: usize, count: usize, to: *mut P::E) {
    for pixel in 0..count {
        // SAFETY: guaranteed by the caller.
        unsafe { P::copy(from.add(pixel * stride), to.add(pixel * P::S::LANES)) };
    }
}

/// Micro-kernel of [`GroupOuterArgs`]: `MANY` rows at once, then `FEW`, which divides a group's lanes.
///
/// # Safety
///
/// As for [`GroupKernels::outer`].
#[inline(always)]
pub(super) unsafe fn group_outer<P: Products, const MANY: usize, const FEW: usize>(call: &GroupOuterArgs<P::E>) {
    let mut first = 0;
    while first + MANY <= call.rows {
        // SAFETY: guaranteed by the caller.
        unsafe { outer_rows::<P, MANY>(call, first) };
        first += MANY;
    }
    while first < call.rows {
        // SAFETY: guaranteed by the caller. `FEW` divides the remaining rows, since it divides a group's lanes and `MANY`.
        unsafe { outer_rows::<P, FEW>(call, first) };
        first += FEW;
    }
}

/// # Safety
///
/// As for [`group_outer`], with `ROWS` rows from `first`.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "with iterators the compiler keeps the sums in memory")]
unsafe fn outer_rows<P: Products, const ROWS: usize>(call: &GroupOuterArgs<P::E>, first: usize) {
    // SAFETY: `GroupOuterArgs` documents every address as valid.
    unsafe {
        let (lanes, step) = (P::S::LANES, P::E::STEP);
        let of_groups = step * P::GROUPS;
        let mut acc = [P::S::zero(); ROWS];
        let mut dy = call.dy;
        for line in 0..call.lines {
            let mut x = call.x.add(line * call.x_stride[0] + first * of_groups);
            for _ in 0..call.steps {
                let vdy = P::load(dy);
                for row in 0..ROWS {
                    acc[row] = P::multiply_add(P::splat(x.add(row * of_groups)), vdy, acc[row]);
                }
                x = x.wrapping_add(call.x_stride[1]);
                dy = dy.wrapping_add(lanes * step);
            }
        }
        for row in 0..ROWS {
            let sums = call.sums.add((first + row) * lanes);
            P::S::store(sums, P::S::add(P::S::load(sums), acc[row]));
        }
    }
}
