//! Batch norm on a GPU: three launches forward, three backward, one in evaluation. With the statistics of all ranks' batches,
//! another launch each way, and an all-gather between the GPUs: each rank merges all ranks' moments in rank order, so all ranks
//! have the same bits, and the host waits for nothing.

use std::sync::Arc;

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::moments::Moments;
use super::norm_kernels::{final_gradients, input_gradient, normalise, partial_gradients, shared_gradients};
use super::norm_moments::{final_moments, own_moments, partial_moments, shared_moments};
use super::rows::{Blocks, Rows, all};
use super::update::{cube, tensor_of, writable};
use crate::extension::{Activation, NormOptions, RunningStats};
use crate::statistics::StatisticsReduce;

/// Saved tensors of a batch norm.
#[derive(Debug, Clone)]
pub struct SavedNorm {
    x: Rows,
    /// The output, if ReLU's derivative is computed from it.
    out: Option<Rows>,
    statistics: Statistics,
    affine: [CubeTensor; 2],
    activation: Activation,
    has_residual: bool,
    shared: Option<Shared>,
}

/// The ranks whose batches share statistics.
#[derive(Debug, Clone)]
struct Shared {
    ranks: Arc<dyn StatisticsReduce>,
    /// The reciprocal of the number of all ranks' rows, for each column.
    part: CubeTensor,
}

/// Mean and reciprocal of the standard deviation; if `given`, `inverse` is the variance.
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

/// Gathers the ranks' vectors, each rank's one behind the other. Returns them and the number of ranks.
fn gather(ranks: &dyn StatisticsReduce, vectors: &[&CubeTensor]) -> (CubeTensor, usize) {
    let on_device = ranks.on_device().expect("`batch_norm_train` calls the GPU kernels only with such ranks");
    let gathered = on_device.all_gather(vectors.iter().map(|&vector| tensor_of(vector.clone())).collect());
    (cube(&gathered).expect("statistics are f32 and stay on the GPU"), on_device.world())
}

/// Computes `activation((x - mean) · inverse · weight + bias + residual)`.
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
    // SAFETY: matrices have the rows and columns that the kernel gets, and vectors one element per column.
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

/// Computes the moments of pieces of the rows. Returns them, and the rows of a piece.
fn partial(x: &Rows, blocks: &Blocks, vector: usize) -> (CubeTensor, usize) {
    let [piece, pieces] = blocks.pieces();
    let workspace = x.of_columns(2 * pieces);
    // SAFETY: as in `apply`; the workspace has two vectors per piece.
    unsafe {
        partial_moments::launch_unchecked(
            x.client(),
            blocks.reduction(),
            blocks.dim(),
            vector,
            x.arg(),
            all(&workspace),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            piece,
            dtype_to_storage_type(x.dtype()),
        );
    }
    (workspace, piece)
}

/// Returns the output, the mean and the unbiased variance. With running statistics, returns their new values instead of
/// the latter two.
pub(super) fn forward(
    input: CubeTensor,
    weight: CubeTensor,
    bias: CubeTensor,
    residual: Option<CubeTensor>,
    options: NormOptions,
) -> ([CubeTensor; 3], SavedNorm) {
    let NormOptions { epsilon, activation, running, shared } = options;
    let (x, residual) = (Rows::new(input), residual.map(Rows::new));
    let affine = [weight, bias].map(into_contiguous);
    let [mean, inverse] = [0; 2].map(|_| x.of_columns(1));
    let momentum = running.as_ref().map(|running| running.momentum);
    // Running statistics are updated in place: a graph of the step runs again on the same memory.
    let [new_mean, new_variance] = match running {
        Some(RunningStats { mean, variance, .. }) => [mean, variance]
            .map(|tensor| writable(tensor).expect("running statistics are f32 and on the input's device")),
        None => [0; 2].map(|_| x.of_columns(1)),
    };
    let vector = x.vector(&[], &[&new_mean, &new_variance]);
    let blocks = Blocks::over(&x, vector);
    let (workspace, piece) = match Moments::take(&x) {
        Some(moments) => (moments.pieces, moments.piece),
        None => partial(&x, &blocks, vector),
    };
    let pieces = x.rows().div_ceil(piece);
    let (count, dim) = blocks.final_reduction(pieces);
    let momentum_or_one = momentum.unwrap_or(1.0) as f32;
    let shared = if let Some(ranks) = shared {
        let [own_mean, own_squares, own_count, part] = [0; 4].map(|_| x.of_columns(1));
        // SAFETY: as above.
        unsafe {
            own_moments::launch_unchecked(
                x.client(),
                count.clone(),
                dim,
                vector,
                all(&workspace),
                all(&own_mean),
                all(&own_squares),
                all(&own_count),
                x.rows(),
                blocks.columns,
                piece,
                pieces,
            );
        }
        let (gathered, world) = gather(&*ranks, &[&own_mean, &own_squares, &own_count]);
        // SAFETY: as above; `gathered` has three vectors per rank.
        unsafe {
            shared_moments::launch_unchecked(
                x.client(),
                blocks.per_column(),
                blocks.per_column_dim(),
                vector,
                all(&gathered),
                all(&mean),
                all(&inverse),
                all(&new_mean),
                all(&new_variance),
                all(&part),
                blocks.columns,
                world,
                epsilon as f32,
                momentum_or_one,
                momentum.is_some(),
            );
        }
        Some(Shared { ranks, part })
    } else {
        // SAFETY: as above.
        unsafe {
            final_moments::launch_unchecked(
                x.client(),
                count,
                dim,
                vector,
                all(&workspace),
                all(&mean),
                all(&inverse),
                all(&new_mean),
                all(&new_variance),
                x.rows(),
                blocks.columns,
                piece,
                pieces,
                epsilon as f32,
                momentum_or_one,
                momentum.is_some(),
            );
        }
        None
    };
    let statistics = Statistics { mean, inverse, given: false };
    let out = apply(&x, residual.as_ref(), &statistics, &affine, epsilon, activation);
    let has_residual = residual.is_some();
    let saved = (has_residual && activation == Activation::Relu).then(|| out.clone());
    (
        [out.into_tensor(), new_mean, new_variance],
        SavedNorm { x, out: saved, statistics, affine, activation, has_residual, shared },
    )
}

