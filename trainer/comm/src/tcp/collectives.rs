//! The collectives over TCP. `mod.rs` lists the algorithms.

use std::sync::Arc;

use parking_lot::Mutex;

use super::mesh::{Mesh, RecvOp, SendOp};
use super::ring::Reduction;
use crate::aligned::AlignedBytes;
use crate::call::CollectiveCall;
use crate::dtype::{ReduceOp, split};
use crate::error::Result;
use crate::kernels;
use crate::transport::{GroupRanks, MessageOp, Transport};
use crate::widen::{to_accumulators, to_results};

/// Limit of small data in bytes. Below the limit the number of steps determines the time, above it the number of bytes.
const SMALL: usize = 32 << 10;
/// Largest part of the ring on one host, in bytes. Longer arrays are reduced in windows, one after the other, so the data that
/// a step has received is still in a cache when the next step sends it. Measured for 45 MB over two ranks: 12 to 19 ms, against
/// 26 to 29 ms without windows; over four ranks on two cores 60 to 79 ms, against 61 to 94 ms. Between hosts there are no
/// windows, since the latency of steps counts there, not the memory.
const LOCAL_PART: usize = 512 << 10;
/// Bytes of the pieces in which a long broadcast travels down the chain.
const CHAIN_PIECE: usize = 256 << 10;

/// The TCP transport of one group. The groups of a stream share its mesh.
pub(crate) struct TcpGroup {
    mesh: Arc<Mutex<Mesh>>,
    pub(super) group: GroupRanks,
    pub(super) name: String,
}

impl TcpGroup {
    pub(crate) fn new(mesh: Arc<Mutex<Mesh>>, group: GroupRanks) -> Self {
        let name = group.name();
        Self { mesh, group, name }
    }

    fn check_same_call(&self, mesh: &mut Mesh, call: &CollectiveCall) -> Result<()> {
        self.recursive_doubling(mesh, call, &mut [], None)
    }

    fn reduction(call: &CollectiveCall, op: ReduceOp) -> Reduction {
        Reduction { dtype: call.dtype.accumulator(), op }
    }

    fn all_reduce_long(&self, mesh: &mut Mesh, call: &CollectiveCall, op: ReduceOp, data: &mut [u8]) -> Result<()> {
        self.check_same_call(mesh, call)?;
        let n = self.group.len();
        let window = if mesh.is_on_one_host(&self.group.ranks) { n * LOCAL_PART } else { data.len() };
        data.chunks_mut(window).try_for_each(|window| self.all_reduce_ring(mesh, call, op, window))
    }

    fn all_reduce_ring(&self, mesh: &mut Mesh, call: &CollectiveCall, op: ReduceOp, data: &mut [u8]) -> Result<()> {
        let (n, own) = (self.group.len(), (self.group.me + 1) % self.group.len());
        let cut = split(data.len(), call.dtype.size(), n);
        if call.dtype == call.dtype.accumulator() {
            self.ring_reduce_scatter(mesh, call, data, &cut, Self::reduction(call, op))?;
            if op == ReduceOp::Mean {
                kernels::divide(call.dtype, &mut data[cut[own]..cut[own + 1]], n);
            }
        } else {
            let mut sums = to_accumulators(call.dtype, data);
            let sums = sums.get_mut();
            let wide = call.dtype.accumulator().size() / call.dtype.size();
            let wide_cut: Vec<usize> = cut.iter().map(|at| at * wide).collect();
            self.ring_reduce_scatter(mesh, call, sums, &wide_cut, Self::reduction(call, op))?;
            let (sums, part) = (&mut sums[wide_cut[own]..wide_cut[own + 1]], &mut data[cut[own]..cut[own + 1]]);
            to_results(call.dtype, op, n, sums, part);
        }
        self.ring_all_gather(mesh, call, data, &cut, own)
    }

    fn reduce_long(&self, mesh: &mut Mesh, call: &CollectiveCall, op: ReduceOp, data: &mut [u8]) -> Result<()> {
        self.check_same_call(mesh, call)?;
        let (n, me, root) = (self.group.len(), self.group.me, call.root_or_peer());
        let mut sums = to_accumulators(call.dtype, data);
        let sums = sums.get_mut();
        let cut = split(sums.len(), call.dtype.accumulator().size(), n);
        self.ring_reduce_scatter(mesh, call, sums, &cut, Self::reduction(call, op))?;
        let held = |rank: usize| (rank + 1) % n;
        if me != root {
            let part = &sums[cut[held(me)]..cut[held(me) + 1]];
            return mesh.transfer(call, &self.name, &mut [self.send_to(call, root, part)], &mut []);
        }
        // Rank p-1 holds the sum of part p. The root already has its own part.
        let mut recvs: Vec<RecvOp<'_>> = cut_up(sums, &cut)
            .enumerate()
            .map(|(part, bytes)| ((part + n - 1) % n, bytes))
            .filter(|(rank, _)| *rank != me)
            .map(|(rank, bytes)| self.recv_from(rank, bytes))
            .collect();
        mesh.transfer(call, &self.name, &mut [], &mut recvs)?;
        drop(recvs);
        to_results(call.dtype, op, n, sums, data);
        Ok(())
    }

