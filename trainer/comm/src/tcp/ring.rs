//! Steps that several collectives share: the comparison by recursive doubling, and the ring.

use std::ops::Range;

use super::collectives::TcpGroup;
use super::mesh::{Mesh, RecvOp, SendOp, Sink};
use super::peer::{FrameHeader, FrameKind};
use crate::aligned::AlignedBytes;
use crate::call::{COMPARISON_BYTES, CallComparison, CollectiveCall};
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::kernels;

/// Bytes that are received before they are reduced. They stay in a second-level cache.
const PIECE: usize = 128 << 10;

/// A reduction in accumulators.
#[derive(Clone, Copy)]
pub(super) struct Reduction {
    pub dtype: DType,
    pub op: ReduceOp,
}

pub(super) fn data_head(call: &CollectiveCall, len: usize) -> Vec<u8> {
    FrameHeader { kind: FrameKind::Data, group: call.group, sequence: call.sequence, len: len as u64 }.encode().to_vec()
}

fn comparison_head(call: &CollectiveCall, comparison: &CallComparison) -> Vec<u8> {
    let head = FrameHeader {
        kind: FrameKind::CallComparison,
        group: call.group,
        sequence: call.sequence,
        len: COMPARISON_BYTES as u64,
    };
    let mut out = head.encode().to_vec();
    out.extend_from_slice(&comparison.encode());
    out
}

impl TcpGroup {
    /// Compares the calls of all ranks, and reduces `data` (may be empty) in the same messages. Every rank ends with the same
    /// bits.
    ///
    /// A rank that notices a mismatch sends no more data, but continues to exchange comparisons. So at the end all ranks know
    /// the same two different calls.
    pub(super) fn recursive_doubling(
        &self,
        mesh: &mut Mesh,
        call: &CollectiveCall,
        data: &mut [u8],
        reduction: Option<Reduction>,
    ) -> Result<()> {
        let (n, me) = (self.group.len(), self.group.me);
        let largest_power_of_two = 1 << n.ilog2();
        let extra = n - largest_power_of_two;
        let mut comparison = CallComparison::of(self.group.global_rank(), *call);
        let mut theirs = AlignedBytes::zero(data.len());
        let theirs = theirs.get_mut();
        let combine = |comparison: &CallComparison, data: &mut [u8], theirs: &[u8], mine_first: bool| {
            if let Some(Reduction { dtype, op }) = reduction.filter(|_| !comparison.has_mismatch()) {
                kernels::accumulate(dtype, op, data, theirs, mine_first);
            }
        };
        if me >= largest_power_of_two {
            self.exchange(mesh, call, me - largest_power_of_two, &mut comparison, Some(data), None)?;
            self.exchange(mesh, call, me - largest_power_of_two, &mut comparison, None, Some(data))?;
            return comparison.check(&self.name);
        }
        if me < extra {
            self.exchange(mesh, call, me + largest_power_of_two, &mut comparison, None, Some(theirs))?;
            combine(&comparison, data, theirs, true);
        }
        let mut distance = 1;
        while distance < largest_power_of_two {
            let partner = me ^ distance;
            self.exchange(mesh, call, partner, &mut comparison, Some(data), Some(theirs))?;
            combine(&comparison, data, theirs, me < partner);
            distance *= 2;
        }
        if me < extra {
            self.exchange(mesh, call, me + largest_power_of_two, &mut comparison, Some(data), None)?;
        }
        comparison.check(&self.name)
    }

