//! Batch norm on a GPU: three launches forward, three backward, one in evaluation.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::super::extension::{Activation, NormOptions, Running};
use super::norm_kernels::{input_gradient, normalise, piece_gradients, piece_moments, whole_gradients, whole_moments};
use super::rows::{Blocks, Rows, all};
use super::update::cube;

/// What a batch norm keeps for its backward pass.
#[derive(Debug, Clone)]
pub struct KeptNorm {
    x: Rows,
    /// The output, where it tells what the ReLU let pass.
    out: Option<Rows>,
    statistics: Statistics,
    affine: [CubeTensor; 2],
    activation: Activation,
    adds: bool,
}

/// Mean, and one over the standard deviation; where `given`, the variance.
#[derive(Debug, Clone)]
struct Statistics {
    mean: CubeTensor,
    inverse: CubeTensor,
    given: bool,
}

pub(super) struct Grads {
    pub(super) input: CubeTensor,
    pub(super) weight: CubeTensor,
    pub(super) bias: CubeTensor,
    pub(super) residual: CubeTensor,
}

/// `activation((x - mean) · inverse · weight + bias + residual)`.
fn apply(
    x: &Rows,
    residual: Option<&Rows>,
    statistics: &Statistics,
    [weight, bias]: &[CubeTensor; 2],
    epsilon: f64,
    activation: Activation,
) -> Rows {
    let (out, second) = (x.output(), residual.unwrap_or(x));
    let Statistics { mean, inverse, given } = statistics;
    let vector = x.vector(&[second, &out], &[mean, inverse, weight, bias]);
    let blocks = Blocks::over(x, vector);
    // SAFETY: matrices have the rows and columns that the kernel is told, vectors an element a column.
    unsafe {
        normalise::launch_unchecked(
            x.client(),
            blocks.elementwise(),
            blocks.dim(),
            vector,
            x.arg(),
            second.arg(),
            all(mean),
            all(inverse),
            all(weight),
            all(bias),
            out.arg(),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            second.pitch(vector),
            out.pitch(vector),
            epsilon as f32,
            *given,
            residual.is_some(),
            activation,
            dtype_to_storage_type(x.dtype()),
        );
    }
    out
}

/// Output, mean and unbiased variance, the latter two as they go into the running ones if there are any.
pub(super) fn forward(
    input: CubeTensor,
    weight: CubeTensor,
    bias: CubeTensor,
    residual: Option<CubeTensor>,
    options: NormOptions,
) -> ([CubeTensor; 3], KeptNorm) {
    let NormOptions { epsilon, activation, running, .. } = options;
    let (x, residual) = (Rows::of(input), residual.map(Rows::of));
    let affine = [weight, bias].map(into_contiguous);
    let [mean, inverse, moved_mean, moved_variance] = [0; 4].map(|_| x.of_columns(1));
    let momentum = running.as_ref().map(|running| running.momentum);
    let old = running.map(|Running { mean, variance, .. }| {
        [mean, variance].map(|tensor| cube(&tensor).expect("running statistics are f32 and where the input is"))
    });
    // read where there are running ones, else bound and left alone
    let old = old.unwrap_or_else(|| [mean.clone(), inverse.clone()]);
    let vector = x.vector(&[], &[&old[0], &old[1]]);
    let blocks = Blocks::over(&x, vector);
    let ([piece, pieces], (count, dim)) = (blocks.pieces(), blocks.whole());
    let scratch = x.of_columns(2 * pieces);
    // SAFETY: as in `apply`; the scratch has two vectors a piece.
    unsafe {
        piece_moments::launch_unchecked(
            x.client(),
            blocks.reduction(),
            blocks.dim(),
            vector,
            x.arg(),
            all(&scratch),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            piece,
            dtype_to_storage_type(x.dtype()),
        );
        whole_moments::launch_unchecked(
            x.client(),
            count,
            dim,
            vector,
            all(&scratch),
            all(&old[0]),
            all(&old[1]),
            all(&mean),
            all(&inverse),
            all(&moved_mean),
            all(&moved_variance),
            x.rows(),
            blocks.columns,
            piece,
            pieces,
            epsilon as f32,
            momentum.unwrap_or(1.0) as f32,
            momentum.is_some(),
        );
    }
    let statistics = Statistics { mean, inverse, given: false };
    let out = apply(&x, residual.as_ref(), &statistics, &affine, epsilon, activation);
    let adds = residual.is_some();
    let kept = (adds && activation == Activation::Relu).then(|| out.clone());
    ([out.into_tensor(), moved_mean, moved_variance], KeptNorm { x, out: kept, statistics, affine, activation, adds })
}

pub(super) fn backward(kept: KeptNorm, grad: CubeTensor) -> Grads {
    let KeptNorm { x, out, statistics: Statistics { mean, inverse, .. }, affine: [weight, bias], activation, adds } =
        kept;
    let dy = Rows::of(grad.clone());
    // what is added has the same gradient, unless an activation lies behind it
    let keeps = adds && activation != Activation::Identity;
    let dx = x.output();
    let residual = keeps.then(|| x.output());
    let [sum, product] = [0; 2].map(|_| x.of_columns(1));
    let (second, third) = (out.as_ref().unwrap_or(&x), residual.as_ref().unwrap_or(&dx));
    let vector = x.vector(&[&dy, second, &dx, third], &[&weight, &bias]);
    let blocks = Blocks::over(&x, vector);
    let ([piece, pieces], (count, dim)) = (blocks.pieces(), blocks.whole());
    let scratch = x.of_columns(2 * pieces);
    // SAFETY: as in `forward`.
    unsafe {
        piece_gradients::launch_unchecked(
            x.client(),
            blocks.reduction(),
            blocks.dim(),
            vector,
            x.arg(),
            dy.arg(),
            second.arg(),
            all(&mean),
            all(&inverse),
            all(&weight),
            all(&bias),
            all(&scratch),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            dy.pitch(vector),
            second.pitch(vector),
            piece,
            out.is_some(),
            activation,
            dtype_to_storage_type(x.dtype()),
        );
        whole_gradients::launch_unchecked(
            x.client(),
            count,
            dim,
            vector,
            all(&scratch),
            all(&sum),
            all(&product),
            blocks.columns,
            pieces,
        );
        input_gradient::launch_unchecked(
            x.client(),
            blocks.elementwise(),
            blocks.dim(),
            vector,
            x.arg(),
            dy.arg(),
            second.arg(),
            all(&mean),
            all(&inverse),
            all(&weight),
            all(&bias),
            all(&sum),
            all(&product),
            dx.arg(),
            third.arg(),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            dy.pitch(vector),
            second.pitch(vector),
            dx.pitch(vector),
            out.is_some(),
            keeps,
            activation,
            dtype_to_storage_type(x.dtype()),
        );
    }
    let residual = residual.map_or(grad, Rows::into_tensor);
    Grads { input: dx.into_tensor(), weight: product, bias: sum, residual }
}

/// By given statistics, `[mean, variance]`.
pub(super) fn by(
    input: CubeTensor,
    affine: [CubeTensor; 2],
    given: [CubeTensor; 2],
    residual: Option<CubeTensor>,
    epsilon: f64,
    activation: Activation,
) -> CubeTensor {
    let (x, residual) = (Rows::of(input), residual.map(Rows::of));
    let [mean, variance] = given.map(into_contiguous);
    let statistics = Statistics { mean, inverse: variance, given: true };
    apply(&x, residual.as_ref(), &statistics, &affine.map(into_contiguous), epsilon, activation).into_tensor()
}
