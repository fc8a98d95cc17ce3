//! The tensors of the kernels' tests, and the results to expect.

use comm::cuda::layout::WireType;
use comm::cuda::plan::DeviceCall;
use comm::cuda::protocol::Kernel;
use half::{bf16, f16};

/// Returns a value after it was sent.
fn travelled(wire: WireType, value: f32) -> f32 {
    match wire {
        WireType::F32 => value,
        WireType::F16 => f16::from_f32(value).to_f32(),
        WireType::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

/// Returns the expected output of a rank. `values` is by rank.
pub fn expected(call: &DeviceCall, rank: usize, values: &[Vec<f32>], scale: f32) -> Vec<f32> {
    let sent = |rank: usize, i: usize| travelled(call.wire, values[rank][i] * scale);
    let sum = |i: usize| {
        let total = (1..values.len()).fold(sent(0, i), |total, other| total + sent(other, i));
        travelled(call.wire, total)
    };
    let n = call.elements as usize;
    match call.kernel {
        Kernel::OneShot | Kernel::TwoShot => (0..n).map(sum).collect(),
        Kernel::ReduceScatter => (rank * n..(rank + 1) * n).map(sum).collect(),
        Kernel::AllGather => (0..values.len()).flat_map(|other| (0..n).map(move |i| sent(other, i))).collect(),
        Kernel::Broadcast => (0..n).map(|i| sent(call.root, i)).collect(),
        Kernel::Probe | Kernel::Order => Vec::new(),
    }
}

/// Returns a rank's elements. Their sums depend on the order, and differ after rounding.
pub fn values(rank: usize, count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ((rank as u64 + 1) << 32);
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let unit = (state >> 40) as f32 / (1 << 24) as f32 - 0.5;
        unit * [1.0, 8.0, 0.125, 64.0][(state >> 33) as usize % 4]
    };
    (0..count).map(next).collect()
}

/// Cuts an array into tensors of uneven lengths, one of them empty.
pub fn tensors(values: &[f32]) -> Vec<Vec<f32>> {
    let n = values.len();
    let cuts = [0, n / 7, n / 7, n / 3, n / 2 + (n / 2 < n) as usize, n];
    cuts.windows(2).map(|pair| values[pair[0]..pair[1].max(pair[0])].to_vec()).collect()
}
