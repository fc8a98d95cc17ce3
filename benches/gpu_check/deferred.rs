//! Compares chains of convolutions and batch norms on a GPU, where the convolutions' kernels apply the batch norms to their input
//! ([`ops::Features`]), with the same chains as separate operations. The separate operations run on the CPU. With ReLU they run on
//! the GPU: tensor cores round, and the derivative of ReLU jumps where rounding changes a sign.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use ops::{
    Activation, ConvOptions, Epilogue, Features, FollowingNorm, RunningStats, add, batch_norm_train, concat,
    conv_batch_norm, conv2d, fuses_batch_norm, global_avg_pool, slice_channels, unflatten,
};

use super::convolutions::types;
use super::ops::{numbers, values};

/// A residual block: a convolution, batch norm and activation, a second convolution and batch norm, and what follows.
#[derive(Debug, Clone, Copy)]
struct Block {
    images: [usize; 4],
    /// Channels of both outputs.
    outputs: [usize; 2],
    /// Windows of both convolutions.
    windows: [usize; 2],
    /// Stride of the first convolution.
    stride: usize,
    /// Groups of both convolutions.
    groups: [usize; 2],
    activation: Activation,
    end: End,
    /// Whether the GPU's kernels apply the first and the second batch norm.
    fused: [bool; 2],
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    /// The second convolution's output; a batch norm does not follow.
    Convolution,
    /// The second batch norm's output.
    Norm,
    /// The mean over all pixels of the second batch norm's output, with the block's activation.
    NormMean,
    /// The sum with the block's input, or with a convolution of this input and its batch norm, and ReLU.
    Sum,
    /// As [`End::Sum`], with the block's input in f32 also if the rest is in bf16.
    SumOfF32,
    Projection,
    /// As [`End::Projection`]; a convolution reads the sum.
    ProjectionReader,
    /// The mean over all pixels of [`End::Sum`] or [`End::Projection`].
    SumMean,
    ProjectionMean,
    /// The second batch norm's output, in slices that are added and concatenated, as in DPN. Their gradients have padded rows.
    Slices,
    /// As [`End::Sum`]; two convolutions read the sum.
    TwoReaders,
    /// As [`End::Sum`]; a convolution and an operation that is not counted read the sum.
    OtherReader,
}

impl Block {
    const fn new(images: [usize; 4], outputs: [usize; 2], windows: [usize; 2], stride: usize, end: End) -> Self {
        Self { images, outputs, windows, stride, groups: [1; 2], activation: Activation::Relu, end, fused: [true; 2] }
    }

    const fn activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    const fn first_groups(mut self, groups: usize) -> Self {
        self.groups[0] = groups;
        self
    }

    const fn groups(mut self, groups: usize) -> Self {
        self.groups[1] = groups;
        self
    }

    const fn fused(mut self, fused: [bool; 2]) -> Self {
        self.fused = fused;
        self
    }

    /// Returns true if no result jumps where rounding changes a sign.
    fn is_smooth(&self) -> bool {
        !matches!(self.activation, Activation::Relu | Activation::Relu6)
            && matches!(self.end, End::Convolution | End::Norm | End::NormMean | End::Slices)
    }

    fn projects(&self) -> bool {
        matches!(self.end, End::Projection | End::ProjectionReader | End::ProjectionMean)
    }
}

