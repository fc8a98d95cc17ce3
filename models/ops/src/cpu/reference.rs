//! Tests of all passes of a convolution, on every instruction set of this processor, against sums in f64.

use proptest::prelude::*;

use half::bf16;

use super::element::Element;
use super::kernel::Isa;
use super::shape::ConvShape;
use super::{bf16 as narrow, conv};
use crate::extension::ConvOptions;

/// Pseudo-random values in [-1, 1).
fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 40) as f32 / (1 << 23) as f32) - 1.0
        })
        .collect()
}

/// Calls `each(x index, w index, y index)` for every product of the convolution.
fn products(s: &ConvShape, mut each: impl FnMut(usize, usize, usize)) {
    let [depth, columns] = s.group_channels();
    for n in 0..s.batch {
        for oy in 0..s.output[0] {
            for ox in 0..s.output[1] {
                for tap in 0..s.taps() {
                    let iy = (oy * s.stride[0] + tap / s.kernel[1] * s.dilation[0]).wrapping_sub(s.padding[0]);
                    let ix = (ox * s.stride[1] + tap % s.kernel[1] * s.dilation[1]).wrapping_sub(s.padding[1]);
                    if iy >= s.input[0] || ix >= s.input[1] {
                        continue;
                    }
                    for co in 0..s.channels[1] {
                        for d in 0..depth {
                            let ci = co / columns * depth + d;
                            each(
                                ((n * s.input[0] + iy) * s.input[1] + ix) * s.channels[0] + ci,
                                (co * depth + d) * s.taps() + tap,
                                ((n * s.output[0] + oy) * s.output[1] + ox) * s.channels[1] + co,
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Checks every element against the reference, with errors relative to the reference's largest element. `E` rounds
/// results by half a unit in its last place; f32's sums and their rounding are within 4e-6.
fn close<E: Element>(name: &str, ours: &[E], reference: &[f64]) -> Result<(), TestCaseError> {
    let rounding = if E::DTYPE == burn::tensor::DType::BF16 { 2.0_f64.powi(-8) } else { 0.0 };
    let largest = reference.iter().fold(1.0_f64, |m, v| m.max(v.abs()));
    prop_assert_eq!(ours.len(), reference.len());
    for (i, (a, b)) in ours.iter().zip(reference).enumerate() {
        let (a, tolerance) = (f64::from(a.to_f32()), 4e-6 * largest + rounding * b.abs());
        prop_assert!((a - b).abs() <= tolerance, "{name}[{i}]: {a} is not {b} (largest {largest})");
    }
    Ok(())
}

/// Pseudo-random values that are exact in bf16.
fn narrow_values(len: usize, seed: u64) -> Vec<f32> {
    values(len, seed).into_iter().map(|value| bf16::from_f32(value).to_f32()).collect()
}

/// Checks all passes in f32, and in bf16 with inputs that are exact in bf16.
fn check(shape: &ConvShape, seed: u64) -> Result<(), TestCaseError> {
    let (x, w) = (narrow_values(shape.input_len(), seed), narrow_values(shape.weight_len(), seed + 1));
    let dy = narrow_values(shape.output_len(), seed + 2);
    let bias = values(shape.channels[1], seed + 3);
    let mut y64: Vec<f64> = (0..shape.output_len()).map(|i| f64::from(bias[i % bias.len()])).collect();
    let (mut dx64, mut dw64) = (vec![0.0; x.len()], vec![0.0; w.len()]);
    products(shape, |i, k, o| {
        y64[o] += f64::from(x[i]) * f64::from(w[k]);
        dx64[i] += f64::from(dy[o]) * f64::from(w[k]);
        dw64[k] += f64::from(dy[o]) * f64::from(x[i]);
    });
    let without_bias: Vec<f64> = y64.iter().enumerate().map(|(i, y)| y - f64::from(bias[i % bias.len()])).collect();
    let with_relu: Vec<f64> = y64.iter().map(|y| y.max(0.0)).collect();
    for isa in Isa::<f32>::supported() {
        close(isa.name, &conv::forward(isa, shape, &x, &w, None, false), &without_bias)?;
        close(isa.name, &conv::forward(isa, shape, &x, &w, Some(&bias), false), &y64)?;
        close(isa.name, &conv::forward(isa, shape, &x, &w, Some(&bias), true), &with_relu)?;
        close(isa.name, &conv::data_grad(isa, shape, &w, &dy), &dx64)?;
        close(isa.name, &conv::weight_grad(isa, shape, &x, &dy), &dw64)?;
    }
    let [x, dy] = [&x, &dy].map(|values| values.iter().map(|value| bf16::from_f32(*value)).collect::<Vec<_>>());
    for isa in Isa::<bf16>::supported() {
        close(isa.name, &narrow::conv::forward(isa, shape, &x, &w, None, false), &without_bias)?;
        close(isa.name, &narrow::conv::forward(isa, shape, &x, &w, Some(&bias), false), &y64)?;
        close(isa.name, &narrow::conv::forward(isa, shape, &x, &w, Some(&bias), true), &with_relu)?;
        close(isa.name, &narrow::conv::data_grad(isa, shape, &w, &dy), &dx64)?;
        close(isa.name, &narrow::conv::weight_grad(isa, shape, &x, &dy), &dw64)?;
    }
    Ok(())
}

prop_compose! {
    fn shapes()(
        batch in 1..4_usize,
        groups in prop_oneof![Just(1_usize), 1..5_usize],
        depth in prop_oneof![1..6_usize, 14..40_usize],
        columns in prop_oneof![1..6_usize, 14..40_usize],
        kernel in [1..5_usize, 1..5_usize],
        stride in [1..4_usize, 1..4_usize],
        padding in [0..4_usize, 0..4_usize],
        dilation in [1..3_usize, 1..3_usize],
        room in [0..9_usize, 0..9_usize],
        depthwise in any::<bool>(),
    ) -> ConvShape {
        let reach = [0, 1].map(|i| dilation[i] * (kernel[i] - 1) + 1);
        let input = [0, 1].map(|i| (reach[i] + room[i]).saturating_sub(2 * padding[i]).max(1));
        let channels = if depthwise { [depth, depth] } else { [depth * groups, columns * groups] };
        let groups = if depthwise { depth } else { groups };
        let options = ConvOptions { stride, padding, dilation, groups };
        let weight = [channels[1], channels[0] / groups, kernel[0], kernel[1]];
        ConvShape::new([batch, channels[0], input[0], input[1]], weight, &options)
    }
}

prop_compose! {
    /// Shapes of the Winograd path.
    fn winograd_shapes()(
        batch in 1..4_usize,
        channels in [prop_oneof![Just(16_usize), Just(32), Just(48)], prop_oneof![Just(16_usize), Just(32), Just(48)]],
        input in [2..12_usize, 2..12_usize],
        padding in 0..3_usize,
    ) -> ConvShape {
        let padding = if input[0].min(input[1]) < 3 { padding.max(1) } else { padding };
        let options = ConvOptions { stride: [1, 1], padding: [padding; 2], dilation: [1, 1], groups: 1 };
        ConvShape::new([batch, channels[0], input[0], input[1]], [channels[1], channels[0], 3, 3], &options)
    }
}

prop_compose! {
    /// Shapes with few channels per group, as whole vectors or not: those of narrow tiles and of the depthwise kernels.
    fn narrow_shapes()(
        batch in 1..20_usize,
        groups in 1..9_usize,
        channels in [prop_oneof![1..9_usize, Just(12), Just(16)], prop_oneof![1..9_usize, Just(12), Just(16)]],
        wide in 1..90_usize,
        side in prop_oneof![Just(1_usize), Just(3), Just(5)],
        stride in 1..3_usize,
        padding in 0..3_usize,
        room in [0..6_usize, 0..6_usize],
        depthwise in any::<bool>(),
    ) -> ConvShape {
        let input = room.map(|room| (side + room).saturating_sub(2 * padding).max(1));
        let (channels, groups) = if depthwise { ([wide; 2], wide) } else { (channels.map(|c| c * groups), groups) };
        let options = ConvOptions { stride: [stride; 2], padding: [padding; 2], dilation: [1, 1], groups };
        let weight = [channels[1], channels[0] / groups, side, side];
        ConvShape::new([batch, channels[0], input[0], input[1]], weight, &options)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn convolutions_equal_sums_in_f64(shape in shapes(), seed in any::<u32>()) {
        check(&shape, u64::from(seed))?;
    }

    #[test]
    fn narrow_convolutions_equal_sums_in_f64(shape in narrow_shapes(), seed in any::<u32>()) {
        check(&shape, u64::from(seed))?;
    }

    #[test]
    fn winograd_convolutions_equal_sums_in_f64(shape in winograd_shapes(), seed in any::<u32>()) {
        check(&shape, u64::from(seed))?;
    }
}
