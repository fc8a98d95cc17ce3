//! Compares convolutions on a GPU with the CPU: the output, and the gradients of image, weight and bias.
//!
//! Some cases have a batch norm after the convolution: the convolution's kernel computes its batch statistics. Others have a
//! batch norm before the convolution: the kernel of the convolution's data gradient computes the sums that the batch norm's
//! backward pass needs.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use ops::{Activation, ConvOptions, Epilogue, RunningStats, batch_norm_train, conv2d};

use super::ops::{numbers, relative_error, values};

/// Tolerances, relative to the largest value. BF16 rounds inputs to 8 significant bits, TF32 to 11.
const BF16: f32 = 8e-3;
const TF32: f32 = 2e-3;

/// A convolution of images `[batch, groups * in, height, width]`.
#[derive(Debug, Clone, Copy)]
struct Case {
    images: [usize; 4],
    outputs: usize,
    window: [usize; 2],
    options: ConvOptions,
    bias: bool,
    relu: bool,
    norm: Norm,
}

/// The batch norm after or before a convolution.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Norm {
    None,
    /// A batch norm of the convolution's output.
    Next,
    /// A batch norm whose input is not the convolution's output itself: it must not use the convolution's statistics.
    Later,
    /// A batch norm before the convolution, with an activation and, if true, with a residual.
    Before(Activation, bool),
    /// As [`Norm::Before`]; two convolutions read the batch norm's output.
    BeforeTwo(Activation, bool),
    /// As [`Norm::Before`]; an operation whose gradient kernel computes no sums reads the batch norm's output too.
    BeforeOther(Activation, bool),
}

impl Case {
    const fn new(images: [usize; 4], outputs: usize, window: [usize; 2], stride: usize, padding: usize) -> Self {
        let options = ConvOptions {
            stride: [stride; 2],
            padding: [padding; 2],
            dilation: [1, 1],
            groups: 1,
            norm_follows: false,
        };
        Self { images, outputs, window, options, bias: false, relu: false, norm: Norm::None }
    }

    const fn groups(mut self, groups: usize) -> Self {
        self.options.groups = groups;
        self
    }

    const fn dilation(mut self, pixels: usize) -> Self {
        self.options.dilation = [pixels; 2];
        self
    }

    const fn norm(mut self, norm: Norm) -> Self {
        self.options.norm_follows = matches!(norm, Norm::Next | Norm::Later);
        self.norm = norm;
        self
    }

    const fn bias(mut self, relu: bool) -> Self {
        self.bias = true;
        self.relu = relu;
        self
    }
}

