//! Stream capture: operations are recorded into a list of nodes, and the list becomes a graph.
//!
//! Nodes are kept in the order of the calls, each with the nodes of other streams that must run before it. A forked stream that was
//! not joined at the end is an error, as with the real driver.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

use crate::cu_result::{
    CAPTURED_EVENT, DriverResult, ILLEGAL_STATE, INVALID_VALUE, STREAM_CAPTURE_IMPLICIT, STREAM_CAPTURE_INVALIDATED,
    STREAM_CAPTURE_ISOLATION, STREAM_CAPTURE_MERGE, STREAM_CAPTURE_UNJOINED, STREAM_CAPTURE_UNMATCHED,
    STREAM_CAPTURE_UNSUPPORTED, STREAM_CAPTURE_WRONG_THREAD,
};
use crate::event::Event;
use crate::machine::Device;
use crate::op::Op;
use crate::stream::{Stream, StreamRef};

/// Unsafe calls are refused on every thread (`CU_STREAM_CAPTURE_MODE_GLOBAL`).
const GLOBAL: c_int = 0;
/// Unsafe calls are refused on the capturing thread.
const THREAD_LOCAL: c_int = 1;
/// Unsafe calls are allowed.
const RELAXED: c_int = 2;

/// Active captures.
static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());
/// Number of active captures. Most calls are made while there is none, and then need no lock.
static ACTIVE_COUNT: AtomicUsize = AtomicUsize::new(0);

/// A capture.
#[derive(Debug)]
pub(crate) struct Capture {
    /// Id of the stream that the capture began on.
    origin: usize,
    mode: c_int,
    thread: ThreadId,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    nodes: Vec<Node>,
    invalid: bool,
    ended: bool,
    /// Captured streams by id.
    streams: HashMap<usize, CapturedStream>,
}

/// A node of a graph.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) op: Op,
    /// Id of the captured stream.
    pub(crate) stream: usize,
    /// The node's number among the nodes of its stream, from 1.
    pub(crate) number: u64,
    /// For other streams, the number of their last node that comes before.
    pub(crate) after: Vec<(usize, u64)>,
}

/// The nodes of a capture, in the order of the calls.
#[derive(Debug)]
pub(crate) struct Recording {
    /// Id of the stream that the capture began on.
    pub(crate) origin: usize,
    pub(crate) nodes: Vec<Node>,
}

/// A stream that is part of a capture.
#[derive(Debug)]
struct CapturedStream {
    stream: Weak<Stream>,
    /// Number of nodes submitted to this stream.
    nodes: u64,
    dependencies: Dependencies,
}

/// Dependencies: for each stream, the number of its nodes that come before.
type Dependencies = HashMap<usize, u64>;

/// The point in a capture at which an event was recorded.
#[derive(Debug, Clone)]
pub(crate) struct CapturePoint {
    capture: Arc<Capture>,
    dependencies: Dependencies,
}