/// Computes all gradients.
pub(super) fn backward(saved: SavedNorm, grad: CubeTensor) -> Grads {
    let SavedNorm {
        x,
        out,
        statistics: Statistics { mean, inverse, .. },
        affine: [weight, bias],
        activation,
        has_residual,
        shared,
    } = saved;
    let dy = Rows::new(grad.clone());
    // The residual's gradient is the output's, unless an activation follows.
    let separate_residual = has_residual && activation != Activation::Identity;
    let dx = x.output();
    let residual = separate_residual.then(|| x.output());
    let [sum, product] = [0; 2].map(|_| x.of_columns(1));
    let (second, third) = (out.as_ref().unwrap_or(&x), residual.as_ref().unwrap_or(&dx));
    let vector = x.vector(&[&dy, second, &dx, third], &[&weight, &bias]);
    let blocks = Blocks::over(&x, vector);
    let [piece, pieces] = blocks.pieces();
    let (count, dim) = blocks.final_reduction(pieces);
    let workspace = x.of_columns(2 * pieces);
    // SAFETY: as in `forward`.
    unsafe {
        partial_gradients::launch_unchecked(
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
            all(&workspace),
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
        final_gradients::launch_unchecked(
            x.client(),
            count,
            dim,
            vector,
            all(&workspace),
            all(&sum),
            all(&product),
            blocks.columns,
            pieces,
        );
    }
    // Weight and bias keep the sums over this rank's rows, which are reduced with all other gradients.
    let (all_sum, all_product, part) = match shared {
        None => (sum.clone(), product.clone(), 1.0 / x.rows() as f32),
        Some(Shared { ranks, part }) => {
            let (gathered, world) = gather(&*ranks, &[&sum, &product]);
            let [all_sum, all_product] = [0; 2].map(|_| x.of_columns(1));
            // SAFETY: as above; `gathered` has two vectors per rank.
            unsafe {
                shared_gradients::launch_unchecked(
                    x.client(),
                    blocks.per_column(),
                    blocks.per_column_dim(),
                    vector,
                    all(&gathered),
                    all(&part),
                    all(&all_sum),
                    all(&all_product),
                    blocks.columns,
                    world,
                );
            }
            (all_sum, all_product, 1.0)
        }
    };
    // SAFETY: as in `forward`.
    unsafe {
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
            all(&all_sum),
            all(&all_product),
            dx.arg(),
            third.arg(),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            dy.pitch(vector),
            second.pitch(vector),
            dx.pitch(vector),
            part,
            out.is_some(),
            separate_residual,
            activation,
            dtype_to_storage_type(x.dtype()),
        );
    }
    let residual = residual.map_or(grad, Rows::into_tensor);
    Grads { input: dx.into_tensor(), weight: product, bias: sum, residual }
}

/// Normalises with the given statistics, `[mean, variance]`.
pub(super) fn eval(
    input: CubeTensor,
    affine: [CubeTensor; 2],
    given: [CubeTensor; 2],
    residual: Option<CubeTensor>,
    epsilon: f64,
    activation: Activation,
) -> CubeTensor {
    let (x, residual) = (Rows::new(input), residual.map(Rows::new));
    let [mean, variance] = given.map(into_contiguous);
    let statistics = Statistics { mean, inverse: variance, given: true };
    apply(&x, residual.as_ref(), &statistics, &affine.map(into_contiguous), epsilon, activation).into_tensor()
}
