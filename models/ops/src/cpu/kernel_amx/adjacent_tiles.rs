//! The kernel of convolutions: register tiles that are adjacent in an input tile of [`igemm_amx`](super::super::igemm_amx).

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use half::bf16;

use super::super::kernel::AmxTileArgs;
use super::{COLS, DEPTH, ROWS, Sums, finish_row, load_bias, prefetch_lines, store_sums};

/// Micro-kernel of [`AmxTileArgs`].
///
/// # Safety
///
/// As documented there, with AMX-BF16 and AVX512-BF16 available.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512bf16,avx2,fma")]
pub(super) unsafe fn adjacent_tiles(call: &AmxTileArgs<bf16>) {
    // SAFETY: the features are enabled; the caller guarantees the rest.
    unsafe {
        match call.blocks {
            1 => tiles::<1>(call),
            _ => tiles::<2>(call),
        }
    }
}

/// Computes all register tiles of a call, `BLOCKS` times 16 columns wide.
///
/// The rows of a tile are rounded and stored during the products of the next one. The columns do not fit into L1. They are
/// prefetched, because loads that miss L1 delay the products where two threads share a core: then products and loads overlap
/// little.
///
/// # Safety
///
/// As for [`adjacent_tiles`], with `BLOCKS` as in the call.
#[inline(always)]
unsafe fn tiles<const BLOCKS: usize>(call: &AmxTileArgs<bf16>) {
    let stride = BLOCKS * COLS * 2 * size_of::<bf16>();
    let row_stride = call.row_len * size_of::<bf16>();
    let steps = call.taps.len() * call.depth.div_ceil(DEPTH);
    let mut sums = [const { MaybeUninit::<Sums<BLOCKS>>::uninit() }; 2];
    let mut last: &[*mut bf16] = &[];
    // SAFETY: `AmxTileArgs` documents every address as valid. The blocks use AMX tile registers, which nothing else uses. A tile's
    // sums were stored before its rows.
    unsafe {
        let bias = load_bias(call.bias);
        for (tile, out) in call.out.chunks(2 * ROWS).enumerate() {
            let two = out.len() > ROWS;
            let tile_rows = call.rows.add(tile * 2 * ROWS * call.row_len);
            let [even, odd] = &mut sums;
            let (sums, last_sums) = if tile % 2 == 0 { (even, odd) } else { (odd, even) };
            let (mut stored, rows_per_step) = (0, last.len().div_ceil(steps.max(1)));
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, preserves_flags, nomem)
            );
            let mut columns = call.columns;
            for tap in call.taps {
                let rows = tile_rows.add(*tap);
                for k in (0..call.depth).step_by(DEPTH) {
                    let rows = rows.add(k);
                    let next = columns.add(DEPTH * BLOCKS * COLS);
                    load!("tmm6", columns, stride);
                    load!("tmm4", rows, row_stride);
                    multiply!("tmm0", "tmm4", "tmm6");
                    prefetch_lines(next);
                    if BLOCKS == 2 {
                        load!("tmm7", columns.add(COLS * 2), stride);
                        multiply!("tmm1", "tmm4", "tmm7");
                        prefetch_lines(next.wrapping_add(DEPTH * COLS));
                    }
                    if two {
                        load!("tmm5", rows.add(ROWS * call.row_len), row_stride);
                        multiply!("tmm2", "tmm5", "tmm6");
                        if BLOCKS == 2 {
                            multiply!("tmm3", "tmm5", "tmm7");
                        }
                    }
                    columns = next;
                    let until = last.len().min(stored + rows_per_step);
                    store_rows(call, &bias, last_sums, last, stored..until);
                    stored = until;
                }
            }
            store_rows(call, &bias, last_sums, last, stored..last.len());
            store_sums(sums, two);
            last = out;
        }
        let tiles = call.out.len().div_ceil(2 * ROWS);
        store_rows(call, &bias, &sums[(tiles + 1) % 2], last, 0..last.len());
    }
}

/// Stores the results of some rows of a register tile.
///
/// # Safety
///
/// As for [`tiles`]; the sums were stored.
#[inline(always)]
unsafe fn store_rows<const BLOCKS: usize>(
    call: &AmxTileArgs<bf16>,
    bias: &[__m512; BLOCKS],
    sums: &MaybeUninit<Sums<BLOCKS>>,
    out: &[*mut bf16],
    rows: Range<usize>,
) {
    for row in rows {
        if !out[row].is_null() {
            // SAFETY: guaranteed by the caller.
            unsafe { finish_row::<bf16, BLOCKS>(sums, row, bias, call.relu, out[row].add(call.column), call.cols) };
        }
    }
}
