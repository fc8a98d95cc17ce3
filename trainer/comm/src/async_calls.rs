//! Asynchronous collectives. Each collective runs after all calls that were submitted before, while the calling thread continues.
//! [`Work::wait`] returns the buffer. PyTorch: `async_op=True`.

use bytemuck::{cast_slice, cast_slice_mut};

use super::communicator::Communicator;
use super::dtype::{Element, ReduceOp};
use super::queue::Work;

impl Communicator {
    /// Starts an [`all_reduce`](Self::all_reduce) that runs after all calls submitted before, while this thread continues.
    /// [`Work::wait`] returns the buffer.
    pub fn all_reduce_async<T: Element>(&self, mut data: Vec<T>, op: ReduceOp) -> Work<Vec<T>> {
        let this = self.clone();
        self.submit(move || {
            this.all_reduce_now(cast_slice_mut(&mut data), T::DTYPE, op)?;
            Ok(data)
        })
    }

    /// Starts a [`broadcast`](Self::broadcast). [`Work::wait`] returns the buffer.
    pub fn broadcast_async<T: Element>(&self, mut data: Vec<T>, root: usize) -> Work<Vec<T>> {
        let this = self.clone();
        self.submit(move || {
            this.broadcast_now(cast_slice_mut(&mut data), T::DTYPE, root)?;
            Ok(data)
        })
    }

    /// Starts an [`all_gather`](Self::all_gather). [`Work::wait`] returns all ranks' elements.
    pub fn all_gather_async<T: Element>(&self, send: Vec<T>) -> Work<Vec<T>> {
        let this = self.clone();
        self.submit(move || {
            let mut recv = vec![T::zeroed(); send.len() * this.world_size()];
            this.all_gather_now(cast_slice(&send), cast_slice_mut(&mut recv), T::DTYPE)?;
            Ok(recv)
        })
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter). [`Work::wait`] returns this rank's part.
    pub fn reduce_scatter_async<T: Element>(&self, send: Vec<T>, op: ReduceOp) -> Work<Vec<T>> {
        let this = self.clone();
        self.submit(move || {
            let mut recv = vec![T::zeroed(); send.len() / this.world_size()];
            this.reduce_scatter_now(cast_slice(&send), cast_slice_mut(&mut recv), T::DTYPE, op)?;
            Ok(recv)
        })
    }

    /// Starts a [`reduce`](Self::reduce). [`Work::wait`] returns the buffer.
    pub fn reduce_async<T: Element>(&self, mut data: Vec<T>, op: ReduceOp, root: usize) -> Work<Vec<T>> {
        let this = self.clone();
        self.submit(move || {
            this.reduce_now(&mut data, op, root)?;
            Ok(data)
        })
    }

    /// Starts a [`gather`](Self::gather). [`Work::wait`] returns all ranks' elements on the root, and nothing elsewhere.
    pub fn gather_async<T: Element>(&self, send: Vec<T>, root: usize) -> Work<Vec<T>> {
        let this = self.clone();
        self.submit(move || {
            let mut recv = vec![T::zeroed(); if this.rank() == root { send.len() * this.world_size() } else { 0 }];
            this.gather_now(&send, &mut recv, root)?;
            Ok(recv)
        })
    }

    /// Starts a [`scatter`](Self::scatter) of `count` elements to each rank. [`Work::wait`] returns this rank's part.
    pub fn scatter_async<T: Element>(&self, send: Vec<T>, count: usize, root: usize) -> Work<Vec<T>> {
        let this = self.clone();
        self.submit(move || {
            let mut recv = vec![T::zeroed(); count];
            this.scatter_now(&send, &mut recv, root)?;
            Ok(recv)
        })
    }

    /// Starts an [`all_to_all`](Self::all_to_all). [`Work::wait`] returns the parts for this rank.
    pub fn all_to_all_async<T: Element>(&self, send: Vec<T>) -> Work<Vec<T>> {
        let this = self.clone();
        self.submit(move || {
            let mut recv = vec![T::zeroed(); send.len()];
            this.all_to_all_now(&send, &mut recv)?;
            Ok(recv)
        })
    }

    /// Starts a [`barrier`](Self::barrier). [`Work::wait`] returns when all ranks have reached it.
    pub fn barrier_async(&self) -> Work<()> {
        let this = self.clone();
        self.submit(move || this.barrier_now())
    }
}
