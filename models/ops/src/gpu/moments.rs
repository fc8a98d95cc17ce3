//! The moments that a convolution has computed of its result on the way, for the batch norm that follows.
//!
//! They travel beside the tensor. Those of the last two convolutions are kept (a residual block's last one and its shortcut's) with
//! their results' memory, which nobody can change in place as long as two have it. A batch norm of this memory takes them, and any
//! other one computes its own.

use std::cell::RefCell;

use burn_cubecl::tensor::CubeTensor;

use super::copies::place;
use super::rows::Rows;

/// Mean and sum of squares around it of each column of pieces of rows: `[pieces][2][columns]`, f32.
#[derive(Debug)]
pub(super) struct Moments {
    of: CubeTensor,
    pub(super) pieces: CubeTensor,
    /// Rows of a piece.
    pub(super) piece: usize,
}

/// Convolutions whose moments are kept.
const KEPT: usize = 2;

thread_local! {
    static LAST: RefCell<Vec<Moments>> = const { RefCell::new(Vec::new()) };
}

impl Moments {
    /// Keeps the moments of `rows` until the second next convolution of this thread.
    pub(super) fn keep(rows: &Rows, pieces: CubeTensor, piece: usize) {
        LAST.with_borrow_mut(|last| {
            last.drain(..(last.len() + 1).saturating_sub(KEPT));
            last.push(Self { of: rows.tensor().clone(), pieces, piece });
        });
    }

    /// Takes the moments that were kept, if there are those of `rows`.
    pub(super) fn take(rows: &Rows) -> Option<Self> {
        LAST.with_borrow_mut(|last| {
            let found = last.iter().position(|kept| kept.are_of(rows.tensor()))?;
            Some(last.remove(found))
        })
    }

    fn are_of(&self, asked: &CubeTensor) -> bool {
        let kept = &self.of;
        kept.device == asked.device
            && place(kept) == place(asked)
            && kept.dtype == asked.dtype
            && kept.meta.shape() == asked.meta.shape()
            && kept.meta.strides() == asked.meta.strides()
    }
}
