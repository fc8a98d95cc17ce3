//! Compares the crate `ops` on a GPU with the CPU: forward, and the gradients of all inputs.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use ops::{
    Activation, ConvOptions, Epilogue, RunningStats, batch_norm_eval, batch_norm_train, concat, conv2d,
    global_avg_pool, interleave, join_paths, relu, scale_channels, sigmoid, silu, slice_channels,
};

/// A case: name, shape, type, and a function of two images and two vectors over the channels.
type Case<'a> = (String, [usize; 4], DType, Box<dyn Fn(&Inputs) -> Vec<Tensor<1>> + 'a>);

/// Largest differences, as parts of the largest value: rounding errors of long sums in f32, and of inputs with 8 and 11 bits.
const F32: f32 = 2e-5;
const BF16: f32 = 8e-3;
const TF32: f32 = 2e-3;
/// Name of convolutions with more than 32 channels per group. burn convolves them group by group, and multiplies f32 in TF32 if
/// its autotuning finds that faster.
const WIDE: &str = "wide convolution";

/// Inputs of a case, all with gradients.
struct Inputs {
    image: Tensor<4>,
    other: Tensor<4>,
    weight: Tensor<1>,
    bias: Tensor<1>,
}

/// Returns pseudo-random numbers around zero with a deviation of about 1.
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..count).map(|_| (next() + next() + next() + next() - 2.0) * 1.7).collect()
}

fn flat<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    let count = tensor.shape().num_elements();
    tensor.reshape([count])
}

pub fn values(tensor: Tensor<1>) -> Result<Vec<f32>, String> {
    tensor.cast(FloatDType::F32).into_data().try_into_vec::<f32>().map_err(|e| format!("{e:?}"))
}

/// Returns all results and then all gradients of a case on a device. With `last`, images are channels-last in memory; with
/// `reference`, they are f32.
fn results(case: &Case, device: &Device, [reference, last]: [bool; 2]) -> Result<Vec<Vec<f32>>, String> {
    let (_, [batch, planes, height, width], dtype, compute) = case;
    let image = |seed: u64| {
        // The mean of a channel is not near zero, to reveal a variance that is a difference of large numbers.
        let data: Vec<f32> = numbers(seed, batch * planes * height * width)
            .iter()
            .enumerate()
            .map(|(i, x)| x + (i / (height * width) % planes % 8 * 4) as f32)
            .collect();
        let image = Tensor::<4>::from_data(TensorData::new(data, [*batch, *planes, *height, *width]), device);
        let image = if last {
            // Memory in the other order, the same shape.
            let rows = image.permute([0, 2, 3, 1]).reshape([batch * height * width, *planes]);
            rows.reshape([*batch, *height, *width, *planes]).permute([0, 3, 1, 2])
        } else {
            image
        };
        // The CPU computes in f32 with the same numbers.
        let image = if *dtype == DType::BF16 { image.cast(FloatDType::BF16) } else { image };
        if reference { image.cast(FloatDType::F32).detach().require_grad() } else { image.require_grad() }
    };
    let vector = |seed: u64| {
        let data: Vec<f32> = numbers(seed, *planes).iter().map(|x| x * 0.3 + 1.0).collect();
        Tensor::<1>::from_data(TensorData::new(data, [*planes]), device).require_grad()
    };
    let inputs = Inputs { image: image(1), other: image(2), weight: vector(3), bias: vector(4) };
    let outputs = compute(&inputs);
    let first = outputs[0].clone();
    let grad_output = Tensor::<1>::from_data(TensorData::new(numbers(5, first.dims()[0]), first.dims()), device);
    let loss = (first.clone().cast(FloatDType::F32) * grad_output).sum();
    let mut gradients = loss.backward();
    let mut found: Vec<Vec<f32>> = outputs.into_iter().map(values).collect::<Result<_, _>>()?;
    for image in [&inputs.image, &inputs.other] {
        if let Some(gradient) = image.grad_remove(&mut gradients) {
            found.push(values(flat(gradient))?);
        }
    }
    for vector in [&inputs.weight, &inputs.bias] {
        if let Some(gradient) = vector.grad_remove(&mut gradients) {
            found.push(values(gradient)?);
        }
    }
    Ok(found)
}