/// Cases with rows of channels that are multiples of 16, 8 and 4 bytes, and others; with one and several tiles of each size,
/// full and partial; with the windows, strides, paddings and groups of the networks.
const CASES: [Case; 42] = [
    Case::new([3, 3, 9, 7], 64, [3, 3], 1, 1),
    Case::new([2, 3, 17, 15], 24, [7, 7], 2, 3),
    // ReLU's gradient jumps where rounding changes a sign: no output of this case is that near zero.
    Case::new([2, 1, 9, 9], 6, [5, 5], 1, 0).bias(true),
    Case::new([3, 6, 8, 8], 16, [5, 5], 1, 0).bias(false),
    Case::new([4, 64, 8, 8], 64, [3, 3], 1, 1),
    Case::new([4, 64, 8, 8], 128, [3, 3], 2, 1),
    Case::new([4, 64, 7, 5], 128, [1, 1], 2, 0),
    Case::new([2, 72, 6, 6], 130, [1, 1], 1, 0).bias(false),
    Case::new([2, 36, 5, 6], 20, [3, 3], 1, 1),
    Case::new([2, 24, 9, 8], 200, [3, 3], 2, 1),
    Case::new([2, 16, 9, 9], 16, [3, 3], 1, 2).dilation(2),
    Case::new([2, 80, 4, 4], 80, [3, 3], 2, 1).groups(2),
    Case::new([2, 120, 5, 5], 36, [1, 1], 1, 0).groups(3).bias(false),
    Case::new([2, 12, 10, 7], 9, [2, 3], 3, 0),
    Case::new([1, 33, 6, 6], 35, [3, 3], 1, 1),
    // A linear layer.
    Case::new([130, 100, 1, 1], 10, [1, 1], 1, 0).bias(false),
    // The kernels' largest tile and most pieces.
    Case::new([24, 8, 32, 32], 128, [1, 1], 1, 0),
    Case::new([12, 16, 32, 32], 32, [3, 3], 1, 1),
    Case::new([1, 256, 2, 2], 256, [3, 3], 1, 1),
    Case::new([12, 16, 32, 32], 32, [3, 3], 1, 1).norm(Norm::Next),
    Case::new([5, 64, 9, 7], 130, [3, 3], 2, 1).norm(Norm::Next),
    Case::new([3, 80, 5, 5], 80, [3, 3], 1, 1).groups(2).norm(Norm::Next),
    Case::new([12, 16, 32, 32], 32, [1, 1], 1, 0).norm(Norm::Later),
    Case::new([4, 64, 8, 8], 64, [3, 3], 1, 1).norm(Norm::Before(Activation::Relu, false)),
    Case::new([4, 64, 8, 8], 64, [3, 3], 1, 1).norm(Norm::Before(Activation::Relu, true)),
    Case::new([12, 16, 32, 32], 32, [3, 3], 1, 1).norm(Norm::Before(Activation::Silu, false)),
    Case::new([2, 24, 9, 8], 40, [3, 3], 2, 1).norm(Norm::Before(Activation::Relu6, false)),
    Case::new([1, 33, 6, 6], 35, [3, 3], 1, 1).norm(Norm::Before(Activation::Identity, false)),
    Case::new([2, 80, 4, 4], 80, [3, 3], 2, 1).groups(2).norm(Norm::Before(Activation::Relu, false)),
    // The convolution's kernel does not compute the derivative of GELU.
    Case::new([2, 24, 9, 8], 16, [1, 1], 1, 0).norm(Norm::Before(Activation::Gelu, false)),
    Case::new([4, 64, 8, 8], 128, [3, 3], 2, 1).norm(Norm::BeforeTwo(Activation::Relu, true)),
    Case::new([1, 33, 6, 6], 35, [3, 3], 1, 1).norm(Norm::BeforeTwo(Activation::Relu, false)),
    Case::new([24, 8, 32, 32], 128, [1, 1], 1, 0).norm(Norm::BeforeTwo(Activation::Identity, false)),
    Case::new([4, 64, 8, 8], 64, [3, 3], 1, 1).norm(Norm::BeforeOther(Activation::Relu, false)),
    // Narrow groups, several of which are one product: all full; the last product with fewer groups; few channels; more channels
    // on one side; chunks of 16 bytes that are not inside a group.
    Case::new([4, 32, 8, 8], 32, [3, 3], 1, 1).groups(4).norm(Norm::Next),
    Case::new([3, 152, 6, 7], 152, [3, 3], 2, 1).groups(19).norm(Norm::Next),
    Case::new([2, 56, 9, 8], 56, [3, 3], 1, 1).groups(7).norm(Norm::Before(Activation::Relu, false)),
    Case::new([2, 96, 5, 5], 96, [3, 3], 2, 1).groups(32).norm(Norm::Before(Activation::Relu, true)),
    Case::new([2, 21, 7, 6], 14, [3, 2], 1, 1).groups(7).bias(false),
    Case::new([2, 24, 6, 6], 120, [3, 3], 1, 2).groups(12).dilation(2),
    Case::new([12, 128, 16, 16], 128, [3, 3], 1, 1).groups(32),
    Case::new([2, 68, 4, 4], 34, [1, 1], 1, 0).groups(17).bias(true),
];

