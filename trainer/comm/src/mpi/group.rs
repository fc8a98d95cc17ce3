//! The transport of one group over MPI.

use std::sync::Arc;
use std::time::Duration;

use super::calls::{self, Words};
use super::runtime::{Desk, Office, Runtime, Stall};
use crate::abort::Abort;
use crate::descriptor::{Agreement, DESCRIPTOR_BYTES, Descriptor, OpKind};
use crate::dtype::{DType, ReduceOp};
use crate::error::{CommError, ErrorKind, Result};
use crate::kernels;
use crate::message::Message;
use crate::transport::{Members, REASON_LIMIT, Transport};

/// See the module.
pub(crate) struct MpiGroup {
    /// Before the runtime: communicators are freed before MPI ends.
    office: Office,
    members: Members,
    name: String,
    abort: Arc<Abort>,
    timeout: Duration,
    _runtime: Arc<Runtime>,
}

impl MpiGroup {
    /// Returns when all members have come; `limit` is for that, `timeout` for each call later.
    pub(crate) fn new(
        members: Members,
        runtime: Arc<Runtime>,
        abort: Arc<Abort>,
        limit: Duration,
        timeout: Duration,
    ) -> Result<Self> {
        let office = Office::open(members.id, &members.ranks, &abort, limit)?;
        let name = members.name();
        Ok(Self { office, members, name, abort, timeout, _runtime: runtime })
    }

    fn len(&self) -> usize {
        self.members.len()
    }

    fn run<R: Send + 'static>(
        &self,
        call: &Descriptor,
        job: impl FnOnce(&mut Desk) -> R + Send + 'static,
    ) -> Result<R> {
        self.office.run(self.timeout, job).map_err(|stall| self.stalled(call, &stall))
    }

    fn stalled(&self, call: &Descriptor, stall: &Stall) -> CommError {
        let (me, place) = (self.members.my_rank(), call.place(&self.name));
        match stall {
            Stall::Aborted => self.abort.wait(REASON_LIMIT).unwrap_or_else(|| {
                CommError::new(ErrorKind::Aborted, "the job was aborted, and the reason did not arrive")
            }),
            Stall::Panicked => CommError::system(format!("{call}, {place}: the MPI call of rank {me} failed")),
            Stall::Timeout => CommError::new(
                ErrorKind::Timeout,
                format!("{call}, {place}: MPI did not return within {:.1?} (rank {me} waits)", self.timeout),
            ),
        }
    }

    /// Compares what all ranks call; none returns before all have come.
    fn agree(&self, call: &Descriptor) -> Result<()> {
        let (mine, n) = (Words::copy(&call.encode()), self.len());
        let lens = vec![DESCRIPTOR_BYTES; n];
        let all = self.run(call, move |desk| calls::all_gather(&desk.comm, DType::U8, &mine, &lens))?;
        let mut agreement = Agreement::of(self.members.my_rank(), *call);
        for (rank, bytes) in self.members.ranks.iter().zip(all.get().chunks(DESCRIPTOR_BYTES)) {
            let theirs = Descriptor::decode(bytes)
                .ok_or_else(|| CommError::system(format!("{call}: rank {rank} sent what no rank sends")))?;
            agreement = agreement.merge(Agreement::of(*rank, theirs));
        }
        agreement.check(&self.name)
    }

    fn op(call: &Descriptor) -> Result<ReduceOp> {
        call.reduce.ok_or_else(|| CommError::usage(format!("{call} names no reduction")))
    }

    fn root(call: &Descriptor) -> i32 {
        call.root.unwrap_or_default() as i32
    }

    fn is_root(&self, call: &Descriptor) -> bool {
        call.root == Some(self.members.me as u32)
    }

    /// Refuses what 31 bits do not count.
    fn countable(call: &Descriptor, bytes: usize) -> Result<()> {
        if bytes / call.dtype.size() <= i32::MAX as usize {
            return Ok(());
        }
        Err(CommError::usage(format!("{call}: MPI counts at most {} elements in a call", i32::MAX))
            .hint("exchange the data in smaller pieces"))
    }

    /// `data` as accumulators.
    fn widened(call: &Descriptor, data: &[u8]) -> Words {
        let (from, to) = (call.dtype, call.dtype.accumulator());
        if from == to {
            return Words::copy(data);
        }
        let mut wide = Words::zero(data.len() / from.size() * to.size());
        kernels::widen(from, data, wide.get_mut());
        wide
    }

    /// Sums to final values: the mean's division, and the one rounding of 16-bit floats.
    fn finish(&self, call: &Descriptor, op: ReduceOp, mut sums: Words, into: &mut [u8]) {
        let wide = call.dtype.accumulator();
        if op == ReduceOp::Mean {
            kernels::divide(wide, sums.get_mut(), self.len());
        }
        if wide == call.dtype { into.copy_from_slice(sums.get()) } else { kernels::round(call.dtype, sums.get(), into) }
    }

    /// Everybody's parts folded in rank order.
    fn fold(call: &Descriptor, op: ReduceOp, all: &Words, into: &mut [u8]) {
        if !into.is_empty() {
            let sources: Vec<&[u8]> = all.get().chunks_exact(into.len()).collect();
            kernels::fold(call.dtype, op, into, &sources);
        }
    }
}

