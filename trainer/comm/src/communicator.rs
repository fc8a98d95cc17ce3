//! [`Communicator`]: checks the arguments of a call, runs the call on the transport, and reports errors to all ranks.

use std::fmt;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use parking_lot::Mutex;

use super::call::{CollectiveCall, OpType};
use super::dtype::{DType, Element, ReduceOp};
use super::error::{CommError, ErrorKind, Result};
use super::fnv;
use super::point_to_point::MessageBatch;
use super::process::{CommStream, Process};
use super::queue::Work;
use super::rendezvous::TransportKind;
use super::transport::{GroupRanks, Transport};

/// One rank's state of a group.
pub(super) struct CommunicatorState {
    pub(super) group: GroupRanks,
    pub(super) name: Arc<str>,
    /// The number of collectives so far, and the transport.
    pub(super) transport: Mutex<(u64, Box<dyn Transport>)>,
    pub(super) stream: Arc<CommStream>,
    /// The batch that new messages join. `None` before the first message.
    pub(super) messages: Mutex<Option<MessageBatch>>,
    /// Dropped last: the process sends its goodbye to the store after all groups are gone.
    pub(super) process: Arc<Process>,
}

impl CommunicatorState {
    /// Returns an id for a new group of `ranks`. All ranks compute the same id, because all ranks have called the
    /// same number of collectives.
    pub(super) fn next_group_id(&self, ranks: &[usize]) -> u64 {
        let sequence = self.transport.lock().0;
        let words = [self.group.id, sequence].into_iter().chain(ranks.iter().map(|r| *r as u64));
        // 0 is the id of the whole job.
        fnv::hash(words.flat_map(u64::to_le_bytes)).max(1)
    }
}

/// A rank's membership in a group: the whole job, or a part of it made by [`Communicator::group`].
///
/// All ranks of the group must call every collective, in the same order, with the same lengths, types, reduction and root.
/// Reductions have the same bits on all ranks and in all runs.
///
/// Rank arguments (`root`, the peer of a message) are ranks of this group. Error texts name ranks of the whole job, unless
/// they say `root` or `group rank`.
///
/// # Errors of every collective
///
/// - [`ErrorKind::Mismatch`] if ranks call different collectives, or the same one with different lengths, types, reductions or
///   roots. All ranks of the job return the same error.
/// - [`ErrorKind::Timeout`] if a rank does not arrive within [`CommConfig::timeout`](super::CommConfig::timeout).
/// - [`ErrorKind::PeerLost`] if a rank died or left, [`ErrorKind::NoAnswer`] or [`ErrorKind::Reset`] if the network between hosts
///   was down for longer than the timeout, [`ErrorKind::Aborted`] after an [`abort`](Self::abort).
/// - [`ErrorKind::Usage`] if the arguments cannot work on any rank, [`ErrorKind::System`] if the operating system fails.
///
/// An error ends the job: every later call on any rank returns the first error.
#[derive(Clone)]
pub struct Communicator {
    pub(super) inner: Arc<CommunicatorState>,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator(rank {} of {}, {})", self.rank(), self.world_size(), self.inner.name)
    }
}

impl Communicator {
    pub(super) fn for_world(process: Process) -> Result<Self> {
        let group =
            GroupRanks { id: 0, me: process.rank, ranks: (0..process.world_size).collect(), duplicate_of: None };
        Self::with_new_stream(Arc::new(process), group)
    }

    pub(super) fn with_new_stream(process: Arc<Process>, group: GroupRanks) -> Result<Self> {
        let stream = CommStream::new(&process, &group).map_err(|e| process.fail(e))?;
        Self::with_stream(Arc::new(stream), process, group)
    }

    pub(super) fn with_stream(stream: Arc<CommStream>, process: Arc<Process>, group: GroupRanks) -> Result<Self> {
        let transport = stream.transport(&process, &group).map_err(|e| process.fail(e))?;
        let name = group.name().into();
        let (transport, messages) = (Mutex::new((0, transport)), Mutex::default());
        Ok(Self { inner: Arc::new(CommunicatorState { group, name, transport, stream, messages, process }) })
    }

