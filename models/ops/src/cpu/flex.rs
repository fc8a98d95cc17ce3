//! The kernel traits for burn-flex, burn's CPU backend.

use std::sync::Arc;

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::allocator::Buffer;
use super::batch_norm::{self, DerivativeAt, Stats};
use super::kernel::Isa;
use super::shape::{ConvShape, PoolShape};
use super::tensor::{Dense, image, row_major};
use super::{activation, channels, concat, conv, max_pool};
use crate::extension::{
    Activation, BatchNormGrads, ConvGrads, ConvKernels, ConvOptions, EvalOps, Kernels, NormKernels, NormOptions,
    PoolOptions, TrainingOps, impl_without_autodiff,
};

/// Saved tensors of a convolution or linear layer.
#[derive(Debug, Clone)]
pub struct SavedConv {
    shape: ConvShape,
    input: Dense,
    weight: Dense,
    /// The output, if the operation includes ReLU.
    output: Option<Dense>,
    /// Whether the operation is a linear layer, whose gradients have two axes.
    linear: bool,
}

/// Saved tensors of a batch norm.
#[derive(Debug, Clone)]
pub struct SavedNorm {
    stats: Arc<Stats>,
    input: Dense,
    /// The output, if ReLU's derivative is computed from it.
    output: Option<Dense>,
    options: NormOptions,
}

/// Saved values of a max pooling: the shape, and the position of each window's largest value.
#[derive(Debug, Clone)]
pub struct SavedMaxPool {
    shape: PoolShape,
    argmax: Arc<Buffer>,
}

fn vector(values: &[f32]) -> FlexTensor {
    let mut buffer = Buffer::new(values.len());
    buffer.copy_from_slice(values);
    row_major(buffer, [values.len()])
}

impl NormKernels for Flex {
    type SavedNorm = SavedNorm;

    fn norm_forward(
        input: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        residual: Option<FlexTensor>,
        options: NormOptions,
    ) -> ([FlexTensor; 3], SavedNorm) {
        let (input, residual) = (Dense::channels_last(input), residual.map(Dense::channels_last));
        let (weight, bias) = (Dense::row_major(weight), Dense::row_major(bias));
        let NormOptions { epsilon, activation, ref shared, .. } = options;
        let stats = Stats::from_batch(input.values(), weight.values(), bias.values(), epsilon, shared.as_deref());
        let output = stats.apply(input.values(), residual.as_ref().map(Dense::values), activation);
        let output = image(output, input.dims4());
        let [mean, variance] = [&stats.mean, &stats.unbiased()].map(|values| vector(values));
        let saved =
            (activation == Activation::Relu && residual.is_some()).then(|| Dense::channels_last(output.clone()));
        ([output, mean, variance], SavedNorm { stats: Arc::new(stats), input, output: saved, options })
    }

