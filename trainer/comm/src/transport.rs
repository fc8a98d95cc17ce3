//! What a transport has to do. Lengths, roots and types are checked before it is called; data is plain bytes.

use super::call::CollectiveCall;
use super::error::{CommError, Result};
use super::shm::Window;

/// Longest time that a rank waits for the reason of an abort that it has seen already.
pub(crate) const REASON_LIMIT: std::time::Duration = std::time::Duration::from_secs(2);

/// The collectives over one group. Every method first makes sure that all ranks of the group call the same (`call`), and
/// fails on all of them otherwise. `call.sequence` counts the group's collectives from 1. Slices have the alignment of
/// `call.dtype`. After an error the transport is of no further use.
pub(crate) trait Transport: Send {
    fn all_reduce(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()>;
    fn broadcast(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()>;
    /// `data` of ranks other than the root stays as it is.
    fn reduce(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()>;
    /// `recv` is all ranks' data in rank order, `lens[r]` bytes of rank `r`.
    fn all_gather(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8], lens: &[usize]) -> Result<()>;
    /// `recv` is empty unless this rank is the root.
    fn gather(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()>;
    /// `send` is empty unless this rank is the root.
    fn scatter(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()>;
    /// `send` is one part of `recv`'s length for each rank.
    fn reduce_scatter(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()>;
    /// `send` and `recv` are one part for each rank, all of the same length.
    fn all_to_all(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()>;
    fn barrier(&mut self, call: &CollectiveCall) -> Result<()>;
    /// An array of `call.count` bytes a rank that all ranks can reach, if there is such memory.
    fn share(&mut self, call: &CollectiveCall) -> Result<Option<Window>> {
        self.barrier(call)?;
        Ok(None)
    }
    /// Reduces the first `call.count` elements of all ranks' arrays in `window`, one of [`Transport::share`]'s. After an error
    /// nobody may have it again: other ranks may still be at work in it.
    fn all_reduce_shared(&mut self, call: &CollectiveCall, _window: Window) -> Result<Window> {
        Err(CommError::usage(format!("{call}: this transport has no shared memory")))
    }
    /// `call.root` is the receiver.
    fn send(&mut self, call: &CollectiveCall, tag: u64, data: &[u8]) -> Result<()>;
    /// `call.root` is the sender. The next message of that sender with that tag must have `data`'s type and length.
    fn recv(&mut self, call: &CollectiveCall, tag: u64, data: &mut [u8]) -> Result<()>;
}

/// Who belongs to a group, for transports and messages.
#[derive(Clone, Debug)]
pub(crate) struct GroupRanks {
    /// 0 for the whole job.
    pub id: u64,
    /// This process's place in `ranks`.
    pub me: usize,
    /// Ranks in the whole job, by rank in the group.
    pub ranks: Vec<usize>,
    /// The name of the group that this one duplicates.
    pub copy_of: Option<std::sync::Arc<str>>,
}

impl GroupRanks {
    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    /// `the world` or `group [0, 2]` or `a duplicate of the world`.
    pub(crate) fn name(&self) -> String {
        match &self.copy_of {
            Some(original) => format!("a duplicate of {original}"),
            None if self.id == 0 => "the world".into(),
            None => format!("group {:?}", self.ranks),
        }
    }

    /// This process's rank in the whole job.
    pub(crate) fn job_rank(&self) -> usize {
        self.ranks[self.me]
    }
}
