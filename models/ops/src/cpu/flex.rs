//! The kernels as an implementation for burn-flex.

use std::sync::Arc;

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::super::extension::{
    Activation, BatchNormGrads, ConvGrads, ConvKernels, ConvOptions, EvalOps, Kernels, NormKernels, NormOptions,
    PoolOptions, TrainingOps, forward_alone,
};
use super::batch_norm::{self, Slope, Stats};
use super::kernel::Isa;
use super::memory::Buffer;
use super::shape::{ConvShape, PoolShape};
use super::tensor::{Dense, image, row_major};
use super::{activation, channels, conv, join, max_pool};

/// What a convolution or linear layer keeps for its backward pass.
#[derive(Debug, Clone)]
pub struct KeptConv {
    shape: ConvShape,
    input: Dense,
    weight: Dense,
    /// The output, where a ReLU is part of the operation.
    output: Option<Dense>,
    /// Linear layer: gradients have two axes.
    dense: bool,
}

/// What a batch norm keeps for its backward pass.
#[derive(Debug, Clone)]
pub struct KeptNorm {
    stats: Arc<Stats>,
    input: Dense,
    /// The output, where it tells what the ReLU let pass.
    output: Option<Dense>,
    options: NormOptions,
}

/// What a max pooling keeps for its backward pass: the shape and the position of the largest value of each window.
#[derive(Debug, Clone)]
pub struct KeptPool {
    shape: PoolShape,
    choice: Arc<Buffer>,
}

fn vector(values: &[f32]) -> FlexTensor {
    let mut buffer = Buffer::new(values.len());
    buffer.copy_from_slice(values);
    row_major(buffer, [values.len()])
}

impl NormKernels for Flex {
    type Norm = KeptNorm;

    fn norm_forward(
        input: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        residual: Option<FlexTensor>,
        options: NormOptions,
    ) -> ([FlexTensor; 3], KeptNorm) {
        let (input, residual) = (Dense::channels_last(input), residual.map(Dense::channels_last));
        let (weight, bias) = (Dense::row_major(weight), Dense::row_major(bias));
        let NormOptions { epsilon, activation, ref shared, .. } = options;
        let stats = Stats::of(input.values(), weight.values(), bias.values(), epsilon, shared.as_deref());
        let output = stats.apply(input.values(), residual.as_ref().map(Dense::values), activation);
        let output = image(output, input.dims4());
        let [mean, variance] = [&stats.mean, &stats.unbiased()].map(|values| vector(values));
        let kept = (activation == Activation::Relu && residual.is_some()).then(|| Dense::channels_last(output.clone()));
        ([output, mean, variance], KeptNorm { stats: Arc::new(stats), input, output: kept, options })
    }

    fn norm_backward(kept: KeptNorm, grad: FlexTensor) -> BatchNormGrads<Flex> {
        let grad = Dense::channels_last(grad);
        let slope = match &kept.output {
            Some(output) => Slope::Output(output.values()),
            None => Slope::Input(kept.options.activation),
        };
        let found = batch_norm::backward(
            &kept.stats,
            kept.input.values(),
            grad.values(),
            slope,
            kept.options.shared.as_deref(),
        );
        let dims = kept.input.dims4();
        BatchNormGrads {
            input: image(found.x, dims),
            weight: vector(&found.weight),
            bias: vector(&found.bias),
            residual: found.residual.map_or_else(|| grad.into_tensor(), |residual| image(residual, dims)),
        }
    }

    fn activate_forward(input: FlexTensor, activation: Activation) -> FlexTensor {
        let input = Dense::natural(input);
        input.like(activation::forward(input.values(), activation))
    }

    fn activate_backward(input: FlexTensor, grad: FlexTensor, activation: Activation) -> FlexTensor {
        let (input, grad) = (Dense::natural(input), Dense::natural(grad));
        input.like(activation::backward(input.values(), grad.values(), activation))
    }

    fn sum(left: FlexTensor, right: FlexTensor) -> FlexTensor {
        let (left, right) = (Dense::natural(left), Dense::natural(right));
        left.like(channels::sum(left.values(), right.values()))
    }
}

impl ConvKernels for Flex {
    type Conv = KeptConv;

