//! The operations on bf16 images against the same operations in f64, with autodiff. The inputs are bf16 numbers, so the
//! difference is the rounding of the results to bf16 and of the sums to f32.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};
use ops::Activation::{Gelu, Identity, Relu, Silu};
use ops::{
    Activation, ConvOptions, Epilogue, PoolOptions, StatisticsReduce, add, avg_pool2d, batch_norm_eval,
    batch_norm_train, concat, conv2d, gelu, global_avg_pool, interleave, linear, max_pool2d, relu, scale_channels,
    sigmoid, silu, slice_channels, to_bf16, upcast,
};
use proptest::prelude::*;

/// Half a unit in the last place of bf16, relative.
const BF16: f64 = 1.0 / 256.0;
/// Rounding of sums in f32, relative to the largest value.
const SUMS: f64 = 1e-5;

/// Pseudo-random bf16 numbers in [-2, 2) with 8 significant bits.
fn values(len: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as f32 / (1_u64 << 30) as f32 - 1.0
    };
    (0..len).map(|_| f64::from(f32::from_bits((2.0 * next()).to_bits() & 0xffff_0000))).collect()
}

fn tensor<const D: usize>(dims: [usize; D], seed: u64, dtype: DType) -> Tensor<D> {
    let data = TensorData::new(values(dims.iter().product(), seed), dims);
    Tensor::from_data(data, (&Device::flex().autodiff(), dtype)).require_grad()
}

fn host<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().try_into_vec_as::<f64>().unwrap()
}

fn close(what: &str, narrow: &[f64], wide: &[f64]) {
    assert_eq!(narrow.len(), wide.len(), "{what}");
    let largest = wide.iter().fold(1.0_f64, |m, v| m.max(v.abs()));
    for (i, (a, b)) in narrow.iter().zip(wide).enumerate() {
        let allowed = BF16 * b.abs() + SUMS * largest;
        assert!((a - b).abs() <= allowed, "{what}[{i}]: {a} is not {b} (largest {largest})");
    }
}

/// Returns an operation's output and, with a random upstream gradient, the gradients of its inputs: an image-like tensor
/// for each of `images` and an f32 parameter for each of `parameters` (f64 for the reference).
type Results = (DType, Vec<Vec<f64>>);

fn results<const D: usize>(
    dtype: DType,
    images: &[[usize; 4]],
    parameters: &[Vec<usize>],
    seed: u64,
    operation: impl Fn(&[Tensor<4>], &[Tensor<1>]) -> Tensor<D>,
) -> Results {
    let of_parameters = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let images: Vec<_> = images.iter().zip(seed..).map(|(dims, seed)| tensor(*dims, seed, dtype)).collect();
    let parameters: Vec<_> = parameters
        .iter()
        .zip(seed + 10..)
        .map(|(dims, seed)| tensor([dims.iter().product()], seed, of_parameters))
        .collect();
    let output = operation(&images, &parameters);
    let upstream = tensor(output.dims(), seed + 20, output.dtype()).detach();
    let grads = (output.clone() * upstream).sum().backward();
    let found = output.dtype();
    let mut all = vec![host(output)];
    for image in &images {
        let grad = image.grad(&grads).expect("a gradient");
        assert_eq!(grad.dtype(), dtype, "the gradient of an image");
        all.push(host(grad));
    }
    for parameter in &parameters {
        let grad = parameter.grad(&grads).expect("a gradient");
        assert_eq!(grad.dtype(), of_parameters, "the gradient of a parameter");
        all.push(host(grad));
    }
    (found, all)
}

/// Compares the operation on bf16 images with the same on f64 images, and a repeat bit for bit.
fn check<const D: usize>(
    what: &str,
    images: &[[usize; 4]],
    parameters: &[Vec<usize>],
    seed: u64,
    operation: impl Fn(&[Tensor<4>], &[Tensor<1>]) -> Tensor<D>,
) {
    check_against(DType::F64, what, images, parameters, seed, operation);
}