    /// Broadcasts small data over a binomial tree. `relative_rank` is a rank's distance from the root.
    fn broadcast_tree(&self, mesh: &mut Mesh, call: &CollectiveCall, data: &mut [u8]) -> Result<()> {
        let (n, root) = (self.group.len(), call.root_or_peer());
        let relative_rank = (self.group.me + n - root) % n;
        let rank = |relative_rank: usize| (relative_rank + root) % n;
        let top = n.next_power_of_two();
        let lowest = if relative_rank == 0 { top } else { 1 << relative_rank.trailing_zeros() };
        if relative_rank != 0 {
            mesh.transfer(call, &self.name, &mut [], &mut [self.recv_from(rank(relative_rank - lowest), data)])?;
        }
        let children = std::iter::successors(Some(lowest / 2), |d| Some(d / 2)).take_while(|d| *d > 0);
        let mut sends: Vec<SendOp<'_>> = children
            .map(|distance| relative_rank + distance)
            .filter(|child| *child < n)
            .map(|child| self.send_to(call, rank(child), data))
            .collect();
        mesh.transfer(call, &self.name, &mut sends, &mut [])
    }

    /// Broadcasts long data along the chain root, root+1, …, in pieces. Each rank sends one piece while it receives the next.
    fn broadcast_chain(&self, mesh: &mut Mesh, call: &CollectiveCall, data: &mut [u8]) -> Result<()> {
        let (n, me, root) = (self.group.len(), self.group.me, call.root_or_peer());
        let relative_rank = (me + n - root) % n;
        let (left, right) = ((me + n - 1) % n, (me + 1) % n);
        let pieces = data.len().div_ceil(CHAIN_PIECE);
        for step in 0..=pieces {
            let (passed, rest) = data.split_at_mut((step * CHAIN_PIECE).min(data.len()));
            let mut sends = Vec::new();
            let mut recvs = Vec::new();
            if step > 0 && relative_rank + 1 < n {
                sends.push(self.send_to(call, right, &passed[(step - 1) * CHAIN_PIECE..]));
            }
            if step < pieces && relative_rank > 0 {
                let len = rest.len().min(CHAIN_PIECE);
                recvs.push(self.recv_from(left, &mut rest[..len]));
            }
            mesh.transfer(call, &self.name, &mut sends, &mut recvs)?;
        }
        Ok(())
    }

    /// Sends part `r` of `send` to each rank `r`, and receives each rank's part for this rank into part `r` of `recv`.
    fn all_to_all_direct(&self, mesh: &mut Mesh, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let (n, me) = (self.group.len(), self.group.me);
        let len = send.len() / n;
        let part = |rank: usize| &send[rank * len..(rank + 1) * len];
        recv[me * len..(me + 1) * len].copy_from_slice(part(me));
        if len == 0 {
            return Ok(());
        }
        // Starts with the next rank, so that not all ranks send to rank 0 first.
        let mut sends: Vec<SendOp<'_>> = (1..n).map(|s| (me + s) % n).map(|r| self.send_to(call, r, part(r))).collect();
        let mut recvs: Vec<RecvOp<'_>> = recv
            .chunks_exact_mut(len)
            .enumerate()
            .filter(|(rank, _)| *rank != me)
            .map(|(rank, bytes)| self.recv_from(rank, bytes))
            .collect();
        mesh.transfer(call, &self.name, &mut sends, &mut recvs)
    }
}

/// Returns the parts of `data` between the offsets `cut`.
fn cut_up<'a>(data: &'a mut [u8], cut: &[usize]) -> impl Iterator<Item = &'a mut [u8]> {
    let mut rest = data;
    let lens: Vec<usize> = cut.windows(2).map(|w| w[1] - w[0]).collect();
    lens.into_iter().map(move |len| {
        let (part, later) = std::mem::take(&mut rest).split_at_mut(len);
        rest = later;
        part
    })
}

