//! Group calls: calls between `ncclGroupStart` and `ncclGroupEnd` are executed at the end. So one thread can act for several
//! ranks, none of which could proceed alone.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;

use super::collective::Collective;
use super::comm::{Comm, InitRank};
use super::{INTERNAL, INVALID_USAGE, refuse};
use crate::cu_result::DriverResult;
use crate::stream::StreamRef;

/// A call that a group can contain.
pub(super) enum GroupCall {
    /// `ncclCommInitRank`, and the address for its handle.
    InitRank(InitRank, usize),
    Collective(StreamRef, Arc<Collective>),
}

/// The open group of a thread.
struct Group {
    depth: usize,
    calls: Vec<GroupCall>,
}

thread_local! {
    static GROUP: RefCell<Group> = const { RefCell::new(Group { depth: 0, calls: Vec::new() }) };
}

fn with<R>(body: impl FnOnce(&mut Group) -> R) -> DriverResult<R> {
    GROUP.try_with(|group| body(&mut group.borrow_mut())).map_err(|_| INTERNAL)
}

/// Implements `ncclGroupStart`.
pub(super) fn start() -> DriverResult {
    with(|group| group.depth += 1)
}

/// Implements `ncclGroupEnd`.
pub(super) fn end() -> DriverResult {
    let calls = with(|group| {
        group.depth = group.depth.checked_sub(1).ok_or(())?;
        Ok(if group.depth == 0 { std::mem::take(&mut group.calls) } else { Vec::new() })
    })?;
    let calls = calls.map_err(|()| refuse(INVALID_USAGE, "ncclGroupEnd: not in a group call."))?;
    run(calls)
}

/// Executes the call, or keeps it for the end of the group.
pub(super) fn submit_or_defer(call: GroupCall) -> DriverResult {
    let immediate = with(|group| match group.depth {
        0 => Some(call),
        _ => {
            group.calls.push(call);
            None
        }
    })?;
    match immediate {
        Some(GroupCall::InitRank(join, to)) => join_into(&join, to),
        Some(GroupCall::Collective(target, call)) => Comm::submit(&target, &call),
        None => Ok(()),
    }
}

fn join_into(join: &InitRank, to: usize) -> DriverResult {
    let handle = join.run()?;
    // SAFETY: the caller keeps the address valid until the call or the group has ended.
    unsafe { (to as *mut usize).write(handle) };
    Ok(())
}

/// Runs a group. Calls that block (joining, and collectives on the null stream) run in parallel.
fn run(group: Vec<GroupCall>) -> DriverResult {
    let (mut joins, mut blocking) = (Vec::new(), BTreeMap::<usize, Vec<(StreamRef, Arc<Collective>)>>::new());
    let mut queued = Vec::new();
    for call in group {
        match call {
            GroupCall::InitRank(join, to) => joins.push((join, to)),
            GroupCall::Collective(StreamRef::Null(device), call) => {
                let comm = Arc::as_ptr(&call.comm) as usize;
                blocking.entry(comm).or_default().push((StreamRef::Null(device), call));
            }
            GroupCall::Collective(target, call) => queued.push((target, call)),
        }
    }
    let submit =
        |calls: &[(StreamRef, Arc<Collective>)]| calls.iter().try_for_each(|(target, call)| Comm::submit(target, call));
    let joined = in_parallel(&joins, |(join, to)| join_into(join, *to));
    let queued = submit(&queued);
    let calls: Vec<_> = blocking.into_values().collect();
    let done = in_parallel(&calls, |calls| submit(calls));
    joined.and(queued).and(done)
}

/// Runs each item on a separate thread; returns the first error.
fn in_parallel<T: Sync>(all: &[T], run: impl Fn(&T) -> DriverResult + Sync) -> DriverResult {
    thread::scope(|scope| {
        let threads: Vec<_> = all.iter().map(|one| scope.spawn(|| run(one))).collect();
        let results: Vec<DriverResult> =
            threads.into_iter().map(|thread| thread.join().unwrap_or(Err(INTERNAL))).collect();
        results.into_iter().collect()
    })
}
