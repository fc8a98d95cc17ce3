//! The operations as burn sees them: what a backend computes ([`Kernels`]) and what a graph records (`TrainingOps`).

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn::tensor::Tensor;

use crate::StatisticsReduce;

/// How a convolution's windows lie; each pair is `[vertical, horizontal]`, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvOptions {
    /// Step between windows.
    pub stride: [usize; 2],
    /// Zeros on either side.
    pub padding: [usize; 2],
    /// Step between the pixels of one window.
    pub dilation: [usize; 2],
    /// Number of groups of channels that do not see each other.
    pub groups: usize,
}

/// How a pooling's windows lie; each pair is `[vertical, horizontal]`, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolOptions {
    /// Size of a window.
    pub kernel: [usize; 2],
    /// Step between windows.
    pub stride: [usize; 2],
    /// Pixels on either side that never win.
    pub padding: [usize; 2],
}

/// What becomes of each value in the end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// It stays.
    #[default]
    Identity,
    /// Negative values become zero, NaN stays.
    Relu,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `x / (1 + e^-x)`, `torch.nn.functional.silu` (<https://arxiv.org/abs/1710.05941>).
    Swish,
}

/// How a batch norm in training mode normalises, and what follows.
#[derive(Debug, Clone)]
pub struct NormOptions {
    /// Added to the variance under the root.
    pub epsilon: f64,
    /// At the end. With a residual, one whose slope can be told from its result.
    pub activation: Activation,
    /// Adds the statistics up where the batch is shared.
    pub shared: Option<Arc<dyn StatisticsReduce>>,
    /// What the statistics go into; only a GPU's kernels are given it.
    pub running: Option<Running>,
}

/// Running statistics of a batch norm.
#[derive(Debug, Clone)]
pub struct Running {
    /// Exponential mean of the batches' means, `[C]`, without autodiff.
    pub mean: Tensor<1>,
    /// Exponential mean of the batches' unbiased variances, `[C]`, likewise.
    pub variance: Tensor<1>,
    /// Weight of the newest batch.
    pub momentum: f64,
}

/// Gradients of a convolution or linear layer.
#[derive(Debug)]
pub struct ConvGrads<B: Backend> {
    /// Like the input, if it was asked for.
    pub input: Option<FloatTensor<B>>,
    /// Like the weight, if it was asked for.
    pub weight: Option<FloatTensor<B>>,
    /// Like the bias, if it was asked for.
    pub bias: Option<FloatTensor<B>>,
}

/// Gradients of a batch norm.
#[derive(Debug)]
pub struct BatchNormGrads<B: Backend> {
    /// Like the input.
    pub input: FloatTensor<B>,
    /// Like the weight.
    pub weight: FloatTensor<B>,
    /// Like the bias.
    pub bias: FloatTensor<B>,
    /// Like the residual.
    pub residual: FloatTensor<B>,
}

/// Forward and backward computations of a backend that knows nothing of graphs: normalisation and activations.
///
/// Each forward function gives, beside its result, what its backward function wants to have kept.
pub trait NormKernels: Backend {
    /// What a batch norm keeps.
    type Norm: Clone + Debug + Send + 'static;

    /// See [`batch_norm_train`](super::batch_norm_train): output, mean and unbiased variance, or the running ones.
    fn norm_forward(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        residual: Option<FloatTensor<Self>>,
        options: NormOptions,
    ) -> ([FloatTensor<Self>; 3], Self::Norm);
    /// All gradients.
    fn norm_backward(kept: Self::Norm, grad: FloatTensor<Self>) -> BatchNormGrads<Self>;

