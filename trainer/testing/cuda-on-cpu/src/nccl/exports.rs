//! The functions of `libnccl`, with the types of `nccl.h`: communicators, arrays and streams are numbers.
#![allow(non_snake_case, reason = "the names of nccl.h")]

use std::ffi::{c_char, c_int};

use super::collective::{Call, Kind};
use super::comm::{self, Join};
use super::group::{self, Job};
use super::meeting::UniqueId;
use super::number::{Reduction, Type};
use super::{INVALID_ARGUMENT, LAST, describe, of_driver, refuse};
use crate::code::{Answer, Code};
use crate::context::current;
use crate::log::lock;

/// 2.29.7.
const VERSION: c_int = 22907;

/// Defines functions that C calls.
macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => { $(
        $(#[$doc])*
        #[doc = concat!("`", stringify!($name), "` of `nccl.h`.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) -> Code {
            let arguments = [$((stringify!($argument), $crate::log::Argument::number(&$argument))),*];
            super::call(stringify!($name), &arguments, || $body)
        }
    )* };
}

fn put<T: std::fmt::Debug>(to: Option<&mut T>, value: T) -> Answer {
    let to = to.ok_or_else(|| refuse(INVALID_ARGUMENT, "there is no room for the answer"))?;
    crate::log::note(|| format!("-> {value:x?}"));
    *to = value;
    Ok(())
}

fn join(to: Option<&mut usize>, world: c_int, id: UniqueId, rank: c_int) -> Answer {
    let to = to.ok_or_else(|| refuse(INVALID_ARGUMENT, "there is no room for the communicator"))?;
    *to = 0;
    let join = Join::new(id, world, rank, current().map_err(of_driver)?)?;
    group::give(Job::Join(join, std::ptr::from_mut(to) as usize))
}

fn enqueue(comm: usize, stream: usize, kind: Kind, of: c_int, count: usize, send: usize, receive: usize) -> Answer {
    let comm = comm::get(comm)?;
    let target = comm.target(stream)?;
    let call = Call::new(&comm, kind, Type::of(of)?, count, send, receive)?;
    // as with NVIDIA's library nobody waits for nothing
    if count == 0 { Ok(()) } else { group::give(Job::Call(target, call)) }
}

/// What is below 0 is no rank either.
fn root(rank: c_int) -> usize {
    usize::try_from(rank).unwrap_or(usize::MAX)
}

exports! {
    fn ncclGetVersion(version: Option<&mut c_int>) {
        put(version, VERSION)
    }

    /// Makes the file that the id stands for, which is there until all ranks have come.
    fn ncclGetUniqueId(id: Option<&mut UniqueId>) {
        let to = id.ok_or_else(|| refuse(INVALID_ARGUMENT, "there is no room for the id"))?;
        *to = UniqueId::create()?;
        Ok(())
    }

    /// Waits for all ranks.
    fn ncclCommInitRank(comm: Option<&mut usize>, world: c_int, id: UniqueId, rank: c_int) {
        join(comm, world, id, rank)
    }

    /// As without the configuration, which is not read.
    fn ncclCommInitRankConfig(comm: Option<&mut usize>, world: c_int, id: UniqueId, rank: c_int, config: usize) {
        let _ = config;
        join(comm, world, id, rank)
    }

    fn ncclCommCount(comm: usize, count: Option<&mut c_int>) {
        put(count, comm::get(comm)?.meeting.world as c_int)
    }

    fn ncclCommUserRank(comm: usize, rank: Option<&mut c_int>) {
        put(rank, comm::get(comm)?.meeting.rank as c_int)
    }

    fn ncclCommCuDevice(comm: usize, device: Option<&mut c_int>) {
        put(device, comm::get(comm)?.device.index as c_int)
    }

    /// Nothing goes wrong behind anybody's back: a rank that is gone is one that others wait for.
    fn ncclCommGetAsyncError(comm: usize, error: Option<&mut c_int>) {
        comm::get(comm)?;
        put(error, 0)
    }

    /// Waits for what it has been given.
    fn ncclCommFinalize(comm: usize) {
        comm::get(comm)?.finish();
        Ok(())
    }

    /// Waits for what it has been given.
    fn ncclCommDestroy(comm: usize) {
        let comm = comm::remove(comm)?;
        comm.finish();
        comm.abort();
        Ok(())
    }

    /// This rank's streams go on; what they were to write may be there or not. The other ranks are not told.
    fn ncclCommAbort(comm: usize) {
        comm::remove(comm)?.abort();
        Ok(())
    }

    fn ncclGroupStart() {
        group::start()
    }

    fn ncclGroupEnd() {
        group::end()
    }

    fn ncclAllReduce(
        send: usize,
        receive: usize,
        count: usize,
        of: c_int,
        reduction: c_int,
        comm: usize,
        stream: usize,
    ) {
        enqueue(comm, stream, Kind::AllReduce(Reduction::of(reduction)?), of, count, send, receive)
    }

    fn ncclReduce(
        send: usize,
        receive: usize,
        count: usize,
        of: c_int,
        reduction: c_int,
        to: c_int,
        comm: usize,
        stream: usize,
    ) {
        enqueue(comm, stream, Kind::Reduce(Reduction::of(reduction)?, root(to)), of, count, send, receive)
    }

    fn ncclReduceScatter(
        send: usize,
        receive: usize,
        count: usize,
        of: c_int,
        reduction: c_int,
        comm: usize,
        stream: usize,
    ) {
        enqueue(comm, stream, Kind::ReduceScatter(Reduction::of(reduction)?), of, count, send, receive)
    }

    fn ncclAllGather(send: usize, receive: usize, count: usize, of: c_int, comm: usize, stream: usize) {
        enqueue(comm, stream, Kind::AllGather, of, count, send, receive)
    }

    fn ncclBroadcast(send: usize, receive: usize, count: usize, of: c_int, from: c_int, comm: usize, stream: usize) {
        enqueue(comm, stream, Kind::Broadcast(root(from)), of, count, send, receive)
    }
}

/// `ncclGetErrorString` of `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    describe(code).as_ptr()
}

/// `ncclGetLastError` of `nccl.h`: this process's, whatever the communicator.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(comm: usize) -> *const c_char {
    let _ = comm;
    lock(&LAST).as_ptr()
}