/// [`check`] with images of the type `reference` instead of f64.
fn check_against<const D: usize>(
    reference: DType,
    what: &str,
    images: &[[usize; 4]],
    parameters: &[Vec<usize>],
    seed: u64,
    operation: impl Fn(&[Tensor<4>], &[Tensor<1>]) -> Tensor<D>,
) {
    let run = |dtype| results(dtype, images, parameters, seed, &operation);
    let (narrow, wide) = (run(DType::BF16), run(reference));
    for (i, (narrow, wide)) in narrow.1.iter().zip(&wide.1).enumerate() {
        close(&format!("{what} of {images:?} {parameters:?}, result {i}"), narrow, wide);
    }
    assert_eq!(run(DType::BF16), narrow, "{what}: repeats differ");
}

fn square(stride: usize, padding: usize, dilation: usize, groups: usize) -> ConvOptions {
    ConvOptions { stride: [stride; 2], padding: [padding; 2], dilation: [dilation; 2], groups, norm_follows: false }
}

/// Two ranks with the same rows.
#[derive(Debug)]
struct Twice;

impl StatisticsReduce for Twice {
    fn all_reduce_sum(&self, values: &mut [f64]) {
        values.iter_mut().for_each(|value| *value *= 2.0);
    }
}

fn norm(
    x: &[Tensor<4>],
    p: &[Tensor<1>],
    residual: bool,
    activation: Activation,
    process_group: Option<Arc<dyn StatisticsReduce>>,
) -> Tensor<4> {
    let epilogue = Epilogue { residual: residual.then(|| x[1].clone()), activation };
    batch_norm_train(x[0].clone(), p[0].clone(), p[1].clone(), 1e-5, epilogue, process_group, None).output
}

/// The smallest magnitude of ReLU's input after a batch norm. ReLU passes the gradient of a value or not, by its sign, and a sum
/// in f32 may have another sign than in f64 when it is almost zero.
fn nearest_to_zero(images: &[[usize; 4]], seed: u64) -> f64 {
    let c = vec![images[0][1]];
    let (_, all) = results(DType::F64, images, &[c.clone(), c], seed, |x, p| norm(x, p, x.len() == 2, Identity, None));
    all[0].iter().fold(f64::MAX, |least, value| least.min(value.abs()))
}