    /// Returns this process's rank in the group.
    pub fn rank(&self) -> usize {
        self.inner.group.me
    }

    /// Returns the number of ranks in the group (the world size).
    pub fn world_size(&self) -> usize {
        self.inner.group.len()
    }

    /// Returns the group's ranks as ranks of the whole job, by rank in the group.
    pub fn ranks(&self) -> &[usize] {
        &self.inner.group.ranks
    }

    /// Returns the transport.
    pub fn transport(&self) -> TransportKind {
        self.inner.process.kind
    }

    /// Ends the job: every wait on every rank returns an error with `reason`.
    pub fn abort(&self, reason: impl Into<String>) {
        let rank = self.inner.process.rank;
        let message = format!("rank {rank} aborted the job: {}", reason.into());
        self.inner.process.fail(CommError::new(ErrorKind::Aborted, message).blame(rank));
    }

    /// Returns the error that ended the job, or `None` while the job runs. Does not wait, so a loop that computes for a long time
    /// between collectives can poll it.
    pub fn error(&self) -> Option<CommError> {
        self.inner.process.abort.error()
    }

    pub(super) fn call(&self, op: OpType, dtype: DType, count: usize) -> CollectiveCall {
        let group = self.inner.group.id;
        CollectiveCall { op, dtype, reduce: None, root: None, memory: None, count: count as u64, group, sequence: 0 }
    }

    /// Runs one collective on the calling thread. The queue must be empty, or the caller must be the queue's thread.
    pub(super) fn run<R>(
        &self,
        mut call: CollectiveCall,
        body: impl FnOnce(&mut dyn Transport, &CollectiveCall) -> Result<R>,
    ) -> Result<R> {
        let (process, stream) = (&self.inner.process, &self.inner.stream);
        let mut guard = self.inner.transport.lock();
        let (sequence, transport) = &mut *guard;
        process.abort.check()?;
        if !matches!(call.op, OpType::Send | OpType::Recv) {
            *sequence += 1;
            call.sequence = *sequence;
        }
        stream.begin(&call, &self.inner.name);
        let result = check_arguments(&call, self.world_size()).and_then(|()| body(&mut **transport, &call));
        let result = result.map_err(|error| process.fail(error));
        stream.end();
        result
    }

    /// Ends the job with an error about this rank's arguments, and returns this error.
    pub(super) fn fail_usage<R>(&self, what: &str, cause: String) -> Result<R> {
        let message = format!("{what} on rank {}, in {}: {cause}", self.inner.group.global_rank(), self.inner.name);
        Err(self.inner.process.fail(CommError::usage(message)))
    }

    /// Checks that `bytes` are whole, aligned elements, and returns their number.
    fn element_count(&self, what: &str, bytes: &[u8], dtype: DType) -> Result<usize> {
        if !bytes.len().is_multiple_of(dtype.size()) || !bytes.as_ptr().addr().is_multiple_of(dtype.size()) {
            return self.fail_usage(what, format!("the buffer is not an aligned array of {dtype}"));
        }
        Ok(bytes.len() / dtype.size())
    }

    // Each `_now` method runs a collective on the calling thread. The public method waits for the queue first. The queue's thread
    // runs the asynchronous calls.

    pub(super) fn all_reduce_now(&self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        let count = self.element_count("all_reduce", data, dtype)?;
        let call = CollectiveCall { reduce: Some(op), ..self.call(OpType::AllReduce, dtype, count) };
        self.run(call, |t, call| t.all_reduce(call, data))
    }

    pub(super) fn broadcast_now(&self, data: &mut [u8], dtype: DType, root: usize) -> Result<()> {
        let count = self.element_count("broadcast", data, dtype)?;
        let call = CollectiveCall { root: Some(root as u32), ..self.call(OpType::Broadcast, dtype, count) };
        self.run(call, |t, call| t.broadcast(call, data))
    }

    pub(super) fn all_gather_now(&self, send: &[u8], recv: &mut [u8], dtype: DType) -> Result<()> {
        let count = self.element_count("all_gather", send, dtype)?;
        if recv.len() != send.len() * self.world_size() {
            let (have, want) = (recv.len() / dtype.size(), count * self.world_size());
            return self.fail_usage("all_gather", format!("the receiver has {have} elements, {want} will arrive"));
        }
        let lens = vec![send.len(); self.world_size()];
        self.run(self.call(OpType::AllGather, dtype, count), |t, call| t.all_gather(call, send, recv, &lens))
    }