/// Returns the largest difference divided by the largest value.
pub fn relative_error(ours: &[f32], theirs: &[f32]) -> f32 {
    let largest = theirs.iter().fold(1e-30f32, |largest, x| largest.max(x.abs()));
    let differences = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs());
    // NaN counts as the largest difference.
    differences.fold(0.0f32, |most, d| if d <= most { most } else { d }) / largest
}

fn cases<'a>() -> Vec<Case<'a>> {
    let mut cases: Vec<Case> = Vec::new();
    let norm = |residual: bool, activation: Activation| {
        move |x: &Inputs| {
            let after = Epilogue { residual: residual.then(|| x.other.clone()), activation };
            let (mean, variance) = (x.bias.clone().without_autodiff(), x.weight.clone().without_autodiff());
            // Without running statistics for one activation: the batch's statistics are returned.
            let running = (activation != Activation::Silu).then_some(RunningStats { mean, variance, momentum: 0.1 });
            let batch = batch_norm_train(x.image.clone(), x.weight.clone(), x.bias.clone(), 1e-5, after, None, running);
            vec![flat(batch.output), batch.mean, batch.variance]
        }
    };
    use Activation::{Gelu, Identity, Relu, Sigmoid, Silu};
    // Rows with and without a remainder by the vector width, one or more tiles of columns, one or more pieces.
    for (shape, dtype, residual, activation) in [
        ([4, 64, 8, 8], DType::F32, false, Relu),
        ([4, 64, 8, 8], DType::F32, true, Relu),
        ([4, 64, 8, 8], DType::F32, true, Identity),
        ([4, 64, 8, 8], DType::F32, false, Silu),
        ([4, 64, 8, 8], DType::F32, false, Gelu),
        ([4, 64, 8, 8], DType::BF16, false, Relu),
        ([4, 64, 8, 8], DType::BF16, true, Relu),
        ([3, 6, 5, 7], DType::F32, false, Identity),
        ([3, 6, 5, 7], DType::F32, true, Sigmoid),
        ([2, 24, 3, 3], DType::BF16, false, Silu),
        ([2, 200, 2, 2], DType::F32, false, Relu),
        ([3, 1, 1, 1], DType::F32, false, Identity),
        ([64, 8, 33, 32], DType::F32, false, Relu),
    ] {
        let name = format!("batch norm, {activation:?}{}", if residual { ", residual" } else { "" });
        cases.push((name, shape, dtype, Box::new(norm(residual, activation))));
    }
    cases.push((
        "batch norm in evaluation".into(),
        [2, 24, 3, 3],
        DType::F32,
        Box::new(|x: &Inputs| {
            let plain = |x: &Tensor<1>| x.clone().without_autodiff();
            let after = Epilogue { residual: Some(x.other.clone().without_autodiff()), activation: Silu };
            let affine = [plain(&x.weight), plain(&x.bias)];
            let given = [plain(&x.bias), plain(&x.weight)];
            let output = batch_norm_eval(x.image.clone().without_autodiff(), affine, given, 1e-5, after);
            // An output that has a gradient.
            vec![flat(x.image.clone()), flat(output)]
        }),
    ));
    for dtype in [DType::F32, DType::BF16] {
        cases.push(("ReLU".into(), [3, 6, 5, 7], dtype, Box::new(|x: &Inputs| vec![flat(relu(x.image.clone()))])));
    }
    // The weights of a convolution are the first numbers of the other image.
    let conv = |outputs: usize, groups: usize, kernel: usize, stride: usize, dilation: usize, relu: bool| {
        move |x: &Inputs| {
            let [_, planes, _, _] = x.image.dims();
            let shape = [outputs, planes / groups, kernel, kernel];
            let weight = flat(x.other.clone()).slice(0..shape.iter().product()).reshape(shape);
            let bias = relu.then(|| x.bias.clone().slice(0..outputs).cast(x.image.dtype()));
            let padding = [kernel / 2 * dilation; 2];
            let dilation = [dilation; 2];
            let options = ConvOptions { stride: [stride; 2], padding, dilation, groups, norm_follows: false };
            vec![flat(conv2d(x.image.clone(), weight, bias, options, relu))]
        }
    };
    // Depthwise convolutions, and those with a stride and a dilation, are not on tensor cores.
    for (shape, dtype, [outputs, groups, kernel, stride, dilation], relu) in [
        ([2, 24, 8, 8], DType::F32, [24, 24, 3, 1, 1], false),
        ([3, 36, 7, 5], DType::F32, [36, 36, 5, 2, 1], true),
        ([2, 6, 8, 8], DType::F32, [6, 6, 3, 2, 1], false),
        ([2, 24, 8, 8], DType::F32, [24, 3, 3, 2, 2], false),
        ([2, 24, 7, 9], DType::F32, [16, 8, 3, 2, 3], true),
        ([2, 24, 8, 8], DType::F32, [12, 4, 1, 2, 2], false),
        ([2, 24, 8, 8], DType::BF16, [24, 24, 3, 1, 1], false),
        ([2, 24, 8, 8], DType::BF16, [24, 3, 3, 2, 2], false),
        ([2, 80, 4, 4], DType::F32, [40, 2, 1, 2, 2], true),
    ] {
        let kind = if shape[1] / groups > 32 { WIDE } else { "convolution" };
        let with = if relu { ", ReLU" } else { "" };
        let name = format!("{kind} {kernel}x{kernel}/{stride}, {groups} groups, dilation {dilation}{with}");
        cases.push((name, shape, dtype, Box::new(conv(outputs, groups, kernel, stride, dilation, relu))));
    }
    // The images' gradient is a sum: that of the scaled images, and that of the means.
    let excite = |x: &Inputs| {
        let image = relu(x.image.clone());
        let factors = sigmoid(global_avg_pool(image.clone()) * x.weight.clone().unsqueeze());
        vec![flat(scale_channels(image, factors))]
    };
    for (shape, dtype) in [
        ([3, 24, 5, 7], DType::F32),
        ([2, 200, 8, 8], DType::F32),
        ([2, 6, 3, 3], DType::F32),
        ([3, 24, 5, 7], DType::BF16),
    ] {
        cases.push(("squeeze-and-excitation".into(), shape, dtype, Box::new(excite)));
    }
    let pair = |x: &Inputs| vec![flat(silu(concat(vec![relu(x.other.clone()), x.image.clone()])))];
    let paths = |x: &Inputs| {
        let [_, planes, _, _] = x.image.dims();
        let right = relu(slice_channels(x.other.clone(), 0..planes / 2));
        vec![flat(silu(join_paths(x.image.clone(), right, planes / 3)))]
    };
    for (shape, dtype) in [([3, 24, 5, 7], DType::F32), ([2, 6, 3, 3], DType::F32), ([3, 24, 5, 7], DType::BF16)] {
        cases.push(("concatenation of two".into(), shape, dtype, Box::new(pair)));
        cases.push(("paths of a block of DPN".into(), shape, dtype, Box::new(paths)));
    }
    let side = |x: &Inputs| vec![flat(silu(concat(vec![x.image.clone(), relu(x.other.clone()), x.image.clone()])))];
    cases.push(("side by side".into(), [2, 12, 4, 4], DType::F32, Box::new(side)));
    let turns = |x: &Inputs| {
        vec![flat(interleave(slice_channels(x.image.clone(), 3..9), slice_channels(x.other.clone(), 0..6)))]
    };
    cases.push(("in turn".into(), [2, 12, 4, 4], DType::F32, Box::new(turns)));
    cases
}

