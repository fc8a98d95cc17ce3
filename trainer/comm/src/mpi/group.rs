//! The transport of one group over MPI.

use std::sync::Arc;
use std::time::Duration;

use super::calls;
use super::runtime::{CallError, GroupState, GroupThread, Runtime};
use crate::abort::AbortFlag;
use crate::aligned::AlignedBytes;
use crate::call::{CALL_BYTES, CallComparison, CollectiveCall, OpType};
use crate::dtype::{DType, ReduceOp};
use crate::error::{CommError, ErrorKind, Result};
use crate::kernels;
use crate::message_header::MessageHeader;
use crate::transport::{ABORT_REASON_TIMEOUT, GroupRanks, MessageBody, MessageOp, Transport};
use crate::widen::{to_accumulators, to_results};

/// The MPI transport of one group.
pub(crate) struct MpiGroup {
    /// Dropped before the runtime: communicators are freed before MPI ends.
    group_thread: GroupThread,
    group: GroupRanks,
    name: String,
    abort: Arc<AbortFlag>,
    timeout: Duration,
    _runtime: Arc<Runtime>,
}

impl MpiGroup {
    /// Makes the transport. Waits at most `limit` until all ranks of the group have called this function. `timeout` limits each
    /// later call.
    pub(crate) fn new(
        group: GroupRanks,
        runtime: Arc<Runtime>,
        abort: Arc<AbortFlag>,
        limit: Duration,
        timeout: Duration,
    ) -> Result<Self> {
        let group_thread = GroupThread::open(group.id, &group.ranks, &abort, limit)?;
        let name = group.name();
        Ok(Self { group_thread, group, name, abort, timeout, _runtime: runtime })
    }

    fn len(&self) -> usize {
        self.group.len()
    }

    fn run<R: Send + 'static>(
        &self,
        call: &CollectiveCall,
        task: impl FnOnce(&mut GroupState) -> R + Send + 'static,
    ) -> Result<R> {
        self.group_thread.run(self.timeout, task).map_err(|error| self.call_failed(call, &error))
    }

    fn call_failed(&self, call: &CollectiveCall, error: &CallError) -> CommError {
        let (me, place) = (self.group.global_rank(), call.position(&self.name));
        match error {
            CallError::Aborted => self.abort.wait(ABORT_REASON_TIMEOUT).unwrap_or_else(|| {
                CommError::new(ErrorKind::Aborted, "the job was aborted, and the reason did not arrive")
            }),
            CallError::Panicked => CommError::system(format!("{call}, {place}: the MPI call of rank {me} failed")),
            CallError::Timeout => CommError::new(
                ErrorKind::Timeout,
                format!("{call}, {place}: MPI did not return within {:.1?} (rank {me} waits)", self.timeout),
            ),
        }
    }

    /// Compares all ranks' calls. No rank returns before all ranks have called this function.
    fn check_same_call(&self, call: &CollectiveCall) -> Result<()> {
        let (mine, n) = (AlignedBytes::copy(&call.encode()), self.len());
        let lens = vec![CALL_BYTES; n];
        let all = self.run(call, move |state| calls::all_gather(&state.comm, DType::U8, &mine, &lens))?;
        let mut comparison = CallComparison::of(self.group.global_rank(), *call);
        for (rank, bytes) in self.group.ranks.iter().zip(all.get().chunks(CALL_BYTES)) {
            let theirs = CollectiveCall::decode(bytes)
                .ok_or_else(|| CommError::system(format!("{call}: rank {rank} sent an invalid call")))?;
            comparison = comparison.merge(CallComparison::of(*rank, theirs));
        }
        comparison.check(&self.name)
    }

    fn root(call: &CollectiveCall) -> i32 {
        call.root_or_peer() as i32
    }

    fn is_root(&self, call: &CollectiveCall) -> bool {
        call.root == Some(self.group.me as u32)
    }

    /// Refuses more elements than 31 bits can count.
    fn check_count(call: &CollectiveCall, bytes: usize) -> Result<()> {
        if bytes / call.dtype.size() <= i32::MAX as usize {
            return Ok(());
        }
        Err(CommError::usage(format!("{call}: MPI counts at most {} elements in a call", i32::MAX))
            .hint("exchange the data in smaller pieces"))
    }

    /// Reduces the gathered parts of all ranks, in rank order.
    fn reduce_gathered(call: &CollectiveCall, op: ReduceOp, all: &AlignedBytes, into: &mut [u8]) {
        if !into.is_empty() {
            let sources: Vec<&[u8]> = all.get().chunks_exact(into.len()).collect();
            kernels::reduce_into(call.dtype, op, into, &sources);
        }
    }
}

