//! The trait of a transport. Lengths, roots and types are checked before a method is called. Data is plain bytes.

use super::call::{CollectiveCall, OpType};
use super::error::{CommError, Result};
use super::shm::Window;

/// Longest wait for the error message of an abort, after the abort itself was noticed.
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "`tcp` waits for the reason in its own way"))]
pub(crate) const ABORT_REASON_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(30);

/// The collectives of one group. Every collective first compares the calls of all ranks. If two calls differ, the collective
/// fails on all ranks. `call.sequence` counts the group's collectives from 1. Slices have the alignment of `call.dtype`. After
/// an error the transport cannot be used again.
pub(crate) trait Transport: Send {
    fn all_reduce(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()>;
    fn broadcast(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()>;
    /// `data` of ranks other than the root does not change.
    fn reduce(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()>;
    /// `recv` gets all ranks' data in rank order, `lens[r]` bytes of rank `r`.
    fn all_gather(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8], lens: &[usize]) -> Result<()>;
    /// `recv` is empty unless this rank is the root.
    fn gather(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()>;
    /// `send` is empty unless this rank is the root.
    fn scatter(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()>;
    /// `send` has one part of `recv`'s length per rank.
    fn reduce_scatter(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()>;
    /// `send` and `recv` have one part per rank, all of the same length.
    fn all_to_all(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()>;
    fn barrier(&mut self, call: &CollectiveCall) -> Result<()>;
    /// Makes an array of `call.count` bytes per rank that all ranks can access. `None` if the transport has no such memory.
    fn share(&mut self, call: &CollectiveCall) -> Result<Option<Window>> {
        self.barrier(call)?;
        Ok(None)
    }
    /// Reduces the first `call.count` elements of all ranks' arrays in `window`, which [`Transport::share`] made. After an error
    /// no rank gets its array back: other ranks may still access it.
    fn all_reduce_shared(&mut self, call: &CollectiveCall, _window: Window) -> Result<Window> {
        Err(CommError::usage(format!("{call}: this transport has no shared memory")))
    }
    /// `call.root` is the receiver.
    fn send(&mut self, call: &CollectiveCall, tag: u64, data: &[u8]) -> Result<()>;
    /// `call.root` is the sender. The sender's next message with that tag must have the type and length of `data`.
    fn recv(&mut self, call: &CollectiveCall, tag: u64, data: &mut [u8]) -> Result<()>;
    /// Advances messages as far as possible without waiting for other ranks, and returns whether any byte has moved. Messages
    /// to one rank are sent in order. A blocked message delays neither messages to other ranks nor messages that arrive.
    fn progress(&mut self, messages: &mut [MessageOp<'_>]) -> Result<bool>;
}

/// A message that is being sent or received.
pub(crate) struct MessageOp<'a> {
    /// A `Send` or `Recv`; `root` is the other rank.
    pub call: CollectiveCall,
    pub tag: u64,
    pub body: MessageBody<'a>,
    /// Bytes of header and body that the sender has already written.
    pub sent: usize,
    pub is_done: bool,
}

/// The data of a message: to be read by a sender, to be written by a receiver.
pub(crate) enum MessageBody<'a> {
    Send(&'a [u8]),
    Recv(&'a mut [u8]),
}

impl<'a> MessageOp<'a> {
    pub(crate) fn new(call: CollectiveCall, tag: u64, body: MessageBody<'a>) -> Self {
        debug_assert!(matches!(
            (call.op, &body),
            (OpType::Send, MessageBody::Send(_)) | (OpType::Recv, MessageBody::Recv(_))
        ));
        Self { call, tag, body, sent: 0, is_done: false }
    }

    /// Returns the other rank, by rank in the group.
    pub(crate) fn peer(&self) -> usize {
        self.call.root_or_peer()
    }
}

/// The ranks of a group.
#[derive(Clone, Debug)]
pub(crate) struct GroupRanks {
    /// Id of the group; 0 for the whole job.
    pub id: u64,
    /// This process's rank in the group: its index in `ranks`.
    pub me: usize,
    /// Ranks of the whole job, by rank in the group.
    pub ranks: Vec<usize>,
    /// Name of the group that this group duplicates.
    pub duplicate_of: Option<std::sync::Arc<str>>,
}

impl GroupRanks {
    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Returns `the world`, `group [0, 2]` or `a duplicate of the world`.
    pub(crate) fn name(&self) -> String {
        match &self.duplicate_of {
            Some(original) => format!("a duplicate of {original}"),
            None if self.id == 0 => "the world".into(),
            None => format!("group {:?}", self.ranks),
        }
    }

    /// Returns this process's rank in the whole job.
    pub(crate) fn global_rank(&self) -> usize {
        self.ranks[self.me]
    }
}