impl Transport for TcpGroup {
    fn all_reduce(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()> {
        let (mesh, op) = (&mut *self.mesh.lock(), call.reduction()?);
        if data.len() > SMALL {
            return self.all_reduce_long(mesh, call, op, data);
        }
        let mut sums = to_accumulators(call.dtype, data);
        self.recursive_doubling(mesh, call, sums.get_mut(), Some(Self::reduction(call, op)))?;
        to_results(call.dtype, op, self.group.len(), sums.get_mut(), data);
        Ok(())
    }

    fn broadcast(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()> {
        let mesh = &mut *self.mesh.lock();
        self.check_same_call(mesh, call)?;
        if data.len() > SMALL { self.broadcast_chain(mesh, call, data) } else { self.broadcast_tree(mesh, call, data) }
    }

    fn reduce(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()> {
        let (mesh, op) = (&mut *self.mesh.lock(), call.reduction()?);
        if data.len() > SMALL {
            return self.reduce_long(mesh, call, op, data);
        }
        let mut sums = to_accumulators(call.dtype, data);
        self.recursive_doubling(mesh, call, sums.get_mut(), Some(Self::reduction(call, op)))?;
        if self.group.me == call.root_or_peer() {
            to_results(call.dtype, op, self.group.len(), sums.get_mut(), data);
        }
        Ok(())
    }

    fn all_gather(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8], lens: &[usize]) -> Result<()> {
        let mesh = &mut *self.mesh.lock();
        self.check_same_call(mesh, call)?;
        let (n, me) = (self.group.len(), self.group.me);
        let mut cut = vec![0];
        cut.extend(lens.iter().scan(0, |at, len| {
            *at += len;
            Some(*at)
        }));
        recv[cut[me]..cut[me + 1]].copy_from_slice(send);
        if recv.len() > SMALL {
            return self.ring_all_gather(mesh, call, recv, &cut, me);
        }
        let mut sends: Vec<SendOp<'_>> = (1..n).map(|s| self.send_to(call, (me + s) % n, send)).collect();
        let mut recvs: Vec<RecvOp<'_>> = cut_up(recv, &cut)
            .enumerate()
            .filter(|(rank, _)| *rank != me)
            .map(|(rank, bytes)| self.recv_from(rank, bytes))
            .collect();
        mesh.transfer(call, &self.name, &mut sends, &mut recvs)
    }

    fn gather(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let mesh = &mut *self.mesh.lock();
        self.check_same_call(mesh, call)?;
        let (me, root, len) = (self.group.me, call.root_or_peer(), send.len());
        if len == 0 {
            return Ok(());
        }
        if me != root {
            return mesh.transfer(call, &self.name, &mut [self.send_to(call, root, send)], &mut []);
        }
        recv[me * len..(me + 1) * len].copy_from_slice(send);
        let mut recvs: Vec<RecvOp<'_>> = recv
            .chunks_exact_mut(len)
            .enumerate()
            .filter(|(rank, _)| *rank != me)
            .map(|(rank, bytes)| self.recv_from(rank, bytes))
            .collect();
        mesh.transfer(call, &self.name, &mut [], &mut recvs)
    }

    fn scatter(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let mesh = &mut *self.mesh.lock();
        self.check_same_call(mesh, call)?;
        let (n, me, root, len) = (self.group.len(), self.group.me, call.root_or_peer(), recv.len());
        if me != root {
            return mesh.transfer(call, &self.name, &mut [], &mut [self.recv_from(root, recv)]);
        }
        let part = |rank: usize| &send[rank * len..(rank + 1) * len];
        recv.copy_from_slice(part(me));
        let mut sends: Vec<SendOp<'_>> =
            (0..n).filter(|rank| *rank != me).map(|rank| self.send_to(call, rank, part(rank))).collect();
        mesh.transfer(call, &self.name, &mut sends, &mut [])
    }

    fn reduce_scatter(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let (mesh, op) = (&mut *self.mesh.lock(), call.reduction()?);
        self.check_same_call(mesh, call)?;
        let mut parts = AlignedBytes::zero(send.len());
        let parts = parts.get_mut();
        self.all_to_all_direct(mesh, call, send, parts)?;
        if !recv.is_empty() {
            let sources: Vec<&[u8]> = parts.chunks_exact(recv.len()).collect();
            kernels::reduce_into(call.dtype, op, recv, &sources);
        }
        Ok(())
    }

    fn all_to_all(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let mesh = &mut *self.mesh.lock();
        self.check_same_call(mesh, call)?;
        self.all_to_all_direct(mesh, call, send, recv)
    }

    fn barrier(&mut self, call: &CollectiveCall) -> Result<()> {
        self.check_same_call(&mut self.mesh.lock(), call)
    }

    fn send(&mut self, call: &CollectiveCall, tag: u64, data: &[u8]) -> Result<()> {
        let to = self.group.ranks[call.root_or_peer()];
        self.mesh.lock().send_message(call, &self.name, to, tag, data)
    }

    fn recv(&mut self, call: &CollectiveCall, tag: u64, data: &mut [u8]) -> Result<()> {
        let from = self.group.ranks[call.root_or_peer()];
        self.mesh.lock().recv_message(call, &self.name, from, tag, data)
    }

    fn progress(&mut self, messages: &mut [MessageOp<'_>]) -> Result<bool> {
        self.mesh.lock().progress(&self.name, &self.group.ranks, messages)
    }
}