/// Blocks with all tiles, strides and windows of the networks, images of odd sizes, and channels that are not a multiple of a
/// tile or of 16 bytes.
const BLOCKS: [Block; 33] = [
    Block::new([4, 64, 8, 8], [64, 64], [3, 3], 1, End::Convolution),
    Block::new([4, 64, 8, 8], [64, 64], [3, 3], 1, End::Norm),
    Block::new([4, 64, 8, 8], [64, 64], [3, 3], 1, End::Sum),
    Block::new([4, 64, 8, 8], [64, 128], [3, 3], 2, End::Projection),
    Block::new([3, 72, 9, 7], [40, 72], [1, 3], 1, End::TwoReaders),
    Block::new([2, 64, 7, 9], [64, 64], [3, 3], 1, End::OtherReader),
    Block::new([3, 24, 9, 7], [48, 40], [3, 1], 1, End::Slices).activation(Activation::Silu),
    // The largest tile, narrow tiles and several pieces of the weight gradient.
    Block::new([24, 16, 32, 32], [32, 128], [1, 1], 1, End::Projection),
    Block::new([12, 3, 32, 32], [24, 32], [3, 3], 1, End::Norm),
    Block::new([2, 16, 6, 6], [96, 24], [1, 1], 1, End::Norm).activation(Activation::Relu6),
    Block::new([3, 24, 9, 7], [40, 24], [1, 3], 2, End::Norm).activation(Activation::Silu),
    Block::new([3, 24, 9, 8], [40, 24], [1, 3], 1, End::Sum).activation(Activation::Silu),
    Block::new([2, 32, 5, 5], [80, 80], [3, 3], 1, End::Projection).groups(2),
    Block::new([1, 8, 6, 6], [8, 8], [3, 3], 1, End::Sum).activation(Activation::Identity),
    // Both batch norms in front of the sum are in one pass of the backward direction.
    Block::new([4, 64, 8, 8], [64, 128], [3, 3], 2, End::ProjectionReader),
    Block::new([3, 24, 9, 7], [40, 72], [1, 3], 1, End::ProjectionReader),
    // The mean over all pixels is in the pass of the output.
    Block::new([3, 24, 9, 7], [40, 24], [1, 3], 1, End::SumMean),
    Block::new([4, 64, 8, 8], [64, 128], [3, 3], 2, End::ProjectionMean),
    Block::new([3, 24, 9, 7], [40, 24], [1, 3], 2, End::NormMean),
    Block::new([2, 24, 4, 4], [40, 72], [1, 1], 1, End::NormMean).activation(Activation::Silu),
    // Several narrow groups in a product; the last product with fewer; products that are not a multiple of 16 bytes.
    Block::new([2, 32, 8, 8], [32, 32], [1, 3], 1, End::Norm).groups(4),
    Block::new([2, 24, 7, 9], [152, 152], [1, 3], 1, End::ProjectionReader).groups(19),
    Block::new([2, 16, 8, 8], [96, 96], [1, 3], 1, End::Norm).groups(32).activation(Activation::Silu),
    Block::new([2, 16, 6, 6], [168, 168], [1, 3], 1, End::Norm).groups(8).fused([true, false]),
    // Depthwise convolutions.
    Block::new([3, 16, 9, 7], [24, 24], [1, 3], 1, End::Norm).groups(24).activation(Activation::Relu6),
    Block::new([2, 24, 9, 8], [24, 40], [3, 1], 2, End::Norm).first_groups(24).activation(Activation::Silu),
    Block::new([2, 40, 7, 9], [40, 40], [3, 5], 1, End::ProjectionReader).first_groups(40).groups(40),
    Block::new([2, 64, 6, 6], [64, 64], [5, 3], 1, End::Sum).first_groups(64).groups(64),
    Block::new([2, 24, 5, 5], [24, 24], [1, 3], 1, End::NormMean).groups(24).activation(Activation::Silu),
    // Threads that process several runs of pixels.
    Block::new([17, 8, 32, 32], [128, 128], [1, 3], 1, End::Norm).groups(128),
    // Rows that are not a multiple of 16 bytes.
    Block::new([2, 16, 8, 8], [33, 24], [1, 3], 1, End::Norm).fused([false, true]),
    // The kernels do not compute GELU.
    Block::new([2, 16, 8, 8], [32, 24], [1, 3], 1, End::Norm).activation(Activation::Gelu).fused([false, true]),
    // A residual of another type.
    Block::new([3, 24, 9, 7], [40, 24], [1, 3], 1, End::SumOfF32),
];

/// A run of a block on a device.
struct Run<'a> {
    dtype: DType,
    device: &'a Device,
    /// Whether to use separate operations.
    reference: bool,
    /// Tensors with gradients.
    parameters: Vec<Tensor<1>>,
    images: Vec<Tensor<4>>,
    statistics: Vec<Tensor<1>>,
    fused: Vec<bool>,
}

