//! Events.

use std::ffi::c_uint;
use std::sync::Arc;

use super::{exports, write_out};
use crate::capture;
use crate::context::current;
use crate::cu_result::{CAPTURED_EVENT, DriverResult, INVALID_HANDLE, INVALID_VALUE, NOT_READY};
use crate::event::{DISABLE_TIMING, EVENTS, Event};
use crate::machine::machine;
use crate::stream::StreamRef;

/// `CU_EVENT_BLOCKING_SYNC`.
const BLOCKING_SYNC: c_uint = 1;

fn record(event: usize, stream: usize) -> DriverResult {
    let target = StreamRef::of(stream)?;
    let event = EVENTS.get(event)?;
    if event.device != target.device().index {
        return Err(INVALID_HANDLE);
    }
    capture::record(&target, &event)
}

/// Returns an event whose state is queried. An event knows its context, so the thread needs no current one: burn waits for
/// events on threads without a context.
fn queried(event: usize) -> DriverResult<Arc<Event>> {
    let event = EVENTS.get(event)?;
    match event.capture_point() {
        Some(_) => Err(CAPTURED_EVENT),
        None => Ok(event),
    }
}

fn elapsed(milliseconds: Option<&mut f32>, start: usize, end: usize) -> DriverResult {
    write_out(milliseconds, EVENTS.get(start)?.elapsed(&*EVENTS.get(end)?)?)
}

exports! {
    /// Events of other processes are not supported: `CU_EVENT_INTERPROCESS` is refused.
    fn cuEventCreate(event: Option<&mut usize>, flags: c_uint) {
        let device = current()?;
        let to = event.filter(|_| flags & !(BLOCKING_SYNC | DISABLE_TIMING) == 0).ok_or(INVALID_VALUE)?;
        write_out(Some(to), EVENTS.add(Arc::new(Event::new(device.index, flags))))
    }

    /// Pending waits for the event stay valid.
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
        let event = queried(event)?;
        event.wait(event.last_ticket());
        machine()?.devices().get(event.device).ok_or(INVALID_HANDLE)?.check_fault()
    }

    fn cuEventQuery(event: usize) {
        let event = queried(event)?;
        capture::refuse_unsafe()?;
        match event.is_complete() {
            true => machine()?.devices().get(event.device).ok_or(INVALID_HANDLE)?.check_fault(),
            false => Err(NOT_READY),
        }
    }

    fn cuEventElapsedTime(milliseconds: Option<&mut f32>, start: usize, end: usize) {
        elapsed(milliseconds, start, end)
    }

    fn cuEventElapsedTime_v2(milliseconds: Option<&mut f32>, start: usize, end: usize) {
        crate::machine::require_driver((12, 8), "cuEventElapsedTime_v2");
        elapsed(milliseconds, start, end)
    }
}
