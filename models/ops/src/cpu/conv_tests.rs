//! Tests of all passes of a convolution, on every instruction set of this processor, against sums in f64.

use proptest::prelude::*;

use half::bf16;

use super::element::Element;
use super::kernel::{MicroKernels, Operand};
use super::winograd_tile::Winograd;
use super::{conv, weight_grad, winograd, winograd_grad};
use crate::extension::ConvOptions;
use crate::shape::ConvShape;

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

/// Error that bf16's Winograd convolutions add, relative to the largest element: transformed tiles and filters are rounded
/// once more. [`winograd_in_bf16_has_the_documented_accuracy`] measures it.
const WINOGRAD_BF16: f64 = 0.03;

/// Checks every element against the reference, with `error` relative to the reference's largest element. `E` rounds
/// results by half a unit in its last place; f32's sums and their rounding are within 4e-6.
fn close<E: Element>(name: &str, ours: &[E], reference: &[f64], error: f64) -> Result<(), TestCaseError> {
    let rounding = if E::DTYPE == burn::tensor::DType::BF16 { 2.0_f64.powi(-8) } else { 0.0 };
    let largest = reference.iter().fold(1.0_f64, |m, v| m.max(v.abs()));
    prop_assert_eq!(ours.len(), reference.len());
    for (i, (a, b)) in ours.iter().zip(reference).enumerate() {
        let (a, tolerance) = (f64::from(a.to_f32()), (4e-6 + error) * largest + rounding * b.abs());
        prop_assert!((a - b).abs() <= tolerance, "{name}[{i}]: {a} is not {b} (largest {largest})");
    }
    Ok(())
}

/// Rounds values to bf16.
fn rounded(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|value| bf16::from_f32(*value)).collect()
}

/// Pseudo-random values that are exact in bf16.
fn narrow_values(len: usize, seed: u64) -> Vec<f32> {
    rounded(&values(len, seed)).into_iter().map(bf16::to_f32).collect()
}

/// Operands of a convolution and its results in f64.
struct Sums {
    w: Vec<f32>,
    bias: Vec<f32>,
    y: Vec<f64>,
    dx: Vec<f64>,
    dw: Vec<f64>,
}

impl Sums {
    fn new(shape: &ConvShape, x: &[f32], w: Vec<f32>, dy: &[f32], bias: Vec<f32>) -> Self {
        let (mut y, mut dx, mut dw) = (vec![0.0; dy.len()], vec![0.0; x.len()], vec![0.0; w.len()]);
        products(shape, |i, k, o| {
            y[o] += f64::from(x[i]) * f64::from(w[k]);
            dx[i] += f64::from(dy[o]) * f64::from(w[k]);
            dw[k] += f64::from(dy[o]) * f64::from(x[i]);
        });
        Self { w, bias, y, dx, dw }
    }

    /// Checks all passes on all instruction sets.
    fn check<E: Operand>(&self, shape: &ConvShape, x: &[E], dy: &[E], error: f64) -> Result<(), TestCaseError> {
        let (w, bias) = (&self.w, &self.bias);
        let biased: Vec<f64> = self.y.iter().enumerate().map(|(i, y)| y + f64::from(bias[i % bias.len()])).collect();
        let with_relu: Vec<f64> = biased.iter().map(|y| y.max(0.0)).collect();
        for isa in MicroKernels::<E>::supported() {
            close(isa.name, &conv::forward(isa, shape, x, w, None, false), &self.y, error)?;
            close(isa.name, &conv::forward(isa, shape, x, w, Some(bias), false), &biased, error)?;
            close(isa.name, &conv::forward(isa, shape, x, w, Some(bias), true), &with_relu, error)?;
            close(isa.name, &conv::data_grad(isa, shape, w, dy), &self.dx, error)?;
            close(isa.name, &conv::weight_grad(isa, shape, x, dy), &self.dw, error)?;
        }
        Ok(())
    }
}

