//! The cores' peak rate: multiply-adds that stay in registers.

use std::hint::black_box;
use std::time::Instant;

use pulp::{Arch, Simd, WithSimd};

/// Independent chains of multiply-adds per thread. Two FMA units with a latency of four cycles need at least eight.
const CHAINS: usize = 12;
/// Iterations of a sample, about a millisecond, so that some samples are not interrupted by other work.
const ROUNDS: usize = 500_000;
const SAMPLES: usize = 40;

struct Chains;

impl WithSimd for Chains {
    /// Number of floating-point operations, and a value that depends on all of them.
    type Output = (f64, f32);

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> (f64, f32) {
        // The sums converge, so no value becomes denormal or infinite.
        let (factor, term) = (simd.splat_f32s(black_box(0.5)), simd.splat_f32s(black_box(1.0)));
        let mut chains = [simd.splat_f32s(black_box(0.25)); CHAINS];
        for _ in 0..ROUNDS {
            for chain in &mut chains {
                *chain = simd.mul_add_f32s(*chain, factor, term);
            }
        }
        let last = chains.into_iter().map(|chain| simd.reduce_sum_f32s(chain)).sum();
        ((2 * ROUNDS * CHAINS * S::F32_LANES) as f64, last)
    }
}

/// Returns the FLOP/s of all threads with the widest vector registers: the sum of each thread's best sample while all run.
pub fn flop_rate() -> f64 {
    let rates = rayon::broadcast(|_| {
        let sample = |_| {
            let start = Instant::now();
            let (flop, last) = Arch::new().dispatch(Chains);
            black_box(last);
            flop / start.elapsed().as_secs_f64()
        };
        (0..SAMPLES).map(sample).fold(0.0, f64::max)
    });
    rates.into_iter().sum()
}

/// Returns the peak rate of bf16 divided by that of f32. It is 2 with AVX512-BF16, which adds two products per lane. `None` if the
/// kernels compute bf16 in f32.
pub fn bf16_factor() -> Option<f64> {
    ops::CpuIsa::selected().is_ok_and(|isa| isa >= ops::CpuIsa::Avx512Bf16).then_some(2.0)
}
