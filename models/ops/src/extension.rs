//! Backend traits: `*Kernels` are computations without autodiff, `*Ops` the differentiable operations made from them.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use burn::tensor::{DType, Tensor};

use crate::statistics::StatisticsReduce;

/// Geometry of a convolution, as `torch.nn.functional.conv2d`. Pairs are `[vertical, horizontal]`, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvOptions {
    /// Distance between windows.
    pub stride: [usize; 2],
    /// Zero padding on either side.
    pub padding: [usize; 2],
    /// Distance between the taps of a window.
    pub dilation: [usize; 2],
    /// Number of groups of channels that are convolved separately.
    pub groups: usize,
    /// Whether a batch norm in training mode follows. The GPU kernel then also computes the moments of the convolution's output.
    pub norm_follows: bool,
}

impl ConvOptions {
    /// Returns the options of a convolution with stride 1, no padding and no dilation, which no batch norm follows.
    pub fn stride_one(groups: usize) -> Self {
        Self { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups, norm_follows: false }
    }
}

/// Geometry of a max pooling, as `torch.nn.functional.max_pool2d`. Pairs are `[vertical, horizontal]`, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolOptions {
    /// Size of a window.
    pub kernel: [usize; 2],
    /// Distance between windows.
    pub stride: [usize; 2],
    /// Padding with negative infinity on either side.
    pub padding: [usize; 2],
}

/// Elementwise activation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// No activation.
    #[default]
    Identity,
    /// Replaces negative values by zero. NaN stays NaN.
    Relu,
    /// Limits values to 0..6, `torch.nn.functional.relu6`. NaN stays NaN.
    Relu6,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `x / (1 + e^-x)`, `torch.nn.functional.silu` (<https://arxiv.org/abs/1710.05941>).
    Silu,
    /// `x · Φ(x)` with the normal distribution's Φ, `torch.nn.functional.gelu` (<https://arxiv.org/abs/1606.08415>). The exact
    /// form with erf, PyTorch's default, not the approximation with tanh.
    Gelu,
}

/// Options of a batch norm in training mode.
#[derive(Debug, Clone)]
pub struct NormOptions {
    /// Added to the variance before the square root.
    pub epsilon: f64,
    /// Applied last. With a residual, only [`Activation::Identity`] or [`Activation::Relu`]: the input of other activations is not
    /// saved.
    pub activation: Activation,
    /// Sums the statistics over all ranks that share the batch.
    pub process_group: Option<Arc<dyn StatisticsReduce>>,
    /// Running statistics to update; only the GPU kernels get them.
    pub running: Option<RunningStats>,
}

/// Running statistics of a batch norm.
#[derive(Debug, Clone)]
pub struct RunningStats {
    /// Exponential moving average of the batches' means, `[C]`, without autodiff.
    pub mean: Tensor<1>,
    /// Exponential moving average of the batches' unbiased variances, `[C]`, without autodiff.
    pub variance: Tensor<1>,
    /// Weight of the current batch.
    pub momentum: f64,
}

/// Gradients of a convolution or linear layer; `None` where not required.
#[derive(Debug)]
pub struct ConvGrads<B: Backend> {
    /// Of the input's shape.
    pub input: Option<FloatTensor<B>>,
    /// Of the weight's shape.
    pub weight: Option<FloatTensor<B>>,
    /// Of the bias's shape.
    pub bias: Option<FloatTensor<B>>,
}

/// Gradients of a batch norm.
#[derive(Debug)]
pub struct BatchNormGrads<B: Backend> {
    /// Of the input's shape.
    pub input: FloatTensor<B>,
    /// Of the weight's shape.
    pub weight: FloatTensor<B>,
    /// Of the bias's shape.
    pub bias: FloatTensor<B>,
    /// Of the residual's shape.
    pub residual: FloatTensor<B>,
}

/// Batch norm and activations of a backend without autodiff: forward and backward computations.
///
/// [`Self::norm_forward`] also returns the saved tensors that [`Self::norm_backward`] needs.
pub trait NormKernels: Backend {
    /// Saved tensors of a batch norm.
    type SavedNorm: Clone + Debug + Send + 'static;

