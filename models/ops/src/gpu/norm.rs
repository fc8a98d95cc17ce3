//! Batch norm on a GPU. Launches:
//!
//! - Forward: one, plus one if the convolution before it has not computed the moments.
//! - Backward: one, plus one if no convolution has computed the sums over the gradient.
//! - Evaluation: one.
//!
//! Synchronised batch norm takes two more launches forward and one more backward, and an all-gather between the GPUs in each
//! direction. Each rank merges the moments of all ranks in rank order, so all ranks have the same bits. The host never waits.

use std::sync::Arc;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::full_device_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::counters::counters;
use super::norm_kernels::{gradient_sums, input_gradient, normalise, normalise_batch, shared_gradients};
use super::norm_moments::{moments_of_rows, shared_moments};
use super::rows::{Blocks, Rows, all};
use super::side_results::{NormOutput, SideResults};
use super::storage::{storage_of, tensor_of_storage, writable_storage};
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
    /// The batch norms whose outputs are the input and the residual.
    sources: [Option<Arc<NormOutput>>; 2],
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

/// Gathers the vectors of all ranks, in rank order. Returns them and the world size.
fn gather(ranks: &dyn StatisticsReduce, vectors: &[&CubeTensor]) -> (CubeTensor, usize) {
    let on_device = ranks.on_device().expect("`batch_norm_train` calls the GPU kernels only with such ranks");
    let gathered = on_device.all_gather(vectors.iter().map(|&vector| tensor_of_storage(vector.clone())).collect());
    (storage_of(&gathered).expect("statistics are f32 and stay on the GPU"), on_device.world())
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
    let vector = x.vector_size(&[second, &out], &[mean, inverse, weight, bias]);
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

/// Returns each column's mean and the sum of squares around the mean, `[2][columns]`.
fn moments(x: &Rows, blocks: &Blocks, vector: usize) -> CubeTensor {
    let [piece, pieces] = blocks.pieces();
    let (workspace, total) = (x.of_columns(2 * pieces), x.of_columns(2));
    let [zeros, _] = counters(&total);
    // SAFETY: as in `apply`; the workspace has two vectors per piece, `total` has two, and a tile of columns has a counter.
    unsafe {
        moments_of_rows::launch_unchecked(
            x.client(),
            blocks.reduction(),
            blocks.dim(),
            vector,
            x.arg(),
            all(&workspace),
            all(&total),
            all(&zeros),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            piece,
            pieces,
            dtype_to_storage_type(x.dtype()),
        );
    }
    total
}

/// Returns the output, the mean and the unbiased variance. With running statistics, returns their new values instead of mean
/// and variance.
pub(super) fn forward(
    input: CubeTensor,
    weight: CubeTensor,
    bias: CubeTensor,
    residual: Option<CubeTensor>,
    options: NormOptions,
) -> ([CubeTensor; 3], SavedNorm) {
    let NormOptions { epsilon, activation, running, shared } = options;
    let (x, residual) = (Rows::new(input), residual.map(Rows::new));
    let sources = [NormOutput::read(&x), residual.as_ref().and_then(NormOutput::read)];
    let affine = [weight, bias].map(into_contiguous);
    let [mean, inverse] = [0; 2].map(|_| x.of_columns(1));
    let momentum = running.as_ref().map(|running| running.momentum);
    // Update running statistics in place: a recorded graph of the step runs again on the same memory.
    let [new_mean, new_variance] = match running {
        Some(RunningStats { mean, variance, .. }) => [mean, variance]
            .map(|tensor| writable_storage(tensor).expect("running statistics are f32 and on the input's device")),
        None => [0; 2].map(|_| x.of_columns(1)),
    };
    let vector = x.vector_size(&[], &[&new_mean, &new_variance]);
    let blocks = Blocks::over(&x, vector);
    let moments = SideResults::take_moments(&x).unwrap_or_else(|| self::moments(&x, &blocks, vector));
    let momentum_or_one = momentum.unwrap_or(1.0) as f32;
    let (out, shared) = if let Some(ranks) = shared {
        let count = full_of_columns(&x, x.rows() as f32);
        let (gathered, world) = gather(&*ranks, &[&moments, &count]);
        let part = x.of_columns(1);
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
        let statistics = Statistics { mean: mean.clone(), inverse: inverse.clone(), given: false };
        let out = apply(&x, residual.as_ref(), &statistics, &affine, epsilon, activation);
        (out, Some(Shared { ranks, part }))
    } else {
        let (out, second) = (x.output(), residual.as_ref().unwrap_or(&x));
        let [weight, bias] = &affine;
        let vector = x.vector_size(&[second, &out], &[weight, bias, &new_mean, &new_variance]);
        let blocks = Blocks::over(&x, vector);
        // SAFETY: as in `apply`; there are two vectors of moments.
        unsafe {
            normalise_batch::launch_unchecked(
                x.client(),
                blocks.elementwise(),
                blocks.dim(),
                vector,
                x.arg(),
                second.arg(),
                all(&moments),
                all(weight),
                all(bias),
                all(&mean),
                all(&inverse),
                all(&new_mean),
                all(&new_variance),
                out.arg(),
                x.rows(),
                blocks.columns,
                x.pitch(vector),
                second.pitch(vector),
                out.pitch(vector),
                x.rows() as f32,
                epsilon as f32,
                momentum_or_one,
                momentum.is_some(),
                residual.is_some(),
                activation,
                dtype_to_storage_type(x.dtype()),
            );
        }
        (out, None)
    };
    let has_residual = residual.is_some();
    let from_output = has_residual && activation == Activation::Relu;
    NormOutput::new([&x, &out], [&mean, &inverse], &affine, activation, from_output).keep();
    let saved = from_output.then(|| out.clone());
    let statistics = Statistics { mean, inverse, given: false };
    (
        [out.into_tensor(), new_mean, new_variance],
        SavedNorm { x, out: saved, statistics, affine, activation, has_residual, shared, sources },
    )
}

/// Allocates a vector over the columns, filled with a value.
fn full_of_columns(x: &Rows, value: f32) -> CubeTensor {
    let tensor = x.tensor();
    let (shape, value) = (Shape::from([x.columns()]), InputScalar::new(value, f32::elem_type_native()));
    full_device_dtype(tensor.client.clone(), shape, tensor.device.clone(), value, DType::F32)
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
        sources,
    } = saved;
    NormOutput::forget();
    // The batch norms in front count this operation as a reader, but it computes no sums for them.
    for source in sources.iter().flatten() {
        source.done();
    }
    let dy = Rows::new(grad.clone());
    // The residual's gradient is the output's, unless an activation follows.
    let separate_residual = has_residual && activation != Activation::Identity;
    let dx = x.output();
    let residual = separate_residual.then(|| x.output());
    let [bias_out, weight_out] = [0; 2].map(|_| x.of_columns(1));
    let (second, third) = (out.as_ref().unwrap_or(&x), residual.as_ref().unwrap_or(&dx));
    let vector = x.vector_size(&[&dy, second, &dx, third], &[&weight, &bias]);
    let blocks = Blocks::over(&x, vector);
    let own = SideResults::take_sums(&dy).unwrap_or_else(|| {
        let [piece, pieces] = blocks.pieces();
        let (workspace, total) = (x.of_columns(2 * pieces), x.of_columns(2));
        let [zeros, _] = counters(&total);
        // SAFETY: as in `moments`.
        unsafe {
            gradient_sums::launch_unchecked(
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
                all(&total),
                all(&zeros),
                x.rows(),
                blocks.columns,
                x.pitch(vector),
                dy.pitch(vector),
                second.pitch(vector),
                piece,
                pieces,
                out.is_some(),
                activation,
                dtype_to_storage_type(x.dtype()),
            );
        }
        total
    });
    // The gradients of weight and bias are sums over this rank's rows. They are all-reduced with all other gradients.
    let (sums, part) = match shared {
        None => (own.clone(), 1.0 / x.rows() as f32),
        Some(Shared { ranks, part }) => {
            let (gathered, world) = gather(&*ranks, &[&own]);
            let sums = x.of_columns(2);
            // SAFETY: as above; `gathered` has two vectors per rank.
            unsafe {
                shared_gradients::launch_unchecked(
                    x.client(),
                    blocks.per_column(),
                    blocks.per_column_dim(),
                    vector,
                    all(&gathered),
                    all(&part),
                    all(&sums),
                    blocks.columns,
                    world,
                );
            }
            (sums, 1.0)
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
            all(&sums),
            all(&own),
            all(&bias_out),
            all(&weight_out),
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
    Grads { input: dx.into_tensor(), weight: weight_out, bias: bias_out, residual }
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
