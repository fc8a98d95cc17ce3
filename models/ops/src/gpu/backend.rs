//! The kernel traits for burn's CubeCL backend.

use burn::backend::Cube;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use super::{activation, conv, head, loss, norm};
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
        let norm::Grads { input, weight, bias, residual } = norm::backward(saved, grad);
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

    fn global_avg_pool_backward(size: [usize; 2], dtype: DType, grad: CubeTensor) -> CubeTensor {
        head::global_avg_pool_gradient(size, dtype, grad)
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

impl_without_autodiff!(Cube, CubeTensor);

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