    fn norm_backward(saved: SavedNorm, grad: FlexTensor) -> BatchNormGrads<Flex> {
        let grad = Dense::channels_last(grad);
        let derivative_at = match &saved.output {
            Some(output) => DerivativeAt::Output(output.values()),
            None => DerivativeAt::Input(saved.options.activation),
        };
        let grads = batch_norm::backward(
            &saved.stats,
            saved.input.values(),
            grad.values(),
            derivative_at,
            saved.options.shared.as_deref(),
        );
        let dims = saved.input.dims4();
        BatchNormGrads {
            input: image(grads.x, dims),
            weight: vector(&grads.weight),
            bias: vector(&grads.bias),
            residual: grads.residual.map_or_else(|| grad.into_tensor(), |residual| image(residual, dims)),
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

    fn elementwise_add(left: FlexTensor, right: FlexTensor) -> FlexTensor {
        let (left, right) = (Dense::natural(left), Dense::natural(right));
        left.like(channels::add(left.values(), right.values()))
    }
}

impl ConvKernels for Flex {
    type SavedConv = SavedConv;

    fn conv_forward(
        input: FlexTensor,
        weight: FlexTensor,
        bias: Option<FlexTensor>,
        options: ConvOptions,
        relu: bool,
    ) -> (FlexTensor, SavedConv) {
        let (input, weight, bias) = (Dense::channels_last(input), Dense::row_major(weight), bias.map(Dense::row_major));
        let shape = ConvShape::new(input.dims4(), weight.dims4(), &options);
        let bias = bias.as_ref().map(Dense::values);
        let output = conv::forward(Isa::best(), &shape, input.values(), weight.values(), bias, relu);
        let output = image(output, [shape.batch, shape.channels[1], shape.output[0], shape.output[1]]);
        let saved = relu.then(|| Dense::channels_last(output.clone()));
        (output, SavedConv { shape, input, weight, output: saved, linear: false })
    }

    fn conv_backward(saved: SavedConv, grad: FlexTensor, required: [bool; 3]) -> ConvGrads<Flex> {
        let SavedConv { shape, input, weight, output, linear } = saved;
        let grad = Dense::natural(grad);
        let masked = output.map(|output| activation::relu_grad(output.values(), grad.values()));
        let dy: &[f32] = masked.as_deref().unwrap_or(grad.values());
        let isa = Isa::best();
        let [input_channels, output_channels] = shape.channels;
        ConvGrads {
            // The input's gradient comes first, because the next steps of the backward pass need it.
            input: required[0].then(|| {
                let dx = conv::data_grad(isa, &shape, weight.values(), dy);
                match linear {
                    true => row_major(dx, [shape.batch, input_channels]),
                    false => image(dx, [shape.batch, input_channels, shape.input[0], shape.input[1]]),
                }
            }),
            weight: required[1].then(|| {
                let dw = conv::weight_grad(isa, &shape, input.values(), dy);
                match linear {
                    true => row_major(dw, [output_channels, input_channels]),
                    false => row_major(dw, weight.dims4()),
                }
            }),
            bias: required[2].then(|| row_major(channels::channel_sums(dy, output_channels), [output_channels])),
        }
    }
}

impl Kernels for Flex {
    type SavedMaxPool = SavedMaxPool;

    fn linear_forward(input: FlexTensor, weight: FlexTensor, bias: FlexTensor, relu: bool) -> (FlexTensor, SavedConv) {
        let (input, weight, bias) = (Dense::row_major(input), Dense::row_major(weight), Dense::row_major(bias));
        let ([batch, channels], [columns, depth]) = (input.shape().dims(), weight.shape().dims());
        let options = ConvOptions { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1 };
        let shape = ConvShape::new([batch, channels, 1, 1], [columns, depth, 1, 1], &options);
        let output = conv::forward(Isa::best(), &shape, input.values(), weight.values(), Some(bias.values()), relu);
        let output = row_major(output, [batch, columns]);
        let saved = relu.then(|| Dense::row_major(output.clone()));
        (output, SavedConv { shape, input, weight, output: saved, linear: true })
    }

    fn max_pool_forward(input: FlexTensor, options: PoolOptions) -> (FlexTensor, SavedMaxPool) {
        let input = Dense::channels_last(input);
        let shape = PoolShape::new(input.dims4(), &options);
        let (output, argmax) = max_pool::forward(&shape, input.values());
        let output = image(output, [shape.batch, shape.channels, shape.output[0], shape.output[1]]);
        (output, SavedMaxPool { shape, argmax: Arc::new(argmax) })
    }

    fn max_pool_backward(saved: SavedMaxPool, grad: FlexTensor) -> FlexTensor {
        let SavedMaxPool { shape, argmax } = saved;
        let grad = Dense::channels_last(grad);
        let dx = max_pool::backward(&shape, argmax.bytes(), grad.values());
        image(dx, [shape.batch, shape.channels, shape.input[0], shape.input[1]])
    }

    fn global_avg_pool_forward(input: FlexTensor) -> FlexTensor {
        let input = Dense::channels_last(input);
        let [batch, channels, height, width] = input.dims4();
        row_major(channels::mean(input.values(), batch, height * width, channels), [batch, channels])
    }

    fn global_avg_pool_backward([height, width]: [usize; 2], grad: FlexTensor) -> FlexTensor {
        let grad = Dense::row_major(grad);
        let [batch, channels] = grad.shape().dims();
        image(channels::mean_grad(grad.values(), batch, height * width, channels), [batch, channels, height, width])
    }

    fn concat_forward(parts: Vec<FlexTensor>, interleaved: bool) -> FlexTensor {
        let parts: Vec<Dense> = parts.into_iter().map(Dense::channels_last).collect();
        let each: Vec<(&[f32], usize)> = parts.iter().map(|part| (part.values(), part.dims4()[1])).collect();
        let [batch, _, height, width] = parts[0].dims4();
        let all = each.iter().map(|part| part.1).sum();
        image(concat::concat(&each, batch * height * width, interleaved), [batch, all, height, width])
    }

    fn concat_backward(channels: &[usize], grad: FlexTensor, interleaved: bool) -> Vec<FlexTensor> {
        let grad = Dense::channels_last(grad);
        let [batch, _, height, width] = grad.dims4();
        let grads = concat::concat_grad(grad.values(), channels, batch * height * width, interleaved);
        grads.into_iter().zip(channels).map(|(grad, &c)| image(grad, [batch, c, height, width])).collect()
    }

    fn slice_channels_forward(input: FlexTensor, first: usize, count: usize) -> FlexTensor {
        let input = Dense::channels_last(input);
        let [batch, all, height, width] = input.dims4();
        image(concat::slice(input.values(), all, first..first + count), [batch, count, height, width])
    }

    fn slice_channels_backward(all: usize, first: usize, grad: FlexTensor) -> FlexTensor {
        let grad = Dense::channels_last(grad);
        let [batch, count, height, width] = grad.dims4();
        image(concat::slice_grad(grad.values(), all, first..first + count), [batch, all, height, width])
    }

    fn scale_channels_forward(input: FlexTensor, factors: FlexTensor) -> FlexTensor {
        let (input, factors) = (Dense::channels_last(input), Dense::row_major(factors));
        input.like(channels::scale(input.values(), factors.values(), input.dims4()))
    }

    fn scale_channels_backward(input: FlexTensor, factors: FlexTensor, grad: FlexTensor) -> [FlexTensor; 2] {
        let (input, grad) = (Dense::channels_last(input), Dense::channels_last(grad));
        let factors = Dense::row_major(factors);
        let dims = input.dims4();
        let [dx, sums] = channels::scale_grad(input.values(), factors.values(), grad.values(), dims);
        [input.like(dx), row_major(sums, [dims[0], dims[1]])]
    }
}

impl_without_autodiff!(Flex, FlexTensor);

impl TrainingOps for Flex {
    fn linear_bias(input: FlexTensor, weight: FlexTensor, bias: FlexTensor, relu: bool) -> FlexTensor {
        Self::linear_forward(input, weight, bias, relu).0
    }

    fn max_pool(input: FlexTensor, options: PoolOptions) -> FlexTensor {
        Self::max_pool_forward(input, options).0
    }

    fn global_avg_pool(input: FlexTensor) -> FlexTensor {
        Self::global_avg_pool_forward(input)
    }

    fn scale_channels(input: FlexTensor, factors: FlexTensor) -> FlexTensor {
        Self::scale_channels_forward(input, factors)
    }

    fn concat_two(a: FlexTensor, b: FlexTensor, interleaved: bool) -> FlexTensor {
        Self::concat_forward(vec![a, b], interleaved)
    }

    fn concat_three(a: FlexTensor, b: FlexTensor, c: FlexTensor) -> FlexTensor {
        Self::concat_forward(vec![a, b, c], false)
    }

    fn slice_channels(input: FlexTensor, first: usize, count: usize) -> FlexTensor {
        Self::slice_channels_forward(input, first, count)
    }

    fn add(left: FlexTensor, right: FlexTensor) -> FlexTensor {
        Self::elementwise_add(left, right)
    }
}

fn norm_eval(
    input: FlexTensor,
    affine: [FlexTensor; 2],
    stats: [FlexTensor; 2],
    residual: Option<FlexTensor>,
    epsilon: f64,
    activation: Activation,
) -> FlexTensor {
    let (input, residual) = (Dense::channels_last(input), residual.map(Dense::channels_last));
    let ([weight, bias], [mean, variance]) = (affine.map(Dense::row_major), stats.map(Dense::row_major));
    let stats = Stats::from_running(mean.values(), variance.values(), weight.values(), bias.values(), epsilon);
    image(stats.apply(input.values(), residual.as_ref().map(Dense::values), activation), input.dims4())
}

impl EvalOps for Flex {
    fn norm_eval(
        input: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        mean: FlexTensor,
        variance: FlexTensor,
        epsilon: f64,
        activation: Activation,
    ) -> FlexTensor {
        norm_eval(input, [weight, bias], [mean, variance], None, epsilon, activation)
    }

    fn norm_eval_add(
        input: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        mean: FlexTensor,
        variance: FlexTensor,
        residual: FlexTensor,
        epsilon: f64,
        activation: Activation,
    ) -> FlexTensor {
        norm_eval(input, [weight, bias], [mean, variance], Some(residual), epsilon, activation)
    }
}