    /// An activation of each value.
    fn activate_forward(input: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self>;
    /// The gradient of an activation of `input`.
    fn activate_backward(
        input: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        activation: Activation,
    ) -> FloatTensor<Self>;

    /// The sum of two tensors of one shape.
    fn sum(left: FloatTensor<Self>, right: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Convolutions.
pub trait ConvKernels: NormKernels {
    /// What a convolution or linear layer keeps.
    type Conv: Clone + Debug + Send + 'static;

    /// See [`conv2d`](super::conv2d).
    fn conv_forward(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        options: ConvOptions,
        relu: bool,
    ) -> (FloatTensor<Self>, Self::Conv);
    /// The gradients, of `[input, weight, bias]` those that are `wanted`.
    fn conv_backward(kept: Self::Conv, grad: FloatTensor<Self>, wanted: [bool; 3]) -> ConvGrads<Self>;
}

/// The others.
pub trait Kernels: ConvKernels {
    /// What a max pooling keeps.
    type Pool: Clone + Debug + Send + 'static;

    /// See [`linear`](super::linear); its gradients are those of a convolution.
    fn dense_forward(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        relu: bool,
    ) -> (FloatTensor<Self>, Self::Conv);

    /// See [`max_pool2d`](super::max_pool2d).
    fn pool_forward(input: FloatTensor<Self>, options: PoolOptions) -> (FloatTensor<Self>, Self::Pool);
    /// The gradient of the input.
    fn pool_backward(kept: Self::Pool, grad: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`global_avg_pool`](super::global_avg_pool).
    fn pixel_mean_forward(input: FloatTensor<Self>) -> FloatTensor<Self>;
    /// The gradient of an input of `[height, width]` pixels.
    fn pixel_mean_backward(size: [usize; 2], grad: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`concat`](super::concat) and, `in_turn`, [`interleave`](super::interleave).
    fn join_forward(parts: Vec<FloatTensor<Self>>, in_turn: bool) -> FloatTensor<Self>;
    /// The gradients of parts of so many channels.
    fn join_backward(channels: &[usize], grad: FloatTensor<Self>, in_turn: bool) -> Vec<FloatTensor<Self>>;

    /// See [`channels`](super::channels).
    fn some_forward(input: FloatTensor<Self>, first: usize, count: usize) -> FloatTensor<Self>;
    /// The gradient of an input of `all` channels, of which those from `first` on were taken.
    fn some_backward(all: usize, first: usize, grad: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`scale_channels`](super::scale_channels).
    fn scale_forward(input: FloatTensor<Self>, factors: FloatTensor<Self>) -> FloatTensor<Self>;
    /// The gradients of input and factors.
    fn scale_backward(
        input: FloatTensor<Self>,
        factors: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2];
}

/// Operations with a backward pass: normalisation and activations. Names differ from burn's own on purpose: both are in scope
/// on the same types. The macro takes no optional tensors, hence the pairs.
#[backend_extension(Autodiff, Flex, Cube: cfg(all(feature = "cuda", not(feature = "fusion"))))]
pub trait NormOps: Backend {
    /// See [`batch_norm_train`](super::batch_norm_train).
    fn norm(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        options: NormOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
    /// The same with a residual.
    fn norm_add(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        options: NormOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
    /// An activation of each value.
    fn activate(input: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self>;
}

/// Convolutions with a backward pass.
#[backend_extension(Autodiff, Flex, Cube: cfg(all(feature = "cuda", not(feature = "fusion"))))]
pub trait ConvOps: Backend {
    /// See [`conv2d`](super::conv2d).
    fn conv(input: FloatTensor<Self>, weight: FloatTensor<Self>, options: ConvOptions, relu: bool)
    -> FloatTensor<Self>;
    /// The same with a bias.
    fn conv_bias(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        options: ConvOptions,
        relu: bool,
    ) -> FloatTensor<Self>;
}

/// The other operations with a backward pass.
#[backend_extension(Autodiff, Flex)]
pub trait TrainingOps: Backend {
    /// See [`linear`](super::linear).
    fn dense(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        relu: bool,
    ) -> FloatTensor<Self>;
    /// See [`max_pool2d`](super::max_pool2d).
    fn pool(input: FloatTensor<Self>, options: PoolOptions) -> FloatTensor<Self>;
    /// See [`global_avg_pool`](super::global_avg_pool).
    fn pixel_mean(input: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`scale_channels`](super::scale_channels).
    fn scale(input: FloatTensor<Self>, factors: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`concat`](super::concat) and, `in_turn`, [`interleave`](super::interleave).
    fn join_two(a: FloatTensor<Self>, b: FloatTensor<Self>, in_turn: bool) -> FloatTensor<Self>;
    /// See [`concat`](super::concat).
    fn join_three(a: FloatTensor<Self>, b: FloatTensor<Self>, c: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`channels`](super::channels).
    fn some(input: FloatTensor<Self>, first: usize, count: usize) -> FloatTensor<Self>;
    /// See [`add`](super::add).
    fn add(left: FloatTensor<Self>, right: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Operations without a backward pass.
#[backend_extension(Flex, Cube: cfg(all(feature = "cuda", not(feature = "fusion"))))]
pub trait EvalOps: Backend {
    /// See [`batch_norm_eval`](super::batch_norm_eval).
    #[allow(clippy::too_many_arguments, reason = "the macro takes tensors as arguments of their own")]
    fn norm_by(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        epsilon: f64,
        activation: Activation,
    ) -> FloatTensor<Self>;
    /// The same with a residual.
    #[allow(clippy::too_many_arguments, reason = "the macro takes tensors as arguments of their own")]
    fn norm_by_add(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        epsilon: f64,
        activation: Activation,
    ) -> FloatTensor<Self>;
}

/// A backend's convolutions, batch norm and activations where there is no graph: nothing is kept. Its tensors are `$tensor`.
macro_rules! forward_alone {
    ($backend:ty, $tensor:ty) => {
        impl $crate::extension::ConvOps for $backend {
            fn conv(input: $tensor, weight: $tensor, options: $crate::ConvOptions, relu: bool) -> $tensor {
                Self::conv_forward(input, weight, None, options, relu).0
            }

            fn conv_bias(
                input: $tensor,
                weight: $tensor,
                bias: $tensor,
                options: $crate::ConvOptions,
                relu: bool,
            ) -> $tensor {
                Self::conv_forward(input, weight, Some(bias), options, relu).0
            }
        }

        impl $crate::extension::NormOps for $backend {
            fn norm(
                input: $tensor,
                weight: $tensor,
                bias: $tensor,
                options: $crate::NormOptions,
            ) -> ($tensor, $tensor, $tensor) {
                let ([output, mean, variance], _) = Self::norm_forward(input, weight, bias, None, options);
                (output, mean, variance)
            }

            fn norm_add(
                input: $tensor,
                weight: $tensor,
                bias: $tensor,
                residual: $tensor,
                options: $crate::NormOptions,
            ) -> ($tensor, $tensor, $tensor) {
                let ([output, mean, variance], _) = Self::norm_forward(input, weight, bias, Some(residual), options);
                (output, mean, variance)
            }

            fn activate(input: $tensor, activation: $crate::Activation) -> $tensor {
                Self::activate_forward(input, activation)
            }
        }
    };
}
pub(super) use forward_alone;
