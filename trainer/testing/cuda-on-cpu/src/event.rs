//! Events. Each `cuEventRecord` takes a new ticket. A wait refers to the last ticket at the time of the call, not to later
//! ones.

use std::collections::BTreeSet;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::capture::CapturePoint;
use crate::cu_result::{DriverResult, INVALID_HANDLE, NOT_READY};
use crate::handles::Table;

/// All events.
pub(crate) static EVENTS: Table<Event> = Table::new();

/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const DISABLE_TIMING: u32 = 2;

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    /// Index of the event's GPU.
    pub(crate) device: usize,
    timing: bool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The last ticket; 0 if the event was never recorded.
    recorded: u64,
    /// Tickets whose record operation has not been executed.
    pending: BTreeSet<u64>,
    /// The last ticket that was executed, and the time.
    executed: Option<(u64, Instant)>,
    /// The point in a capture, if the last record was part of one.
    captured: Option<CapturePoint>,
}

impl Event {
    pub(crate) fn new(device: usize, flags: u32) -> Self {
        Self { device, timing: flags & DISABLE_TIMING == 0, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Takes a new ticket. The caller must make sure that [`execute`](Self::execute) is called with the ticket.
    pub(crate) fn record(&self) -> u64 {
        let mut state = self.state.lock();
        state.recorded += 1;
        let ticket = state.recorded;
        state.pending.insert(ticket);
        state.captured = None;
        ticket
    }

    /// Records the event in a capture.
    pub(crate) fn record_in_capture(&self, point: CapturePoint) {
        self.state.lock().captured = Some(point);
    }

    /// Returns the point in a capture, if the last record was part of one.
    pub(crate) fn capture_point(&self) -> Option<CapturePoint> {
        self.state.lock().captured.clone()
    }

    /// Returns the last ticket; 0, which is never pending, if the event was never recorded.
    pub(crate) fn last_ticket(&self) -> u64 {
        self.state.lock().recorded
    }

    /// Executes a record: the stream has reached the ticket.
    pub(crate) fn execute(&self, ticket: u64) {
        let mut state = self.state.lock();
        state.pending.remove(&ticket);
        if state.executed.is_none_or(|(last, _)| last < ticket) {
            state.executed = Some((ticket, Instant::now()));
        }
        self.changed.notify_all();
    }

    /// Waits until a ticket has been executed.
    pub(crate) fn wait(&self, ticket: u64) {
        let mut state = self.state.lock();
        while state.pending.contains(&ticket) {
            self.changed.wait(&mut state);
        }
    }

    /// Returns whether the last ticket was executed.
    pub(crate) fn is_complete(&self) -> bool {
        let state = self.state.lock();
        !state.pending.contains(&state.recorded)
    }

    /// Returns the time at which the last ticket was executed.
    fn time(&self) -> DriverResult<Instant> {
        let state = self.state.lock();
        match state.executed {
            _ if state.recorded == 0 || !self.timing || state.captured.is_some() => Err(INVALID_HANDLE),
            Some((ticket, at)) if ticket == state.recorded => Ok(at),
            _ => Err(NOT_READY),
        }
    }

    /// Returns the milliseconds from this event to `end`.
    pub(crate) fn elapsed(&self, end: &Self) -> DriverResult<f32> {
        if self.device != end.device {
            return Err(INVALID_HANDLE);
        }
        // The driver reports an event without timing before an event that is not complete.
        let (start, end) = (self.time(), end.time());
        if [&start, &end].contains(&&Err(INVALID_HANDLE)) {
            return Err(INVALID_HANDLE);
        }
        let (start, end) = (start?, end?);
        let seconds = match end.checked_duration_since(start) {
            Some(after) => after.as_secs_f64(),
            None => -start.duration_since(end).as_secs_f64(),
        };
        Ok((seconds * 1e3) as f32)
    }
}