    /// Exchanges comparisons with one rank, and data in the directions that have data.
    fn exchange(
        &self,
        mesh: &mut Mesh,
        call: &CollectiveCall,
        with: usize,
        comparison: &mut CallComparison,
        send: Option<&[u8]>,
        recv: Option<&mut [u8]>,
    ) -> Result<()> {
        let peer = self.group.ranks[with];
        let mut sends = Vec::new();
        if let Some(data) = send {
            let mut head = comparison_head(call, comparison);
            let (opening, silent) = (head.len(), data.is_empty() || comparison.has_mismatch());
            if !silent {
                head.extend_from_slice(&data_head(call, data.len()));
            }
            // This transfer may end once the comparison is sent. The data follows while the peer's data arrives, or is not sent
            // if the peer's comparison shows a mismatch.
            sends.push(SendOp { needed: opening, ..SendOp::new(peer, head, if silent { &[] } else { data }) });
        }
        let mut recvs = Vec::new();
        if recv.is_some() {
            recvs.push(RecvOp::CallComparison { peer, got: None });
        }
        mesh.transfer(call, &self.name, &mut sends, &mut recvs)?;
        if let Some(RecvOp::CallComparison { got: Some(theirs), .. }) = recvs.pop() {
            *comparison = comparison.merge(theirs);
        }
        if comparison.has_mismatch() {
            return Ok(());
        }
        for out in &mut sends {
            out.needed = out.head.len() + out.body.len();
        }
        let mut recvs: Vec<RecvOp<'_>> =
            recv.filter(|into| !into.is_empty()).map(|into| self.recv_from(with, into)).into_iter().collect();
        mesh.transfer(call, &self.name, &mut sends, &mut recvs)
    }

    pub(super) fn recv_from<'a>(&self, rank: usize, into: &'a mut [u8]) -> RecvOp<'a> {
        RecvOp::Data { peer: self.group.ranks[rank], sink: Sink::Copy(into), filled: 0, done: false }
    }

    pub(super) fn send_to<'a>(&self, call: &CollectiveCall, rank: usize, body: &'a [u8]) -> SendOp<'a> {
        SendOp::new(self.group.ranks[rank], data_head(call, body.len()), body)
    }

    /// Returns the parts of `data`, cut at `cut`, that a step of the ring sends and receives.
    fn parts<'a>(data: &'a mut [u8], cut: &[usize], send: usize, recv: usize) -> (&'a [u8], &'a mut [u8]) {
        let range = |part: usize| -> Range<usize> { cut[part]..cut[part + 1] };
        let (out, into) = (range(send), range(recv));
        if send < recv {
            let (low, high) = data.split_at_mut(into.start);
            (&low[out], &mut high[..into.len()])
        } else {
            let (low, high) = data.split_at_mut(out.start);
            (&high[..out.len()], &mut low[into])
        }
    }

    /// Runs the ring reduce-scatter. Afterwards this rank's `data` holds the reduction of part `(me + 1) mod n`, and partial
    /// sums in the other parts. The sum of part q starts at rank q, and each following rank adds its own values.
    pub(super) fn ring_reduce_scatter(
        &self,
        mesh: &mut Mesh,
        call: &CollectiveCall,
        data: &mut [u8],
        cut: &[usize],
        reduction: Reduction,
    ) -> Result<()> {
        let (n, me) = (self.group.len(), self.group.me);
        let (left, right) = ((me + n - 1) % n, (me + 1) % n);
        let mut scratch = AlignedBytes::zero(PIECE);
        for step in 0..n - 1 {
            let (send, recv) = ((me + n - step) % n, (me + n - step - 1) % n);
            let (body, into) = Self::parts(data, cut, send, recv);
            let mut sends = [self.send_to(call, right, body)];
            let sink = Sink::Reduce { into, scratch: scratch.get_mut(), dtype: reduction.dtype, op: reduction.op };
            let mut recvs = [RecvOp::Data { peer: self.group.ranks[left], sink, filled: 0, done: false }];
            mesh.transfer(call, &self.name, &mut sends, &mut recvs)?;
        }
        Ok(())
    }

    /// Runs the ring all-gather. At the start this rank has part `own`, and rank `me + i` has part `own + i`.
    pub(super) fn ring_all_gather(
        &self,
        mesh: &mut Mesh,
        call: &CollectiveCall,
        data: &mut [u8],
        cut: &[usize],
        own: usize,
    ) -> Result<()> {
        let (n, me) = (self.group.len(), self.group.me);
        let (left, right) = ((me + n - 1) % n, (me + 1) % n);
        for step in 0..n - 1 {
            let (send, recv) = ((own + n - step) % n, (own + n - step - 1) % n);
            let (body, into) = Self::parts(data, cut, send, recv);
            let mut sends = [self.send_to(call, right, body)];
            let mut recvs = [self.recv_from(left, into)];
            mesh.transfer(call, &self.name, &mut sends, &mut recvs)?;
        }
        Ok(())
    }
}