    fn conv_forward(
        input: FlexTensor,
        weight: FlexTensor,
        bias: Option<FlexTensor>,
        options: ConvOptions,
        relu: bool,
    ) -> (FlexTensor, KeptConv) {
        let (input, weight, bias) = (Dense::channels_last(input), Dense::row_major(weight), bias.map(Dense::row_major));
        let shape = ConvShape::new(input.dims4(), weight.dims4(), &options);
        let bias = bias.as_ref().map(Dense::values);
        let output = conv::forward(Isa::best(), &shape, input.values(), weight.values(), bias, relu);
        let output = image(output, [shape.batch, shape.channels[1], shape.output[0], shape.output[1]]);
        let kept = relu.then(|| Dense::channels_last(output.clone()));
        (output, KeptConv { shape, input, weight, output: kept, dense: false })
    }

    fn conv_backward(kept: KeptConv, grad: FlexTensor, wanted: [bool; 3]) -> ConvGrads<Flex> {
        let KeptConv { shape, input, weight, output, dense } = kept;
        let grad = Dense::natural(grad);
        let masked = output.map(|output| activation::relu_grad(output.values(), grad.values()));
        let dy: &[f32] = masked.as_deref().unwrap_or(grad.values());
        let isa = Isa::best();
        let [input_channels, output_channels] = shape.channels;
        ConvGrads {
            // The data's gradient first: what hangs on it comes next in the backward pass.
            input: wanted[0].then(|| {
                let dx = conv::data_grad(isa, &shape, weight.values(), dy);
                match dense {
                    true => row_major(dx, [shape.batch, input_channels]),
                    false => image(dx, [shape.batch, input_channels, shape.input[0], shape.input[1]]),
                }
            }),
            weight: wanted[1].then(|| {
                let dw = conv::weight_grad(isa, &shape, input.values(), dy);
                match dense {
                    true => row_major(dw, [output_channels, input_channels]),
                    false => row_major(dw, weight.dims4()),
                }
            }),
            bias: wanted[2].then(|| row_major(channels::channel_sums(dy, output_channels), [output_channels])),
        }
    }
}

impl Kernels for Flex {
    type Pool = KeptPool;

    fn dense_forward(input: FlexTensor, weight: FlexTensor, bias: FlexTensor, relu: bool) -> (FlexTensor, KeptConv) {
        let (input, weight, bias) = (Dense::row_major(input), Dense::row_major(weight), Dense::row_major(bias));
        let ([batch, channels], [columns, depth]) = (input.shape().dims(), weight.shape().dims());
        let options = ConvOptions { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1 };
        let shape = ConvShape::new([batch, channels, 1, 1], [columns, depth, 1, 1], &options);
        let output = conv::forward(Isa::best(), &shape, input.values(), weight.values(), Some(bias.values()), relu);
        let output = row_major(output, [batch, columns]);
        let kept = relu.then(|| Dense::row_major(output.clone()));
        (output, KeptConv { shape, input, weight, output: kept, dense: true })
    }

    fn pool_forward(input: FlexTensor, options: PoolOptions) -> (FlexTensor, KeptPool) {
        let input = Dense::channels_last(input);
        let shape = PoolShape::new(input.dims4(), &options);
        let (output, choice) = max_pool::forward(&shape, input.values());
        let output = image(output, [shape.batch, shape.channels, shape.output[0], shape.output[1]]);
        (output, KeptPool { shape, choice: Arc::new(choice) })
    }

    fn pool_backward(kept: KeptPool, grad: FlexTensor) -> FlexTensor {
        let KeptPool { shape, choice } = kept;
        let grad = Dense::channels_last(grad);
        let dx = max_pool::backward(&shape, choice.bytes(), grad.values());
        image(dx, [shape.batch, shape.channels, shape.input[0], shape.input[1]])
    }

    fn pixel_mean_forward(input: FlexTensor) -> FlexTensor {
        let input = Dense::channels_last(input);
        let [batch, channels, height, width] = input.dims4();
        row_major(channels::mean(input.values(), batch, height * width, channels), [batch, channels])
    }

    fn pixel_mean_backward([height, width]: [usize; 2], grad: FlexTensor) -> FlexTensor {
        let grad = Dense::row_major(grad);
        let [batch, channels] = grad.shape().dims();
        image(channels::mean_grad(grad.values(), batch, height * width, channels), [batch, channels, height, width])
    }

    fn join_forward(parts: Vec<FlexTensor>, in_turn: bool) -> FlexTensor {
        let parts: Vec<Dense> = parts.into_iter().map(Dense::channels_last).collect();
        let each: Vec<(&[f32], usize)> = parts.iter().map(|part| (part.values(), part.dims4()[1])).collect();
        let [batch, _, height, width] = parts[0].dims4();
        let all = each.iter().map(|part| part.1).sum();
        image(join::join(&each, batch * height * width, in_turn), [batch, all, height, width])
    }

