//! All-gather of arrays whose lengths may differ.

use bytemuck::{cast_slice, cast_slice_mut};

use super::call::OpType;
use super::communicator::Communicator;
use super::dtype::Element;
use super::error::Result;

/// The result of [`Communicator::all_gather_v`].
#[derive(Clone, Debug, PartialEq)]
pub struct Gathered<T> {
    /// All ranks' elements, in rank order.
    pub data: Vec<T>,
    /// Number of elements of each rank.
    pub counts: Vec<usize>,
}

impl<T> Gathered<T> {
    /// Returns each rank's elements, rank 0's first.
    pub fn parts(&self) -> impl Iterator<Item = &[T]> {
        let mut rest = self.data.as_slice();
        self.counts.iter().filter_map(move |&count| rest.split_off(..count))
    }
}

impl Communicator {
    /// Gathers all ranks' `send` in rank order. The numbers of elements may differ. Runs two collectives, the first for the
    /// lengths. MPI's name is `MPI_Allgatherv`.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn all_gather_v<T: Element>(&self, send: &[T]) -> Result<Gathered<T>> {
        self.gather_v(OpType::AllGatherV, send)
    }

    /// Does what [`all_gather_v`](Self::all_gather_v) does, as the call `op` in error messages.
    pub(super) fn gather_v<T: Element>(&self, op: OpType, send: &[T]) -> Result<Gathered<T>> {
        self.synchronize();
        let call = self.call(op, T::DTYPE, 0);
        let mut counts = vec![0u64; self.world_size()];
        let each = vec![8; self.world_size()];
        let mine = [send.len() as u64];
        self.run(call, |t, call| t.all_gather(call, cast_slice(&mine), cast_slice_mut(&mut counts), &each))?;
        let counts: Vec<usize> = counts.into_iter().map(|c| c as usize).collect();
        let lens: Vec<usize> = counts.iter().map(|c| c * size_of::<T>()).collect();
        let mut data = vec![T::zeroed(); counts.iter().sum()];
        self.run(call, |t, call| t.all_gather(call, cast_slice(send), cast_slice_mut(&mut data), &lens))?;
        Ok(Gathered { data, counts })
    }
}