/// Prints one line per case. Returns whether all are correct.
pub fn run() -> Result<bool, String> {
    let (gpu, cpu) = (crate::first_gpu()?, Device::flex().autodiff());
    println!("{:48} {:>18} {:>6} {:>9} {:>9}", "operation", "shape", "type", "error", "limit");
    let mut all_passed = true;
    for case in cases() {
        let (name, shape, dtype, _) = &case;
        let limit = match dtype {
            DType::BF16 => BF16,
            _ if name.starts_with(WIDE) => TF32,
            _ => F32,
        };
        let theirs = results(&case, &cpu, [true, false])?;
        let mut most = 0.0f32;
        for last in [false, true] {
            let ours = results(&case, &gpu, [false, last])?;
            if ours.len() != theirs.len() || ours.iter().zip(&theirs).any(|(a, b)| a.len() != b.len()) {
                return Err(format!("{name}: the shapes of the results differ from the CPU"));
            }
            for (ours, theirs) in ours.iter().zip(&theirs) {
                let error = relative_error(ours, theirs);
                most = if error <= most { most } else { error };
            }
        }
        let passed = most <= limit;
        all_passed &= passed;
        let mark = if passed { "" } else { "  WRONG" };
        println!("{name:48} {:>18} {:>6} {most:9.1e} {limit:9.0e}{mark}", format!("{shape:?}"), dtype.name());
    }
    Ok(all_passed)
}
