//! Events.

use std::ffi::c_uint;
use std::sync::Arc;

use super::{exports, put};
use crate::capture;
use crate::code::{Answer, CAPTURED_EVENT, INVALID_HANDLE, INVALID_VALUE, NOT_READY};
use crate::context::current;
use crate::event::{DISABLE_TIMING, EVENTS, Event};
use crate::machine::machine;
use crate::stream::Target;

/// `CU_EVENT_BLOCKING_SYNC`.
const BLOCKING_SYNC: c_uint = 1;

fn record(event: usize, stream: usize) -> Answer {
    let target = Target::of(stream)?;
    let event = EVENTS.get(event)?;
    if event.device != target.device().index {
        return Err(INVALID_HANDLE);
    }
    capture::record(&target, &event)
}

/// An event whose state somebody asks for. Events know their context, so the thread needs none: burn waits for them on
/// threads that have none.
fn asked(event: usize) -> Answer<Arc<Event>> {
    let event = EVENTS.get(event)?;
    match event.mark() {
        Some(_) => Err(CAPTURED_EVENT),
        None => Ok(event),
    }
}

fn elapsed(milliseconds: Option<&mut f32>, start: usize, end: usize) -> Answer {
    put(milliseconds, EVENTS.get(start)?.elapsed(&*EVENTS.get(end)?)?)
}

exports! {
    /// Not for other processes: `CU_EVENT_INTERPROCESS` is refused.
    fn cuEventCreate(event: Option<&mut usize>, flags: c_uint) {
        let device = current()?;
        let to = event.filter(|_| flags & !(BLOCKING_SYNC | DISABLE_TIMING) == 0).ok_or(INVALID_VALUE)?;
        put(Some(to), EVENTS.add(Arc::new(Event::new(device.index, flags))))
    }

    /// Whoever waits for it goes on waiting for its record.
    fn cuEventDestroy_v2(event: usize) {
        EVENTS.remove(event)?;
        Ok(())
    }

    fn cuEventRecord(event: usize, stream: usize) {
        record(event, stream)
    }

    fn cuEventRecordWithFlags(event: usize, stream: usize, flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        record(event, stream)
    }

    fn cuEventSynchronize(event: usize) {
        let event = asked(event)?;
        event.wait(event.last());
        machine()?.devices().get(event.device).ok_or(INVALID_HANDLE)?.healthy()
    }

    fn cuEventQuery(event: usize) {
        let event = asked(event)?;
        capture::refuse_unsafe()?;
        match event.is_done() {
            true => machine()?.devices().get(event.device).ok_or(INVALID_HANDLE)?.healthy(),
            false => Err(NOT_READY),
        }
    }

    fn cuEventElapsedTime(milliseconds: Option<&mut f32>, start: usize, end: usize) {
        elapsed(milliseconds, start, end)
    }

    fn cuEventElapsedTime_v2(milliseconds: Option<&mut f32>, start: usize, end: usize) {
        elapsed(milliseconds, start, end)
    }
}
