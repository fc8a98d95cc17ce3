//! Point-to-point messages, blocking or not, and the collectives that are built on messages.
//!
//! `isend` and `irecv` add their message to a batch. One task of the stream's queue advances all messages of a batch together
//! until all are done (MPI: progress). So a ring of ranks that all send first does not deadlock. A message joins the current
//! batch unless a collective was submitted after the batch. So messages and collectives keep the order of the code.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use bytemuck::{cast_slice, cast_slice_mut};
use parking_lot::{Condvar, Mutex};

use super::call::{CollectiveCall, OpType};
use super::communicator::{Communicator, check_arguments};
use super::deadline::WaitDeadline;
use super::dtype::{DType, Element, ReduceOp};
use super::error::{CommError, Result};
use super::gather_v::Gathered;
use super::message_header::MessageHeader;
use super::queue::Work;
use super::transport::{MessageBody, MessageOp, Transport};

/// Tag of the messages of this module's collectives.
const RESERVED_TAG: u64 = u64::MAX;
/// Maximum number of elements that [`Communicator::average_gradients`] reduces at once: 25 MiB, as PyTorch's `bucket_cap_mb`.
const BUCKET_ELEMENTS: usize = (25 << 20) / size_of::<f32>();
/// Number of polls without progress before the thread sleeps between polls, and the length of a sleep.
const SPINS_BEFORE_SLEEP: u32 = 100;
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// A batch of messages, and the number of the queue's task that advances the batch.
pub(super) struct MessageBatch {
    shared: Arc<SharedBatch>,
    task: u64,
}

#[derive(Default)]
struct SharedBatch {
    state: Mutex<BatchState>,
    changed: Condvar,
}

#[derive(Default)]
struct BatchState {
    new: Vec<Box<dyn PendingMessage>>,
    /// Whether the task has ended.
    closed: bool,
}

/// Ends a batch whose task has not run, since no thread could be started, or has panicked.
struct CloseAtDrop(Arc<SharedBatch>);

impl Drop for CloseAtDrop {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.closed = true;
        let unsent = std::mem::take(&mut state.new);
        drop(state);
        let error =
            || CommError::system("the communication thread could not start, or panicked").hint("see `ulimit -u`");
        unsent.into_iter().for_each(|message| message.finish(Err(error())));
    }
}

impl SharedBatch {
    /// Adds a message. Returns it if the task has ended.
    fn add(&self, message: Box<dyn PendingMessage>) -> Option<Box<dyn PendingMessage>> {
        let mut state = self.state.lock();
        if state.closed {
            return Some(message);
        }
        state.new.push(message);
        self.changed.notify_all();
        None
    }
}

/// A message of any element type, with the sender of its result.
trait PendingMessage: Send {
    fn op(&mut self) -> MessageOp<'_>;
    fn set_progress(&mut self, sent: usize, is_done: bool);
    fn is_done(&self) -> bool;
    fn finish(self: Box<Self>, result: Result<()>);
}

struct TypedMessage<T> {
    call: CollectiveCall,
    tag: u64,
    data: Vec<T>,
    sent: usize,
    is_done: bool,
    result: SyncSender<Result<Vec<T>>>,
}

impl<T: Element> PendingMessage for TypedMessage<T> {
    fn op(&mut self) -> MessageOp<'_> {
        let body = match self.call.op {
            OpType::Send => MessageBody::Send(cast_slice(&self.data)),
            _ => MessageBody::Recv(cast_slice_mut(&mut self.data)),
        };
        MessageOp { sent: self.sent, is_done: self.is_done, ..MessageOp::new(self.call, self.tag, body) }
    }

    fn set_progress(&mut self, sent: usize, is_done: bool) {
        (self.sent, self.is_done) = (sent, is_done);
    }

    fn is_done(&self) -> bool {
        self.is_done
    }

    fn finish(self: Box<Self>, result: Result<()>) {
        let Self { data, result: work, .. } = *self;
        // Nobody waits for a `Work` that was dropped.
        let _ = work.send(result.map(|()| data));
    }
}

