//! Captures: what streams are given becomes a list, and the list a graph.
//!
//! The order of the calls is one in which a graph may be run, so nodes are kept in that order, without edges. Who comes after
//! whom is still kept: a stream that nobody has joined at the end is an error, as it is to the real driver.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, ThreadId};

use crate::code::{
    Answer, CAPTURED_EVENT, ILLEGAL_STATE, INVALID_VALUE, STREAM_CAPTURE_IMPLICIT, STREAM_CAPTURE_INVALIDATED,
    STREAM_CAPTURE_ISOLATION, STREAM_CAPTURE_MERGE, STREAM_CAPTURE_UNJOINED, STREAM_CAPTURE_UNMATCHED,
    STREAM_CAPTURE_UNSUPPORTED, STREAM_CAPTURE_WRONG_THREAD,
};
use crate::event::Event;
use crate::log::lock;
use crate::machine::Device;
use crate::op::Op;
use crate::stream::{Stream, Target};

/// Calls that a capture may not see are refused to any thread (`CU_STREAM_CAPTURE_MODE_GLOBAL`).
const GLOBAL: c_int = 0;
/// They are refused to the thread that captures.
const THREAD_LOCAL: c_int = 1;
/// They are not refused.
const RELAXED: c_int = 2;

/// Captures that are going on.
static LIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());
/// How many: most calls are made when there is none.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// See the module.
#[derive(Debug)]
pub(crate) struct Capture {
    /// Id of the stream that it has begun on.
    origin: usize,
    mode: c_int,
    thread: ThreadId,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    nodes: Vec<Op>,
    invalid: bool,
    ended: bool,
    /// By their ids.
    streams: HashMap<usize, Branch>,
}

/// A stream in a capture.
#[derive(Debug)]
struct Branch {
    stream: Weak<Stream>,
    /// How many nodes it has been given.
    nodes: u64,
    seen: Seen,
}

/// For each stream, after how many of its nodes something comes.
type Seen = HashMap<usize, u64>;

/// Where in a capture an event was recorded.
#[derive(Debug, Clone)]
pub(crate) struct Mark {
    capture: Arc<Capture>,
    seen: Seen,
}