impl Run<'_> {
    fn on_cpu(&self) -> bool {
        self.device.clone().inner() == Device::flex()
    }

    fn image<const D: usize>(&mut self, shape: [usize; D], scale: f32) -> Tensor<D> {
        let seed = (self.images.len() + self.parameters.len()) as u64 + 1;
        let data: Vec<f32> = numbers(seed, shape.iter().product()).iter().map(|x| x * scale).collect();
        let tensor = Tensor::<D>::from_data(TensorData::new(data, shape), self.device);
        // The CPU computes in f32 with the same numbers.
        let tensor = if self.dtype == DType::BF16 { tensor.cast(FloatDType::BF16) } else { tensor };
        if self.on_cpu() { tensor.cast(FloatDType::F32).detach() } else { tensor }.require_grad()
    }

    fn images(&mut self, shape: [usize; 4], scale: f32) -> Tensor<4> {
        let tensor = self.image(shape, scale);
        self.images.push(tensor.clone());
        tensor
    }

    fn vector(&mut self, channels: usize) -> Tensor<1> {
        let seed = (self.images.len() + self.parameters.len()) as u64 + 1;
        let data: Vec<f32> = numbers(seed, channels).iter().map(|x| x * 0.3 + 1.0).collect();
        let tensor = Tensor::<1>::from_data(TensorData::new(data, [channels]), self.device).require_grad();
        self.parameters.push(tensor.clone());
        tensor
    }

    /// Applies a convolution and a batch norm, and the epilogue if it is not a sum of fused operations, as the layers of networks
    /// do.
    fn conv_norm(&mut self, input: Features, conv: [usize; 4], mut epilogue: Epilogue) -> Features {
        let [outputs, window, stride, groups] = conv;
        let channels = input.source().dims()[1];
        let weight = self.images([outputs, channels / groups, window, window], 0.2);
        let affine = [0; 2].map(|_| self.vector(outputs));
        let options = options(window, stride, groups, true);
        let start = |value: f32| Tensor::<1>::full([outputs], value, &self.device.clone().inner());
        let running = RunningStats { mean: start(0.0), variance: start(1.0), momentum: 0.1 };
        let residual = epilogue.residual.take();
        let activation = if residual.is_some() { Activation::Identity } else { epilogue.activation };
        let fused = !self.reference && fuses_batch_norm(&input, weight.dims(), &options, activation);
        self.fused.push(fused);
        let (output, mean, variance) = if fused {
            let norm = FollowingNorm { affine, epsilon: 1e-5, running, activation };
            let found = conv_batch_norm(input, weight, options, norm);
            let output = match residual {
                Some(residual) => found.output.add(residual.into(), epilogue.activation),
                None => found.output,
            };
            (output, found.mean, found.variance)
        } else {
            let convolved = conv2d(input, weight, None, options, false);
            let ([scale, shift], epilogue) = (affine, Epilogue { residual, ..epilogue });
            let found = batch_norm_train(convolved, scale, shift, 1e-5, epilogue, None, Some(running));
            (found.output.into(), found.mean, found.variance)
        };
        self.statistics.extend([mean, variance]);
        output
    }

    fn block(&mut self, block: &Block) -> Tensor<4> {
        let Block { images, outputs, windows, stride, groups, activation, end, .. } = *block;
        let input = self.images(images, 1.0);
        let plain = |activation| Epilogue { residual: None, activation };
        let x = self.conv_norm(input.clone().into(), [outputs[0], windows[0], stride, groups[0]], plain(activation));
        let second = [outputs[1], windows[1], 1, groups[1]];
        let sum = match end {
            End::Convolution => {
                let weight = self.images([outputs[1], outputs[0], windows[1], windows[1]], 0.2);
                return conv2d(x, weight, None, options(windows[1], 1, 1, false), false);
            }
            End::Norm => return self.conv_norm(x, second, plain(Activation::Identity)).into_images(),
            End::Slices => {
                let x = self.conv_norm(x, second, plain(Activation::Identity)).into_images();
                let (one, other) = (slice_channels(x.clone(), 0..24), slice_channels(x.clone(), 16..40));
                return concat(vec![add(one, other), slice_channels(x, 24..40)]);
            }
            End::NormMean => self.conv_norm(x, second, plain(activation)),
            _ if block.projects() && self.reference => {
                let projection = [outputs[1], 1, stride, 1];
                let residual = self.conv_norm(input.into(), projection, plain(Activation::Identity)).into_images();
                self.conv_norm(x, second, Epilogue { residual: Some(residual), activation: Activation::Relu })
            }
            _ if block.projects() => {
                let projection = [outputs[1], 1, stride, 1];
                let residual = self.conv_norm(input.into(), projection, plain(Activation::Identity));
                self.conv_norm(x, second, plain(Activation::Identity)).add(residual, Activation::Relu)
            }
            End::SumOfF32 => {
                let residual = Some(input.cast(FloatDType::F32));
                self.conv_norm(x, second, Epilogue { residual, activation: Activation::Relu })
            }
            _ => self.conv_norm(x, second, Epilogue { residual: Some(input), activation: Activation::Relu }),
        };
        if matches!(end, End::NormMean | End::SumMean | End::ProjectionMean) {
            return unflatten(global_avg_pool(sum));
        }
        let sum = sum.into_images();
        let mut read = |sum: Tensor<4>| {
            let weight = self.images([16, outputs[1], 3, 3], 0.2);
            conv2d(sum, weight, None, options(3, 1, 1, false), false)
        };
        match end {
            End::ProjectionReader => read(sum),
            End::TwoReaders => read(sum.clone()) + read(sum),
            End::OtherReader => read(sum.clone()) + sum.slice_dim(1, 0..16).mul_scalar(0.5),
            _ => sum,
        }
    }
}

