//! The tile micro-kernel for AMX-BF16 of Intel's processors since Sapphire Rapids.
//!
//! An AMX tile register holds 16 rows of 64 bytes. One instruction multiplies 16x32 by 32x16 bf16 and adds the products to 16x16
//! sums in f32. A register tile here is 32 rows by 32 columns: four registers of sums, two of rows and two of columns. The
//! columns are read from packed panels as they are. Rows of a register must have constant distances in memory
//! ([`super::igemm_amx`]); rows of a [`TileArgs`], which have a pointer each, are first copied to a buffer.
//!
//! The sums differ from AVX512-BF16's by rounding, and denormal numbers count as zero. Stable Rust has no intrinsics for
//! these instructions, so they are inline assembly. The compiler never uses AMX tile registers by itself, so they keep their
//! values from one `asm!` block to the next.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::sync::LazyLock;

use half::bf16;

use super::convert::round;
use super::kernel::{AmxKernels, MicroKernels, TileArgs};
use super::kernel_x86::{AVX512_BF16, AVX512_BF16_16};
use super::vector::{Lanes, Simd};
use super::vector_x86::Avx512Bf16;

/// Rows of an AMX tile register.
const ROWS: usize = 16;
/// bf16 elements in a row of an AMX tile register.
const DEPTH: usize = 32;
/// Columns of an AMX tile register of sums.
const COLS: usize = 16;

/// Defines the micro-kernels for register tiles of `$blocks` times 16 columns. Only the tile kernels use AMX; all others are those
/// of `$vectors`.
macro_rules! amx {
    ($blocks:literal, $vectors:expr, $narrower:expr) => {{
        #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512bf16,avx2,fma")]
        unsafe fn tile_bf16(call: &TileArgs<bf16>) {
            // SAFETY: the features are enabled; the caller guarantees the rest.
            unsafe { tile::<bf16, $blocks>(call) }
        }
        #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512bf16,avx2,fma")]
        unsafe fn tile_f32(call: &TileArgs<bf16, f32>) {
            // SAFETY: as above.
            unsafe { tile::<f32, $blocks>(call) }
        }
        MicroKernels {
            name: "amx_bf16",
            rows: 2 * ROWS,
            cols: $blocks * COLS,
            depth: DEPTH,
            outer_rows: $vectors.outer_rows,
            narrower: $narrower,
            amx: Some(AMX_KERNELS),
            tile_f32,
            tile_bf16,
            outer: $vectors.outer,
            pack: $vectors.pack,
            winograd: $vectors.winograd,
            groups: $vectors.groups,
            two_groups: $vectors.two_groups,
        }
    }};
}

pub(super) static AMX_BF16: MicroKernels<bf16> = amx!(2, AVX512_BF16, &[&AMX_BF16_16]);
static AMX_BF16_16: MicroKernels<bf16> = amx!(1, AVX512_BF16_16, &[]);

const AMX_KERNELS: AmxKernels<bf16> =
    AmxKernels { vectors: &AVX512_BF16, round, transpose, begin, end, tiles: adjacent_tiles, product };

/// Returns true if the processor has AMX-BF16 and the kernel lets this process use it. Linux reserves the registers' memory per
/// process on request.
pub(super) fn permitted() -> bool {
    static PERMITTED: LazyLock<bool> = LazyLock::new(|| {
        // Bits of CPUID leaf 7: AMX-BF16 and AMX-TILE.
        const FEATURES: u32 = 1 << 22 | 1 << 24;
        __cpuid_count(7, 0).edx & FEATURES == FEATURES && request()
    });
    *PERMITTED
}

#[cfg(target_os = "linux")]
fn request() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call changes nothing but this permission.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn request() -> bool {
    false
}

/// Operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_of_row: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: Config = {
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], bytes_of_row: [0; 16], rows: [0; 16] };
    let mut register = 0;
    while register < 8 {
        config.bytes_of_row[register] = 64;
        config.rows[register] = ROWS as u8;
        register += 1;
    }
    config
};

