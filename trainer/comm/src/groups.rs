//! Sub-groups and asynchronous calls.

use bytemuck::{cast_slice, cast_slice_mut};

use super::communicator::Communicator;
use super::dtype::{Element, ReduceOp};
use super::error::{CommError, ErrorKind, Result};
use super::queue::Work;
use super::transport::GroupRanks;

impl Communicator {
    /// Makes a communicator for `ranks` (of this group, in the order that they shall have in the new one). All ranks of
    /// this group call it with the same list; those that are not in it get `None`.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] on every rank if the lists differ.
    pub fn group(&self, ranks: &[usize]) -> Result<Option<Communicator>> {
        let mut seen = vec![false; self.world()];
        for rank in ranks {
            match seen.get_mut(*rank) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return self.refuse("group", format!("rank {rank} is listed twice")),
                None => return self.refuse("group", format!("there is no rank {rank} among {}", self.world())),
            }
        }
        let list: Vec<i64> = ranks.iter().map(|r| *r as i64).collect();
        let all = self.all_gather_v(&list)?;
        let mut at = 0;
        let lists: Vec<&[i64]> = all
            .counts
            .iter()
            .map(|count| {
                at += count;
                &all.data[at - count..at]
            })
            .collect();
        if let Some(other) = lists.iter().position(|l| *l != lists[0]) {
            let (first, rank) = (self.ranks()[0], self.ranks()[other]);
            let message = format!(
                "rank {rank} calls group({:?}) where rank {first} calls group({:?}), in {}",
                lists[other], lists[0], self.inner.name
            );
            return Err(self.inner.process.fail(CommError::new(ErrorKind::Mismatch, message).blame(rank)));
        }
        let Some(me) = ranks.iter().position(|r| *r == self.rank()) else { return Ok(None) };
        let ranks: Vec<usize> = ranks.iter().map(|r| self.ranks()[*r]).collect();
        let group = GroupRanks { id: self.inner.next_group(&ranks), me, ranks, copy_of: None };
        Self::on(self.inner.stream.clone(), self.inner.process.clone(), group).map(Some)
    }

    /// A communicator of the same ranks that is independent of this one, as of `MPI_Comm_dup`: collectives of both may be
    /// under way at once, on different threads, and in any order relative to each other on different ranks. All ranks of
    /// this group call it. It costs memory (`shm`) or a connection to each rank (`tcp`): made once, not for every use.
    ///
    /// Clones of a communicator, its groups and its asynchronous calls take turns instead.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] on every rank if one calls something else; [`ErrorKind::Setup`] if memory or connections
    /// cannot be had.
    pub fn duplicate(&self) -> Result<Communicator> {
        self.agree_to_duplicate()?;
        let of = &self.inner.group;
        let copy_of = Some(self.inner.name.clone());
        let group = GroupRanks { id: self.inner.next_group(&of.ranks), me: of.me, ranks: of.ranks.clone(), copy_of };
        Self::on_new_stream(self.inner.process.clone(), group)
    }

    /// [`Communicator::all_reduce`], executed after everything submitted before while this thread goes on. The handle gives
    /// the buffer back.
    pub fn all_reduce_async<T: Element>(&self, mut data: Vec<T>, op: ReduceOp) -> Work<Vec<T>> {
        let this = self.clone();
        self.inner.stream.queue.submit(move || {
            this.all_reduce_now(cast_slice_mut(&mut data), T::DTYPE, op)?;
            Ok(data)
        })
    }

    /// [`Communicator::broadcast`], asynchronously.
    pub fn broadcast_async<T: Element>(&self, mut data: Vec<T>, root: usize) -> Work<Vec<T>> {
        let this = self.clone();
        self.inner.stream.queue.submit(move || {
            this.broadcast_now(cast_slice_mut(&mut data), T::DTYPE, root)?;
            Ok(data)
        })
    }

    /// [`Communicator::all_gather`], asynchronously; the handle gives everybody's elements.
    pub fn all_gather_async<T: Element>(&self, send: Vec<T>) -> Work<Vec<T>> {
        let this = self.clone();
        self.inner.stream.queue.submit(move || {
            let mut recv = vec![T::zeroed(); send.len() * this.world()];
            this.all_gather_now(cast_slice(&send), cast_slice_mut(&mut recv), T::DTYPE)?;
            Ok(recv)
        })
    }

    /// [`Communicator::reduce_scatter`], asynchronously; the handle gives this rank's part.
    pub fn reduce_scatter_async<T: Element>(&self, send: Vec<T>, op: ReduceOp) -> Work<Vec<T>> {
        let this = self.clone();
        self.inner.stream.queue.submit(move || {
            let mut recv = vec![T::zeroed(); send.len() / this.world()];
            this.reduce_scatter_now(cast_slice(&send), cast_slice_mut(&mut recv), T::DTYPE, op)?;
            Ok(recv)
        })
    }
}