/// Checks that all passes have the same bits when they are repeated, in buffers with other contents.
fn check_repeat<E: Operand>(shape: &ConvShape, x: &[E], w: &[f32], dy: &[E]) -> Result<(), TestCaseError> {
    let bits = || {
        let isa = MicroKernels::best();
        let (y, dx) = (conv::forward(isa, shape, x, w, None, false), conv::data_grad(isa, shape, w, dy));
        let dw = conv::weight_grad(isa, shape, x, dy);
        [bytemuck::cast_slice(&y), bytemuck::cast_slice(&dx), bytemuck::cast_slice(&dw)].map(<[u8]>::to_vec)
    };
    prop_assert!(bits() == bits());
    Ok(())
}

/// Checks all passes in f32, and in bf16 with inputs that are exact in bf16.
fn check(shape: &ConvShape, seed: u64) -> Result<(), TestCaseError> {
    let (x, w) = (narrow_values(shape.input_len(), seed), narrow_values(shape.weight_len(), seed + 1));
    let dy = narrow_values(shape.output_len(), seed + 2);
    let sums = Sums::new(shape, &x, w, &dy, values(shape.channels[1], seed + 3));
    sums.check(shape, &x, &dy, 0.0)?;
    check_repeat(shape, &x, &sums.w, &dy)?;
    check_repeat(shape, &rounded(&x), &sums.w, &rounded(&dy))?;
    let rounds_tiles =
        |isa: &MicroKernels<bf16>| matches!(isa.winograd, Winograd::Same(_)) && winograd::fits(isa, shape);
    let error = if MicroKernels::supported().into_iter().any(rounds_tiles) { WINOGRAD_BF16 } else { 0.0 };
    sums.check(shape, &rounded(&x), &rounded(&dy), error)
}

prop_compose! {
    fn shapes()(
        batch in 1..4_usize,
        groups in prop_oneof![Just(1_usize), 1..5_usize],
        depth in prop_oneof![1..6_usize, Just(8), 14..40_usize],
        columns in prop_oneof![1..6_usize, Just(8), 14..40_usize],
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
        let options = ConvOptions { stride, padding, dilation, groups, norm_follows: false };
        let weight = [channels[1], channels[0] / groups, kernel[0], kernel[1]];
        ConvShape::new([batch, channels[0], input[0], input[1]], weight, &options)
    }
}

prop_compose! {
    /// Shapes of the Winograd path.
    fn winograd_shapes()(
        batch in 1..4_usize,
        channels in [prop_oneof![Just(32_usize), Just(48), Just(64)], prop_oneof![Just(16_usize), Just(32), Just(64)]],
        input in [2..12_usize, 2..12_usize],
        padding in 0..3_usize,
    ) -> ConvShape {
        let padding = if input[0].min(input[1]) < 3 { padding.max(1) } else { padding };
        let options = ConvOptions { stride: [1, 1], padding: [padding; 2], dilation: [1, 1], groups: 1, norm_follows: false };
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
        let options = ConvOptions { stride: [stride; 2], padding: [padding; 2], dilation: [1, 1], groups, norm_follows: false };
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

/// Makes the shape of a 3x3 convolution with padding.
fn square(batch: usize, channels: [usize; 2], side: usize) -> ConvShape {
    let options = ConvOptions { stride: [1, 1], padding: [1, 1], dilation: [1, 1], groups: 1, norm_follows: false };
    ConvShape::new([batch, channels[0], side, side], [channels[1], channels[0], 3, 3], &options)
}

/// Images with more rows than fit into a plane are computed in bands. No pass of narrow groups depends on the number of threads.
#[test]
fn bands_of_narrow_groups_equal_sums_in_f64() {
    for (groups, stride, side) in [(3, 1, [41, 37]), (5, 2, [70, 33]), (2, 1, [30, 9])] {
        let options =
            ConvOptions { stride: [stride; 2], padding: [1, 1], dilation: [1, 1], groups, norm_follows: false };
        let shape = ConvShape::new([2, 8 * groups, side[0], side[1]], [8 * groups, 8, 3, 3], &options);
        check(&shape, 1).unwrap();
        let (x, w) = (narrow_values(shape.input_len(), 1), values(shape.weight_len(), 2));
        let dy = narrow_values(shape.output_len(), 3);
        for isa in MicroKernels::<f32>::supported() {
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    let (y, dx) =
                        (conv::forward(isa, &shape, &x, &w, None, false), conv::data_grad(isa, &shape, &w, &dy));
                    [y, dx, conv::weight_grad(isa, &shape, &x, &dy)].map(|values| values.to_vec())
                })
            };
            assert_eq!(run(1), run(3));
        }
    }
}

