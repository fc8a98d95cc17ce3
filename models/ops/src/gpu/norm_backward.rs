//! The backward pass of a batch norm on a GPU.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;

use super::counters::counters;
use super::norm::{SavedNorm, SyncGroup, gather};
use super::norm_kernels::{gradient_sums, input_gradient, merge_rank_sums};
use super::rows::{Blocks, Rows, all};
use super::side_results::{NormOutput, SideResults};
use crate::extension::Activation;

/// The gradients of a batch norm.
pub(super) struct Grads {
    pub(super) input: CubeTensor,
    pub(super) weight: CubeTensor,
    pub(super) bias: CubeTensor,
    pub(super) residual: CubeTensor,
}

/// Computes all gradients.
pub(super) fn backward(saved: SavedNorm, grad: CubeTensor) -> Grads {
    NormOutput::clear();
    // The batch norms in front count this operation as a reader, but it computes no sums for them.
    for source in saved.sources.iter().flatten() {
        source.finish_reader();
    }
    let x = &saved.x;
    let dy = Rows::new(grad.clone());
    // The residual's gradient is the output's, unless an activation follows.
    let separate_residual = saved.has_residual && saved.activation != Activation::Identity;
    let dx = x.empty_like();
    let residual = separate_residual.then(|| x.empty_like());
    let [bias_out, weight_out] = [0; 2].map(|_| x.empty_columns(1));
    let (second, third) = (saved.out.as_ref().unwrap_or(x), residual.as_ref().unwrap_or(&dx));
    let [weight, bias] = &saved.affine;
    let vector = x.vector_size(&[&dy, second, &dx, third], &[weight, bias]);
    let blocks = Blocks::over(x, vector);
    let own = SideResults::take_sums(&dy).unwrap_or_else(|| sums_of_gradient(&saved, &dy, &blocks, vector));
    // The gradients of weight and bias are sums over this rank's rows. They are all-reduced with all other gradients.
    let (sums, inv_rows) = match &saved.sync {
        None => (own.clone(), 1.0 / x.rows() as f32),
        Some(sync) => (sync_sums(x, sync, &own, &blocks, vector), 1.0),
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
            all(&saved.mean),
            all(&saved.inv_std),
            all(weight),
            all(bias),
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
            inv_rows,
            saved.out.is_some(),
            separate_residual,
            saved.activation,
            dtype_to_storage_type(x.dtype()),
        );
    }
    let residual = residual.map_or(grad, Rows::into_tensor);
    Grads { input: dx.into_tensor(), weight: weight_out, bias: bias_out, residual }
}

/// Returns the sums over this rank's rows of `g` and of `g · x̂`, `[2][columns]`, where `g` is the gradient of the activation's
/// input.
fn sums_of_gradient(saved: &SavedNorm, dy: &Rows, blocks: &Blocks, vector: usize) -> CubeTensor {
    let SavedNorm { x, out, mean, inv_std, affine: [weight, bias], activation, .. } = saved;
    let second = out.as_ref().unwrap_or(x);
    let [piece, pieces] = blocks.pieces();
    let (workspace, total) = (x.empty_columns(2 * pieces), x.empty_columns(2));
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
            all(mean),
            all(inv_std),
            all(weight),
            all(bias),
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
            *activation,
            dtype_to_storage_type(x.dtype()),
        );
    }
    total
}

/// Returns the means over all ranks' rows of what [`sums_of_gradient`] sums up over this rank's.
fn sync_sums(x: &Rows, sync: &SyncGroup, own: &CubeTensor, blocks: &Blocks, vector: usize) -> CubeTensor {
    let (gathered, world_size) = gather(&*sync.ranks, &[own]);
    let means = x.empty_columns(2);
    // SAFETY: as in `apply`; `gathered` has two vectors per rank.
    unsafe {
        merge_rank_sums::launch_unchecked(
            x.client(),
            blocks.per_column(),
            blocks.per_column_dim(),
            vector,
            all(&gathered),
            all(&sync.inv_rows),
            all(&means),
            blocks.columns,
            world_size,
        );
    }
    means
}
