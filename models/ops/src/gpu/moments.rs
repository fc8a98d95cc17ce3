//! The moments that a convolution has computed of its result on the way, for the batch norm that follows.
//!
//! They travel beside the tensor. The last convolution's are kept with its result's memory, which nobody can change in place as long
//! as two have it. A batch norm of this memory takes them, and any other one computes its own.

use std::cell::RefCell;

use burn_cubecl::tensor::CubeTensor;

use super::rows::Rows;

/// Mean and sum of squares around it of each column of pieces of rows: `[pieces][2][columns]`, f32.
#[derive(Debug)]
pub(super) struct Moments {
    of: CubeTensor,
    pub(super) pieces: CubeTensor,
    /// Rows of a piece.
    pub(super) piece: usize,
}

thread_local! {
    static LAST: RefCell<Option<Moments>> = const { RefCell::new(None) };
}

impl Moments {
    /// Keeps the moments of `rows` until the next convolution of this thread.
    pub(super) fn keep(rows: &Rows, pieces: CubeTensor, piece: usize) {
        LAST.set(Some(Self { of: rows.tensor().clone(), pieces, piece }));
    }

    /// Takes the moments that were kept, if they are those of `rows`.
    pub(super) fn take(rows: &Rows) -> Option<Self> {
        LAST.take().filter(|kept| {
            let (kept, asked) = (&kept.of, rows.tensor());
            let place = |tensor: &CubeTensor| (tensor.handle.memory.clone().binding().id(), tensor.handle.offset_start);
            kept.device == asked.device
                && place(kept) == place(asked)
                && kept.dtype == asked.dtype
                && kept.meta.shape() == asked.meta.shape()
                && kept.meta.strides() == asked.meta.strides()
        })
    }
}