impl Capture {
    /// Adds a node.
    pub(crate) fn add(&self, stream: usize, op: Op) -> Answer {
        let mut state = lock(&self.state);
        if state.invalid {
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        let branch = state.streams.get_mut(&stream).ok_or(STREAM_CAPTURE_INVALIDATED)?;
        branch.nodes += 1;
        branch.seen.insert(stream, branch.nodes);
        state.nodes.push(op);
        Ok(())
    }

    /// It can only be ended now.
    pub(crate) fn invalidate(&self) {
        lock(&self.state).invalid = true;
    }

    pub(crate) fn is_valid(&self) -> bool {
        !lock(&self.state).invalid
    }

    fn mark(self: &Arc<Self>, stream: usize) -> Answer<Mark> {
        let state = lock(&self.state);
        let branch = state.streams.get(&stream).filter(|_| !state.invalid).ok_or(STREAM_CAPTURE_INVALIDATED)?;
        Ok(Mark { capture: self.clone(), seen: branch.seen.clone() })
    }

    /// `stream`, which is in this capture or joins it, comes after `mark`.
    fn follow(&self, stream: &Arc<Stream>, mark: &Mark) {
        let mut state = lock(&self.state);
        let new = || Branch { stream: Arc::downgrade(stream), nodes: 0, seen: Seen::new() };
        let branch = state.streams.entry(stream.id).or_insert_with(new);
        for (id, nodes) in &mark.seen {
            let seen = branch.seen.entry(*id).or_default();
            *seen = (*seen).max(*nodes);
        }
    }

    /// Ends it: its streams are streams again.
    fn end(self: &Arc<Self>) -> Answer<Vec<Op>> {
        let (nodes, streams, invalid) = {
            let mut state = lock(&self.state);
            state.ended = true;
            (std::mem::take(&mut state.nodes), std::mem::take(&mut state.streams), state.invalid)
        };
        lock(&LIVE).retain(|capture| !Arc::ptr_eq(capture, self));
        COUNT.fetch_sub(1, Ordering::AcqRel);
        for stream in streams.values().filter_map(|branch| branch.stream.upgrade()) {
            stream.set_capture(None);
        }
        let origin = streams.get(&self.origin).ok_or(STREAM_CAPTURE_INVALIDATED)?;
        if invalid {
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        let is_joined = |(id, branch): (&usize, &Branch)| origin.seen.get(id).copied().unwrap_or(0) >= branch.nodes;
        if streams.iter().all(is_joined) { Ok(nodes) } else { Err(STREAM_CAPTURE_UNJOINED) }
    }
}

/// `cuStreamBeginCapture`.
pub(crate) fn begin(target: &Target, mode: c_int) -> Answer {
    let Target::Stream(stream) = target else { return Err(STREAM_CAPTURE_UNSUPPORTED) };
    if !(GLOBAL..=RELAXED).contains(&mode) {
        return Err(INVALID_VALUE);
    }
    if stream.capture().is_some() {
        return Err(ILLEGAL_STATE);
    }
    let branch = Branch { stream: Arc::downgrade(stream), nodes: 0, seen: Seen::new() };
    let state = State { streams: HashMap::from([(stream.id, branch)]), ..State::default() };
    let capture =
        Arc::new(Capture { origin: stream.id, mode, thread: thread::current().id(), state: Mutex::new(state) });
    lock(&LIVE).push(capture.clone());
    COUNT.fetch_add(1, Ordering::AcqRel);
    stream.set_capture(Some(capture));
    Ok(())
}

/// `cuStreamEndCapture`.
pub(crate) fn end(target: &Target) -> Answer<Vec<Op>> {
    let Target::Stream(stream) = target else { return Err(ILLEGAL_STATE) };
    let capture = stream.capture().ok_or(ILLEGAL_STATE)?;
    if capture.origin != stream.id {
        return Err(STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != thread::current().id() {
        return Err(STREAM_CAPTURE_WRONG_THREAD);
    }
    capture.end()
}

/// Refuses what a capture may not see, and with it the capture: memory that is made or freed, waits for everything.
pub(crate) fn refuse_unsafe() -> Answer {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let here = thread::current().id();
    let mut answer = Ok(());
    for capture in lock(&LIVE).iter() {
        if capture.mode == GLOBAL || capture.mode == THREAD_LOCAL && capture.thread == here {
            capture.invalidate();
            answer = Err(STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    answer
}

fn captured(device: &Device, is: impl Fn(&Stream) -> bool) -> bool {
    COUNT.load(Ordering::Acquire) > 0
        && lock(&LIVE).iter().any(|capture| {
            let state = lock(&capture.state);
            let streams = state.streams.values().filter_map(|branch| branch.stream.upgrade());
            // collected, so that no stream is dropped while it is asked
            streams.collect::<Vec<_>>().iter().any(|stream| stream.device.index == device.index && is(stream))
        })
}

/// Refuses the null stream while a stream that keeps order with it is captured.
pub(crate) fn refuse_legacy(device: &Device) -> Answer {
    if captured(device, |stream| stream.blocking) { Err(STREAM_CAPTURE_IMPLICIT) } else { Ok(()) }
}

/// Refuses a wait for all of a GPU while a stream of it is captured.
pub(crate) fn refuse_waits(device: &Device) -> Answer {
    if captured(device, |_| true) {
        for capture in lock(&LIVE).iter() {
            capture.invalidate();
        }
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    Ok(())
}

/// `cuEventRecord`.
pub(crate) fn record(target: &Target, event: &Arc<Event>) -> Answer {
    if let Target::Stream(stream) = target
        && let Some(capture) = stream.capture()
    {
        event.record_in_capture(capture.mark(stream.id)?);
        return Ok(());
    }
    target.device().healthy()?;
    let ticket = event.record();
    target.submit(Op::Record(event.clone(), ticket)).inspect_err(|_| event.execute(ticket))
}

/// `cuStreamWaitEvent`.
pub(crate) fn wait(target: &Target, event: &Arc<Event>) -> Answer {
    let Some(mark) = event.mark() else {
        let ticket = event.last();
        return match target {
            // nothing was recorded, so there is nothing to wait for
            _ if ticket == 0 => Ok(()),
            Target::Stream(stream) if stream.capture().is_some() => {
                stream.capture().inspect(|capture| capture.invalidate());
                Err(STREAM_CAPTURE_ISOLATION)
            }
            target => target.submit(Op::Wait(event.clone(), ticket)),
        };
    };
    let capture = &mark.capture;
    let Target::Stream(stream) = target else { return Err(STREAM_CAPTURE_IMPLICIT) };
    match stream.capture() {
        _ if lock(&capture.state).ended => Err(CAPTURED_EVENT),
        _ if !capture.is_valid() => Err(STREAM_CAPTURE_INVALIDATED),
        Some(own) if !Arc::ptr_eq(&own, capture) => {
            own.invalidate();
            capture.invalidate();
            Err(STREAM_CAPTURE_MERGE)
        }
        own => {
            capture.follow(stream, &mark);
            if own.is_none() {
                stream.set_capture(Some(capture.clone()));
            }
            Ok(())
        }
    }
}
