//! The kernel traits for burn-flex, burn's CPU backend.

use std::sync::Arc;

use burn::backend::Flex;
use burn::tensor::{DType, Shape};
use burn_flex::FlexTensor;

use super::allocator::Buffer;
use super::batch_norm::{self, DerivativeAt, Stats};
use super::element::{Element, with_element};
use super::kernel::{MicroKernels, Operand};
use super::tensor::{Dense, image, row_major};
use super::{activation, channels, concat, conv, convert, loss, max_pool};
use crate::extension::{
    Activation, BatchNormGrads, ConvGrads, ConvKernels, ConvOptions, EvalOps, HeadKernels, LayerKernels, LayerOps,
    NormKernels, NormOptions, PoolOptions, impl_without_autodiff,
};
use crate::shape::{ConvShape, PoolShape};

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
    argmax: Arc<Buffer<u8>>,
}

fn f32_tensor(values: &[f32]) -> FlexTensor {
    let mut buffer = Buffer::new(values.len());
    buffer.copy_from_slice(values);
    row_major(buffer, [values.len()])
}

/// See [`NormKernels::norm_backward`].
fn norm_backward<E: Element>(saved: &SavedNorm, grad: Dense) -> BatchNormGrads<Flex> {
    let derivative_at = match &saved.output {
        Some(output) => DerivativeAt::Output(output.values()),
        None => DerivativeAt::Input(saved.options.activation),
    };
    let (x, dy) = (saved.input.values::<E>(), grad.values());
    let grads = batch_norm::backward(&saved.stats, x, dy, derivative_at, saved.options.process_group.as_deref());
    let dims = saved.input.dims4();
    BatchNormGrads {
        input: image(grads.x, dims),
        weight: f32_tensor(&grads.weight),
        bias: f32_tensor(&grads.bias),
        residual: grads.residual.map_or_else(|| grad.into_tensor(), |residual| image(residual, dims)),
    }
}

/// See [`ConvKernels::conv_backward`].
fn conv_backward<E: Operand>(saved: SavedConv, grad: &Dense, required: [bool; 3]) -> ConvGrads<Flex> {
    let SavedConv { shape, input, weight, output, linear } = saved;
    let masked = output.map(|output| activation::relu_grad::<E>(output.values(), grad.values()));
    let dy: &[E] = masked.as_deref().unwrap_or(grad.values());
    let [input_channels, output_channels] = shape.channels;
    ConvGrads {
        // The input's gradient comes first, because the next steps of the backward pass need it.
        input: required[0].then(|| {
            let dx = conv::data_grad(MicroKernels::<E>::best(), &shape, weight.values(), dy);
            match linear {
                true => row_major(dx, [shape.batch, input_channels]),
                false => image(dx, [shape.batch, input_channels, shape.input[0], shape.input[1]]),
            }
        }),
        weight: required[1].then(|| {
            let dw = conv::weight_grad(MicroKernels::<E>::best(), &shape, input.values(), dy);
            match linear {
                true => row_major(dw, [output_channels, input_channels]),
                false => row_major(dw, weight.dims4()),
            }
        }),
        bias: required[2].then(|| row_major(channels::channel_sums(dy, output_channels), [output_channels])),
    }
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
        let NormOptions { epsilon, activation, ref process_group, .. } = options;
        let (stats, output) = with_element!(input.dtype(), E => {
            let x = input.values::<E>();
            let stats = Stats::from_batch(x, weight.values(), bias.values(), epsilon, process_group.as_deref());
            let output = stats.apply(x, residual.as_ref().map(Dense::values::<E>), activation);
            (stats, image(output, input.dims4()))
        });
        let [mean, variance] = [&stats.mean, &stats.unbiased()].map(|values| f32_tensor(values));
        let saved =
            (activation == Activation::Relu && residual.is_some()).then(|| Dense::channels_last(output.clone()));
        ([output, mean, variance], SavedNorm { stats: Arc::new(stats), input, output: saved, options })
    }

    fn norm_backward(saved: SavedNorm, grad: FlexTensor) -> BatchNormGrads<Flex> {
        let grad = Dense::channels_last(grad);
        with_element!(grad.dtype(), E => norm_backward::<E>(&saved, grad))
    }

    fn activate_forward(input: FlexTensor, activation: Activation) -> FlexTensor {
        let input = Dense::natural(input);
        with_element!(input.dtype(), E => input.like(activation::forward::<E>(input.values(), activation)))
    }

    fn activate_backward(input: FlexTensor, grad: FlexTensor, activation: Activation) -> FlexTensor {
        let (input, grad) = (Dense::natural(input), Dense::natural(grad));
        with_element!(input.dtype(), E => {
            input.like(activation::backward::<E>(input.values(), grad.values(), activation))
        })
    }

    fn elementwise_add(left: FlexTensor, right: FlexTensor) -> FlexTensor {
        let (left, right) = (Dense::natural(left), Dense::natural(right));
        with_element!(left.dtype(), E => left.like(channels::add::<E>(left.values(), right.values())))
    }
}

