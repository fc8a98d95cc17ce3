//! Compares the calls of all ranks before any data moves.
//!
//! Every collective starts with a comparison of all ranks' [`CollectiveCall`]s. No rank leaves a collective before all calls
//! have been compared. So all ranks notice a mismatch in the same collective, and all report the same two calls: the call of
//! the lowest rank, and the call of the lowest rank that differs from it.

use std::fmt;

use super::dtype::{DType, ReduceOp};
use super::error::{CommError, ErrorKind, Result};
use super::wire::Reader;

/// The collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum OpType {
    /// Every rank gets the reduction.
    AllReduce = 1,
    /// Every rank gets the root's data.
    Broadcast = 2,
    /// The root gets the reduction.
    Reduce = 3,
    /// Every rank gets all ranks' data.
    AllGather = 4,
    /// Like `AllGather`, with lengths that may differ.
    AllGatherV = 5,
    /// The root gets all ranks' data.
    Gather = 6,
    /// Each rank gets its part of the root's data.
    Scatter = 7,
    /// Every rank gets its part of the reduction.
    ReduceScatter = 8,
    /// Part `j` of rank `i` becomes part `i` of rank `j`.
    AllToAll = 9,
    /// No rank continues before all ranks have called it.
    Barrier = 10,
    /// A message to one rank. Not compared like a collective; named in messages.
    Send = 11,
    /// The receiving end of `Send`.
    Recv = 12,
    /// Makes a sub-group.
    Group = 13,
    /// Makes an independent communicator of the same ranks.
    Duplicate = 14,
    /// Makes memory that ranks share.
    Share = 15,
    /// Like `AllToAll`, with lengths that may differ.
    AllToAllV = 16,
}

impl OpType {
    const ALL: [OpType; 16] = [
        OpType::AllReduce,
        OpType::Broadcast,
        OpType::Reduce,
        OpType::AllGather,
        OpType::AllGatherV,
        OpType::Gather,
        OpType::Scatter,
        OpType::ReduceScatter,
        OpType::AllToAll,
        OpType::Barrier,
        OpType::Send,
        OpType::Recv,
        OpType::Group,
        OpType::Duplicate,
        OpType::Share,
        OpType::AllToAllV,
    ];

    /// Returns the name of the method.
    pub fn name(self) -> &'static str {
        match self {
            OpType::AllReduce => "all_reduce",
            OpType::Broadcast => "broadcast",
            OpType::Reduce => "reduce",
            OpType::AllGather => "all_gather",
            OpType::AllGatherV => "all_gather_v",
            OpType::Gather => "gather",
            OpType::Scatter => "scatter",
            OpType::ReduceScatter => "reduce_scatter",
            OpType::AllToAll => "all_to_all",
            OpType::Barrier => "barrier",
            OpType::Send => "send",
            OpType::Recv => "recv",
            OpType::Group => "group",
            OpType::Duplicate => "duplicate",
            OpType::Share => "shared_array",
            OpType::AllToAllV => "all_to_all_v",
        }
    }
}

/// One call of one rank. `count` is in elements and has the same meaning on every rank of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CollectiveCall {
    pub op: OpType,
    pub dtype: DType,
    pub reduce: Option<ReduceOp>,
    pub root: Option<u32>,
    /// Number of the group's shared array, if the call works in one.
    pub memory: Option<u32>,
    pub count: u64,
    /// Id of the group; 0 for the whole job.
    pub group: u64,
    /// Number of this collective in its group, from 1.
    pub sequence: u64,
}

/// Bytes of an encoded call.
pub(crate) const CALL_BYTES: usize = 36;

impl CollectiveCall {
    /// Returns the reduction.
    pub(crate) fn reduction(&self) -> Result<ReduceOp> {
        self.reduce.ok_or_else(|| CommError::usage(format!("{self} names no reduction")))
    }

    /// Returns the root, or the peer of a message, as a rank of the group.
    pub(crate) fn root_or_peer(&self) -> usize {
        self.root.unwrap_or_default() as usize
    }

