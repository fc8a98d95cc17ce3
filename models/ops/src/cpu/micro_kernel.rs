//! The loops of the two micro-kernels, for any element type and instruction set.

use std::marker::PhantomData;

use half::bf16;

use super::kernel::{Operand, OuterArgs, TileArgs, prefetch};
use super::vector::{Lanes, Simd};

/// The sum of a step's products in each lane, for one element type and instruction set. A step is [`Operand::STEP`]
/// adjacent elements.
///
/// # Safety
///
/// As for [`Simd`].
pub(super) unsafe trait Products {
    type E: Operand;
    /// The instructions for sums.
    type S: Simd;
    /// One step's elements of every lane.
    type Steps: Copy;
    /// Number of groups of a grouped convolution whose lanes alternate in a vector.
    const GROUPS: usize = 1;
    /// Broadcasts a step of each group to the lanes of the group.
    unsafe fn splat(from: *const Self::E) -> Self::Steps;
    /// Loads a step per lane.
    unsafe fn load(from: *const Self::E) -> Self::Steps;
    /// Packs `LANES` columns of a step's rows.
    unsafe fn pack(rows: &[*const Self::E], to: *mut Self::E);
    /// `a · b + c`
    unsafe fn multiply_add(a: Self::Steps, b: Self::Steps, c: <Self::S as Simd>::V) -> <Self::S as Simd>::V;
    /// Copies `LANES` channels of a pixel, and alternates those of the groups.
    #[inline(always)]
    unsafe fn copy(from: *const Self::E, to: *mut Self::E) {
        // SAFETY: guaranteed by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from, to, Self::S::LANES) }
    }
    /// Orders sums by group.
    #[inline(always)]
    unsafe fn by_group(sums: <Self::S as Simd>::V) -> <Self::S as Simd>::V {
        sums
    }
}

/// [`Products`] of a depth that is not a multiple of a step.
///
/// # Safety
///
/// As for [`Products`].
pub(super) unsafe trait PartialStep: Products {
    /// Broadcasts one element, followed by zeros.
    unsafe fn splat_one(from: *const Self::E) -> Self::Steps;
}

/// Steps of one f32.
pub(super) struct Single<S>(PhantomData<S>);

// SAFETY: the instructions are `S`'s.
unsafe impl<S: Simd> Products for Single<S> {
    type E = f32;
    type S = S;
    type Steps = S::V;
    #[inline(always)]
    unsafe fn splat(from: *const f32) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe { S::splat(from) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load(from) }
    }
    #[inline(always)]
    unsafe fn pack(rows: &[*const f32], to: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe { S::store(to, S::load(rows[0])) }
    }
    #[inline(always)]
    unsafe fn multiply_add(a: S::V, b: S::V, c: S::V) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe { S::fma(a, b, c) }
    }
}

// SAFETY: the instructions are `S`'s.
unsafe impl<S: Simd> PartialStep for Single<S> {
    #[inline(always)]
    unsafe fn splat_one(from: *const f32) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe { S::splat(from) }
    }
}

/// Steps of two bf16, for instruction sets without such products: both are widened to f32.
pub(super) struct Pairs<S>(PhantomData<S>);