impl Transport for MpiGroup {
    fn all_reduce(&mut self, call: &Descriptor, data: &mut [u8]) -> Result<()> {
        self.agree(call)?;
        let (op, dtype) = (Self::op(call)?, call.dtype);
        if data.is_empty() {
            return Ok(());
        }
        if calls::reduces(dtype, op) {
            let send = Self::widened(call, data);
            let sums = self.run(call, move |desk| calls::all_reduce(&desk.comm, dtype.accumulator(), op, &send))?;
            self.finish(call, op, sums, data);
        } else {
            Self::countable(call, data.len())?;
            let (send, lens) = (Words::copy(data), vec![data.len(); self.len()]);
            let all = self.run(call, move |desk| calls::all_gather(&desk.comm, dtype, &send, &lens))?;
            Self::fold(call, op, &all, data);
        }
        Ok(())
    }

    fn broadcast(&mut self, call: &Descriptor, data: &mut [u8]) -> Result<()> {
        self.agree(call)?;
        let (dtype, root, len, is_root) = (call.dtype, Self::root(call), data.len(), self.is_root(call));
        let mut words = if is_root { Words::copy(data) } else { Words::zero(len) };
        let words = self.run(call, move |desk| {
            calls::broadcast(&desk.comm, dtype, &mut words, root);
            words
        })?;
        if !is_root {
            data.copy_from_slice(words.get());
        }
        Ok(())
    }

    fn reduce(&mut self, call: &Descriptor, data: &mut [u8]) -> Result<()> {
        self.agree(call)?;
        let (op, dtype, root) = (Self::op(call)?, call.dtype, Self::root(call));
        if data.is_empty() {
            return Ok(());
        }
        if calls::reduces(dtype, op) {
            let send = Self::widened(call, data);
            let sums = self.run(call, move |desk| calls::reduce(&desk.comm, dtype.accumulator(), op, &send, root))?;
            if self.is_root(call) {
                self.finish(call, op, sums, data);
            }
        } else {
            Self::countable(call, data.len())?;
            let send = Words::copy(data);
            let all = self.run(call, move |desk| calls::gather(&desk.comm, dtype, &send, root))?;
            if self.is_root(call) {
                Self::fold(call, op, &all, data);
            }
        }
        Ok(())
    }

    fn all_gather(&mut self, call: &Descriptor, send: &[u8], recv: &mut [u8], lens: &[usize]) -> Result<()> {
        self.agree(call)?;
        // The lengths' own exchange is part of `all_gather_v`: its elements are not the call's.
        let dtype = if recv.len().is_multiple_of(call.dtype.size()) { call.dtype } else { DType::U8 };
        Self::countable(call, recv.len())?;
        let (send, lens) = (Words::copy(send), lens.to_vec());
        let all = self.run(call, move |desk| calls::all_gather(&desk.comm, dtype, &send, &lens))?;
        recv.copy_from_slice(all.get());
        Ok(())
    }

    fn gather(&mut self, call: &Descriptor, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.agree(call)?;
        Self::countable(call, send.len())?;
        let (send, dtype, root) = (Words::copy(send), call.dtype, Self::root(call));
        let all = self.run(call, move |desk| calls::gather(&desk.comm, dtype, &send, root))?;
        recv.copy_from_slice(all.get());
        Ok(())
    }

    fn scatter(&mut self, call: &Descriptor, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.agree(call)?;
        Self::countable(call, recv.len())?;
        let (send, len, dtype, root) = (Words::copy(send), recv.len(), call.dtype, Self::root(call));
        let part = self.run(call, move |desk| calls::scatter(&desk.comm, dtype, &send, len, root))?;
        recv.copy_from_slice(part.get());
        Ok(())
    }

    fn reduce_scatter(&mut self, call: &Descriptor, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.agree(call)?;
        Self::countable(call, recv.len())?;
        let (op, dtype, send) = (Self::op(call)?, call.dtype, Words::copy(send));
        let all = self.run(call, move |desk| calls::all_to_all(&desk.comm, dtype, &send))?;
        Self::fold(call, op, &all, recv);
        Ok(())
    }

    fn all_to_all(&mut self, call: &Descriptor, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.agree(call)?;
        Self::countable(call, send.len() / self.len())?;
        let (dtype, send) = (call.dtype, Words::copy(send));
        let all = self.run(call, move |desk| calls::all_to_all(&desk.comm, dtype, &send))?;
        recv.copy_from_slice(all.get());
        Ok(())
    }

    fn barrier(&mut self, call: &Descriptor) -> Result<()> {
        self.agree(call)
    }

    fn send(&mut self, call: &Descriptor, tag: u64, data: &[u8]) -> Result<()> {
        debug_assert!(call.op == OpKind::Send);
        let (to, body) = (Self::root(call), Words::copy(data));
        let message = Message { tag, dtype: call.dtype, bytes: data.len() as u64 };
        self.run(call, move |desk| calls::send(desk, to, &message, &body)).map_err(|e| self.late(call, e))
    }

    fn recv(&mut self, call: &Descriptor, tag: u64, data: &mut [u8]) -> Result<()> {
        let from = Self::root(call) as usize;
        let came = self.run(call, move |desk| calls::recv(desk, from, tag)).map_err(|e| self.late(call, e))?;
        let (message, body) = came.ok_or_else(|| self.stalled(call, &Stall::Aborted))?;
        message.check(call, data.len(), self.members.my_rank(), self.members.ranks[from], &self.name)?;
        data.copy_from_slice(body.get());
        Ok(())
    }
}

impl MpiGroup {
    fn late(&self, call: &Descriptor, error: CommError) -> CommError {
        if error.kind != ErrorKind::Timeout {
            return error;
        }
        let peer = self.members.ranks[Self::root(call) as usize];
        Message::late(self.members.my_rank(), call, peer, self.timeout, &self.name)
    }
}
