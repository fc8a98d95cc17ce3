//! Batch norm on a GPU. The backward pass is in `norm_backward.rs`. Launches:
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
use super::norm_kernels::{normalise, normalise_batch};
use super::norm_moments::{merge_rank_moments, moments_of_rows};
use super::rows::{Blocks, Rows, all};
use super::side_results::{NormOutput, SideResults};
use super::storage::{storage_of, tensor_of_storage, writable_storage};
use crate::extension::{Activation, NormOptions, RunningStats};
use crate::statistics::StatisticsReduce;

/// Saved tensors of a batch norm.
#[derive(Debug, Clone)]
pub struct SavedNorm {
    pub(super) x: Rows,
    /// The output, if ReLU's derivative is computed from it.
    pub(super) out: Option<Rows>,
    /// The batch's mean and reciprocal of the standard deviation (`invstd` in PyTorch), `[C]`.
    pub(super) mean: CubeTensor,
    pub(super) inv_std: CubeTensor,
    pub(super) affine: [CubeTensor; 2],
    pub(super) activation: Activation,
    pub(super) has_residual: bool,
    pub(super) sync: Option<SyncGroup>,
    /// The batch norms whose outputs are the input and the residual.
    pub(super) sources: [Option<Arc<NormOutput>>; 2],
}

/// The ranks whose batches share statistics.
#[derive(Debug, Clone)]
pub(super) struct SyncGroup {
    pub(super) ranks: Arc<dyn StatisticsReduce>,
    /// The reciprocal of the number of all ranks' rows, for each column.
    pub(super) inv_rows: CubeTensor,
}

/// Statistics with which a batch norm normalises, `[C]` each.
#[derive(Clone, Copy)]
enum Statistics<'a> {
    /// A batch's mean and reciprocal of the standard deviation.
    Batch { mean: &'a CubeTensor, inv_std: &'a CubeTensor },
    /// Running mean and variance.
    Running { mean: &'a CubeTensor, variance: &'a CubeTensor },
}

/// Gathers the vectors of all ranks, in rank order. Returns them and the world size.
pub(super) fn gather(ranks: &dyn StatisticsReduce, vectors: &[&CubeTensor]) -> (CubeTensor, usize) {
    let on_device = ranks.on_device().expect("`batch_norm_train` calls the GPU kernels only with such ranks");
    let gathered = on_device.all_gather(vectors.iter().map(|&vector| tensor_of_storage(vector.clone())).collect());
    (storage_of(&gathered).expect("statistics are f32 and stay on the GPU"), on_device.world_size())
}

/// Computes `activation((x - mean) · inv_std · weight + bias + residual)`.
fn apply(
    x: &Rows,
    residual: Option<&Rows>,
    statistics: Statistics<'_>,
    [weight, bias]: &[CubeTensor; 2],
    epsilon: f64,
    activation: Activation,
) -> Rows {
    let (out, second) = (x.empty_like(), residual.unwrap_or(x));
    let (mean, spread, of_variance) = match statistics {
        Statistics::Batch { mean, inv_std } => (mean, inv_std, false),
        Statistics::Running { mean, variance } => (mean, variance, true),
    };
    let vector = x.vector_size(&[second, &out], &[mean, spread, weight, bias]);
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
            all(spread),
            all(weight),
            all(bias),
            out.arg(),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            second.pitch(vector),
            out.pitch(vector),
            epsilon as f32,
            of_variance,
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
    let (workspace, total) = (x.empty_columns(2 * pieces), x.empty_columns(2));
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
    let NormOptions { epsilon, activation, running, process_group } = options;
    let (x, residual) = (Rows::new(input), residual.map(Rows::new));
    let sources = [NormOutput::register_reader(&x), residual.as_ref().and_then(NormOutput::register_reader)];
    let affine = [weight, bias].map(into_contiguous);
    let [mean, inv_std] = [0; 2].map(|_| x.empty_columns(1));
    let momentum = running.as_ref().map(|running| running.momentum as f32);
    // Update running statistics in place: a recorded graph of the step runs again on the same memory.
    let updated = match running {
        Some(RunningStats { mean, variance, .. }) => [mean, variance]
            .map(|tensor| writable_storage(tensor).expect("running statistics are f32 and on the input's device")),
        None => [0; 2].map(|_| x.empty_columns(1)),
    };
    let vector = x.vector_size(&[], &[&updated[0], &updated[1]]);
    let blocks = Blocks::over(&x, vector);
    let moments = SideResults::take_moments(&x).unwrap_or_else(|| self::moments(&x, &blocks, vector));
    let batch =
        BatchStatistics { mean: &mean, inv_std: &inv_std, updated: &updated, momentum, epsilon: epsilon as f32 };
    let (out, sync) = match process_group {
        None => (normalise_local(&x, residual.as_ref(), &moments, batch, &affine, activation), None),
        Some(ranks) => {
            let inv_rows = sync_statistics(&x, &*ranks, &moments, batch, (&blocks, vector));
            let statistics = Statistics::Batch { mean: &mean, inv_std: &inv_std };
            let out = apply(&x, residual.as_ref(), statistics, &affine, epsilon, activation);
            (out, Some(SyncGroup { ranks, inv_rows }))
        }
    };
    let has_residual = residual.is_some();
    let from_output = has_residual && activation == Activation::Relu;
    NormOutput::new([&x, &out], [&mean, &inv_std], &affine, activation, from_output).keep();
    let saved = from_output.then(|| out.clone());
    let [new_mean, new_variance] = updated;
    (
        [out.into_tensor(), new_mean, new_variance],
        SavedNorm { x, out: saved, mean, inv_std, affine, activation, has_residual, sync, sources },
    )
}