// SAFETY: the instructions are `S`'s.
unsafe impl<S: Simd> Products for Pairs<S> {
    type E = bf16;
    type S = S;
    type Steps = [S::V; 2];
    #[inline(always)]
    unsafe fn splat(from: *const bf16) -> [S::V; 2] {
        // SAFETY: guaranteed by the caller. A pair has the size of a float.
        unsafe { S::split(S::splat(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load(from: *const bf16) -> [S::V; 2] {
        // SAFETY: as in `splat`.
        unsafe { S::split(S::load(from.cast())) }
    }
    #[inline(always)]
    unsafe fn pack(rows: &[*const bf16], to: *mut bf16) {
        // SAFETY: guaranteed by the caller.
        unsafe { pack_pairs::<S>(rows, to) }
    }
    #[inline(always)]
    unsafe fn multiply_add(a: [S::V; 2], b: [S::V; 2], c: S::V) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe { S::fma(a[1], b[1], S::fma(a[0], b[0], c)) }
    }
}

// SAFETY: the instructions are `S`'s.
unsafe impl<S: Simd> PartialStep for Pairs<S> {
    #[inline(always)]
    unsafe fn splat_one(from: *const bf16) -> [S::V; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { [S::splat(&(*from).to_f32()), S::zero()] }
    }
}

/// Interleaves the columns of two rows.
///
/// # Safety
///
/// As for [`Products::pack`].
#[inline(always)]
pub(super) unsafe fn pack_pairs<S: Simd>(rows: &[*const bf16], to: *mut bf16) {
    // SAFETY: guaranteed by the caller. A pair has the size of a float.
    unsafe { S::store(to.cast(), S::join([S::load_bf16(rows[0]), S::load_bf16(rows[1])])) }
}

/// Adds one step's outer product of `ROWS` rows and `VECS` vectors of columns.
///
/// # Safety
///
/// `splat` is valid for each row, and `b` points to the columns' steps.
#[inline(always)]
unsafe fn add_step<P: Products, const ROWS: usize, const VECS: usize>(
    acc: &mut [[<P::S as Simd>::V; VECS]; ROWS],
    splat: impl Fn(usize) -> P::Steps,
    b: *const P::E,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let vb: [P::Steps; VECS] = std::array::from_fn(|j| P::load(b.add(j * P::S::LANES * P::E::STEP)));
        for (row, acc) in acc.iter_mut().enumerate() {
            let va = splat(row);
            for (acc, vb) in acc.iter_mut().zip(vb) {
                *acc = P::multiply_add(va, vb, *acc);
            }
        }
    }
}

/// Micro-kernel of [`TileArgs`].
///
/// # Safety
///
/// As for [`MicroKernels::tile`](super::kernel::MicroKernels::tile), with `P`'s instructions available, `ROWS = MicroKernels::rows`
/// and `VECS · LANES = MicroKernels::cols`.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "with iterators the compiler keeps the tile in memory")]
pub(super) unsafe fn tile<P: PartialStep, O: Lanes, const ROWS: usize, const VECS: usize>(call: &TileArgs<P::E, O>) {
    // SAFETY: `TileArgs` documents every address as valid.
    unsafe {
        let lanes = P::S::LANES;
        let mut acc = [[P::S::zero(); VECS]; ROWS];
        let mut b = call.b;
        for tap in 0..call.taps {
            let mut a = [std::ptr::null::<P::E>(); ROWS];
            for (row, pointer) in a.iter_mut().enumerate() {
                *pointer = (*call.a.add(tap * ROWS + row)).add(call.offset);
            }
            let steps = call.depth / P::E::STEP;
            for k in 0..steps {
                add_step::<P, ROWS, VECS>(&mut acc, |row| P::splat(a[row].add(k * P::E::STEP)), b);
                b = b.add(VECS * lanes * P::E::STEP);
            }
            if !call.depth.is_multiple_of(P::E::STEP) {
                add_step::<P, ROWS, VECS>(&mut acc, |row| P::splat_one(a[row].add(steps * P::E::STEP)), b);
                b = b.add(VECS * lanes * P::E::STEP);
            }
        }
        // The compiler unrolls this loop, and not the next one, which is longer. If the next one read `acc`, the compiler would
        // keep the tile in memory and store each sum after each product.
        let mut sums = std::mem::MaybeUninit::<[[<P::S as Simd>::V; VECS]; ROWS]>::uninit();
        let sums = sums.as_mut_ptr().cast::<f32>();
        for row in 0..ROWS {
            for j in 0..VECS {
                P::S::store(sums.add((row * VECS + j) * lanes), acc[row][j]);
            }
        }
        for row in 0..ROWS {
            if row < call.rows {
                let mut values: [_; VECS] = std::array::from_fn(|j| P::S::load(sums.add((row * VECS + j) * lanes)));
                if !call.bias.is_null() {
                    for j in 0..VECS {
                        values[j] = P::S::add(values[j], P::S::load(call.bias.add(j * lanes)));
                    }
                }
                if call.relu {
                    for j in 0..VECS {
                        values[j] = P::S::relu(values[j]);
                    }
                }
                let out = (*call.out.add(row)).add(call.column);
                if call.cols == VECS * lanes {
                    for j in 0..VECS {
                        O::store::<P::S>(out.add(j * lanes), values[j]);
                    }
                } else {
                    let mut edge = [O::zeroed(); 64];
                    for j in 0..VECS {
                        O::store::<P::S>(edge.as_mut_ptr().add(j * lanes), values[j]);
                    }
                    std::ptr::copy_nonoverlapping(edge.as_ptr(), out, call.cols);
                }
            }
        }
    }
}

/// Micro-kernel of [`OuterArgs`] for a fixed number of rows.
///
/// # Safety
///
/// As for [`MicroKernels::outer`](super::kernel::MicroKernels::outer), with `P`'s instructions available and `call.rows = ROWS`.
#[inline(always)]
unsafe fn outer<P: Products, const ROWS: usize, const VECS: usize>(call: &OuterArgs<P::E>) {
    // SAFETY: `OuterArgs` documents every address as valid.
    unsafe {
        // The sums of large layers do not stay in cache.
        for row in 0..ROWS {
            for j in 0..VECS {
                prefetch(call.out.add(row * call.stride + j * P::S::LANES));
            }
        }
        let mut acc = [[P::S::zero(); VECS]; ROWS];
        let mut b = call.b;
        for k in 0..call.depth {
            let a = (*call.a.add(k)).add(call.offset * P::E::STEP);
            add_step::<P, ROWS, VECS>(&mut acc, |row| P::splat(a.add(row * P::E::STEP)), b);
            b = b.add(VECS * P::S::LANES * P::E::STEP);
        }
        for (row, acc) in acc.iter().enumerate() {
            for (j, v) in acc.iter().enumerate() {
                let out = call.out.add(row * call.stride + j * P::S::LANES);
                P::S::store(out, P::S::add(P::S::load(out), *v));
            }
        }
    }
}

/// Micro-kernel of [`OuterArgs`] for any number of rows.
///
/// # Safety
///
/// As for [`MicroKernels::outer`](super::kernel::MicroKernels::outer), with `P`'s instructions available.
#[inline(always)]
pub(super) unsafe fn outer_any<P: Products, const VECS: usize>(call: &OuterArgs<P::E>) {
    // SAFETY: guaranteed by the caller, and `ROWS` equals `call.rows`.
    unsafe {
        match call.rows {
            8 => outer::<P, 8, VECS>(call),
            7 => outer::<P, 7, VECS>(call),
            6 => outer::<P, 6, VECS>(call),
            5 => outer::<P, 5, VECS>(call),
            4 => outer::<P, 4, VECS>(call),
            3 => outer::<P, 3, VECS>(call),
            2 => outer::<P, 2, VECS>(call),
            _ => outer::<P, 1, VECS>(call),
        }
    }
}

/// Packs rows as [`MicroKernels::pack`](super::kernel::MicroKernels::pack).
///
/// # Safety
///
/// As for [`MicroKernels::pack`](super::kernel::MicroKernels::pack), with `P`'s instructions available.
#[inline(always)]
pub(super) unsafe fn pack_rows<P: Products>(
    rows: &[*const P::E],
    offset: usize,
    available: usize,
    stride: usize,
    to: *mut P::E,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match stride / P::S::LANES {
            1 if stride <= available => pack_vectors::<P, 1>(rows, offset, to),
            2 if stride <= available => pack_vectors::<P, 2>(rows, offset, to),
            _ => {
                for (step, rows) in rows.chunks_exact(P::E::STEP).enumerate() {
                    let to = std::slice::from_raw_parts_mut(to.add(step * stride * P::E::STEP), stride * P::E::STEP);
                    to.fill(bytemuck::Zeroable::zeroed());
                    for (i, row) in rows.iter().enumerate() {
                        let row = std::slice::from_raw_parts(row.add(offset), available.min(stride));
                        for (column, from) in row.iter().enumerate() {
                            to[lane::<P>(column) * P::E::STEP + i] = *from;
                        }
                    }
                }
            }
        }
    }
}

/// Returns the lane of a column, counted over all vectors.
#[inline(always)]
fn lane<P: Products>(column: usize) -> usize {
    let (of_group, in_vector) = (P::S::LANES / P::GROUPS, column % P::S::LANES);
    column - in_vector + in_vector % of_group * P::GROUPS + in_vector / of_group
}

/// Packs rows of `VECS` vectors.
///
/// # Safety
///
/// As for [`pack_rows`].
#[inline(always)]
unsafe fn pack_vectors<P: Products, const VECS: usize>(rows: &[*const P::E], offset: usize, to: *mut P::E) {
    let (lanes, step) = (P::S::LANES, P::E::STEP);
    for (index, rows) in rows.chunks_exact(step).enumerate() {
        for j in 0..VECS {
            let rows: [*const P::E; 2] = std::array::from_fn(|i| rows[i % step].wrapping_add(offset + j * lanes));
            // SAFETY: guaranteed by the caller.
            unsafe { P::pack(&rows, to.add((index * VECS + j) * lanes * step)) };
        }
    }
}