    pub(crate) fn encode(&self) -> [u8; CALL_BYTES] {
        let mut out = [0u8; CALL_BYTES];
        out[0] = self.op as u8;
        out[1] = self.dtype as u8;
        out[2] = self.reduce.map_or(0, |r| r as u8);
        out[4..8].copy_from_slice(&self.root.unwrap_or(u32::MAX).to_le_bytes());
        out[8..16].copy_from_slice(&self.count.to_le_bytes());
        out[16..24].copy_from_slice(&self.group.to_le_bytes());
        out[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        out[32..36].copy_from_slice(&self.memory.unwrap_or(u32::MAX).to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader::new(bytes);
        let op = r.u8()?;
        let op = OpType::ALL.into_iter().find(|o| *o as u8 == op)?;
        let dtype = DType::from_code(r.u8()?)?;
        let reduce = match r.u8()? {
            0 => None,
            code => Some(ReduceOp::from_code(code)?),
        };
        r.u8()?;
        let root = Some(r.u32()?).filter(|root| *root != u32::MAX);
        let (count, group, sequence) = (r.u64()?, r.u64()?, r.u64()?);
        let memory = Some(r.u32()?).filter(|memory| *memory != u32::MAX);
        Some(Self { op, dtype, reduce, root, memory, count, group, sequence })
    }

    /// Describes the position of the call for error messages: `collective #17 of the world`.
    pub(crate) fn position(&self, group: &str) -> String {
        match self.op {
            OpType::Send | OpType::Recv => format!("in {group}"),
            _ => format!("collective #{} of {group}", self.sequence),
        }
    }
}

impl fmt::Display for CollectiveCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.op.name())?;
        match self.op {
            OpType::Barrier | OpType::Group | OpType::Duplicate => {}
            OpType::AllGatherV | OpType::AllToAllV => write!(f, " of {}", self.dtype)?,
            _ => write!(f, " of {} {}", self.count, self.dtype)?,
        }
        if let Some(reduce) = self.reduce {
            write!(f, " ({reduce})")?;
        }
        if let Some(memory) = self.memory {
            write!(f, " in shared array {memory}")?;
        }
        // All other rank numbers in error messages are ranks of the job, so mark a rank of a sub-group.
        let of_group = if self.group == 0 { "" } else { "group " };
        match (self.op, self.root) {
            (OpType::Send, Some(peer)) => write!(f, " to {of_group}rank {peer}"),
            (OpType::Recv, Some(peer)) => write!(f, " from {of_group}rank {peer}"),
            (_, Some(root)) => write!(f, " with root {root}"),
            (_, None) => Ok(()),
        }
    }
}

/// The calls of a set of ranks: the call of the lowest rank and, if any rank differs from it, the call of the lowest such rank.
///
/// Merging is associative, commutative and idempotent: ranks may merge in any pattern and get the same value. Ranks are ranks
/// of the whole job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallComparison {
    first: (u32, CollectiveCall),
    other: Option<(u32, CollectiveCall)>,
}

/// Bytes of an encoded comparison.
pub(crate) const COMPARISON_BYTES: usize = 2 * (4 + CALL_BYTES);

impl CallComparison {
    pub(crate) fn of(rank: usize, call: CollectiveCall) -> Self {
        Self { first: (rank as u32, call), other: None }
    }

    pub(crate) fn merge(self, with: Self) -> Self {
        let first = if self.first.0 <= with.first.0 { self.first } else { with.first };
        let other = [Some(self.first), self.other, Some(with.first), with.other]
            .into_iter()
            .flatten()
            .filter(|(_, call)| *call != first.1)
            .min_by_key(|(rank, _)| *rank);
        Self { first, other }
    }

    /// Returns whether ranks make different calls.
    pub(crate) fn has_mismatch(&self) -> bool {
        self.other.is_some()
    }

    /// Returns the call of the lowest rank.
    pub(crate) fn first_call(&self) -> &CollectiveCall {
        &self.first.1
    }