/// The statistics that a forward pass writes, `[C]` each.
#[derive(Clone, Copy)]
struct BatchStatistics<'a> {
    /// The batch's mean and reciprocal of the standard deviation.
    mean: &'a CubeTensor,
    inv_std: &'a CubeTensor,
    /// The batch's mean and unbiased variance; with a momentum the running statistics, which are updated in place.
    updated: &'a [CubeTensor; 2],
    momentum: Option<f32>,
    /// Added to the variance.
    epsilon: f32,
}

/// Normalises by the statistics of this rank's batch, which the same launch computes from the moments, `[2][columns]`.
fn normalise_local(
    x: &Rows,
    residual: Option<&Rows>,
    moments: &CubeTensor,
    batch: BatchStatistics<'_>,
    [weight, bias]: &[CubeTensor; 2],
    activation: Activation,
) -> Rows {
    let BatchStatistics { mean, inv_std, updated: [new_mean, new_variance], momentum, epsilon } = batch;
    let (out, second) = (x.empty_like(), residual.unwrap_or(x));
    let vector = x.vector_size(&[second, &out], &[weight, bias, new_mean, new_variance]);
    let blocks = Blocks::over(x, vector);
    // SAFETY: as in `apply`; there are two vectors of moments.
    unsafe {
        normalise_batch::launch_unchecked(
            x.client(),
            blocks.elementwise(),
            blocks.dim(),
            vector,
            x.arg(),
            second.arg(),
            all(moments),
            all(weight),
            all(bias),
            all(mean),
            all(inv_std),
            all(new_mean),
            all(new_variance),
            out.arg(),
            x.rows(),
            blocks.columns,
            x.pitch(vector),
            second.pitch(vector),
            out.pitch(vector),
            x.rows() as f32,
            epsilon,
            momentum.unwrap_or(1.0),
            momentum.is_some(),
            residual.is_some(),
            activation,
            dtype_to_storage_type(x.dtype()),
        );
    }
    out
}

/// Merges the moments of all ranks and computes their statistics. Returns the reciprocal of the number of all ranks' rows, `[C]`.
fn sync_statistics(
    x: &Rows,
    ranks: &dyn StatisticsReduce,
    moments: &CubeTensor,
    batch: BatchStatistics<'_>,
    (blocks, vector): (&Blocks, usize),
) -> CubeTensor {
    let BatchStatistics { mean, inv_std, updated: [new_mean, new_variance], momentum, epsilon } = batch;
    let count = full_of_columns(x, x.rows() as f32);
    let (gathered, world_size) = gather(ranks, &[moments, &count]);
    let inv_rows = x.empty_columns(1);
    // SAFETY: as in `apply`; `gathered` has three vectors per rank.
    unsafe {
        merge_rank_moments::launch_unchecked(
            x.client(),
            blocks.per_column(),
            blocks.per_column_dim(),
            vector,
            all(&gathered),
            all(mean),
            all(inv_std),
            all(new_mean),
            all(new_variance),
            all(&inv_rows),
            blocks.columns,
            world_size,
            epsilon,
            momentum.unwrap_or(1.0),
            momentum.is_some(),
        );
    }
    inv_rows
}

/// Allocates a vector over the columns, filled with a value.
fn full_of_columns(x: &Rows, value: f32) -> CubeTensor {
    let tensor = x.tensor();
    let (shape, value) = (Shape::from([x.columns()]), InputScalar::new(value, f32::elem_type_native()));
    full_device_dtype(tensor.client.clone(), shape, tensor.device.clone(), value, DType::F32)
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
    let statistics = Statistics::Running { mean: &mean, variance: &variance };
    apply(&x, residual.as_ref(), statistics, &affine.map(into_contiguous), epsilon, activation).into_tensor()
}