impl Capture {
    /// Appends a node.
    pub(crate) fn add(&self, stream: usize, op: Op) -> DriverResult {
        let mut state = self.state.lock();
        if state.invalid {
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        let branch = state.streams.get_mut(&stream).ok_or(STREAM_CAPTURE_INVALIDATED)?;
        branch.nodes += 1;
        branch.dependencies.insert(stream, branch.nodes);
        let others = branch.dependencies.iter().filter(|(id, nodes)| **id != stream && **nodes > 0);
        let after = others.map(|(id, nodes)| (*id, *nodes)).collect();
        let node = Node { op, stream, number: branch.nodes, after };
        state.nodes.push(node);
        Ok(())
    }

    /// Invalidates the capture: from now on it can only be ended.
    pub(crate) fn invalidate(&self) {
        self.state.lock().invalid = true;
    }

    pub(crate) fn is_valid(&self) -> bool {
        !self.state.lock().invalid
    }

    fn point(self: &Arc<Self>, stream: usize) -> DriverResult<CapturePoint> {
        let state = self.state.lock();
        let branch = state.streams.get(&stream).filter(|_| !state.invalid).ok_or(STREAM_CAPTURE_INVALIDATED)?;
        Ok(CapturePoint { capture: self.clone(), dependencies: branch.dependencies.clone() })
    }

    /// Orders the later nodes of `stream` after `point`. The stream joins the capture if it is not part of it yet.
    fn add_dependency(&self, stream: &Arc<Stream>, point: &CapturePoint) {
        let mut state = self.state.lock();
        let new = || CapturedStream { stream: Arc::downgrade(stream), nodes: 0, dependencies: Dependencies::new() };
        let branch = state.streams.entry(stream.id).or_insert_with(new);
        for (id, nodes) in &point.dependencies {
            let known = branch.dependencies.entry(*id).or_default();
            *known = (*known).max(*nodes);
        }
    }

    /// Ends the capture and releases its streams.
    fn end(self: &Arc<Self>) -> DriverResult<Recording> {
        let (nodes, streams, invalid) = {
            let mut state = self.state.lock();
            state.ended = true;
            (std::mem::take(&mut state.nodes), std::mem::take(&mut state.streams), state.invalid)
        };
        ACTIVE.lock().retain(|capture| !Arc::ptr_eq(capture, self));
        ACTIVE_COUNT.fetch_sub(1, Ordering::AcqRel);
        for stream in streams.values().filter_map(|branch| branch.stream.upgrade()) {
            stream.set_capture(None);
        }
        let origin = streams.get(&self.origin).ok_or(STREAM_CAPTURE_INVALIDATED)?;
        if invalid {
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        let is_joined =
            |(id, branch): (&usize, &CapturedStream)| origin.dependencies.get(id).copied().unwrap_or(0) >= branch.nodes;
        if streams.iter().all(is_joined) {
            Ok(Recording { origin: self.origin, nodes })
        } else {
            Err(STREAM_CAPTURE_UNJOINED)
        }
    }
}

/// Implements `cuStreamBeginCapture`.
pub(crate) fn begin(target: &StreamRef, mode: c_int) -> DriverResult {
    let StreamRef::Stream(stream) = target else { return Err(STREAM_CAPTURE_UNSUPPORTED) };
    if !(GLOBAL..=RELAXED).contains(&mode) {
        return Err(INVALID_VALUE);
    }
    if stream.capture().is_some() {
        return Err(ILLEGAL_STATE);
    }
    let branch = CapturedStream { stream: Arc::downgrade(stream), nodes: 0, dependencies: Dependencies::new() };
    let state = State { streams: HashMap::from([(stream.id, branch)]), ..State::default() };
    let capture =
        Arc::new(Capture { origin: stream.id, mode, thread: thread::current().id(), state: Mutex::new(state) });
    ACTIVE.lock().push(capture.clone());
    ACTIVE_COUNT.fetch_add(1, Ordering::AcqRel);
    stream.set_capture(Some(capture));
    Ok(())
}

/// Implements `cuStreamEndCapture`.
pub(crate) fn end(target: &StreamRef) -> DriverResult<Recording> {
    let StreamRef::Stream(stream) = target else { return Err(ILLEGAL_STATE) };
    let capture = stream.capture().ok_or(ILLEGAL_STATE)?;
    if capture.origin != stream.id {
        return Err(STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != thread::current().id() {
        return Err(STREAM_CAPTURE_WRONG_THREAD);
    }
    capture.end()
}

/// Refuses a call that is unsafe during a capture (allocating or freeing memory, synchronizing) and invalidates the capture.
pub(crate) fn refuse_unsafe() -> DriverResult {
    if ACTIVE_COUNT.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let here = thread::current().id();
    let mut answer = Ok(());
    for capture in ACTIVE.lock().iter() {
        if capture.mode == GLOBAL || capture.mode == THREAD_LOCAL && capture.thread == here {
            capture.invalidate();
            answer = Err(STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    answer
}

fn captured(device: &Device, is: impl Fn(&Stream) -> bool) -> bool {
    ACTIVE_COUNT.load(Ordering::Acquire) > 0
        && ACTIVE.lock().iter().any(|capture| {
            let state = capture.state.lock();
            let streams = state.streams.values().filter_map(|branch| branch.stream.upgrade());
            // Collect first, so that no stream is dropped during the check.
            streams.collect::<Vec<_>>().iter().any(|stream| stream.device.index == device.index && is(stream))
        })
}

/// Refuses the null stream while a stream that synchronizes with it is captured.
pub(crate) fn refuse_legacy(device: &Device) -> DriverResult {
    if captured(device, |stream| stream.blocking) { Err(STREAM_CAPTURE_IMPLICIT) } else { Ok(()) }
}

/// Refuses to synchronize a GPU while one of its streams is captured.
pub(crate) fn refuse_waits(device: &Device) -> DriverResult {
    if captured(device, |_| true) {
        for capture in ACTIVE.lock().iter() {
            capture.invalidate();
        }
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    Ok(())
}

/// Implements `cuEventRecord`.
pub(crate) fn record(target: &StreamRef, event: &Arc<Event>) -> DriverResult {
    if let StreamRef::Stream(stream) = target
        && let Some(capture) = stream.capture()
    {
        event.record_in_capture(capture.point(stream.id)?);
        return Ok(());
    }
    target.device().check_fault()?;
    let ticket = event.record();
    target.submit(Op::Record(event.clone(), ticket)).inspect_err(|_| event.execute(ticket))
}

/// Implements `cuStreamWaitEvent`.
pub(crate) fn wait(target: &StreamRef, event: &Arc<Event>) -> DriverResult {
    let Some(point) = event.capture_point() else {
        let ticket = event.last_ticket();
        return match target {
            // Never recorded: there is nothing to wait for.
            _ if ticket == 0 => Ok(()),
            StreamRef::Stream(stream) if stream.capture().is_some() => {
                stream.capture().inspect(|capture| capture.invalidate());
                Err(STREAM_CAPTURE_ISOLATION)
            }
            target => target.submit(Op::Wait(event.clone(), ticket)),
        };
    };
    let capture = &point.capture;
    let StreamRef::Stream(stream) = target else { return Err(STREAM_CAPTURE_IMPLICIT) };
    match stream.capture() {
        _ if capture.state.lock().ended => Err(CAPTURED_EVENT),
        _ if !capture.is_valid() => Err(STREAM_CAPTURE_INVALIDATED),
        Some(own) if !Arc::ptr_eq(&own, capture) => {
            own.invalidate();
            capture.invalidate();
            Err(STREAM_CAPTURE_MERGE)
        }
        own => {
            capture.add_dependency(stream, &point);
            if own.is_none() {
                stream.set_capture(Some(capture.clone()));
            }
            Ok(())
        }
    }
}
