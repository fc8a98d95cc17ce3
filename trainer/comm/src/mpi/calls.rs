//! MPI calls on plain bytes: they select MPI's type and reduction, and split long arrays into pieces.

use bytemuck::{cast_slice, cast_slice_mut};
use mpi::collective::SystemOperation;
use mpi::datatype::PartitionMut;
use mpi::point_to_point::{Destination as _, Source as _};
use mpi::request;
use mpi::topology::{Communicator as _, SimpleCommunicator};
use mpi::traits::{CommunicatorCollectives as _, Root as _};
use std::time::Duration;

use super::runtime::{GroupState, UnexpectedMessages};
use crate::aligned::AlignedBytes;
use crate::dtype::{DType, ReduceOp};
use crate::message_header::{MESSAGE_HEADER_BYTES, MessageHeader};

/// Maximum number of elements of one call: MPI counts in 31 bits.
const PIECE: usize = 1 << 28;
/// MPI's tags of a message's header and of its body.
const HEADER: i32 = 1;
const BODY: i32 = 2;
/// Number of polls of an unfinished message before the thread sleeps between polls, and the length of a sleep.
const SPINS_BEFORE_SLEEP: u32 = 200;
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Returns whether MPI can do the reduction for this type. Other reductions are done by this crate.
pub(super) fn can_reduce(dtype: DType, op: ReduceOp) -> bool {
    !(dtype.is_float() && matches!(op, ReduceOp::Min | ReduceOp::Max))
}

fn operation(op: ReduceOp) -> SystemOperation {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => SystemOperation::sum(),
        ReduceOp::Product => SystemOperation::product(),
        ReduceOp::Min => SystemOperation::min(),
        ReduceOp::Max => SystemOperation::max(),
    }
}

/// Binds `$ty` to the Rust type of an accumulator.
macro_rules! with_number {
    ($dtype:expr, $ty:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $ty = f32;
                $body
            }
            DType::F64 => {
                type $ty = f64;
                $body
            }
            DType::I32 => {
                type $ty = i32;
                $body
            }
            DType::I64 => {
                type $ty = i64;
                $body
            }
            DType::U8 => {
                type $ty = u8;
                $body
            }
            // Sums of 16-bit floats are f32 here: `DType::accumulator`.
            DType::F16 | DType::BF16 => unreachable!("16-bit floats are widened first"),
        }
    };
}

/// Binds `$ty` to a type of the element's size, for calls that only move data.
macro_rules! with_size {
    ($dtype:expr, $ty:ident => $body:expr) => {
        match $dtype.size() {
            1 => {
                type $ty = u8;
                $body
            }
            2 => {
                type $ty = u16;
                $body
            }
            4 => {
                type $ty = u32;
                $body
            }
            _ => {
                type $ty = u64;
                $body
            }
        }
    };
}

/// Calls `MPI_Allreduce`. `dtype` is an accumulator type. For a mean, the caller must still divide.
pub(super) fn all_reduce(comm: &SimpleCommunicator, dtype: DType, op: ReduceOp, send: &AlignedBytes) -> AlignedBytes {
    let mut recv = AlignedBytes::zero(send.get().len());
    with_number!(dtype, T => {
        let (send, recv): (&[T], &mut [T]) = (cast_slice(send.get()), cast_slice_mut(recv.get_mut()));
        for (send, recv) in send.chunks(PIECE).zip(recv.chunks_mut(PIECE)) {
            comm.all_reduce_into(send, recv, operation(op));
        }
    });
    recv
}

/// Calls `MPI_Reduce`. The result is empty except on the root.
pub(super) fn reduce(
    comm: &SimpleCommunicator,
    dtype: DType,
    op: ReduceOp,
    send: &AlignedBytes,
    root: i32,
) -> AlignedBytes {
    let (is_root, root) = (comm.rank() == root, comm.process_at_rank(root));
    let mut recv = AlignedBytes::zero(if is_root { send.get().len() } else { 0 });
    with_number!(dtype, T => {
        let (send, recv): (&[T], &mut [T]) = (cast_slice(send.get()), cast_slice_mut(recv.get_mut()));
        for (at, send) in send.chunks(PIECE).enumerate() {
            if is_root {
                root.reduce_into_root(send, &mut recv[at * PIECE..at * PIECE + send.len()], operation(op));
            } else {
                root.reduce_into(send, operation(op));
            }
        }
    });
    recv
}

/// Calls `MPI_Bcast`.
pub(super) fn broadcast(comm: &SimpleCommunicator, dtype: DType, data: &mut AlignedBytes, root: i32) {
    let root = comm.process_at_rank(root);
    with_size!(dtype, T => {
        let data: &mut [T] = cast_slice_mut(data.get_mut());
        data.chunks_mut(PIECE).for_each(|data| root.broadcast_into(data));
    });
}

