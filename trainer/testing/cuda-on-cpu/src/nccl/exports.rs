//! The functions of `libnccl`, with the types of `nccl.h`. Communicators, arrays and streams are numbers.
#![allow(non_snake_case, reason = "the names of nccl.h")]

use std::ffi::{c_char, c_int};

use super::collective::{Collective, CollectiveKind};
use super::comm::{self, InitRank};
use super::data_type::{DataType, Reduction};
use super::group::{self, GroupCall};
use super::segment::UniqueId;
use super::{INVALID_ARGUMENT, LAST, describe, driver_error, refuse};
use crate::context::current;
use crate::cu_result::{CuResult, DriverResult};
use crate::machine::machine;

/// Version 2.29.7.
const VERSION: c_int = 22907;

/// Defines functions that C calls.
macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => { $(
        $(#[$doc])*
        #[doc = concat!("`", stringify!($name), "` of `nccl.h`.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) -> CuResult {
            let arguments = [$((stringify!($argument), $crate::log::Argument::number(&$argument))),*];
            super::call(stringify!($name), &arguments, || $body)
        }
    )* };
}

fn write_out<T: std::fmt::Debug>(to: Option<&mut T>, value: T) -> DriverResult {
    let to = to.ok_or_else(|| refuse(INVALID_ARGUMENT, "the output argument is null"))?;
    crate::log::note(|| format!("-> {value:x?}"));
    *to = value;
    Ok(())
}

fn join(to: Option<&mut usize>, world_size: c_int, id: UniqueId, rank: c_int) -> DriverResult {
    let to = to.ok_or_else(|| refuse(INVALID_ARGUMENT, "the output argument is null"))?;
    *to = 0;
    if machine().map_err(driver_error)?.is_nccl_stuck() {
        loop {
            std::thread::park();
        }
    }
    let join = InitRank::new(id, world_size, rank, current().map_err(driver_error)?)?;
    group::submit_or_defer(GroupCall::InitRank(join, std::ptr::from_mut(to) as usize))
}

fn enqueue(
    comm: usize,
    stream: usize,
    kind: CollectiveKind,
    data_type: c_int,
    count: usize,
    send: usize,
    receive: usize,
) -> DriverResult {
    let comm = comm::get(comm)?;
    let target = comm.target(stream)?;
    let call = Collective::new(&comm, kind, DataType::of(data_type)?, count, send, receive)?;
    // As with NVIDIA's library, an empty collective does not wait.
    if count == 0 { Ok(()) } else { group::submit_or_defer(GroupCall::Collective(target, call)) }
}

/// Converts a root. Negative numbers become an invalid rank.
fn root(rank: c_int) -> usize {
    usize::try_from(rank).unwrap_or(usize::MAX)
}

exports! {
    fn ncclGetVersion(version: Option<&mut c_int>) {
        write_out(version, VERSION)
    }

    /// Creates the file that the id names. The file is removed when all ranks have joined.
    fn ncclGetUniqueId(id: Option<&mut UniqueId>) {
        let to = id.ok_or_else(|| refuse(INVALID_ARGUMENT, "the output argument is null"))?;
        *to = UniqueId::create()?;
        Ok(())
    }

    /// Waits for all ranks.
    fn ncclCommInitRank(comm: Option<&mut usize>, world_size: c_int, id: UniqueId, rank: c_int) {
        join(comm, world_size, id, rank)
    }

    /// The configuration is ignored.
    fn ncclCommInitRankConfig(comm: Option<&mut usize>, world_size: c_int, id: UniqueId, rank: c_int, config: usize) {
        let _ = config;
        join(comm, world_size, id, rank)
    }

    fn ncclCommCount(comm: usize, count: Option<&mut c_int>) {
        write_out(count, comm::get(comm)?.segment.world_size as c_int)
    }

    fn ncclCommUserRank(comm: usize, rank: Option<&mut c_int>) {
        write_out(rank, comm::get(comm)?.segment.rank as c_int)
    }

    fn ncclCommCuDevice(comm: usize, device: Option<&mut c_int>) {
        write_out(device, comm::get(comm)?.device.index as c_int)
    }

    /// There are no asynchronous errors: the other ranks wait for a dead rank until they are aborted.
    fn ncclCommGetAsyncError(comm: usize, error: Option<&mut c_int>) {
        comm::get(comm)?;
        write_out(error, 0)
    }

    /// Waits for all collectives submitted so far.
    fn ncclCommFinalize(comm: usize) {
        comm::get(comm)?.finish();
        Ok(())
    }

    /// Waits for all collectives submitted so far.
    fn ncclCommDestroy(comm: usize) {
        let comm = comm::remove(comm)?;
        comm.finish();
        comm.abort();
        Ok(())
    }

    /// This rank's streams continue; the results of aborted collectives are undefined. The other ranks are not notified.
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
        data_type: c_int,
        reduction: c_int,
        comm: usize,
        stream: usize,
    ) {
        enqueue(comm, stream, CollectiveKind::AllReduce(Reduction::of(reduction)?), data_type, count, send, receive)
    }

    fn ncclReduce(
        send: usize,
        receive: usize,
        count: usize,
        data_type: c_int,
        reduction: c_int,
        to: c_int,
        comm: usize,
        stream: usize,
    ) {
        enqueue(comm, stream, CollectiveKind::Reduce(Reduction::of(reduction)?, root(to)), data_type, count, send, receive)
    }

    fn ncclReduceScatter(
        send: usize,
        receive: usize,
        count: usize,
        data_type: c_int,
        reduction: c_int,
        comm: usize,
        stream: usize,
    ) {
        enqueue(comm, stream, CollectiveKind::ReduceScatter(Reduction::of(reduction)?), data_type, count, send, receive)
    }

    fn ncclAllGather(send: usize, receive: usize, count: usize, data_type: c_int, comm: usize, stream: usize) {
        enqueue(comm, stream, CollectiveKind::AllGather, data_type, count, send, receive)
    }

    fn ncclBroadcast(send: usize, receive: usize, count: usize, data_type: c_int, from: c_int, comm: usize, stream: usize) {
        enqueue(comm, stream, CollectiveKind::Broadcast(root(from)), data_type, count, send, receive)
    }
}

/// `ncclGetErrorString` of `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: CuResult) -> *const c_char {
    describe(code).as_ptr()
}

/// `ncclGetLastError` of `nccl.h`: the last error of the process, whatever the communicator.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(comm: usize) -> *const c_char {
    let _ = comm;
    LAST.lock().as_ptr()
}