prop_compose! {
    fn dims()(
        batch in 1..5_usize,
        channels in prop_oneof![1..9_usize, 14..70_usize],
        height in 1..9_usize,
        width in 1..9_usize,
    ) -> [usize; 4] {
        [batch, channels, height, width]
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn convolutions(
        dims in dims(),
        columns in prop_oneof![1..6_usize, 14..40_usize],
        kernel in prop_oneof![Just(1_usize), Just(3), Just(5), Just(7)],
        stride in 1..3_usize,
        dilation in 1..3_usize,
        groups in prop_oneof![Just(1_usize), 2..5_usize],
        depthwise in any::<bool>(),
        seed in any::<u32>(),
    ) {
        let [batch, depth, height, width] = dims;
        let (groups, depth, columns) = if depthwise { (depth, 1, 1) } else { (groups, depth, columns) };
        // Winograd's algorithm rounds once more, as tests inside the crate measure.
        let whole = depth.is_multiple_of(32) && columns.is_multiple_of(32);
        prop_assume!(!(kernel == 3 && stride * dilation * groups == 1 && whole));
        let padding = dilation * (kernel - 1) / 2;
        let options = square(stride, padding, dilation, groups);
        let filters = [columns * groups, depth, kernel, kernel];
        let conv = |x: &[Tensor<4>], p: &[Tensor<1>], relu| {
            conv2d(x[0].clone(), p[0].clone().reshape(filters), p.get(1).cloned(), options, relu)
        };
        let images = [[batch, depth * groups, height, width]];
        let (seed, weight, bias) = (u64::from(seed), filters.to_vec(), vec![filters[0]]);
        check("convolution", &images, std::slice::from_ref(&weight), seed, |x, p| conv(x, p, false));
        check("convolution with bias", &images, &[weight, bias], seed, |x, p| conv(x, p, false));
    }

    #[test]
    fn batch_norms(dims in dims(), seed in any::<u32>(), which in 0..6_usize) {
        prop_assume!(dims[0] * dims[2] * dims[3] > 3);
        let c = vec![dims[1]];
        // A residual and another activation are two operations, which round twice.
        let (residual, activation) =
            [(false, Identity), (false, Relu), (false, Silu), (true, Identity), (true, Relu), (false, Gelu)][which];
        let images = if residual { vec![dims, dims] } else { vec![dims] };
        if activation == Relu {
            prop_assume!(nearest_to_zero(&images, u64::from(seed)) > 1e-5);
        }
        for process_group in [None, Some(Arc::new(Twice) as Arc<dyn StatisticsReduce>)] {
            check("batch norm", &images, &[c.clone(), c.clone()], u64::from(seed), |x, p| {
                norm(x, p, residual, activation, process_group.clone())
            });
        }
    }

    #[test]
    fn evaluation_of_batch_norm(dims in dims(), seed in any::<u32>(), residual in any::<bool>()) {
        let run = |dtype, of_parameters| {
            let seed = u64::from(seed);
            let image = |at| tensor(dims, seed + at, dtype).without_autodiff();
            let vector = |at| tensor([dims[1]], seed + at, of_parameters).without_autodiff();
            let epilogue = Epilogue { residual: residual.then(|| image(5)), activation: Relu };
            host(batch_norm_eval(image(0), [vector(1), vector(2)], [vector(3), vector(4).abs() + 0.5], 1e-5, epilogue))
        };
        close("evaluation", &run(DType::BF16, DType::F32), &run(DType::F64, DType::F64));
    }

    #[test]
    fn poolings(dims in dims(), kernel in 2..4_usize, stride in 1..4_usize, seed in any::<u32>()) {
        let seed = u64::from(seed);
        check("mean", &[dims], &[], seed, |x, _| global_avg_pool(x[0].clone()));
        prop_assume!(dims[2].min(dims[3]) >= kernel);
        check("mean of windows", &[dims], &[], seed, |x, _| avg_pool2d(x[0].clone(), kernel));
        let options = PoolOptions { kernel: [kernel; 2], stride: [stride; 2], padding: [kernel / 2; 2] };
        // The reference is this crate's in f32: which of several equal values gets the gradient differs in burn.
        check_against(DType::F32, "max pooling", &[dims], &[], seed, |x, _| max_pool2d(x[0].clone(), options));
    }

    #[test]
    fn elementwise_operations_and_channels(dims in dims(), seed in any::<u32>()) {
        let seed = u64::from(seed);
        let [batch, channels, height, width] = dims;
        check("relu", &[dims], &[], seed, |x, _| relu(x[0].clone()));
        check("sigmoid", &[dims], &[], seed, |x, _| sigmoid(x[0].clone()));
        check("silu", &[dims], &[], seed, |x, _| silu(x[0].clone()));
        check("gelu", &[dims], &[], seed, |x, _| gelu(x[0].clone()));
        check("sum", &[dims, dims], &[], seed, |x, _| add(x[0].clone(), x[1].clone()));
        check("interleaved", &[dims, dims], &[], seed, |x, _| interleave(x[0].clone(), x[1].clone()));
        let other = [batch, channels + 3, height, width];
        check("concat", &[dims, other, dims], &[], seed, |x, _| concat(x.to_vec()));
        let range = channels / 3..channels;
        check("slice", &[dims], &[], seed, |x, _| slice_channels(x[0].clone(), range.clone()));
        check("scale", &[dims, [batch, channels, 1, 1]], &[], seed, |x, _| {
            scale_channels(x[0].clone(), x[1].clone().reshape([batch, channels]))
        });
        check("linear", &[[batch, channels, 1, 1]], &[vec![7, channels], vec![7]], seed, |x, p| {
            let (x, weight) = (x[0].clone().reshape([batch, channels]), p[0].clone().reshape([7, channels]));
            linear(x, weight, Some(p[1].clone()), true)
        });
    }
}

#[test]
fn nan_is_propagated() {
    let values = TensorData::new(vec![f64::NAN, -1.0, 1.0, 2.0], [1, 1, 2, 2]);
    let x = Tensor::<4>::from_data(values, (&Device::flex(), DType::BF16));
    assert!(host(relu(x.clone()))[0].is_nan());
    let options = PoolOptions { kernel: [2, 2], stride: [2, 2], padding: [0, 0] };
    assert!(host(max_pool2d(x.clone(), options))[0].is_nan());
    assert!(host(add(x.clone(), x))[0].is_nan());
}

/// Images of two types are burn's business: the kernels take equal types.
#[test]
fn parameters_of_any_type_are_cast_to_f32() {
    let (x, w) = (tensor([2, 3, 5, 5], 1, DType::BF16), tensor([4, 3, 3, 3], 2, DType::BF16));
    let y = conv2d(x.clone(), w.clone(), None, square(1, 1, 1, 1), false);
    let wide = conv2d(x, w.clone().cast(DType::F32), None, square(1, 1, 1, 1), false);
    assert_eq!(host(y.clone()), host(wide));
    let grads = y.sum().backward();
    assert_eq!(w.grad(&grads).unwrap().dtype(), DType::BF16);
}

/// Casts and their gradients equal burn's to the bit, in both memory orders. The lengths are not multiples of a vector's length.
#[test]
fn casts_equal_burns() {
    let device = Device::flex().autodiff();
    for dims in [[1, 1, 1, 1], [3, 5, 7, 3], [2, 3, 150, 151]] {
        let len = dims.iter().product::<usize>();
        // More digits than bf16 has, so that the cast rounds. The first value is a tie.
        let mut numbers: Vec<f32> = values(len, 1).iter().map(|value| (value / 3.0) as f32).collect();
        numbers[0] = f32::from_bits(0x3f81_8000);
        let input = || Tensor::<4>::from_data(TensorData::new(numbers.clone(), dims), &device).require_grad();
        for channels_last in [false, true] {
            // The kernel of ReLU returns images channels-last.
            let ordered = |x: Tensor<4>| if channels_last { relu(x.clone()) - relu(-x) } else { x };
            let (ours, burns) = (input(), input());
            let (a, b) = (to_bf16(ordered(ours.clone())), ordered(burns.clone()).cast(DType::BF16));
            assert_eq!((a.dtype(), b.dtype()), (DType::BF16, DType::BF16));
            assert_eq!(host(a.clone()), host(b.clone()), "{dims:?}");
            let (wide, expected) = (upcast(a), b.cast(DType::F32));
            assert_eq!(wide.dtype(), DType::F32);
            assert_eq!(host(wide.clone()), host(expected.clone()), "{dims:?}");
            let [a, b] = [(ours, wide), (burns, expected)].map(|(input, output)| {
                let grads = (output.clone() * output).sum().backward();
                input.grad(&grads).expect("a gradient")
            });
            assert_eq!(a.dtype(), DType::F32);
            assert_eq!(host(a), host(b), "the gradient for {dims:?}");
        }
    }
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::MAX, f32::MIN_POSITIVE];
    let found = host(to_bf16(Tensor::<1>::from_data(TensorData::from(special), &Device::flex())));
    assert!(found[0].is_nan());
    assert_eq!(found[1..3], [f64::INFINITY, f64::NEG_INFINITY]);
    assert!(found[3] == 0.0 && found[3].is_sign_negative());
    assert_eq!(found[4], f64::INFINITY, "the largest f32 rounds up");
}
