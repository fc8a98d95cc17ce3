//! Steps that several collectives share: the agreement with recursive doubling, and the ring.

use std::ops::Range;

use bytemuck::cast_slice_mut;

use super::collectives::TcpGroup;
use super::mesh::{Mesh, RecvOp, SendOp, Sink};
use super::peer::{FrameHeader, FrameKind};
use crate::call::{AGREEMENT_BYTES, Agreement, CollectiveCall};
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::kernels;

/// Bytes that are received before they are reduced: they stay in a second-level cache.
const PIECE: usize = 128 << 10;

/// Bytes with the alignment of every element type.
pub(super) struct Scratch(Vec<u64>);

impl Scratch {
    pub(super) fn new(bytes: usize) -> Self {
        Self(vec![0; bytes.div_ceil(8)])
    }
    pub(super) fn get(&mut self, bytes: usize) -> &mut [u8] {
        &mut cast_slice_mut(&mut self.0)[..bytes]
    }
}

/// A reduction under way: its type is an accumulator's.
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
    /// Has all ranks agree on `call`, and reduces `data` on the way (empty for none): every rank ends with the same bits.
    ///
    /// A rank that learns of a mismatch goes on with agreements alone, so that in the end all know the same two sides.
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
        let mut theirs = Scratch::new(data.len());
        let theirs = theirs.get(data.len());
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

    /// Exchanges agreements and data with one rank, in the directions for which there is data.
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
            // The rest goes out while theirs comes in, or not at all if theirs says that it is of no use.
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

    /// The parts of `data`, cut at `cut`, that a step of the ring sends and receives.
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

    /// Reduce-scatter round the ring: afterwards this rank's `data` holds the reduction of part `(me + 1) mod n`, and
    /// partial sums elsewhere. Part q starts at rank q, and each rank on its way adds its own.
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
        let mut scratch = Scratch::new(PIECE);
        for step in 0..n - 1 {
            let (send, recv) = ((me + n - step) % n, (me + n - step - 1) % n);
            let (body, into) = Self::parts(data, cut, send, recv);
            let mut sends = [self.send_to(call, right, body)];
            let sink = Sink::Reduce { into, scratch: scratch.get(PIECE), dtype: reduction.dtype, op: reduction.op };
            let mut recvs = [RecvOp::Data { peer: self.group.ranks[left], sink, filled: 0, done: false }];
            mesh.transfer(call, &self.name, &mut sends, &mut recvs)?;
        }
        Ok(())
    }

    /// All-gather round the ring, when this rank has part `own`, and every other rank the part as far on as it is itself.
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