/// With many channels, the bf16 kernels add all blocks to one set of sums. The shape has several blocks, and the last block ends
/// with half a step. Other instruction sets have sums per thread.
#[test]
fn shared_sums_of_the_weight_gradient_do_not_depend_on_threads() {
    let shape = square(67, [544, 32], 5);
    let (x, dy) = (narrow_values(shape.input_len(), 1), narrow_values(shape.output_len(), 2));
    let sums = Sums::new(&shape, &x, values(shape.weight_len(), 3), &dy, values(32, 4));
    let (x, dy) = (rounded(&x), rounded(&dy));
    for isa in MicroKernels::<bf16>::supported() {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| winograd_grad::weight_grad(isa, &shape, &x, &dy))
        };
        let grad = run(1);
        let shared = matches!(isa.winograd, Winograd::Same(_));
        close(isa.name, &grad, &sums.dw, if shared { WINOGRAD_BF16 } else { 0.0 }).unwrap();
        assert_eq!(*grad, *run(1));
        if shared {
            assert_eq!(*grad, *run(3));
        }
    }
}

/// The root mean square error relative to that of the reference.
fn error<E: Element>(ours: &[E], reference: &[f64]) -> f64 {
    let errors = ours.iter().zip(reference).map(|(a, b)| (f64::from(a.to_f32()) - b).powi(2));
    (errors.sum::<f64>() / reference.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

#[test]
fn winograd_in_bf16_has_the_documented_accuracy() {
    /// Sums of twelve uniform values are normal within the precision that matters here.
    fn normal(len: usize, seed: u64) -> Vec<f32> {
        values(12 * len, seed).chunks_exact(12).map(|values| values.iter().sum::<f32>() / 2.0).collect()
    }
    for relu in [false, true] {
        let shape = square(4, [64, 64], 16);
        let mut x = normal(shape.input_len(), 1);
        if relu {
            x.iter_mut().for_each(|x| *x = x.max(0.0));
        }
        let (x, dy) = (rounded(&x), rounded(&normal(shape.output_len(), 2)));
        let [x32, dy32] = [&x, &dy].map(|v| v.iter().map(|v| v.to_f32()).collect::<Vec<_>>());
        let sums = Sums::new(&shape, &x32, normal(shape.weight_len(), 3), &dy32, values(64, 4));
        for isa in MicroKernels::<bf16>::supported() {
            let (mut y, mut dx) = (vec![bf16::ZERO; dy.len()], vec![bf16::ZERO; x.len()]);
            conv::igemm_forward(isa, &shape, &x, &sums.w, None, false, &mut y);
            conv::igemm_data_grad(isa, &shape, &sums.w, &dy, &mut dx);
            let dw = weight_grad::weight_grad(isa, &shape, &x, &dy);
            let direct = [error(&y, &sums.y), error(&dx, &sums.dx), error(&dw, &sums.dw)];
            winograd::forward(isa, &shape, &x, &sums.w, None, false, &mut y);
            winograd::data_grad(isa, &shape, &sums.w, &dy, &mut dx);
            let dw = winograd_grad::weight_grad(isa, &shape, &x, &dy);
            let ours = [error(&y, &sums.y), error(&dx, &sums.dx), error(&dw, &sums.dw)];
            println!("{} relu {relu}: direct {direct:?}, Winograd {ours:?}", isa.name);
            assert!(direct[0] < 2.6e-3 && direct[1] < 2.6e-3 && direct[2] < 1e-6, "{direct:?}");
            match isa.winograd {
                Winograd::Same(_) => assert!(ours.iter().all(|error| *error < 4.8e-3), "{ours:?}"),
                // Filters are not rounded either.
                Winograd::Widened(..) => assert!(ours[0] < 1.8e-3 && ours[1] < 1.8e-3 && ours[2] < 1e-6, "{ours:?}"),
            }
        }
    }
}