impl HeadKernels for Flex {
    fn global_avg_pool_forward(input: FlexTensor) -> FlexTensor {
        let input = Dense::channels_last(input);
        let [batch, channels, height, width] = input.dims4();
        let means = with_element!(input.dtype(), E => {
            channels::mean::<E>(input.values(), batch, height * width, channels)
        });
        row_major(means, [batch, channels])
    }

    fn global_avg_pool_backward(
        [height, width]: [usize; 2],
        dtype: DType,
        grad: FlexTensor,
        addend: Option<FlexTensor>,
    ) -> FlexTensor {
        let grad = Dense::row_major(grad);
        let [batch, channels] = grad.shape().dims();
        let dims = [batch, channels, height, width];
        let grad = with_element!(dtype, E => {
            image(channels::mean_grad::<E>(grad.values(), batch, height * width, channels), dims)
        });
        match addend {
            Some(addend) => Self::elementwise_add(addend, grad),
            None => grad,
        }
    }

    fn cross_entropy_forward(logits: FlexTensor, targets: FlexTensor, scale: f32) -> [FlexTensor; 2] {
        let (logits, targets) = (Dense::row_major(logits), Dense::row_major(targets));
        let classes = logits.shape()[1];
        let (loss, gradient) = loss::cross_entropy(logits.values(), targets.values(), classes, scale);
        [f32_tensor(&[loss]), logits.like(gradient)]
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
        let (weights, bias) = (weight.values(), bias.as_ref().map(Dense::values::<f32>));
        let dims = [shape.batch, shape.channels[1], shape.output[0], shape.output[1]];
        let output = with_element!(input.dtype(), E => {
            image(conv::forward(MicroKernels::<E>::best(), &shape, input.values(), weights, bias, relu), dims)
        });
        let saved = relu.then(|| Dense::channels_last(output.clone()));
        (output, SavedConv { shape, input, weight, output: saved, linear: false })
    }

    fn conv_backward(
        saved: SavedConv,
        grad: FlexTensor,
        addend: Option<FlexTensor>,
        required: [bool; 3],
    ) -> ConvGrads<Flex> {
        let grad = Dense::natural(grad);
        let mut found = with_element!(grad.dtype(), E => conv_backward::<E>(saved, &grad, required));
        if let Some(addend) = addend {
            found.input = found.input.map(|gradient| Self::elementwise_add(addend, gradient));
        }
        found
    }
}

impl LayerKernels for Flex {
    type SavedMaxPool = SavedMaxPool;

    fn convert_forward(input: FlexTensor, dtype: DType) -> FlexTensor {
        let input = Dense::natural(input);
        match (input.dtype(), dtype) {
            (DType::F32, DType::BF16) => input.like(convert::round(input.values())),
            (DType::BF16, DType::F32) => input.like(convert::widen_all::<half::bf16>(input.values())),
            (from, to) => panic!("no kernel casts {from:?} to {to:?}"),
        }
    }

    fn linear_forward(input: FlexTensor, weight: FlexTensor, bias: FlexTensor, relu: bool) -> (FlexTensor, SavedConv) {
        let (input, weight, bias) = (Dense::row_major(input), Dense::row_major(weight), Dense::row_major(bias));
        let ([batch, channels], [columns, depth]) = (input.shape().dims(), weight.shape().dims());
        let options = ConvOptions::stride_one(1);
        let shape = ConvShape::new([batch, channels, 1, 1], [columns, depth, 1, 1], &options);
        let (weights, biases) = (weight.values(), Some(bias.values()));
        let output = with_element!(input.dtype(), E => {
            row_major(conv::forward(MicroKernels::<E>::best(), &shape, input.values(), weights, biases, relu), [batch, columns])
        });
        let saved = relu.then(|| Dense::row_major(output.clone()));
        (output, SavedConv { shape, input, weight, output: saved, linear: true })
    }