/// Calls `MPI_Allgather`, or `MPI_Allgatherv` if lengths differ. `lens` are in bytes.
pub(super) fn all_gather(comm: &SimpleCommunicator, dtype: DType, send: &AlignedBytes, lens: &[usize]) -> AlignedBytes {
    let mut recv = AlignedBytes::zero(lens.iter().sum());
    with_size!(dtype, T => {
        let (send, recv): (&[T], &mut [T]) = (cast_slice(send.get()), cast_slice_mut(recv.get_mut()));
        if lens.iter().all(|len| *len == lens[0]) {
            comm.all_gather_into(send, recv);
        } else {
            let counts: Vec<i32> = lens.iter().map(|len| (len / size_of::<T>()) as i32).collect();
            let starts: Vec<i32> =
                counts.iter().scan(0, |at, count| Some(std::mem::replace(at, *at + count))).collect();
            comm.all_gather_varcount_into(send, &mut PartitionMut::new(recv, counts, starts));
        }
    });
    recv
}

/// Calls `MPI_Gather`. The result is empty except on the root.
pub(super) fn gather(comm: &SimpleCommunicator, dtype: DType, send: &AlignedBytes, root: i32) -> AlignedBytes {
    let (is_root, root) = (comm.rank() == root, comm.process_at_rank(root));
    let mut recv = AlignedBytes::zero(if is_root { send.get().len() * comm.size() as usize } else { 0 });
    with_size!(dtype, T => {
        let (send, recv): (&[T], &mut [T]) = (cast_slice(send.get()), cast_slice_mut(recv.get_mut()));
        if is_root { root.gather_into_root(send, recv) } else { root.gather_into(send) }
    });
    recv
}

/// Calls `MPI_Scatter`. `send` is empty except on the root. A part has `len` bytes.
pub(super) fn scatter(
    comm: &SimpleCommunicator,
    dtype: DType,
    send: &AlignedBytes,
    len: usize,
    root: i32,
) -> AlignedBytes {
    let (is_root, root) = (comm.rank() == root, comm.process_at_rank(root));
    let mut recv = AlignedBytes::zero(len);
    with_size!(dtype, T => {
        let (send, recv): (&[T], &mut [T]) = (cast_slice(send.get()), cast_slice_mut(recv.get_mut()));
        if is_root { root.scatter_into_root(send, recv) } else { root.scatter_into(recv) }
    });
    recv
}

/// Calls `MPI_Alltoall`.
pub(super) fn all_to_all(comm: &SimpleCommunicator, dtype: DType, send: &AlignedBytes) -> AlignedBytes {
    let mut recv = AlignedBytes::zero(send.get().len());
    with_size!(dtype, T => {
        let (send, recv): (&[T], &mut [T]) = (cast_slice(send.get()), cast_slice_mut(recv.get_mut()));
        comm.all_to_all_into(send, recv);
    });
    recv
}

/// Receives every message whose header has arrived. May wait for the body, which the sender has already started to send.
fn receive_arrived(comm: &SimpleCommunicator, unexpected: &mut UnexpectedMessages) {
    while let Some(status) = comm.any_process().immediate_probe_with_tag(HEADER) {
        let from = status.source_rank();
        let sender = comm.process_at_rank(from);
        let mut head = [0u8; MESSAGE_HEADER_BYTES];
        sender.receive_into_with_tag(&mut head[..], HEADER);
        // Only ranks of the job send here, and nothing else with this tag.
        let Some(message) = MessageHeader::decode(&head) else { continue };
        let mut body = AlignedBytes::zero(message.bytes as usize);
        for piece in body.get_mut().chunks_mut(PIECE) {
            sender.receive_into_with_tag(piece, BODY);
        }
        unexpected[from as usize].push_back((message, body));
    }
}

fn pause(idle_polls: &mut u32) {
    *idle_polls += 1;
    if *idle_polls < SPINS_BEFORE_SLEEP { std::thread::yield_now() } else { std::thread::sleep(POLL_INTERVAL) }
}

/// Sends header and body. Receives other messages meanwhile, so two ranks may send to each other at once. For a long message,
/// returns only after the receiver has received it.
pub(super) fn send(state: &mut GroupState, to: i32, message: &MessageHeader, body: &AlignedBytes) {
    let head = message.encode();
    let mut idle_polls = 0;
    let GroupState { comm, unexpected, .. } = state;
    let mut deliver = |bytes: &[u8], tag: i32| {
        let receiver = comm.process_at_rank(to);
        request::scope(|scope| {
            let mut request = receiver.immediate_send_with_tag(scope, bytes, tag);
            while let Err(unfinished) = request.test() {
                request = unfinished;
                receive_arrived(comm, unexpected);
                pause(&mut idle_polls);
            }
        });
    };
    deliver(&head, HEADER);
    body.get().chunks(PIECE).for_each(|piece| deliver(piece, BODY));
}

/// Returns the next message of `from` with this tag, if it has arrived.
pub(super) fn try_recv(state: &mut GroupState, from: usize, tag: u64) -> Option<(MessageHeader, AlignedBytes)> {
    receive_arrived(&state.comm, &mut state.unexpected);
    let place = state.unexpected[from].iter().position(|(message, _)| message.tag == tag)?;
    state.unexpected[from].remove(place)
}

/// Returns the next message of `from` with this tag; `None` if the job ends first.
pub(super) fn recv(state: &mut GroupState, from: usize, tag: u64) -> Option<(MessageHeader, AlignedBytes)> {
    let mut idle_polls = 0;
    loop {
        let arrived = try_recv(state, from, tag);
        if arrived.is_some() {
            return arrived;
        }
        if state.abort.is_raised() {
            return None;
        }
        pause(&mut idle_polls);
    }
}