    fn join_backward(channels: &[usize], grad: FlexTensor, in_turn: bool) -> Vec<FlexTensor> {
        let grad = Dense::channels_last(grad);
        let [batch, _, height, width] = grad.dims4();
        let grads = join::split(grad.values(), channels, batch * height * width, in_turn);
        grads.into_iter().zip(channels).map(|(grad, &c)| image(grad, [batch, c, height, width])).collect()
    }

    fn some_forward(input: FlexTensor, first: usize, count: usize) -> FlexTensor {
        let input = Dense::channels_last(input);
        let [batch, all, height, width] = input.dims4();
        image(join::some(input.values(), all, first..first + count), [batch, count, height, width])
    }

    fn some_backward(all: usize, first: usize, grad: FlexTensor) -> FlexTensor {
        let grad = Dense::channels_last(grad);
        let [batch, count, height, width] = grad.dims4();
        image(join::some_grad(grad.values(), all, first..first + count), [batch, all, height, width])
    }

    fn scale_forward(input: FlexTensor, factors: FlexTensor) -> FlexTensor {
        let (input, factors) = (Dense::channels_last(input), Dense::row_major(factors));
        input.like(channels::scale(input.values(), factors.values(), input.dims4()))
    }

    fn scale_backward(input: FlexTensor, factors: FlexTensor, grad: FlexTensor) -> [FlexTensor; 2] {
        let (input, grad) = (Dense::channels_last(input), Dense::channels_last(grad));
        let factors = Dense::row_major(factors);
        let dims = input.dims4();
        let [dx, sums] = channels::scale_grad(input.values(), factors.values(), grad.values(), dims);
        [input.like(dx), row_major(sums, [dims[0], dims[1]])]
    }
}

forward_alone!(Flex, FlexTensor);

impl TrainingOps for Flex {
    fn dense(input: FlexTensor, weight: FlexTensor, bias: FlexTensor, relu: bool) -> FlexTensor {
        Self::dense_forward(input, weight, bias, relu).0
    }

    fn pool(input: FlexTensor, options: PoolOptions) -> FlexTensor {
        Self::pool_forward(input, options).0
    }

    fn pixel_mean(input: FlexTensor) -> FlexTensor {
        Self::pixel_mean_forward(input)
    }

    fn scale(input: FlexTensor, factors: FlexTensor) -> FlexTensor {
        Self::scale_forward(input, factors)
    }

    fn join_two(a: FlexTensor, b: FlexTensor, in_turn: bool) -> FlexTensor {
        Self::join_forward(vec![a, b], in_turn)
    }

    fn join_three(a: FlexTensor, b: FlexTensor, c: FlexTensor) -> FlexTensor {
        Self::join_forward(vec![a, b, c], false)
    }

    fn some(input: FlexTensor, first: usize, count: usize) -> FlexTensor {
        Self::some_forward(input, first, count)
    }

    fn add(left: FlexTensor, right: FlexTensor) -> FlexTensor {
        Self::sum(left, right)
    }
}

fn norm_by(
    input: FlexTensor,
    affine: [FlexTensor; 2],
    stats: [FlexTensor; 2],
    residual: Option<FlexTensor>,
    epsilon: f64,
    activation: Activation,
) -> FlexTensor {
    let (input, residual) = (Dense::channels_last(input), residual.map(Dense::channels_last));
    let ([weight, bias], [mean, variance]) = (affine.map(Dense::row_major), stats.map(Dense::row_major));
    let stats = Stats::given(mean.values(), variance.values(), weight.values(), bias.values(), epsilon);
    image(stats.apply(input.values(), residual.as_ref().map(Dense::values), activation), input.dims4())
}

impl EvalOps for Flex {
    fn norm_by(
        input: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        mean: FlexTensor,
        variance: FlexTensor,
        epsilon: f64,
        activation: Activation,
    ) -> FlexTensor {
        norm_by(input, [weight, bias], [mean, variance], None, epsilon, activation)
    }

    fn norm_by_add(
        input: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        mean: FlexTensor,
        variance: FlexTensor,
        residual: FlexTensor,
        epsilon: f64,
        activation: Activation,
    ) -> FlexTensor {
        norm_by(input, [weight, bias], [mean, variance], Some(residual), epsilon, activation)
    }
}