/// Returns the element types in which a case is computed, with the largest relative difference.
pub fn types(index: usize, alternate: bool) -> Vec<(DType, f32)> {
    let mut types = vec![(DType::F32, TF32), (DType::BF16, BF16)];
    if alternate {
        types.remove(index % 2);
    }
    types
}

/// Returns the output and the gradients of image, weight and bias. With `reference`, inputs are rounded to `dtype`, and the
/// operations compute in f32.
fn results(case: &Case, dtype: DType, device: &Device, reference: bool) -> Result<Vec<Vec<f32>>, String> {
    let Case { images, outputs, window, options, bias, relu, norm } = *case;
    fn tensor<const D: usize>(
        seed: u64,
        shape: [usize; D],
        dtype: DType,
        device: &Device,
        reference: bool,
    ) -> Tensor<D> {
        let tensor = Tensor::<D>::from_data(TensorData::new(numbers(seed, shape.iter().product()), shape), device);
        let tensor = if dtype == DType::BF16 { tensor.cast(FloatDType::BF16) } else { tensor };
        if reference { tensor.cast(FloatDType::F32).detach().require_grad() } else { tensor.require_grad() }
    }
    let image = tensor(1, images, dtype, device, reference);
    let weight = tensor(2, [outputs, images[1] / options.groups, window[0], window[1]], dtype, device, reference);
    let bias = bias.then(|| tensor(3, [outputs], DType::F32, device, reference));
    let affine =
        [5, 6].map(|seed| tensor(seed, [images[1]], DType::F32, device, reference).mul_scalar(0.3).add_scalar(1.0));
    let affine = affine.map(|vector| vector.detach().require_grad());
    let output = match norm {
        Norm::Before(activation, residual)
        | Norm::BeforeTwo(activation, residual)
        | Norm::BeforeOther(activation, residual) => {
            let [scale, shift] = affine.clone();
            let residual = residual.then(|| tensor(9, images, dtype, device, reference));
            let after = Epilogue { residual, activation };
            let batch = batch_norm_train(image.clone(), scale, shift, 1e-5, after, None, None);
            let convolved = conv2d(batch.output.clone(), weight.clone(), None, options, false);
            match norm {
                Norm::BeforeTwo(..) => {
                    let other = tensor(10, weight.dims(), dtype, device, reference);
                    convolved + conv2d(batch.output, other, None, options, false)
                }
                Norm::BeforeOther(..) => convolved + batch.output.mul_scalar(0.5),
                _ => convolved,
            }
        }
        _ => conv2d(image.clone(), weight.clone(), bias.clone(), options, relu),
    };
    let (output, statistics) = match norm {
        Norm::Next | Norm::Later => {
            let output = if norm == Norm::Later { output.mul_scalar(2.0).add_scalar(1.0) } else { output };
            let vector = |seed: u64| Tensor::<1>::from_data(TensorData::new(numbers(seed, outputs), [outputs]), device);
            let [mean, variance] = [7, 8].map(|seed| vector(seed).inner());
            let running = Some(RunningStats { mean, variance, momentum: 0.1 });
            let batch = batch_norm_train(output, vector(5), vector(6), 1e-5, Epilogue::default(), None, running);
            (batch.output, vec![batch.mean, batch.variance])
        }
        _ => (output, Vec::new()),
    };
    let grad_output =
        Tensor::<4>::from_data(TensorData::new(numbers(4, output.shape().num_elements()), output.dims()), device);
    // The gradient is rounded in the same way.
    let grad_output = if dtype == DType::BF16 { grad_output.cast(FloatDType::BF16) } else { grad_output };
    let grad_output = if reference { grad_output.cast(FloatDType::F32) } else { grad_output };
    let mut gradients = (output.clone() * grad_output).sum().backward();
    let mut found = vec![values(output.flatten::<1>(0, 3))?];
    for tensor in [&image, &weight] {
        let gradient = tensor.grad_remove(&mut gradients).ok_or("no gradient")?;
        found.push(values(gradient.flatten::<1>(0, 3))?);
    }
    for statistic in statistics {
        found.push(values(statistic)?);
    }
    for vector in &affine {
        if let Some(gradient) = vector.grad_remove(&mut gradients) {
            found.push(values(gradient)?);
        }
    }
    if let Some(bias) = bias {
        found.push(values(bias.grad_remove(&mut gradients).ok_or("no gradient")?)?);
    }
    Ok(found)
}