    /// Returns the error that all ranks report, if they make different calls.
    pub(crate) fn check(&self, group: &str) -> Result<()> {
        let Some((rank, call)) = self.other else { return Ok(()) };
        let (first, expected) = self.first;
        let place = if call.sequence == expected.sequence && call.group == expected.group {
            expected.position(group)
        } else if call.group != expected.group {
            format!("in different groups, {}", expected.position(group))
        } else {
            format!("collective #{} against #{} of {group}", call.sequence, expected.sequence)
        };
        Err(CommError::new(
            ErrorKind::Mismatch,
            format!("rank {rank} calls {call} where rank {first} calls {expected}, {place}"),
        )
        .hint("every rank must call the same collectives in the same order, with the same lengths, types and roots")
        .blame(rank as usize))
    }

    pub(crate) fn encode(&self) -> [u8; COMPARISON_BYTES] {
        let mut out = [0u8; COMPARISON_BYTES];
        let half = COMPARISON_BYTES / 2;
        let (rank, call) = self.first;
        out[..4].copy_from_slice(&rank.to_le_bytes());
        out[4..half].copy_from_slice(&call.encode());
        let rank = self.other.map_or(u32::MAX, |o| o.0);
        out[half..half + 4].copy_from_slice(&rank.to_le_bytes());
        if let Some((_, call)) = self.other {
            out[half + 4..].copy_from_slice(&call.encode());
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (a, b) = bytes.split_at_checked(COMPARISON_BYTES / 2)?;
        let side = |half: &[u8]| Some((Reader::new(half).u32()?, CollectiveCall::decode(half.get(4..)?)?));
        let other = if Reader::new(b).u32()? == u32::MAX { None } else { Some(side(b)?) };
        Some(Self { first: side(a)?, other })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(op: OpType, count: u64) -> CollectiveCall {
        let reduce = (op == OpType::AllReduce).then_some(ReduceOp::Sum);
        let root = (op == OpType::Broadcast).then_some(0);
        CollectiveCall { op, dtype: DType::F32, reduce, root, memory: None, count, group: 0, sequence: 17 }
    }

    #[test]
    fn both_sides_are_named() {
        let comparison = CallComparison::of(0, call(OpType::AllReduce, 12))
            .merge(CallComparison::of(1, call(OpType::Broadcast, 10)));
        let error = comparison.check("the world").unwrap_err();
        assert_eq!(
            error.message,
            "rank 1 calls broadcast of 10 f32 with root 0 where rank 0 calls all_reduce of 12 f32 (sum), collective #17 \
             of the world"
        );
        assert_eq!((error.kind, error.culprit), (ErrorKind::Mismatch, Some(1)));
    }

    #[test]
    fn merging_in_any_pattern_has_one_result() {
        let calls = [12u64, 12, 9, 12, 9, 7];
        let ranks: Vec<CallComparison> =
            calls.iter().enumerate().map(|(r, c)| CallComparison::of(r, call(OpType::AllReduce, *c))).collect();
        let forward = ranks.iter().copied().reduce(CallComparison::merge).unwrap();
        let backward = ranks.iter().rev().copied().reduce(CallComparison::merge).unwrap();
        let tree = ranks[4].merge(ranks[1]).merge(ranks[5].merge(ranks[0])).merge(ranks[2].merge(ranks[3]));
        assert_eq!((forward, forward), (backward, tree));
        assert_eq!(forward.merge(forward), forward);
        assert!(forward.check("the world").unwrap_err().message.starts_with("rank 2 calls all_reduce of 9"));
        assert_eq!(CallComparison::decode(&forward.encode()), Some(forward));
        assert_eq!(CallComparison::decode(&ranks[3].encode()), Some(ranks[3]));
    }

    #[test]
    fn damaged_calls_are_refused() {
        let good = call(OpType::AllReduce, 3).encode();
        assert_eq!(CollectiveCall::decode(&good), Some(call(OpType::AllReduce, 3)));
        for (place, value) in [(0, 0u8), (0, 99), (1, 0), (2, 77)] {
            let mut bad = good;
            bad[place] = value;
            assert_eq!(CollectiveCall::decode(&bad), None);
        }
        assert_eq!(CollectiveCall::decode(&good[..CALL_BYTES - 1]), None);
    }
}