/// Prepares this thread's AMX tile registers, and fills them with zeros.
fn begin() {
    // SAFETY: only sets that this process may use have this function.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack, preserves_flags, readonly)) };
}

/// Ends the use of AMX tile registers.
fn end() {
    // SAFETY: as in `begin`.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
}

/// Loads an AMX tile register: `$register` from rows at `$from`, `$stride` bytes apart.
macro_rules! load {
    ($register:literal, $from:expr, $stride:expr) => {
        asm!(concat!("tileloadd ", $register, ", [{from} + {stride}]"),
            from = in(reg) $from, stride = in(reg) $stride, options(nostack, preserves_flags, readonly))
    };
}

/// Adds products: `$sums += $rows · $columns`.
macro_rules! multiply {
    ($sums:literal, $rows:literal, $columns:literal) => {
        asm!(concat!("tdpbf16ps ", $sums, ", ", $rows, ", ", $columns), options(nostack, preserves_flags, nomem))
    };
}

/// Stores the sums of an AMX tile register to rows of `$stride` bytes.
macro_rules! store {
    ($register:literal, $to:expr, $stride:expr) => {
        asm!(concat!("tilestored [{to} + {stride}], ", $register),
            to = in(reg) $to, stride = in(reg) $stride, options(nostack, preserves_flags))
    };
}

// After the macros, which they use.
mod adjacent_tiles;
mod weight_grad;

use adjacent_tiles::adjacent_tiles;
use weight_grad::{product, transpose};

/// A copy of an AMX tile register's rows.
#[repr(C, align(64))]
struct Rows([[MaybeUninit<bf16>; DEPTH]; ROWS]);

impl Rows {
    /// Copies `len` elements from `offset` of each of [`ROWS`] pointers, and adds zeros.
    ///
    /// # Safety
    ///
    /// Each pointer of `rows` points to `offset + len` elements. AVX-512 F and BW are available.
    #[inline(always)]
    unsafe fn gather(&mut self, rows: *const *const bf16, offset: usize, len: usize) {
        let mask = u32::MAX >> (DEPTH - len);
        for (row, to) in self.0.iter_mut().enumerate() {
            // SAFETY: guaranteed by the caller; a copied row is 64 bytes with that alignment.
            unsafe {
                let from = (*rows.add(row)).add(offset);
                let values = if len == DEPTH {
                    _mm512_loadu_si512(from.cast())
                } else {
                    _mm512_maskz_loadu_epi16(mask, from.cast())
                };
                _mm512_store_si512(to.as_mut_ptr().cast(), values);
            }
        }
    }
}

/// Micro-kernel of [`TileArgs`].
///
/// # Safety
///
/// As for [`MicroKernels::tile`], with AMX-BF16 and AVX512-BF16 available, `MicroKernels::rows = 32` and
/// `MicroKernels::cols = BLOCKS · 16`.
#[inline(always)]
unsafe fn tile<O: Lanes, const BLOCKS: usize>(call: &TileArgs<bf16, O>) {
    let stride = BLOCKS * COLS * 2 * size_of::<bf16>();
    let mut copies = [const { Rows([[MaybeUninit::uninit(); DEPTH]; ROWS]) }; 2];
    let two = call.rows > ROWS;
    begin();
    // SAFETY: `TileArgs` documents every address as valid. The blocks use AMX tile registers, which nothing else uses.
    unsafe {
        let mut b = call.b;
        for tap in 0..call.taps {
            let rows = call.a.add(tap * 2 * ROWS);
            for k in (0..call.depth).step_by(DEPTH) {
                let (len, offset) = (DEPTH.min(call.depth - k), call.offset + k);
                load!("tmm6", b, stride);
                if BLOCKS == 2 {
                    load!("tmm7", b.add(COLS * 2), stride);
                }
                copies[0].gather(rows, offset, len);
                load!("tmm4", &raw const copies[0], DEPTH * size_of::<bf16>());
                multiply!("tmm0", "tmm4", "tmm6");
                if BLOCKS == 2 {
                    multiply!("tmm1", "tmm4", "tmm7");
                }
                if two {
                    copies[1].gather(rows.add(ROWS), offset, len);
                    load!("tmm5", &raw const copies[1], DEPTH * size_of::<bf16>());
                    multiply!("tmm2", "tmm5", "tmm6");
                    if BLOCKS == 2 {
                        multiply!("tmm3", "tmm5", "tmm7");
                    }
                }
                b = b.add(DEPTH * BLOCKS * COLS);
            }
        }
        let mut sums = MaybeUninit::<Sums<BLOCKS>>::uninit();
        store_sums(&mut sums, two);
        let bias = load_bias(call.bias);
        for row in 0..call.rows {
            let out = (*call.out.add(row)).add(call.column);
            finish_row::<O, BLOCKS>(&sums, row, &bias, call.relu, out, call.cols);
        }
    }
    end();
}

