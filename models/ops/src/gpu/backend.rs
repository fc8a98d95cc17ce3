//! The kernels as an implementation for burn's CubeCL backend.

use burn::backend::Cube;
use burn::backend::ops::FloatTensorOps;
use burn_cubecl::tensor::CubeTensor;

use super::super::extension::{
    Activation, BatchNormGrads, ConvGrads, ConvKernels, ConvOptions, EvalOps, NormKernels, NormOptions, forward_alone,
};
use super::{activation, conv, norm};

impl NormKernels for Cube {
    type Norm = norm::KeptNorm;

    fn norm_forward(
        input: CubeTensor,
        weight: CubeTensor,
        bias: CubeTensor,
        residual: Option<CubeTensor>,
        options: NormOptions,
    ) -> ([CubeTensor; 3], norm::KeptNorm) {
        norm::forward(input, weight, bias, residual, options)
    }

    fn norm_backward(kept: norm::KeptNorm, grad: CubeTensor) -> BatchNormGrads<Self> {
        let norm::Grads { input, weight, bias, residual } = norm::backward(kept, grad);
        BatchNormGrads { input, weight, bias, residual }
    }

    fn activate_forward(input: CubeTensor, activation: Activation) -> CubeTensor {
        activation::forward(input, activation)
    }

    fn activate_backward(input: CubeTensor, grad: CubeTensor, activation: Activation) -> CubeTensor {
        activation::backward(input, grad, activation)
    }

    fn sum(left: CubeTensor, right: CubeTensor) -> CubeTensor {
        Self::float_add(left, right)
    }
}

impl ConvKernels for Cube {
    type Conv = conv::KeptConv;

    fn conv_forward(
        input: CubeTensor,
        weight: CubeTensor,
        bias: Option<CubeTensor>,
        options: ConvOptions,
        relu: bool,
    ) -> (CubeTensor, conv::KeptConv) {
        conv::forward(input, weight, bias, options, relu)
    }

    fn conv_backward(kept: conv::KeptConv, grad: CubeTensor, wanted: [bool; 3]) -> ConvGrads<Self> {
        conv::backward(kept, grad, wanted)
    }
}

forward_alone!(Cube, CubeTensor);

impl EvalOps for Cube {
    fn norm_by(
        input: CubeTensor,
        weight: CubeTensor,
        bias: CubeTensor,
        mean: CubeTensor,
        variance: CubeTensor,
        epsilon: f64,
        activation: Activation,
    ) -> CubeTensor {
        norm::by(input, [weight, bias], [mean, variance], None, epsilon, activation)
    }

    fn norm_by_add(
        input: CubeTensor,
        weight: CubeTensor,
        bias: CubeTensor,
        mean: CubeTensor,
        variance: CubeTensor,
        residual: CubeTensor,
        epsilon: f64,
        activation: Activation,
    ) -> CubeTensor {
        norm::by(input, [weight, bias], [mean, variance], Some(residual), epsilon, activation)
    }
}
