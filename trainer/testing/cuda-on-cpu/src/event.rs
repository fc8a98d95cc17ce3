//! Events. Each record of one is a ticket: who waits, waits for the last ticket there is at that time, not for later ones.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::capture::Mark;
use crate::code::{Answer, INVALID_HANDLE, NOT_READY};
use crate::handles::Table;
use crate::log::lock;

/// All events.
pub(crate) static EVENTS: Table<Event> = Table::new();

/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const DISABLE_TIMING: u32 = 2;

/// See the module.
#[derive(Debug)]
pub(crate) struct Event {
    /// Index of its GPU.
    pub(crate) device: usize,
    timing: bool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The last ticket; 0 for an event that was never recorded.
    recorded: u64,
    /// Tickets whose record has not been executed.
    pending: BTreeSet<u64>,
    /// The last ticket that was executed, and when.
    executed: Option<(u64, Instant)>,
    /// Where in a capture it was recorded last, when that is where it was.
    mark: Option<Mark>,
}

impl Event {
    pub(crate) fn new(device: usize, flags: u32) -> Self {
        Self { device, timing: flags & DISABLE_TIMING == 0, state: Mutex::default(), changed: Condvar::new() }
    }

    /// A new ticket, which somebody has to [`execute`](Self::execute).
    pub(crate) fn record(&self) -> u64 {
        let mut state = lock(&self.state);
        state.recorded += 1;
        let ticket = state.recorded;
        state.pending.insert(ticket);
        state.mark = None;
        ticket
    }

    /// The last record is one of a capture.
    pub(crate) fn record_in_capture(&self, mark: Mark) {
        lock(&self.state).mark = Some(mark);
    }

    /// Where in a capture it was recorded last.
    pub(crate) fn mark(&self) -> Option<Mark> {
        lock(&self.state).mark.clone()
    }

    /// The last ticket: 0, which nobody waits for, when there is none.
    pub(crate) fn last(&self) -> u64 {
        lock(&self.state).recorded
    }

    /// The stream has come to the record.
    pub(crate) fn execute(&self, ticket: u64) {
        let mut state = lock(&self.state);
        state.pending.remove(&ticket);
        if state.executed.is_none_or(|(last, _)| last < ticket) {
            state.executed = Some((ticket, Instant::now()));
        }
        self.changed.notify_all();
    }

    /// Waits for a ticket.
    pub(crate) fn wait(&self, ticket: u64) {
        let mut state = lock(&self.state);
        while state.pending.contains(&ticket) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the last ticket was executed.
    pub(crate) fn is_done(&self) -> bool {
        let state = lock(&self.state);
        !state.pending.contains(&state.recorded)
    }

    /// When the last ticket was executed.
    fn time(&self) -> Answer<Instant> {
        let state = lock(&self.state);
        match state.executed {
            _ if state.recorded == 0 || !self.timing || state.mark.is_some() => Err(INVALID_HANDLE),
            Some((ticket, at)) if ticket == state.recorded => Ok(at),
            _ => Err(NOT_READY),
        }
    }

    /// Milliseconds from this event to `end`.
    pub(crate) fn elapsed(&self, end: &Self) -> Answer<f32> {
        if self.device != end.device {
            return Err(INVALID_HANDLE);
        }
        // an event that cannot be measured is told before one that is not there yet
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
