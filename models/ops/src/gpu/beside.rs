//! What kernels have computed about a tensor on the way, for the operation that comes next: the moments of a convolution's result,
//! the sums over a gradient, and which batch norm a tensor comes from.
//!
//! It travels beside the tensor, so no network knows of it. The last few are kept, with the tensor's memory, which nobody can change
//! in place as long as two have it. An operation on this memory takes them, and any other one computes its own.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_cubecl::tensor::CubeTensor;

use super::copies::place;
use super::implicit_gemm::knows;
use super::rows::{Rows, aligned};
use crate::extension::Activation;

/// Vectors over the columns of a tensor's rows.
#[derive(Debug)]
pub(super) struct Beside {
    of: CubeTensor,
    values: CubeTensor,
}

/// Tensors whose values are kept: a residual block's last convolution and its shortcut's.
const KEPT: usize = 2;
/// Batch norms that are kept: a block's input is read again after its first batch norms.
const KEPT_NORMS: usize = 3;

type Kept<T> = RefCell<Vec<T>>;

thread_local! {
    static MOMENTS: Kept<Beside> = const { RefCell::new(Vec::new()) };
    static SUMS: Kept<Beside> = const { RefCell::new(Vec::new()) };
    static NORMS: Kept<Arc<NormOutput>> = const { RefCell::new(Vec::new()) };
}

fn push<T>(kept: &mut Vec<T>, most: usize, new: T) {
    kept.drain(..(kept.len() + 1).saturating_sub(most));
    kept.push(new);
}

fn same(one: &CubeTensor, other: &CubeTensor) -> bool {
    one.device == other.device
        && place(one) == place(other)
        && one.dtype == other.dtype
        && one.meta.shape() == other.meta.shape()
        && one.meta.strides() == other.meta.strides()
}

impl Beside {
    /// Keeps the mean and the sum of squares around it of each column, `[2][columns]`.
    pub(super) fn moments(rows: &Rows, values: CubeTensor) {
        MOMENTS.with_borrow_mut(|all| push(all, KEPT, Self { of: rows.tensor().clone(), values }));
    }

    /// Takes what [`Self::moments`] has kept of `rows`.
    pub(super) fn take_moments(rows: &Rows) -> Option<CubeTensor> {
        MOMENTS.with_borrow_mut(|all| Self::take(all, rows))
    }

    /// Keeps the sums over a gradient that [`NormOutput`]'s backward pass needs, `[2][columns]`.
    pub(super) fn sums(rows: &Rows, values: CubeTensor) {
        SUMS.with_borrow_mut(|all| push(all, KEPT, Self { of: rows.tensor().clone(), values }));
    }

    /// Takes what [`Self::sums`] has kept of `rows`.
    pub(super) fn take_sums(rows: &Rows) -> Option<CubeTensor> {
        SUMS.with_borrow_mut(|all| Self::take(all, rows))
    }

    fn take(all: &mut Vec<Self>, rows: &Rows) -> Option<CubeTensor> {
        let found = all.iter().position(|kept| same(&kept.of, rows.tensor()))?;
        Some(all.remove(found).values)
    }
}

/// A batch norm whose output other operations read. The last of these to compute the output's gradient also computes the sums over it.
#[derive(Debug)]
pub(super) struct NormOutput {
    pub(super) x: Rows,
    pub(super) out: Rows,
    pub(super) mean: CubeTensor,
    pub(super) inverse: CubeTensor,
    /// Weight and bias.
    pub(super) affine: [CubeTensor; 2],
    pub(super) activation: Activation,
    /// Whether the activation's slope follows from the output.
    pub(super) from_output: bool,
    /// Operations that have read the output and have not computed its gradient yet.
    readers: AtomicUsize,
}

impl NormOutput {
    pub(super) fn keep(
        [x, out]: [&Rows; 2],
        [mean, inverse]: [&CubeTensor; 2],
        affine: &[CubeTensor; 2],
        activation: Activation,
        from_output: bool,
    ) {
        if !x.is_image() || !knows(activation) {
            return;
        }
        let new = Self {
            x: x.clone(),
            out: out.clone(),
            mean: mean.clone(),
            inverse: inverse.clone(),
            affine: affine.clone(),
            activation,
            from_output,
            readers: AtomicUsize::new(0),
        };
        NORMS.with_borrow_mut(|all| push(all, KEPT_NORMS, Arc::new(new)));
    }

    /// Returns the batch norm whose output an operation reads.
    pub(super) fn read(rows: &Rows) -> Option<Arc<Self>> {
        let found = NORMS.with_borrow(|all| all.iter().find(|norm| same(norm.out.tensor(), rows.tensor())).cloned());
        if let Some(norm) = &found {
            norm.readers.fetch_add(1, Ordering::Relaxed);
        }
        found
    }

    /// Forgets all: the backward pass has begun. What is kept has the batch norms' weights, which the optimizer writes in place.
    pub(super) fn forget() {
        NORMS.with_borrow_mut(Vec::clear);
    }

    /// Says that an operation computes its part of the output's gradient. Returns true for the last of those that have read it.
    pub(super) fn done(&self) -> bool {
        self.readers.fetch_sub(1, Ordering::Relaxed) == 1
    }

    /// Returns true if a gradient has rows like the input and the output.
    pub(super) fn fits(&self, gradient: &Rows) -> bool {
        let alike = |rows: &Rows| rows.dims() == gradient.dims() && rows.pitch(1) == gradient.pitch(1);
        self.x.dtype() == gradient.dtype() && alike(&self.x) && alike(&self.out)
    }

    /// Returns true if all images can be read by vectors.
    pub(super) fn is_aligned(&self) -> bool {
        aligned(self.x.tensor()) && aligned(self.out.tensor())
    }
}