impl Communicator {
    /// Sends `data` to rank `to`. Returns when the caller may change `data` again. Messages with the same tag arrive in the
    /// order of sending. Buffers are small (two chunks of 64 KB with `shm`), so a send may wait until its receiver receives. The
    /// tag `u64::MAX` is reserved.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn send<T: Element>(&self, data: &[T], to: usize, tag: u64) -> Result<()> {
        if !self.inner.stream.queue.is_idle() {
            return self.isend(data.to_vec(), to, tag).wait().map(drop);
        }
        let call = self.message_call(OpType::Send, T::DTYPE, data.len(), to, tag)?;
        self.run(call, |t, call| t.send(call, tag, cast_slice(data)))
    }

    /// Receives the next message of rank `from` with this tag. The message must have this type and length.
    ///
    /// # Errors
    /// See [`Communicator`]. [`ErrorKind::Mismatch`](super::ErrorKind::Mismatch) if the message has another type or length.
    pub fn recv<T: Element>(&self, data: &mut [T], from: usize, tag: u64) -> Result<()> {
        if !self.inner.stream.queue.is_idle() {
            data.copy_from_slice(&self.irecv(vec![T::zeroed(); data.len()], from, tag).wait()?);
            return Ok(());
        }
        let call = self.message_call(OpType::Recv, T::DTYPE, data.len(), from, tag)?;
        self.run(call, |t, call| t.recv(call, tag, cast_slice_mut(data)))
    }

    /// Starts to send `data` to rank `to`, while this thread continues. [`Work::wait`] returns the buffer. All messages of this
    /// communicator that are started before the same collective advance together, in any order. Every message must be received
    /// before any rank enters the next collective. Messages of different groups run one after the other, as collectives do.
    /// PyTorch: `isend`.
    pub fn isend<T: Element>(&self, data: Vec<T>, to: usize, tag: u64) -> Work<Vec<T>> {
        self.post(OpType::Send, data, to, tag)
    }

    /// Starts to receive the next message of rank `from` with this tag into `data`, whose type and length the message must have.
    /// [`Work::wait`] returns the buffer. PyTorch: `irecv`.
    pub fn irecv<T: Element>(&self, data: Vec<T>, from: usize, tag: u64) -> Work<Vec<T>> {
        self.post(OpType::Recv, data, from, tag)
    }

    /// Copies part `j` of rank `i`'s `send` to part `i` of rank `j`'s result, for all `i` and `j`. `counts` has the number of
    /// elements of each part of `send`. The result has the counts of its own parts. PyTorch: `all_to_all_single` with split
    /// sizes; MPI: `MPI_Alltoallv`.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn all_to_all_v<T: Element>(&self, send: &[T], counts: &[usize]) -> Result<Gathered<T>> {
        self.synchronize();
        let (world_size, me) = (self.world_size(), self.rank());
        if counts.len() != world_size || counts.iter().sum::<usize>() != send.len() {
            let cause = format!("counts {counts:?} do not divide {} elements among {world_size} ranks", send.len());
            return self.fail_usage("all_to_all_v", cause);
        }
        let peer_call =
            |op, rank: usize, count| CollectiveCall { root: Some(rank as u32), ..self.call(op, T::DTYPE, count) };
        self.run(self.call(OpType::AllToAllV, T::DTYPE, 0), |t, call| {
            let mine: Vec<u64> = counts.iter().map(|count| *count as u64).collect();
            let mut theirs = vec![0u64; world_size];
            t.all_to_all(call, cast_slice(&mine), cast_slice_mut(&mut theirs))?;
            let theirs: Vec<usize> = theirs.into_iter().map(|count| count as usize).collect();
            let mut data = vec![T::zeroed(); theirs.iter().sum()];
            let mut messages = Vec::new();
            let (mut from, mut into) = (send, data.as_mut_slice());
            for rank in 0..world_size {
                let (part, rest) = from.split_at(counts[rank]);
                let (room, more) = std::mem::take(&mut into).split_at_mut(theirs[rank]);
                (from, into) = (rest, more);
                if rank == me {
                    room.copy_from_slice(part);
                    continue;
                }
                if !part.is_empty() {
                    let call = peer_call(OpType::Send, rank, part.len());
                    messages.push(MessageOp::new(call, RESERVED_TAG, MessageBody::Send(cast_slice(part))));
                }
                if !room.is_empty() {
                    let call = peer_call(OpType::Recv, rank, room.len());
                    messages.push(MessageOp::new(call, RESERVED_TAG, MessageBody::Recv(cast_slice_mut(room))));
                }
            }
            // Begins with the next rank, so that not all ranks send to rank 0 first
            messages.sort_by_key(|message| (message.peer() + world_size - me) % world_size);
            self.exchange(t, &mut messages)?;
            drop(messages);
            Ok(Gathered { data, counts: theirs })
        })
    }

    /// Replaces all ranks' `gradients` by their mean over the ranks. All ranks have arrays of the same lengths in the same order.
    /// PyTorch's tutorial on writing distributed applications has a function of this name.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn average_gradients(&self, gradients: &mut [&mut [f32]]) -> Result<()> {
        let mut flat = Vec::new();
        let mut rest = gradients;
        while !rest.is_empty() {
            // At least one array, however long, and then as many as fit
            let mut total = 0;
            let fitting = rest.iter().take_while(|array| {
                total += array.len();
                total <= BUCKET_ELEMENTS
            });
            let (bucket, later) = rest.split_at_mut(fitting.count().max(1));
            flat.clear();
            bucket.iter().for_each(|array| flat.extend_from_slice(array));
            self.all_reduce(&mut flat, ReduceOp::Mean)?;
            let mut at = 0;
            for array in bucket {
                array.copy_from_slice(&flat[at..at + array.len()]);
                at += array.len();
            }
            rest = later;
        }
        Ok(())
    }

    /// Returns the call of a message.
    fn message_call(&self, op: OpType, dtype: DType, count: usize, peer: usize, tag: u64) -> Result<CollectiveCall> {
        let call = CollectiveCall { root: Some(peer as u32), ..self.call(op, dtype, count) };
        if tag == RESERVED_TAG {
            return self.fail_usage(op.name(), format!("the tag {tag} is reserved"));
        }
        if peer == self.rank() {
            let error = CommError::usage(format!("{call}: a rank cannot exchange messages with itself"));
            return Err(self.inner.process.fail(error));
        }
        check_arguments(&call, self.world_size()).map_err(|error| self.inner.process.fail(error))?;
        Ok(call)
    }

    /// Adds a message to the current batch, or begins a new one.
    fn post<T: Element>(&self, op: OpType, data: Vec<T>, peer: usize, tag: u64) -> Work<Vec<T>> {
        let (result, work) = Work::pair();
        let call = match self.message_call(op, T::DTYPE, data.len(), peer, tag) {
            Ok(call) => call,
            Err(error) => {
                let _ = result.send(Err(error));
                return work;
            }
        };
        let message: Box<dyn PendingMessage> =
            Box::new(TypedMessage { call, tag, data, sent: 0, is_done: false, result });
        let queue = &self.inner.stream.queue;
        let mut current = self.inner.messages.lock();
        let open = current.as_ref().filter(|batch| batch.task == queue.submitted());
        let unsent = match open {
            Some(batch) => batch.shared.add(message),
            None => Some(message),
        };
        let Some(message) = unsent else { return work };
        let shared = Arc::new(SharedBatch::default());
        shared.state.lock().new.push(message);
        let (this, batch) = (self.clone(), CloseAtDrop(shared.clone()));
        // Each message has the error in its own `Work`
        let (task, _) = queue.submit_numbered(move || this.serve(&batch.0), self.fail_later());
        *current = Some(MessageBatch { shared, task });
        work
    }

    /// Advances a batch until all its messages are done. Runs on the queue's thread.
    ///
    /// Drops `self` before it sends the last result. A caller may end the program as soon as it has all results, and the end of the
    /// program does not wait for the queue's thread. So the caller must be the last owner of the communicator, whose drop ends MPI
    /// and leaves the rendezvous.
    fn serve(self, batch: &SharedBatch) -> Result<()> {
        let mut active: Vec<Box<dyn PendingMessage>> = Vec::new();
        let (mut idle_polls, mut deadline) = (0, WaitDeadline::after(self.inner.process.timeout));
        loop {
            let mut state = batch.state.lock();
            if !state.new.is_empty() {
                active.append(&mut state.new);
                deadline = WaitDeadline::after(self.inner.process.timeout);
                idle_polls = 0;
            } else if idle_polls > SPINS_BEFORE_SLEEP {
                batch.changed.wait_for(&mut state, POLL_INTERVAL);
            }
            drop(state);
            match self.progress(&mut active, &mut deadline) {
                Ok(true) => (idle_polls, deadline) = (0, WaitDeadline::after(self.inner.process.timeout)),
                Ok(false) => {
                    idle_polls += 1;
                    std::thread::yield_now();
                }
                Err(error) => {
                    let mut state = batch.state.lock();
                    state.closed = true;
                    active.append(&mut state.new);
                    drop((state, self));
                    active.into_iter().for_each(|message| message.finish(Err(error.clone())));
                    return Err(error);
                }
            }
            let (done, rest): (Vec<_>, Vec<_>) = active.into_iter().partition(|message| message.is_done());
            active = rest;
            let mut state = batch.state.lock();
            state.closed = active.is_empty() && state.new.is_empty();
            let is_last = state.closed;
            drop(state);
            if is_last {
                drop(self);
                done.into_iter().for_each(|message| message.finish(Ok(())));
                return Ok(());
            }
            done.into_iter().for_each(|message| message.finish(Ok(())));
        }
    }

    /// Advances messages. Returns whether any byte has moved.
    fn progress(&self, active: &mut [Box<dyn PendingMessage>], deadline: &mut WaitDeadline) -> Result<bool> {
        let (process, stream) = (&self.inner.process, &self.inner.stream);
        let mut guard = self.inner.transport.lock();
        let transport = &mut *guard.1;
        let mut ops: Vec<MessageOp<'_>> = active.iter_mut().map(|message| message.op()).collect();
        if let Some(op) = ops.first() {
            stream.begin(&op.call, &self.inner.name);
        }
        let moved = process.abort.check().and_then(|()| transport.progress(&mut ops));
        let moved = moved.and_then(|moved| match ops.iter().find(|op| !op.is_done) {
            Some(op) if !moved && deadline.is_over() => Err(self.message_timeout(op)),
            _ => Ok(moved),
        });
        let progress: Vec<(usize, bool)> = ops.iter().map(|op| (op.sent, op.is_done)).collect();
        drop(ops);
        drop(guard);
        active.iter_mut().zip(progress).for_each(|(message, (sent, is_done))| message.set_progress(sent, is_done));
        stream.end();
        moved.map_err(|error| process.fail(error))
    }

    /// Sends and receives all messages, inside a collective.
    fn exchange(&self, transport: &mut dyn Transport, messages: &mut [MessageOp<'_>]) -> Result<()> {
        let timeout = self.inner.process.timeout;
        let (mut idle_polls, mut deadline) = (0, WaitDeadline::after(timeout));
        while let Some(open) = messages.iter().position(|message| !message.is_done) {
            if transport.progress(messages)? {
                (idle_polls, deadline) = (0, WaitDeadline::after(timeout));
            } else if deadline.is_over() {
                return Err(self.message_timeout(&messages[open]));
            } else {
                idle_polls += 1;
                if idle_polls < SPINS_BEFORE_SLEEP {
                    std::thread::yield_now()
                } else {
                    std::thread::sleep(POLL_INTERVAL)
                }
            }
        }
        Ok(())
    }

    fn message_timeout(&self, message: &MessageOp<'_>) -> CommError {
        let (me, peer) = (self.inner.group.global_rank(), self.ranks()[message.peer()]);
        MessageHeader::timed_out(me, &message.call, peer, self.inner.process.timeout, &self.inner.name)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    #[test]
    fn the_queues_thread_drops_its_communicator_before_the_last_result() {
        for _ in 0..100 {
            let comm = crate::solo().unwrap();
            // Nobody receives: the result is an error.
            assert!(comm.isend(vec![0u8], 0, 0).wait().is_err());
            assert_eq!(Arc::strong_count(&comm.inner), 1);
        }
    }
}