fn options(window: usize, stride: usize, groups: usize, norm_follows: bool) -> ConvOptions {
    ConvOptions { stride: [stride; 2], padding: [window / 2; 2], dilation: [1, 1], groups, norm_follows }
}

/// Returns output, statistics and all gradients, and which batch norms were fused.
fn results(
    block: &Block,
    dtype: DType,
    device: &Device,
    reference: bool,
) -> Result<(Vec<Vec<f32>>, Vec<bool>), String> {
    let (parameters, images, statistics, fused) = Default::default();
    let mut run = Run { dtype, device, reference, parameters, images, statistics, fused };
    let output = run.block(block);
    let grad_output =
        Tensor::<4>::from_data(TensorData::new(numbers(99, output.shape().num_elements()), output.dims()), device);
    // A mean is f32.
    let bf16 = output.dtype() == DType::BF16;
    let grad_output = if bf16 { grad_output.cast(FloatDType::BF16) } else { grad_output };
    let mut gradients = (output.clone() * grad_output).sum().backward();
    let mut found = vec![values(output.flatten::<1>(0, 3))?];
    for statistic in run.statistics {
        found.push(values(statistic)?);
    }
    for tensor in &run.images {
        let gradient = tensor.grad_remove(&mut gradients).ok_or("an image or a weight has no gradient")?;
        found.push(values(gradient.flatten::<1>(0, 3))?);
    }
    for vector in &run.parameters {
        found.push(values(vector.grad_remove(&mut gradients).ok_or("a vector has no gradient")?)?);
    }
    Ok((found, run.fused))
}

/// Returns the root mean square of the differences divided by that of the values.
fn relative_rms_error(ours: &[f32], theirs: &[f32]) -> f32 {
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x) * f64::from(x)).sum::<f64>();
    let differences = squares(&mut ours.iter().zip(theirs).map(|(a, b)| a - b));
    (differences / squares(&mut theirs.iter().copied()).max(1e-30)).sqrt() as f32
}

/// Prints one line per case. Returns whether all are correct. `alternate`: as for convolutions.
pub fn run(alternate: bool) -> Result<bool, String> {
    let (gpu, cpu) = (crate::first_gpu()?, Device::flex().autodiff());
    println!("{:78} {:>6} {:>9} {:>9} {:>9}", "convolutions and batch norms", "type", "output", "others", "limit");
    let mut all_passed = true;
    for (index, block) in BLOCKS.iter().enumerate() {
        for (dtype, limit) in types(index, alternate) {
            // Separate operations round the residual to bf16, so a few derivatives of ReLU differ.
            let limit = match dtype {
                DType::BF16 if block.projects() => 0.1,
                // A batch norm's backward pass subtracts most of the gradient of a mean, and more of the rounding remains.
                DType::BF16 if block.end == End::NormMean => 2e-2,
                _ => limit,
            };
            let (theirs, _) = results(block, dtype, if block.is_smooth() { &cpu } else { &gpu }, true)?;
            let (ours, mut fused) = results(block, dtype, &gpu, false)?;
            if ours.len() != theirs.len() || ours.iter().zip(&theirs).any(|(a, b)| a.len() != b.len()) {
                return Err(format!("{block:?}: the shapes of the results differ"));
            }
            let errors: Vec<f32> =
                ours.iter().zip(&theirs).map(|(ours, theirs)| relative_rms_error(ours, theirs)).collect();
            let most = errors.iter().skip(1).fold(0.0f32, |most, &error| if error <= most { most } else { error });
            if block.projects() {
                fused.remove(1);
            }
            let expected = fused.iter().zip(block.fused).all(|(&fused, expected)| fused == expected);
            let passed = errors.iter().all(|&error| error <= limit) && expected;
            all_passed &= passed;
            let mark = if passed { "" } else { "  WRONG" };
            let Block { images, outputs, windows, stride, groups, activation, end, .. } = block;
            let name =
                format!("{images:?} to {outputs:?}, {windows:?}/{stride}, {groups:?} groups, {activation:?}, {end:?}");
            println!("{name:78} {:>6} {:9.1e} {most:9.1e} {limit:9.0e}{mark}", dtype.name(), errors[0]);
            if !passed {
                println!("    fused: {fused:?}, errors: {errors:?}");
            }
        }
    }
    Ok(all_passed)
}
