//! The kernel traits for burn's CubeCL backend.

use burn::backend::Cube;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use super::{activation, conv, deferred, head, join, loss, norm, norm_backward, scale};
use crate::channels::{ChannelKernels, Join, impl_channels_without_autodiff};
use crate::deferred::{ApplyOptions, ConvNormGrads, ConvNormOptions, DeferredKernels, DeferredNorm, DeferredOps};
use crate::extension::{
    Activation, BatchNormGrads, ConvGrads, ConvKernels, ConvOptions, EvalOps, HeadKernels, NormKernels, NormOptions,
    impl_without_autodiff,
};

impl NormKernels for Cube {
    type SavedNorm = norm::SavedNorm;

    fn norm_forward(
        input: CubeTensor,
        weight: CubeTensor,
        bias: CubeTensor,
        residual: Option<CubeTensor>,
        options: NormOptions,
    ) -> ([CubeTensor; 3], norm::SavedNorm) {
        norm::forward(input, weight, bias, residual, options)
    }

    fn norm_backward(saved: norm::SavedNorm, grad: CubeTensor) -> BatchNormGrads<Self> {
        let norm_backward::Grads { input, weight, bias, residual } = norm_backward::backward(saved, grad);
        BatchNormGrads { input, weight, bias, residual }
    }

    fn activate_forward(input: CubeTensor, activation: Activation) -> CubeTensor {
        activation::forward(input, activation)
    }

    fn activate_backward(input: CubeTensor, grad: CubeTensor, activation: Activation) -> CubeTensor {
        activation::backward(input, grad, activation)
    }

    fn elementwise_add(left: CubeTensor, right: CubeTensor) -> CubeTensor {
        Self::float_add(left, right)
    }
}

impl HeadKernels for Cube {
    fn global_avg_pool_forward(input: CubeTensor) -> CubeTensor {
        head::global_avg_pool(input)
    }

    fn global_avg_pool_backward(
        size: [usize; 2],
        dtype: DType,
        grad: CubeTensor,
        addend: Option<CubeTensor>,
    ) -> CubeTensor {
        head::global_avg_pool_gradient(size, dtype, grad, addend)
    }

    fn cross_entropy_forward(logits: CubeTensor, targets: CubeTensor, scale: f32) -> [CubeTensor; 2] {
        loss::cross_entropy(logits, targets, scale)
    }
}

impl ConvKernels for Cube {
    type SavedConv = conv::SavedConv;

    fn conv_forward(
        input: CubeTensor,
        weight: CubeTensor,
        bias: Option<CubeTensor>,
        options: ConvOptions,
        relu: bool,
    ) -> (CubeTensor, conv::SavedConv) {
        conv::forward(input, weight, bias, options, relu)
    }

    fn conv_backward(
        saved: conv::SavedConv,
        grad: CubeTensor,
        addend: Option<CubeTensor>,
        required: [bool; 3],
    ) -> ConvGrads<Self> {
        conv::backward(saved, grad, addend, required)
    }
}

impl DeferredKernels for Cube {
    type SavedApply = deferred::SavedApply;
    type SavedConvNorm = deferred::SavedConvNorm;

    fn conv_norm_forward(
        input: CubeTensor,
        weight: CubeTensor,
        affine: [CubeTensor; 2],
        options: ConvNormOptions,
    ) -> ([CubeTensor; 4], deferred::SavedConvNorm) {
        deferred::conv_norm_forward(input, weight, affine, options)
    }

    fn conv_norm_backward(
        saved: deferred::SavedConvNorm,
        grad: CubeTensor,
        addend: Option<CubeTensor>,
        required: [bool; 2],
    ) -> ConvNormGrads<Self> {
        deferred::conv_norm_backward(saved, grad, addend, required)
    }

    fn conv_deferred_forward(
        input: CubeTensor,
        weight: CubeTensor,
        options: ConvOptions,
        norm: DeferredNorm,
    ) -> (CubeTensor, conv::SavedConv) {
        deferred::conv_deferred_forward(input, weight, &options, &norm)
    }

    fn apply_norm_forward(
        input: CubeTensor,
        residual: Option<CubeTensor>,
        options: ApplyOptions,
    ) -> (CubeTensor, deferred::SavedApply) {
        deferred::apply_forward(input, residual, &options)
    }

    fn apply_norm_backward(saved: deferred::SavedApply, grad: CubeTensor) -> CubeTensor {
        deferred::apply_backward(saved, grad)
    }
}

impl DeferredOps for Cube {
    fn conv_norm(
        input: CubeTensor,
        weight: CubeTensor,
        norm_weight: CubeTensor,
        norm_bias: CubeTensor,
        options: ConvNormOptions,
    ) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
        let ([output, statistics, mean, variance], _) =
            Self::conv_norm_forward(input, weight, [norm_weight, norm_bias], options);
        (output, statistics, mean, variance)
    }

    fn conv_deferred(input: CubeTensor, weight: CubeTensor, options: ConvOptions, norm: DeferredNorm) -> CubeTensor {
        Self::conv_deferred_forward(input, weight, options, norm).0
    }

    fn apply_norm(input: CubeTensor, options: ApplyOptions) -> CubeTensor {
        Self::apply_norm_forward(input, None, options).0
    }

    fn apply_norm_add(input: CubeTensor, residual: CubeTensor, options: ApplyOptions) -> CubeTensor {
        Self::apply_norm_forward(input, Some(residual), options).0
    }
}

impl ChannelKernels for Cube {
    fn scale_channels_forward(input: CubeTensor, factors: CubeTensor) -> CubeTensor {
        scale::scale_channels(input, factors)
    }

    fn scale_channels_backward(input: CubeTensor, factors: CubeTensor, grad: CubeTensor) -> [CubeTensor; 2] {
        scale::scale_channels_gradients(input, factors, grad)
    }

    fn join_forward(left: CubeTensor, right: CubeTensor, join: Join) -> CubeTensor {
        join::forward(left, right, join)
    }

    fn join_backward(
        output: Option<CubeTensor>,
        channels: [usize; 2],
        shared: usize,
        grad: CubeTensor,
    ) -> [CubeTensor; 2] {
        join::backward(output, channels, shared, grad)
    }
}

impl_without_autodiff!(Cube, CubeTensor);
impl_channels_without_autodiff!(Cube, CubeTensor);

impl EvalOps for Cube {
    fn norm_eval(
        input: CubeTensor,
        weight: CubeTensor,
        bias: CubeTensor,
        mean: CubeTensor,
        variance: CubeTensor,
        epsilon: f64,
        activation: Activation,
    ) -> CubeTensor {
        norm::eval(input, [weight, bias], [mean, variance], None, epsilon, activation)
    }

    fn norm_eval_add(
        input: CubeTensor,
        weight: CubeTensor,
        bias: CubeTensor,
        mean: CubeTensor,
        variance: CubeTensor,
        residual: CubeTensor,
        epsilon: f64,
        activation: Activation,
    ) -> CubeTensor {
        norm::eval(input, [weight, bias], [mean, variance], Some(residual), epsilon, activation)
    }
}