/// Prefetches the columns of an AMX tile register to L1. The address may be invalid.
#[inline(always)]
fn prefetch_lines(from: *const bf16) {
    for line in 0..ROWS {
        // SAFETY: a prefetch is a hint and accesses no memory.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line * DEPTH).cast()) };
    }
}

/// A register tile's sums.
#[repr(C, align(64))]
struct Sums<const BLOCKS: usize>([[[f32; COLS]; BLOCKS]; 2 * ROWS]);

/// Stores the registers of sums; of the first half of the rows, or of both.
///
/// # Safety
///
/// The registers hold sums.
#[inline(always)]
unsafe fn store_sums<const BLOCKS: usize>(to: &mut MaybeUninit<Sums<BLOCKS>>, two: bool) {
    let to = to.as_mut_ptr().cast::<[f32; COLS]>();
    let stride = BLOCKS * COLS * size_of::<f32>();
    // SAFETY: the target has all rows.
    unsafe {
        store!("tmm0", to, stride);
        if BLOCKS == 2 {
            store!("tmm1", to.add(1), stride);
        }
        if two {
            let below = to.add(ROWS * BLOCKS);
            store!("tmm2", below, stride);
            if BLOCKS == 2 {
                store!("tmm3", below.add(1), stride);
            }
        }
    }
}

/// Loads a panel's bias, or zeros where the pointer is null.
///
/// # Safety
///
/// AVX-512 is available, and the pointer is null or has `BLOCKS · 16` floats.
#[inline(always)]
unsafe fn load_bias<const BLOCKS: usize>(bias: *const f32) -> [__m512; BLOCKS] {
    // SAFETY: guaranteed by the caller.
    std::array::from_fn(|j| unsafe {
        if bias.is_null() { Avx512Bf16::zero() } else { Avx512Bf16::load(bias.add(j * COLS)) }
    })
}

/// Adds the bias to a row of sums, applies ReLU, and stores `cols` columns.
///
/// # Safety
///
/// AVX512-BF16 is available, the row was stored, and `out` has `cols` elements.
#[inline(always)]
unsafe fn finish_row<O: Lanes, const BLOCKS: usize>(
    sums: &MaybeUninit<Sums<BLOCKS>>,
    row: usize,
    bias: &[__m512; BLOCKS],
    relu: bool,
    out: *mut O,
    cols: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let from = sums.as_ptr().cast::<f32>().add(row * BLOCKS * COLS);
        let values: [_; BLOCKS] = std::array::from_fn(|j| {
            let sum = Avx512Bf16::add(Avx512Bf16::load(from.add(j * COLS)), bias[j]);
            if relu { Avx512Bf16::relu(sum) } else { sum }
        });
        if cols == BLOCKS * COLS {
            for (j, values) in values.into_iter().enumerate() {
                O::store::<Avx512Bf16>(out.add(j * COLS), values);
            }
        } else {
            let mut edge = [O::zeroed(); 2 * COLS];
            for (j, values) in values.into_iter().enumerate() {
                O::store::<Avx512Bf16>(edge.as_mut_ptr().add(j * COLS), values);
            }
            std::ptr::copy_nonoverlapping(edge.as_ptr(), out, cols);
        }
    }
}
