//! The weight gradient's kernels: the transposition of `dy`, and a product that adds to sums in memory.

use std::arch::asm;
use std::arch::x86_64::*;

use half::bf16;

use super::super::kernel::AmxProductArgs;
use super::{COLS, DEPTH, ROWS, prefetch_lines};

/// Indices of [`transpose`] that exchange elements at `distance`, for the row before and the row after.
const fn exchange<const N: usize>(distance: usize) -> [[u16; N]; 2] {
    let mut indices = [[0; N]; 2];
    let mut at = 0;
    while at < N {
        let first = at & distance == 0;
        // An index from N reads the row after.
        indices[0][at] = if first { at } else { N + at - distance } as u16;
        indices[1][at] = if first { at + distance } else { N + at } as u16;
        at += 1;
    }
    indices
}

/// Transposes a square, see [`AmxKernels::transpose`](super::super::kernel::AmxKernels::transpose): elements are exchanged at
/// distances of 1, 2, 4, 8 and 16.
///
/// # Safety
///
/// As documented there, with AVX512-BW available.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn transpose(rows: &[*const bf16], offset: usize, available: usize, to: *mut bf16, stride: usize) {
    const WORDS: [[u16; 32]; 2] = exchange(1);
    /// Of pairs of elements, at half the distance.
    const PAIRS: [[[u16; 16]; 2]; 4] = [exchange(1), exchange(2), exchange(4), exchange(8)];
    let mask = if available == 0 { 0 } else { u32::MAX >> (DEPTH - available) };
    let rows: &[*const bf16; DEPTH] = rows.try_into().expect("a square");
    // Loops, because the compiler does not inline `array::map` of 32 vectors.
    let mut v = [_mm512_setzero_si512(); DEPTH];
    for (v, row) in v.iter_mut().zip(rows) {
        // SAFETY: guaranteed by the caller.
        *v = unsafe { _mm512_maskz_loadu_epi16(mask, row.wrapping_add(offset).cast()) };
    }
    // SAFETY: the tables have 64 bytes.
    let [before, after] = WORDS.map(|table| unsafe { _mm512_loadu_si512(table.as_ptr().cast()) });
    for pair in v.as_chunks_mut::<2>().0 {
        let [a, b] = *pair;
        *pair = [_mm512_permutex2var_epi16(a, before, b), _mm512_permutex2var_epi16(a, after, b)];
    }
    for (stage, tables) in PAIRS.iter().enumerate() {
        let distance = 2 << stage;
        // SAFETY: the tables have 16 numbers of 16 bits.
        let [before, after] =
            tables.map(|table| unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(table.as_ptr().cast())) });
        for row in (0..DEPTH).filter(|row| row & distance == 0) {
            let (a, b) = (v[row], v[row + distance]);
            v[row] = _mm512_permutex2var_epi32(a, before, b);
            v[row + distance] = _mm512_permutex2var_epi32(a, after, b);
        }
    }
    for (row, v) in v.into_iter().enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_storeu_si512(to.add(row * stride).cast(), v) };
    }
}

/// Micro-kernel of [`AmxProductArgs`].
///
/// # Safety
///
/// As documented there, with AMX-BF16 available.
pub(super) unsafe fn product(call: &AmxProductArgs<bf16>) {
    let columns_stride = call.blocks * COLS * 2 * size_of::<bf16>();
    let (rows_stride, sums_stride) = (DEPTH * size_of::<bf16>(), call.stride * size_of::<f32>());
    // SAFETY: `AmxProductArgs` documents every address as valid. The blocks use AMX tile registers, which nothing else uses.
    unsafe {
        let below = call.sums.add(ROWS * call.stride);
        let mut columns = call.columns;
        load!("tmm0", call.sums, sums_stride);
        load!("tmm2", below, sums_stride);
        if call.blocks == 2 {
            load!("tmm1", call.sums.add(COLS), sums_stride);
            load!("tmm3", below.add(COLS), sums_stride);
        }
        for k in (0..call.depth).step_by(DEPTH) {
            let rows = call.rows.add(k * 2 * ROWS);
            let next = columns.add(DEPTH * call.blocks * COLS);
            load!("tmm6", columns, columns_stride);
            load!("tmm4", rows, rows_stride);
            multiply!("tmm0", "tmm4", "tmm6");
            prefetch_lines(next);
            load!("tmm5", rows.add(ROWS * DEPTH), rows_stride);
            multiply!("tmm2", "tmm5", "tmm6");
            if call.blocks == 2 {
                load!("tmm7", columns.add(COLS * 2), columns_stride);
                multiply!("tmm1", "tmm4", "tmm7");
                prefetch_lines(next.wrapping_add(DEPTH * COLS));
                multiply!("tmm3", "tmm5", "tmm7");
            }
            columns = next;
        }
        store!("tmm0", call.sums, sums_stride);
        store!("tmm2", below, sums_stride);
        if call.blocks == 2 {
            store!("tmm1", call.sums.add(COLS), sums_stride);
            store!("tmm3", below.add(COLS), sums_stride);
        }
    }
}