    /// See [`batch_norm_train`](crate::batch_norm_train). Returns the output, the mean and the unbiased variance; with running
    /// statistics, their new values instead of the latter two.
    fn norm_forward(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        residual: Option<FloatTensor<Self>>,
        options: NormOptions,
    ) -> ([FloatTensor<Self>; 3], Self::SavedNorm);
    /// Computes all gradients from `grad`, the gradient of the output `[B, C, H, W]`.
    fn norm_backward(saved: Self::SavedNorm, grad: FloatTensor<Self>) -> BatchNormGrads<Self>;

    /// Applies an activation to every element.
    fn activate_forward(input: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self>;
    /// Computes the gradient of `input`.
    fn activate_backward(
        input: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        activation: Activation,
    ) -> FloatTensor<Self>;

    /// Adds two tensors of the same shape.
    fn elementwise_add(left: FloatTensor<Self>, right: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Convolutions of a backend without autodiff.
pub trait ConvKernels: NormKernels {
    /// Saved tensors of a convolution or linear layer.
    type SavedConv: Clone + Debug + Send + 'static;

    /// See [`conv2d`](crate::conv2d).
    fn conv_forward(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        options: ConvOptions,
        relu: bool,
    ) -> (FloatTensor<Self>, Self::SavedConv);
    /// Computes those gradients of `[input, weight, bias]` that are `required`. `addend` is added to the gradient of the input.
    fn conv_backward(
        saved: Self::SavedConv,
        grad: FloatTensor<Self>,
        addend: Option<FloatTensor<Self>>,
        required: [bool; 3],
    ) -> ConvGrads<Self>;
}

/// A classifier's head and the training loss, of a backend without autodiff.
pub trait HeadKernels: NormKernels {
    /// See [`global_avg_pool`](crate::global_avg_pool).
    fn global_avg_pool_forward(input: FloatTensor<Self>) -> FloatTensor<Self>;
    /// Computes the gradient of an input of `[height, width]` pixels and this element type from `grad` `[B, C]`, plus the `addend`
    /// `[B, C, H, W]`.
    fn global_avg_pool_backward(
        size: [usize; 2],
        dtype: DType,
        grad: FloatTensor<Self>,
        addend: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self>;

    /// See [`cross_entropy`](crate::cross_entropy). Returns the loss `[1]` and its gradient with respect to the logits.
    fn cross_entropy_forward(
        logits: FloatTensor<Self>,
        targets: FloatTensor<Self>,
        scale: f32,
    ) -> [FloatTensor<Self>; 2];
}

/// All other operations of a backend without autodiff.
pub trait LayerKernels: ConvKernels {
    /// Saved tensors of a max pooling.
    type SavedMaxPool: Clone + Debug + Send + 'static;

    /// Casts f32 to bf16 or bf16 to f32. The gradient is cast back by the same function.
    fn convert_forward(input: FloatTensor<Self>, dtype: DType) -> FloatTensor<Self>;

    /// See [`linear`](crate::linear). Its gradients are those of a convolution.
    fn linear_forward(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        relu: bool,
    ) -> (FloatTensor<Self>, Self::SavedConv);

    /// See [`flatten`](crate::flatten).
    fn flatten_forward(input: FloatTensor<Self>) -> FloatTensor<Self>;
    /// Computes the gradient of images of the shape `dims`.
    fn flatten_backward(dims: [usize; 4], grad: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`max_pool2d`](crate::max_pool2d).
    fn max_pool_forward(input: FloatTensor<Self>, options: PoolOptions) -> (FloatTensor<Self>, Self::SavedMaxPool);
    /// Computes the gradient of the input.
    fn max_pool_backward(saved: Self::SavedMaxPool, grad: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`concat`](crate::concat) and, if `interleaved`, [`interleave`](crate::interleave).
    fn concat_forward(parts: Vec<FloatTensor<Self>>, interleaved: bool) -> FloatTensor<Self>;
    /// Computes the gradients of parts with these numbers of channels.
    fn concat_backward(channels: &[usize], grad: FloatTensor<Self>, interleaved: bool) -> Vec<FloatTensor<Self>>;

    /// See [`slice_channels`](crate::slice_channels).
    fn slice_channels_forward(input: FloatTensor<Self>, first: usize, count: usize) -> FloatTensor<Self>;
    /// Computes the gradient of an input with `all` channels, from the gradient of a slice that starts at `first`.
    fn slice_channels_backward(all: usize, first: usize, grad: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Differentiable batch norm and activations. The functions' names differ from burn's, because both are in scope for the same
/// types. The macro does not support optional tensors, so an operation with an optional tensor has two functions.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cuda"))]
pub trait NormOps: Backend {
    /// See [`batch_norm_train`](crate::batch_norm_train).
    fn norm(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        options: NormOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
    /// [`Self::norm`] with a residual.
    fn norm_add(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        options: NormOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
    /// Applies an activation to every element.
    fn activate(input: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self>;
}

/// Differentiable convolutions.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cuda"))]
pub trait ConvOps: Backend {
    /// See [`conv2d`](crate::conv2d).
    fn conv(input: FloatTensor<Self>, weight: FloatTensor<Self>, options: ConvOptions, relu: bool)
    -> FloatTensor<Self>;
    /// [`Self::conv`] with a bias.
    fn conv_bias(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        options: ConvOptions,
        relu: bool,
    ) -> FloatTensor<Self>;
}

/// A classifier's head and the training loss, differentiable.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cuda"))]
pub trait HeadOps: Backend {
    /// See [`global_avg_pool`](crate::global_avg_pool).
    fn global_avg_pool(input: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`cross_entropy`](crate::cross_entropy).
    fn soft_cross_entropy(logits: FloatTensor<Self>, targets: FloatTensor<Self>, scale: f32) -> FloatTensor<Self>;
    /// Notes that the calling thread's next backward pass starts at this tensor, and returns the tensor.
    fn mark_backward_root(loss: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// All other differentiable operations.
#[backend_extension(Autodiff, Flex)]
pub trait LayerOps: Backend {
    /// See [`linear`](crate::linear).
    fn linear_bias(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        relu: bool,
    ) -> FloatTensor<Self>;
    /// Casts f32 to bf16 or bf16 to f32.
    fn convert(input: FloatTensor<Self>, dtype: DType) -> FloatTensor<Self>;
    /// See [`flatten`](crate::flatten).
    fn flatten(input: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`max_pool2d`](crate::max_pool2d).
    fn max_pool(input: FloatTensor<Self>, options: PoolOptions) -> FloatTensor<Self>;
    /// See [`concat`](crate::concat) and, if `interleaved`, [`interleave`](crate::interleave).
    fn concat_two(a: FloatTensor<Self>, b: FloatTensor<Self>, interleaved: bool) -> FloatTensor<Self>;
    /// See [`concat`](crate::concat).
    fn concat_three(a: FloatTensor<Self>, b: FloatTensor<Self>, c: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`slice_channels`](crate::slice_channels).
    fn slice_channels(input: FloatTensor<Self>, first: usize, count: usize) -> FloatTensor<Self>;
    /// See [`add`](crate::add).
    fn add(left: FloatTensor<Self>, right: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Operations that are not differentiable.
#[backend_extension(Flex, Cube: cfg(feature = "cuda"))]
pub trait EvalOps: Backend {
    /// See [`batch_norm_eval`](crate::batch_norm_eval).
    #[allow(clippy::too_many_arguments, reason = "the macro takes tensors as separate arguments")]
    fn norm_eval(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        epsilon: f64,
        activation: Activation,
    ) -> FloatTensor<Self>;
    /// [`Self::norm_eval`] with a residual.
    #[allow(clippy::too_many_arguments, reason = "the macro takes tensors as separate arguments")]
    fn norm_eval_add(
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

/// Implements [`ConvOps`], [`HeadOps`] and [`NormOps`] for a backend without autodiff, whose tensors are `$tensor`. Each
/// operation is the forward function without its saved tensors.
macro_rules! impl_without_autodiff {
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

        impl $crate::extension::HeadOps for $backend {
            fn global_avg_pool(input: $tensor) -> $tensor {
                Self::global_avg_pool_forward(input)
            }

            fn soft_cross_entropy(logits: $tensor, targets: $tensor, scale: f32) -> $tensor {
                let [loss, _] = Self::cross_entropy_forward(logits, targets, scale);
                loss
            }

            fn mark_backward_root(loss: $tensor) -> $tensor {
                loss
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
pub(crate) use impl_without_autodiff;