impl Transport for MpiGroup {
    fn all_reduce(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()> {
        self.check_same_call(call)?;
        let (op, dtype) = (call.reduction()?, call.dtype);
        if data.is_empty() {
            return Ok(());
        }
        if calls::can_reduce(dtype, op) {
            let send = to_accumulators(dtype, data);
            let mut sums =
                self.run(call, move |state| calls::all_reduce(&state.comm, dtype.accumulator(), op, &send))?;
            to_results(dtype, op, self.len(), sums.get_mut(), data);
        } else {
            Self::check_count(call, data.len())?;
            let (send, lens) = (AlignedBytes::copy(data), vec![data.len(); self.len()]);
            let all = self.run(call, move |state| calls::all_gather(&state.comm, dtype, &send, &lens))?;
            Self::reduce_gathered(call, op, &all, data);
        }
        Ok(())
    }

    fn broadcast(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()> {
        self.check_same_call(call)?;
        let (dtype, root, len, is_root) = (call.dtype, Self::root(call), data.len(), self.is_root(call));
        let mut words = if is_root { AlignedBytes::copy(data) } else { AlignedBytes::zero(len) };
        let words = self.run(call, move |state| {
            calls::broadcast(&state.comm, dtype, &mut words, root);
            words
        })?;
        if !is_root {
            data.copy_from_slice(words.get());
        }
        Ok(())
    }

    fn reduce(&mut self, call: &CollectiveCall, data: &mut [u8]) -> Result<()> {
        self.check_same_call(call)?;
        let (op, dtype, root) = (call.reduction()?, call.dtype, Self::root(call));
        if data.is_empty() {
            return Ok(());
        }
        if calls::can_reduce(dtype, op) {
            let send = to_accumulators(dtype, data);
            let mut sums =
                self.run(call, move |state| calls::reduce(&state.comm, dtype.accumulator(), op, &send, root))?;
            if self.is_root(call) {
                to_results(dtype, op, self.len(), sums.get_mut(), data);
            }
        } else {
            Self::check_count(call, data.len())?;
            let send = AlignedBytes::copy(data);
            let all = self.run(call, move |state| calls::gather(&state.comm, dtype, &send, root))?;
            if self.is_root(call) {
                Self::reduce_gathered(call, op, &all, data);
            }
        }
        Ok(())
    }

    fn all_gather(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8], lens: &[usize]) -> Result<()> {
        self.check_same_call(call)?;
        // `all_gather_v` also exchanges the lengths, whose type is not the type of the call.
        let dtype = if recv.len().is_multiple_of(call.dtype.size()) { call.dtype } else { DType::U8 };
        Self::check_count(call, recv.len())?;
        let (send, lens) = (AlignedBytes::copy(send), lens.to_vec());
        let all = self.run(call, move |state| calls::all_gather(&state.comm, dtype, &send, &lens))?;
        recv.copy_from_slice(all.get());
        Ok(())
    }

    fn gather(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.check_same_call(call)?;
        Self::check_count(call, send.len())?;
        let (send, dtype, root) = (AlignedBytes::copy(send), call.dtype, Self::root(call));
        let all = self.run(call, move |state| calls::gather(&state.comm, dtype, &send, root))?;
        recv.copy_from_slice(all.get());
        Ok(())
    }

    fn scatter(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.check_same_call(call)?;
        Self::check_count(call, recv.len())?;
        let (send, len, dtype, root) = (AlignedBytes::copy(send), recv.len(), call.dtype, Self::root(call));
        let part = self.run(call, move |state| calls::scatter(&state.comm, dtype, &send, len, root))?;
        recv.copy_from_slice(part.get());
        Ok(())
    }

    fn reduce_scatter(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.check_same_call(call)?;
        Self::check_count(call, recv.len())?;
        let (op, dtype, send) = (call.reduction()?, call.dtype, AlignedBytes::copy(send));
        let all = self.run(call, move |state| calls::all_to_all(&state.comm, dtype, &send))?;
        Self::reduce_gathered(call, op, &all, recv);
        Ok(())
    }

    fn all_to_all(&mut self, call: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        self.check_same_call(call)?;
        Self::check_count(call, send.len() / self.len())?;
        let (dtype, send) = (call.dtype, AlignedBytes::copy(send));
        let all = self.run(call, move |state| calls::all_to_all(&state.comm, dtype, &send))?;
        recv.copy_from_slice(all.get());
        Ok(())
    }

    fn barrier(&mut self, call: &CollectiveCall) -> Result<()> {
        self.check_same_call(call)
    }

    fn send(&mut self, call: &CollectiveCall, tag: u64, data: &[u8]) -> Result<()> {
        debug_assert!(call.op == OpType::Send);
        let (to, body) = (Self::root(call), AlignedBytes::copy(data));
        let message = MessageHeader { tag, dtype: call.dtype, bytes: data.len() as u64 };
        self.run(call, move |state| calls::send(state, to, &message, &body)).map_err(|e| self.timed_out(call, e))
    }

    fn recv(&mut self, call: &CollectiveCall, tag: u64, data: &mut [u8]) -> Result<()> {
        let from = call.root_or_peer();
        let came = self.run(call, move |state| calls::recv(state, from, tag)).map_err(|e| self.timed_out(call, e))?;
        let (message, body) = came.ok_or_else(|| self.call_failed(call, &CallError::Aborted))?;
        message.check(call, data.len(), self.group.global_rank(), self.group.ranks[from], &self.name)?;
        data.copy_from_slice(body.get());
        Ok(())
    }

    /// Sends one message at a time. A sender receives from all ranks meanwhile, so two senders cannot deadlock.
    fn progress(&mut self, messages: &mut [MessageOp<'_>]) -> Result<bool> {
        let (mut moved, mut waiting) = (false, Vec::new());
        for op in messages.iter_mut().filter(|op| !op.is_done) {
            let (call, tag, from) = (op.call, op.tag, op.peer());
            let MessageBody::Recv(into) = &mut op.body else { continue };
            // An earlier receive with the same tag gets the next message, also one that has arrived since it looked.
            if waiting.contains(&(from, tag)) {
                continue;
            }
            let Some((message, body)) = self.run(&call, move |state| calls::try_recv(state, from, tag))? else {
                waiting.push((from, tag));
                continue;
            };
            message.check(&call, into.len(), self.group.global_rank(), self.group.ranks[from], &self.name)?;
            into.copy_from_slice(body.get());
            (op.is_done, moved) = (true, true);
        }
        let next = messages.iter_mut().find(|op| !op.is_done && matches!(op.body, MessageBody::Send(_)));
        if let Some(op) = next {
            let MessageBody::Send(data) = &op.body else { return Ok(moved) };
            let (call, tag) = (op.call, op.tag);
            self.send(&call, tag, data)?;
            (op.is_done, moved) = (true, true);
        }
        Ok(moved)
    }
}

impl MpiGroup {
    fn timed_out(&self, call: &CollectiveCall, error: CommError) -> CommError {
        if error.kind != ErrorKind::Timeout {
            return error;
        }
        let peer = self.group.ranks[call.root_or_peer()];
        MessageHeader::timed_out(self.group.global_rank(), call, peer, self.timeout, &self.name)
    }
}
