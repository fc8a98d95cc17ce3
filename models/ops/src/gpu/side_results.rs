//! Side results that a kernel leaves for the next operation on the same tensor: the moments of a convolution's result, the sums
//! over a gradient, the gradients of a batch norm, and the batch norm that has made a tensor.
//!
//! The side results are stored here and not in the tensor, so networks contain no code for them. Only the last few are kept. An
//! entry also holds the tensor: burn changes memory in place only if no other tensor shares the memory, so the values stay valid.
//! An operation takes the entry whose tensor is its operand. Without such an entry, the operation computes the values itself.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_cubecl::tensor::CubeTensor;

use super::bf16_weights::{MemoryId, memory_id};
use super::implicit_gemm::supports_activation;
use super::rows::{Rows, aligned};
use crate::extension::Activation;

/// Per-column values of a tensor, with the tensor.
#[derive(Debug)]
pub(super) struct SideResults {
    of: CubeTensor,
    values: CubeTensor,
}

/// Number of entries that are kept: a residual block needs those of its last convolution and of its shortcut's convolution.
const KEPT: usize = 2;
/// Number of gradients of deferred batch norms that are kept: those of all branches of a block.
const KEPT_GRADIENTS: usize = 8;
/// Number of batch norms that are kept. A residual block reads its input once more, after up to two batch norms inside the block.
const KEPT_NORMS: usize = 3;

type Kept<T> = RefCell<Vec<T>>;

thread_local! {
    static MOMENTS: Kept<SideResults> = const { RefCell::new(Vec::new()) };
    static SUMS: Kept<SideResults> = const { RefCell::new(Vec::new()) };
    static GRADIENTS: Kept<KeptGradient> = const { RefCell::new(Vec::new()) };
    static NORMS: Kept<Arc<NormOutput>> = const { RefCell::new(Vec::new()) };
}

fn push<T>(kept: &mut Vec<T>, most: usize, new: T) {
    kept.drain(..(kept.len() + 1).saturating_sub(most));
    kept.push(new);
}

fn is_same_tensor(one: &CubeTensor, other: &CubeTensor) -> bool {
    one.device == other.device
        && memory_id(one) == memory_id(other)
        && one.dtype == other.dtype
        && one.meta.shape() == other.meta.shape()
        && one.meta.strides() == other.meta.strides()
}

impl SideResults {
    /// Keeps each column's mean and the sum of squares around the mean, `[2][columns]`.
    pub(super) fn keep_moments(rows: &Rows, values: CubeTensor) {
        MOMENTS.with_borrow_mut(|all| push(all, KEPT, Self { of: rows.tensor().clone(), values }));
    }

    /// Takes the moments of `rows` that [`Self::moments`] has kept.
    pub(super) fn take_moments(rows: &Rows) -> Option<CubeTensor> {
        MOMENTS.with_borrow_mut(|all| Self::take(all, rows))
    }

    /// Keeps the sums over a gradient that [`NormOutput`]'s backward pass needs, `[2][columns]`.
    pub(super) fn keep_sums(rows: &Rows, values: CubeTensor) {
        SUMS.with_borrow_mut(|all| push(all, KEPT, Self { of: rows.tensor().clone(), values }));
    }

    /// Takes the sums over `rows` that [`Self::sums`] has kept.
    pub(super) fn take_sums(rows: &Rows) -> Option<CubeTensor> {
        SUMS.with_borrow_mut(|all| Self::take(all, rows))
    }

    fn take(all: &mut Vec<Self>, rows: &Rows) -> Option<CubeTensor> {
        let found = all.iter().position(|kept| is_same_tensor(&kept.of, rows.tensor()))?;
        Some(all.remove(found).values)
    }
}

/// Results of the backward pass of a deferred batch norm that follow from sums over all rows.
#[derive(Debug, Clone)]
pub(super) struct NormGradientResult {
    /// The gradients of weight and bias.
    pub(super) affine: [CubeTensor; 2],
    /// `[3·C]`: the factors of the input's gradient, see `implicit_gemm/prologue.cu`.
    pub(super) factors: CubeTensor,
}

/// [`NormGradientResult`], with the gradient of the normalised values and the memory of the batch norm's input.
#[derive(Debug)]
struct KeptGradient {
    of: CubeTensor,
    input: MemoryId,
    values: NormGradientResult,
}

impl KeptGradient {
    fn is(&self, gradient: &Rows, input: &Rows) -> bool {
        self.input == memory_id(input.tensor()) && is_same_tensor(&self.of, gradient.tensor())
    }
}

impl NormGradientResult {
    /// Allocates the values of a batch norm whose gradient has these rows.
    pub(super) fn empty(gradient: &Rows) -> Self {
        Self { affine: [0; 2].map(|_| gradient.empty_columns(1)), factors: gradient.empty_columns(3) }
    }

