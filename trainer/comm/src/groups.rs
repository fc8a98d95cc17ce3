//! Sub-groups and duplicates.

use super::call::OpType;
use super::communicator::Communicator;
use super::error::{CommError, ErrorKind, Result};
use super::transport::GroupRanks;

impl Communicator {
    /// Makes a communicator of `ranks`, which are ranks of this group. A rank's index in the list becomes its rank in the new
    /// group. All ranks of this group call this function with the same list. Ranks that are not in the list get `None`.
    /// PyTorch: `new_group`.
    ///
    /// # Errors
    /// See [`Communicator`]. [`ErrorKind::Mismatch`] on every rank if the lists differ.
    pub fn group(&self, ranks: &[usize]) -> Result<Option<Communicator>> {
        let mut seen = vec![false; self.world_size()];
        for rank in ranks {
            match seen.get_mut(*rank) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return self.fail_usage("group", format!("rank {rank} is listed twice")),
                None => {
                    return self.fail_usage("group", format!("there is no rank {rank} among {}", self.world_size()));
                }
            }
        }
        let list: Vec<i64> = ranks.iter().map(|r| *r as i64).collect();
        let all = self.gather_v(OpType::Group, &list)?;
        let lists: Vec<&[i64]> = all.parts().collect();
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
        let group = GroupRanks { id: self.inner.next_group_id(&ranks), me, ranks, duplicate_of: None };
        Self::with_stream(self.inner.stream.clone(), self.inner.process.clone(), group).map(Some)
    }

    /// Makes a communicator of the same ranks that is independent of this one, as `MPI_Comm_dup` does. Collectives of both may
    /// run at the same time on different threads, and in a different order on each rank. All ranks of this group call this
    /// function. A duplicate costs memory (`shm`) or a connection to each rank (`tcp`), so make it once and reuse it.
    ///
    /// In contrast, the collectives of a communicator's clones, of its groups and of its asynchronous calls run one after the
    /// other.
    ///
    /// # Errors
    /// See [`Communicator`]. [`ErrorKind::Setup`] if there is no memory or no connection.
    pub fn duplicate(&self) -> Result<Communicator> {
        self.agree_to_duplicate()?;
        let of = &self.inner.group;
        let duplicate_of = Some(self.inner.name.clone());
        let group =
            GroupRanks { id: self.inner.next_group_id(&of.ranks), me: of.me, ranks: of.ranks.clone(), duplicate_of };
        Self::with_new_stream(self.inner.process.clone(), group)
    }
}
