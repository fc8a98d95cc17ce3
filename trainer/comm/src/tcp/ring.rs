//! Steps that several collectives share: the agreement by recursive doubling, and the ring.

use std::ops::Range;

use super::collectives::TcpGroup;
use super::mesh::{Mesh, RecvOp, SendOp, Sink};
use super::peer::{FrameHeader, FrameKind};
use crate::aligned::AlignedBytes;
use crate::call::{AGREEMENT_BYTES, Agreement, CollectiveCall};
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

fn agreement_head(call: &CollectiveCall, agreement: &Agreement) -> Vec<u8> {
    let head =
        FrameHeader { kind: FrameKind::Agree, group: call.group, sequence: call.sequence, len: AGREEMENT_BYTES as u64 };
    let mut out = head.encode().to_vec();
    out.extend_from_slice(&agreement.encode());
    out
}

impl TcpGroup {
    /// Compares the calls of all ranks, and reduces `data` (may be empty) in the same messages. Every rank ends with the same
    /// bits.
    ///
    /// A rank that notices a mismatch sends no more data, but continues to exchange agreements. So at the end all ranks know
    /// the same two different calls.
    pub(super) fn recursive_doubling(
        &self,
        mesh: &mut Mesh,
        call: &CollectiveCall,
        data: &mut [u8],
        reduction: Option<Reduction>,
    ) -> Result<()> {
        let (n, me) = (self.group.len(), self.group.me);
        let most = 1 << n.ilog2();
        let extra = n - most;
        let mut agreement = Agreement::of(self.group.job_rank(), *call);
        let mut theirs = AlignedBytes::zero(data.len());
        let theirs = theirs.get_mut();
        let combine = |agreement: &Agreement, data: &mut [u8], theirs: &[u8], mine_first: bool| {
            if let Some(Reduction { dtype, op }) = reduction.filter(|_| !agreement.is_mixed()) {
                kernels::accumulate(dtype, op, data, theirs, mine_first);
            }
        };
        if me >= most {
            self.exchange(mesh, call, me - most, &mut agreement, Some(data), None)?;
            self.exchange(mesh, call, me - most, &mut agreement, None, Some(data))?;
            return agreement.check(&self.name);
        }
        if me < extra {
            self.exchange(mesh, call, me + most, &mut agreement, None, Some(theirs))?;
            combine(&agreement, data, theirs, true);
        }
        let mut distance = 1;
        while distance < most {
            let partner = me ^ distance;
            self.exchange(mesh, call, partner, &mut agreement, Some(data), Some(theirs))?;
            combine(&agreement, data, theirs, me < partner);
            distance *= 2;
        }
        if me < extra {
            self.exchange(mesh, call, me + most, &mut agreement, Some(data), None)?;
        }
        agreement.check(&self.name)
    }

    /// Exchanges agreements with one rank, and data in the directions that have data.
    fn exchange(
        &self,
        mesh: &mut Mesh,
        call: &CollectiveCall,
        with: usize,
        agreement: &mut Agreement,
        send: Option<&[u8]>,
        recv: Option<&mut [u8]>,
    ) -> Result<()> {
        let peer = self.group.ranks[with];
        let mut sends = Vec::new();
        if let Some(data) = send {
            let mut head = agreement_head(call, agreement);
            let (opening, silent) = (head.len(), data.is_empty() || agreement.is_mixed());
            if !silent {
                head.extend_from_slice(&data_head(call, data.len()));
            }
            // This transfer may end once the agreement is sent. The data follows while the peer's data arrives, or is not sent
            // if the peer's agreement shows a mismatch.
            sends.push(SendOp { needed: opening, ..SendOp::new(peer, head, if silent { &[] } else { data }) });
        }
        let mut recvs = Vec::new();
        if recv.is_some() {
            recvs.push(RecvOp::Agreement { peer, got: None });
        }
        mesh.transfer(call, &self.name, &mut sends, &mut recvs)?;
        if let Some(RecvOp::Agreement { got: Some(theirs), .. }) = recvs.pop() {
            *agreement = agreement.merge(theirs);
        }
        if agreement.is_mixed() {
            return Ok(());
        }
        for out in &mut sends {
            out.needed = out.head.len() + out.body.len();
        }
        let mut recvs: Vec<RecvOp<'_>> =
            recv.filter(|into| !into.is_empty()).map(|into| self.copy_from(with, into)).into_iter().collect();
        mesh.transfer(call, &self.name, &mut sends, &mut recvs)
    }

    pub(super) fn copy_from<'a>(&self, rank: usize, into: &'a mut [u8]) -> RecvOp<'a> {
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
    pub(super) fn ring_reduce(
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
    pub(super) fn ring_gather(
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
            let mut recvs = [self.copy_from(left, into)];
            mesh.transfer(call, &self.name, &mut sends, &mut recvs)?;
        }
        Ok(())
    }
}