    /// Returns the tensors in the order of the kernels' arguments.
    pub(super) fn tensors(&self) -> impl Iterator<Item = CubeTensor> {
        self.affine.iter().chain([&self.factors]).cloned()
    }

    /// Keeps the values for a gradient of the normalised values. `input` is the batch norm's input.
    pub(super) fn keep(gradient: &Rows, input: &Rows, values: Self) {
        let new = KeptGradient { of: gradient.tensor().clone(), input: memory_id(input.tensor()), values };
        GRADIENTS.with_borrow_mut(|all| push(all, KEPT_GRADIENTS, new));
    }

    /// Returns true if a gradient is known to be that of the normalised values.
    pub(super) fn is_kept(gradient: &Rows, input: &Rows) -> bool {
        GRADIENTS.with_borrow(|all| all.iter().any(|kept| kept.is(gradient, input)))
    }

    /// Takes the values that [`Self::keep`] has kept.
    pub(super) fn take(gradient: &Rows, input: &Rows) -> Option<Self> {
        GRADIENTS.with_borrow_mut(|all| {
            let found = all.iter().position(|kept| kept.is(gradient, input))?;
            Some(all.remove(found).values)
        })
    }
}

/// A batch norm whose output other operations read. In the backward pass each reader adds its part of the output's gradient. The
/// last reader also computes the sums over this gradient, which the batch norm's backward pass needs.
#[derive(Debug)]
pub(super) struct NormOutput {
    pub(super) x: Rows,
    pub(super) out: Rows,
    pub(super) mean: CubeTensor,
    pub(super) inv_std: CubeTensor,
    /// Weight and bias.
    pub(super) affine: [CubeTensor; 2],
    pub(super) activation: Activation,
    /// Whether the activation's derivative is computed from the output.
    pub(super) from_output: bool,
    /// Whether the last reader computes the gradient of the activation's input, with everything in [`NormGradientResult`].
    pub(super) masked: bool,
    /// The batch norm whose output was added, if the last reader computes its [`NormGradientResult`] too. The gradient is the same.
    pub(super) residual: Option<ResidualNorm>,
    /// Number of operations that have read the output and have not computed its gradient yet.
    readers: AtomicUsize,
}

/// A batch norm whose output is the residual of another one.
#[derive(Debug)]
pub(super) struct ResidualNorm {
    pub(super) x: Rows,
    pub(super) mean: CubeTensor,
    pub(super) inv_std: CubeTensor,
    pub(super) weight: CubeTensor,
}

impl NormOutput {
    /// Makes a batch norm whose readers compute the gradient of the output.
    pub(super) fn new(
        [x, out]: [&Rows; 2],
        [mean, inv_std]: [&CubeTensor; 2],
        affine: &[CubeTensor; 2],
        activation: Activation,
        from_output: bool,
    ) -> Self {
        Self {
            x: x.clone(),
            out: out.clone(),
            mean: mean.clone(),
            inv_std: inv_std.clone(),
            affine: affine.clone(),
            activation,
            from_output,
            masked: false,
            residual: None,
            readers: AtomicUsize::new(0),
        }
    }

    /// Keeps the batch norm for the readers of its output.
    pub(super) fn keep(self) {
        if self.x.is_image() && supports_activation(self.activation) {
            NORMS.with_borrow_mut(|all| push(all, KEPT_NORMS, Arc::new(self)));
        }
    }

    /// Returns the batch norm whose output is `rows`, and counts one more reader.
    pub(super) fn register_reader(rows: &Rows) -> Option<Arc<Self>> {
        let found =
            NORMS.with_borrow(|all| all.iter().find(|norm| is_same_tensor(norm.out.tensor(), rows.tensor())).cloned());
        if let Some(norm) = &found {
            norm.readers.fetch_add(1, Ordering::Relaxed);
        }
        found
    }

    /// Drops all batch norms when the backward pass has begun. The entries share the batch norms' weights, and the optimizer
    /// writes in place only weights that nobody shares.
    pub(super) fn clear() {
        NORMS.with_borrow_mut(Vec::clear);
    }

    /// Reports that a reader computes its part of the output's gradient. Returns true for the last reader.
    pub(super) fn finish_reader(&self) -> bool {
        self.readers.fetch_sub(1, Ordering::Relaxed) == 1
    }

    /// Returns true if a gradient has rows like the input and the output.
    pub(super) fn fits(&self, gradient: &Rows) -> bool {
        let alike = |rows: &Rows| rows.dims() == gradient.dims() && rows.pitch(1) == gradient.pitch(1);
        let of_residual = self.residual.as_ref().is_none_or(|norm| alike(&norm.x));
        self.x.dtype() == gradient.dtype() && alike(&self.x) && alike(&self.out) && of_residual
    }

    /// Returns true if all images can be read by vectors.
    pub(super) fn is_aligned(&self) -> bool {
        let residual = self.residual.iter().map(|norm| &norm.x);
        [&self.x, &self.out].into_iter().chain(residual).all(|rows| aligned(rows.tensor()))
    }
}
