//! Arrays in the memory that a transport reduces fastest, like NCCL's registered buffers and MPI's allocated windows.

use std::fmt;
use std::ops::{Deref, DerefMut};

use bytemuck::{cast_slice, cast_slice_mut};

use super::call::{CollectiveCall, OpType};
use super::communicator::Communicator;
use super::dtype::{DType, Element, ReduceOp};
use super::error::{CommError, Result};
use super::shm::Window;

/// A rank's array, made by [`Communicator::shared_array`] together with the other ranks' arrays.
///
/// With `shm` the other ranks map the array too, and [`Communicator::all_reduce_shared`] reduces it in place, without a copy.
/// With other transports it is ordinary memory.
pub struct SharedArray<T> {
    memory: Memory<T>,
    /// Id of the group that made the array, and the array's number in the group.
    group: u64,
    number: u32,
}

enum Memory<T> {
    Ordinary(Vec<T>),
    Window(Window),
}

impl<T: Element> Deref for SharedArray<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.memory {
            Memory::Ordinary(values) => values,
            Memory::Window(window) => cast_slice(window.bytes()),
        }
    }
}

impl<T: Element> DerefMut for SharedArray<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.memory {
            Memory::Ordinary(values) => values,
            Memory::Window(window) => cast_slice_mut(window.bytes_mut()),
        }
    }
}

impl<T: Element> fmt::Debug for SharedArray<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedArray({} {})", self.len(), T::DTYPE)
    }
}

impl Communicator {
    /// Makes an array of `len` zeros on each rank, for [`Communicator::all_reduce_shared`]. All ranks of the group call this with
    /// the same length. Allocate the array once and reuse it: the allocation costs two waits for all ranks, a file and a mapping.
    ///
    /// # Errors
    /// See [`Communicator`]. [`super::ErrorKind::Setup`] if the system refuses memory of this length.
    pub fn shared_array<T: Element>(&self, len: usize) -> Result<SharedArray<T>> {
        self.synchronize();
        // The arrays of all ranks may be one mapping, with a header.
        let all = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_mul(self.world_size()));
        if all.is_none_or(|bytes| bytes > isize::MAX as usize / 2) {
            return self.fail_usage(
                "shared_array",
                format!("{len} {} on each rank are more than an array can have", T::DTYPE),
            );
        }
        let call = self.call(OpType::Share, DType::U8, len * size_of::<T>());
        let (number, window) = self.run(call, |transport, call| Ok((call.sequence as u32, transport.share(call)?)))?;
        let memory = match window {
            Some(window) => Memory::Window(window),
            None => Memory::Ordinary(self.zeros(len)?),
        };
        Ok(SharedArray { memory, group: self.inner.group.id, number })
    }

    /// Allocates `len` zeros.
    fn zeros<T: Element>(&self, len: usize) -> Result<Vec<T>> {
        let mut values = Vec::new();
        values.try_reserve_exact(len).map_err(|_| {
            let rank = self.inner.process.rank;
            let cause = format!("rank {rank} cannot make an array of {len} {}", T::DTYPE);
            self.inner.process.fail(CommError::setup(cause))
        })?;
        values.resize(len, T::zeroed());
        Ok(values)
    }

    /// Reduces the first `count` elements of `data` over all ranks; every rank gets the result. All ranks pass the array that
    /// the same call of [`Communicator::shared_array`] made.
    ///
    /// # Errors
    /// See [`Communicator`]. After an error the caller does not get the array back, since other ranks may still access the array.
    pub fn all_reduce_shared<T: Element>(
        &self,
        data: SharedArray<T>,
        count: usize,
        op: ReduceOp,
    ) -> Result<SharedArray<T>> {
        self.synchronize();
        let SharedArray { memory, group, number } = data;
        if group != self.inner.group.id {
            return self.fail_usage("all_reduce_shared", "the array belongs to another communicator".into());
        }
        let have = match &memory {
            Memory::Ordinary(values) => values.len(),
            Memory::Window(window) => window.bytes().len() / size_of::<T>(),
        };
        if count > have {
            return self.fail_usage("all_reduce_shared", format!("the array has {have} elements, not {count}"));
        }
        let call = self.call(OpType::AllReduce, T::DTYPE, count);
        let call = CollectiveCall { reduce: Some(op), memory: Some(number), ..call };
        let memory = self.run(call, |transport, call| match memory {
            Memory::Ordinary(mut values) => {
                transport.all_reduce(call, cast_slice_mut(&mut values[..count]))?;
                Ok(Memory::Ordinary(values))
            }
            Memory::Window(window) => Ok(Memory::Window(transport.all_reduce_shared(call, window)?)),
        })?;
        Ok(SharedArray { memory, group, number })
    }
}
