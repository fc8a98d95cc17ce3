//! Groups of calls: what stands between `ncclGroupStart` and `ncclGroupEnd` is done at the end. One thread can so speak for
//! several ranks, none of which could go on alone.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;

use super::collective::Call;
use super::comm::{Comm, Join};
use super::{INTERNAL, INVALID_USAGE, refuse};
use crate::code::Answer;
use crate::stream::Target;

/// A call.
pub(super) enum Job {
    /// `ncclCommInitRank`, and where its handle goes.
    Join(Join, usize),
    Call(Target, Arc<Call>),
}

/// The calls of a thread that it has not ended yet.
struct Group {
    depth: usize,
    jobs: Vec<Job>,
}

thread_local! {
    static GROUP: RefCell<Group> = const { RefCell::new(Group { depth: 0, jobs: Vec::new() }) };
}

fn with<R>(body: impl FnOnce(&mut Group) -> R) -> Answer<R> {
    GROUP.try_with(|group| body(&mut group.borrow_mut())).map_err(|_| INTERNAL)
}

/// `ncclGroupStart`.
pub(super) fn start() -> Answer {
    with(|group| group.depth += 1)
}

/// `ncclGroupEnd`.
pub(super) fn end() -> Answer {
    let jobs = with(|group| {
        group.depth = group.depth.checked_sub(1).ok_or(())?;
        Ok(if group.depth == 0 { std::mem::take(&mut group.jobs) } else { Vec::new() })
    })?;
    let jobs = jobs.map_err(|()| refuse(INVALID_USAGE, "ncclGroupEnd: not in a group call."))?;
    run(jobs)
}

/// Does it, or keeps it for the end of the group.
pub(super) fn give(job: Job) -> Answer {
    let alone = with(|group| match group.depth {
        0 => Some(job),
        _ => {
            group.jobs.push(job);
            None
        }
    })?;
    match alone {
        Some(Job::Join(join, to)) => finish(&join, to),
        Some(Job::Call(target, call)) => Comm::submit(&target, &call),
        None => Ok(()),
    }
}

fn finish(join: &Join, to: usize) -> Answer {
    let handle = join.run()?;
    // SAFETY: the caller's, who keeps it until the call, or the group, is over.
    unsafe { (to as *mut usize).write(handle) };
    Ok(())
}

/// Who has to wait in the call itself, for all ranks or for the null stream, does so beside the others.
fn run(jobs: Vec<Job>) -> Answer {
    let (mut joins, mut at_once) = (Vec::new(), BTreeMap::<usize, Vec<(Target, Arc<Call>)>>::new());
    let mut queued = Vec::new();
    for job in jobs {
        match job {
            Job::Join(join, to) => joins.push((join, to)),
            Job::Call(Target::Null(device), call) => {
                let comm = Arc::as_ptr(&call.comm) as usize;
                at_once.entry(comm).or_default().push((Target::Null(device), call));
            }
            Job::Call(target, call) => queued.push((target, call)),
        }
    }
    let submit = |calls: &[(Target, Arc<Call>)]| calls.iter().try_for_each(|(target, call)| Comm::submit(target, call));
    let joined = beside(&joins, |(join, to)| finish(join, *to));
    let queued = submit(&queued);
    let calls: Vec<_> = at_once.into_values().collect();
    let done = beside(&calls, |calls| submit(calls));
    joined.and(queued).and(done)
}

/// Runs each on a thread of its own; gives the first error.
fn beside<T: Sync>(all: &[T], run: impl Fn(&T) -> Answer + Sync) -> Answer {
    thread::scope(|scope| {
        let threads: Vec<_> = all.iter().map(|one| scope.spawn(|| run(one))).collect();
        let answers: Vec<Answer> = threads.into_iter().map(|thread| thread.join().unwrap_or(Err(INTERNAL))).collect();
        answers.into_iter().collect()
    })
}