    fn flatten_forward(input: FlexTensor) -> FlexTensor {
        let input = Dense::row_major_images(input);
        let [batch, channels, height, width] = input.dims4();
        input.into_tensor().reshape(Shape::from([batch, channels * height * width]))
    }

    fn flatten_backward(dims: [usize; 4], grad: FlexTensor) -> FlexTensor {
        let grad = Dense::row_major(grad).into_tensor();
        Dense::channels_last(grad.reshape(Shape::from(dims))).into_tensor()
    }

    fn max_pool_forward(input: FlexTensor, options: PoolOptions) -> (FlexTensor, SavedMaxPool) {
        let input = Dense::channels_last(input);
        let shape = PoolShape::new(input.dims4(), &options);
        let dims = [shape.batch, shape.channels, shape.output[0], shape.output[1]];
        let (output, argmax) = with_element!(input.dtype(), E => {
            let (output, argmax) = max_pool::forward::<E>(&shape, input.values());
            (image(output, dims), argmax)
        });
        (output, SavedMaxPool { shape, argmax: Arc::new(argmax) })
    }

    fn max_pool_backward(saved: SavedMaxPool, grad: FlexTensor) -> FlexTensor {
        let SavedMaxPool { shape, argmax } = saved;
        let grad = Dense::channels_last(grad);
        let dims = [shape.batch, shape.channels, shape.input[0], shape.input[1]];
        with_element!(grad.dtype(), E => image(max_pool::backward::<E>(&shape, &argmax, grad.values()), dims))
    }

    fn concat_forward(parts: Vec<FlexTensor>, interleaved: bool) -> FlexTensor {
        let parts: Vec<Dense> = parts.into_iter().map(Dense::channels_last).collect();
        let [batch, _, height, width] = parts[0].dims4();
        let dims = [batch, parts.iter().map(|part| part.dims4()[1]).sum(), height, width];
        with_element!(parts[0].dtype(), E => {
            let each: Vec<(&[E], usize)> = parts.iter().map(|part| (part.values(), part.dims4()[1])).collect();
            image(concat::concat(&each, batch * height * width, interleaved), dims)
        })
    }

    fn concat_backward(channels: &[usize], grad: FlexTensor, interleaved: bool) -> Vec<FlexTensor> {
        let grad = Dense::channels_last(grad);
        let [batch, _, height, width] = grad.dims4();
        with_element!(grad.dtype(), E => {
            let grads = concat::concat_grad::<E>(grad.values(), channels, batch * height * width, interleaved);
            grads.into_iter().zip(channels).map(|(grad, &c)| image(grad, [batch, c, height, width])).collect()
        })
    }

    fn slice_channels_forward(input: FlexTensor, first: usize, count: usize) -> FlexTensor {
        let input = Dense::channels_last(input);
        let [batch, all, height, width] = input.dims4();
        let (chosen, dims) = (first..first + count, [batch, count, height, width]);
        with_element!(input.dtype(), E => image(concat::slice::<E>(input.values(), all, chosen), dims))
    }

    fn slice_channels_backward(all: usize, first: usize, grad: FlexTensor) -> FlexTensor {
        let grad = Dense::channels_last(grad);
        let [batch, count, height, width] = grad.dims4();
        let (chosen, dims) = (first..first + count, [batch, all, height, width]);
        with_element!(grad.dtype(), E => image(concat::slice_grad::<E>(grad.values(), all, chosen), dims))
    }
}

impl_without_autodiff!(Flex, FlexTensor);

impl LayerOps for Flex {
    fn linear_bias(input: FlexTensor, weight: FlexTensor, bias: FlexTensor, relu: bool) -> FlexTensor {
        Self::linear_forward(input, weight, bias, relu).0
    }

    fn convert(input: FlexTensor, dtype: DType) -> FlexTensor {
        Self::convert_forward(input, dtype)
    }

    fn flatten(input: FlexTensor) -> FlexTensor {
        Self::flatten_forward(input)
    }

    fn max_pool(input: FlexTensor, options: PoolOptions) -> FlexTensor {
        Self::max_pool_forward(input, options).0
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
    with_element!(input.dtype(), E => {
        image(stats.apply(input.values(), residual.as_ref().map(Dense::values::<E>), activation), input.dims4())
    })
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