/// Returns a convolution of random shape, also with narrow groups, windows that are larger than the images, and strides.
fn random_case(seed: u64) -> Case {
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    // A number from `first` to `last`.
    let mut draw = |first: usize, last: usize| {
        for shift in [13, 7, 17] {
            state ^= if shift == 7 { state >> shift } else { state << shift };
        }
        first + (state >> 33) as usize % (last - first + 1)
    };
    let groups = [1, 1, 2, 3, 8, 19, 32][draw(0, 6)];
    let widest = if groups > 3 { 12 } else { 80 };
    let (inputs, outputs) = (draw(1, widest), draw(1, widest));
    let (window, dilation) = ([draw(1, 4), draw(1, 4)], draw(1, 2));
    let stride = if dilation == 1 { draw(1, 3) } else { 1 };
    let padding = draw(0, window[0].min(window[1]) - 1) * dilation;
    // At least one window fits.
    let extent = (window[0].max(window[1]) - 1) * dilation + 1;
    let image = [draw(1, 4), groups * inputs, draw(extent, extent + 8), draw(extent, extent + 8)];
    let case = Case::new(image, groups * outputs, window, stride, padding).groups(groups).dilation(dilation);
    if draw(0, 1) == 1 { case.bias(false) } else { case }
}

/// Prints one line per case, of which `random` have random shapes. Returns whether all are correct. `alternate`: each case has one
/// element type, f32 and bf16 in turn.
pub fn run(random: usize, alternate: bool) -> Result<bool, String> {
    let (gpu, cpu) = (crate::first_gpu()?, Device::flex().autodiff());
    println!("{:62} {:>6} {:>9} {:>9} {:>9} {:>9}", "convolution", "type", "output", "of image", "of weight", "limit");
    let mut all_passed = true;
    let cases = CASES.into_iter().chain((0..random as u64).map(random_case));
    for (case, index) in cases.zip(0..) {
        let case = &case;
        for (dtype, limit) in types(index, alternate) {
            let theirs = results(case, dtype, &cpu, true)?;
            let ours = results(case, dtype, &gpu, false)?;
            if ours.len() != theirs.len() || ours.iter().zip(&theirs).any(|(a, b)| a.len() != b.len()) {
                return Err(format!("{case:?}: the shapes of the results differ from the CPU"));
            }
            let errors: Vec<f32> =
                ours.iter().zip(&theirs).map(|(ours, theirs)| relative_error(ours, theirs)).collect();
            let passed = errors.iter().all(|&error| error <= limit);
            all_passed &= passed;
            let mark = if passed { "" } else { "  WRONG" };
            let Case { images, outputs, window: [down, across], options, .. } = case;
            let behind = match case.norm {
                Norm::None => "",
                Norm::Next => ", norm",
                Norm::Later => ", …, norm",
                Norm::Before(..) => ", behind norm",
                Norm::BeforeTwo(..) => ", two behind norm",
                Norm::BeforeOther(..) => " and another behind norm",
            };
            let name = format!(
                "{images:?} to {outputs}, {down}x{across}/{}, {} groups{behind}",
                options.stride[0], options.groups
            );
            println!(
                "{name:62} {:>6} {:9.1e} {:9.1e} {:9.1e} {limit:9.0e}{mark}",
                dtype.name(),
                errors[0],
                errors[1],
                errors[2]
            );
        }
    }
    Ok(all_passed)
}