    pub(super) fn reduce_scatter_now(&self, send: &[u8], recv: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        let count = self.element_count("reduce_scatter", recv, dtype)?;
        self.check_parts("reduce_scatter", send.len(), recv.len(), dtype)?;
        let call = CollectiveCall { reduce: Some(op), ..self.call(OpType::ReduceScatter, dtype, count) };
        self.run(call, |t, call| t.reduce_scatter(call, send, recv))
    }

    /// Checks that `whole` bytes are one part of `part` bytes per rank.
    fn check_parts(&self, what: &str, whole: usize, part: usize, dtype: DType) -> Result<()> {
        if whole == part * self.world_size() {
            return Ok(());
        }
        let (whole, part) = (whole / dtype.size(), part / dtype.size());
        self.fail_usage(what, format!("{whole} elements are not {part} for each of {} ranks", self.world_size()))
    }

    pub(super) fn synchronize(&self) {
        self.inner.stream.queue.synchronize();
    }

    /// Submits a collective to the queue.
    pub(super) fn submit<R: Send + 'static>(&self, task: impl FnOnce() -> Result<R> + Send + 'static) -> Work<R> {
        self.inner.stream.queue.submit(task, self.fail_later())
    }

    /// Returns a function that ends the job with an error and returns the job's error. The function does not own the process, so it
    /// does not keep the process alive on the queue's thread after the result is sent.
    pub(super) fn fail_later(&self) -> impl FnOnce(CommError) -> CommError + Send + 'static {
        let process = Arc::downgrade(&self.inner.process);
        move |error| match process.upgrade() {
            Some(process) => process.fail(error),
            None => error,
        }
    }

    /// Reduces `data` over all ranks; every rank gets the result in `data`.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        self.all_reduce_bytes(cast_slice_mut(data), T::DTYPE, op)
    }

    /// Like [`all_reduce`](Self::all_reduce), for a type known at run time. `data` must be aligned to it.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn all_reduce_bytes(&self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        self.synchronize();
        self.all_reduce_now(data, dtype, op)
    }

    /// Copies the root's `data` to every rank's `data`.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        self.broadcast_bytes(cast_slice_mut(data), T::DTYPE, root)
    }

    /// Like [`broadcast`](Self::broadcast), for a type known at run time. `data` must be aligned to it.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn broadcast_bytes(&self, data: &mut [u8], dtype: DType, root: usize) -> Result<()> {
        self.synchronize();
        self.broadcast_now(data, dtype, root)
    }

    /// Reduces `data` over all ranks; the root gets the result in `data`. The other ranks' `data` does not change.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn reduce<T: Element>(&self, data: &mut [T], op: ReduceOp, root: usize) -> Result<()> {
        self.synchronize();
        self.reduce_now(data, op, root)
    }

    pub(super) fn reduce_now<T: Element>(&self, data: &mut [T], op: ReduceOp, root: usize) -> Result<()> {
        let call = self.call(OpType::Reduce, T::DTYPE, data.len());
        let call = CollectiveCall { reduce: Some(op), root: Some(root as u32), ..call };
        self.run(call, |t, call| t.reduce(call, cast_slice_mut(data)))
    }

    /// Gathers all ranks' `send` into every rank's `recv`, in rank order. All ranks send the same number of elements; `recv` has
    /// world size times as many.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn all_gather<T: Element>(&self, send: &[T], recv: &mut [T]) -> Result<()> {
        self.all_gather_bytes(cast_slice(send), cast_slice_mut(recv), T::DTYPE)
    }

    /// Like [`all_gather`](Self::all_gather), for a type known at run time. Both arrays must be aligned to it.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn all_gather_bytes(&self, send: &[u8], recv: &mut [u8], dtype: DType) -> Result<()> {
        self.synchronize();
        self.all_gather_now(send, recv, dtype)
    }

    /// Gathers all ranks' `send` into the root's `recv`, in rank order. Other ranks' `recv` is ignored and may be empty.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn gather<T: Element>(&self, send: &[T], recv: &mut [T], root: usize) -> Result<()> {
        self.synchronize();
        self.gather_now(send, recv, root)
    }

    pub(super) fn gather_now<T: Element>(&self, send: &[T], recv: &mut [T], root: usize) -> Result<()> {
        let recv = if self.rank() == root { recv } else { &mut [] };
        if self.rank() == root {
            self.check_parts("gather", size_of_val(recv), size_of_val(send), T::DTYPE)?;
        }
        let call = CollectiveCall { root: Some(root as u32), ..self.call(OpType::Gather, T::DTYPE, send.len()) };
        self.run(call, |t, call| t.gather(call, cast_slice(send), cast_slice_mut(recv)))
    }

    /// Scatters the root's `send`: each rank gets its part in `recv`. Other ranks' `send` is ignored and may be empty.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn scatter<T: Element>(&self, send: &[T], recv: &mut [T], root: usize) -> Result<()> {
        self.synchronize();
        self.scatter_now(send, recv, root)
    }

    pub(super) fn scatter_now<T: Element>(&self, send: &[T], recv: &mut [T], root: usize) -> Result<()> {
        let send = if self.rank() == root { send } else { &[] };
        if self.rank() == root {
            self.check_parts("scatter", size_of_val(send), size_of_val(recv), T::DTYPE)?;
        }
        let call = CollectiveCall { root: Some(root as u32), ..self.call(OpType::Scatter, T::DTYPE, recv.len()) };
        self.run(call, |t, call| t.scatter(call, cast_slice(send), cast_slice_mut(recv)))
    }

    /// Reduces `send` over all ranks, and scatters the result: each rank gets its part in `recv`. `send` has world size times as
    /// many elements as `recv`.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn reduce_scatter<T: Element>(&self, send: &[T], recv: &mut [T], op: ReduceOp) -> Result<()> {
        self.synchronize();
        self.reduce_scatter_now(cast_slice(send), cast_slice_mut(recv), T::DTYPE, op)
    }

    /// Part `j` of rank `i`'s `send` becomes part `i` of rank `j`'s `recv`. All parts have the same length.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn all_to_all<T: Element>(&self, send: &[T], recv: &mut [T]) -> Result<()> {
        self.synchronize();
        self.all_to_all_now(send, recv)
    }

    pub(super) fn all_to_all_now<T: Element>(&self, send: &[T], recv: &mut [T]) -> Result<()> {
        let count = send.len() / self.world_size();
        self.check_parts("all_to_all", size_of_val(send), count * size_of::<T>(), T::DTYPE)?;
        self.check_parts("all_to_all", size_of_val(recv), count * size_of::<T>(), T::DTYPE)?;
        self.run(self.call(OpType::AllToAll, T::DTYPE, count), |t, call| {
            t.all_to_all(call, cast_slice(send), cast_slice_mut(recv))
        })
    }

    pub(super) fn agree_to_duplicate(&self) -> Result<()> {
        self.synchronize();
        self.run(self.call(OpType::Duplicate, DType::U8, 0), |t, call| t.barrier(call))
    }

    /// Waits until all ranks of the group have called it.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn barrier(&self) -> Result<()> {
        self.synchronize();
        self.barrier_now()
    }

    pub(super) fn barrier_now(&self) -> Result<()> {
        self.run(self.call(OpType::Barrier, DType::U8, 0), |t, call| t.barrier(call))
    }
}

/// Checks the arguments that are wrong on any rank: the root, and the mean of integers.
pub(super) fn check_arguments(call: &CollectiveCall, world_size: usize) -> Result<()> {
    if let Some(root) = call.root.filter(|root| *root as usize >= world_size) {
        return Err(CommError::usage(format!("{call}: there is no rank {root} in a group of {world_size}")));
    }
    if call.reduce == Some(ReduceOp::Mean) && !call.dtype.is_float() {
        return Err(CommError::usage(format!("{call}: the mean of integers is not an integer"))
            .hint("sum them and divide, or convert to a floating-point type first"));
    }
    Ok(())
}
