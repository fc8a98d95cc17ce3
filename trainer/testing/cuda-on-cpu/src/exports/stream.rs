//! Streams.

use std::ffi::{c_int, c_uint, c_void};

use super::{HostFunction, exports, write_out};
use crate::capture;
use crate::context::current;
use crate::cu_result::{DriverResult, INVALID_VALUE, NOT_READY, STREAM_CAPTURE_UNSUPPORTED};
use crate::event::EVENTS;
use crate::memory;
use crate::op::Op;
use crate::stream::{NON_BLOCKING, STREAMS, Stream, StreamRef};

/// `CUstreamCaptureStatus`.
mod status {
    use std::ffi::c_int;

    pub(super) const NONE: c_int = 0;
    pub(super) const ACTIVE: c_int = 1;
    pub(super) const INVALIDATED: c_int = 2;
}

fn create(to: Option<&mut usize>, flags: c_uint, priority: c_int) -> DriverResult {
    let device = current()?;
    let to = to.filter(|_| flags & !NON_BLOCKING == 0).ok_or(INVALID_VALUE)?;
    write_out(Some(to), STREAMS.add(Stream::start(device, flags, priority.clamp(-5, 0))?))
}

/// Submits a memory operation on a word.
fn submit_word(stream: usize, address: usize, flags: c_uint, op: Op) -> DriverResult {
    let target = StreamRef::of(stream)?;
    if flags != 0 || !address.is_multiple_of(size_of::<u64>()) {
        return Err(INVALID_VALUE);
    }
    memory::reachable(address, size_of::<u64>())?;
    target.submit(op)
}

exports! {
    fn cuStreamCreate(stream: Option<&mut usize>, flags: c_uint) {
        create(stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(stream: Option<&mut usize>, flags: c_uint, priority: c_int) {
        create(stream, flags, priority)
    }

    fn cuStreamGetPriority(stream: usize, priority: Option<&mut c_int>) {
        match StreamRef::of(stream)? {
            StreamRef::Null(_) => write_out(priority, 0),
            StreamRef::Stream(stream) => write_out(priority, stream.priority),
        }
    }

    fn cuStreamGetFlags(stream: usize, flags: Option<&mut c_uint>) {
        match StreamRef::of(stream)? {
            StreamRef::Null(_) => write_out(flags, 0),
            StreamRef::Stream(stream) => write_out(flags, stream.flags),
        }
    }

    fn cuStreamGetCtx(stream: usize, context: Option<&mut usize>) {
        write_out(context, StreamRef::of(stream)?.device().context())
    }

    /// Queued operations are still executed.
    fn cuStreamDestroy_v2(stream: usize) {
        current()?;
        STREAMS.remove(stream)?.destroy();
        Ok(())
    }

    fn cuStreamSynchronize(stream: usize) {
        StreamRef::of(stream)?.synchronize()
    }

    fn cuStreamQuery(stream: usize) {
        let target = StreamRef::of(stream)?;
        if let StreamRef::Stream(stream) = &target {
            if let Some(capture) = stream.capture() {
                capture.invalidate();
                return Err(STREAM_CAPTURE_UNSUPPORTED);
            }
            capture::refuse_unsafe()?;
            if !stream.is_idle() {
                return Err(NOT_READY);
            }
        }
        target.device().check_fault()
    }

    fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) {
        let target = StreamRef::of(stream)?;
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        capture::wait(&target, &EVENTS.get(event)?)
    }

    /// Only waits for a value that is at least `value` are supported.
    fn cuStreamWaitValue64_v2(stream: usize, address: usize, value: u64, flags: c_uint) {
        submit_word(stream, address, flags, Op::WaitValue(address, value))
    }

    fn cuStreamWriteValue64_v2(stream: usize, address: usize, value: u64, flags: c_uint) {
        submit_word(stream, address, flags, Op::WriteValue(address, value))
    }

    unsafe fn cuLaunchHostFunc(stream: usize, function: Option<HostFunction>, data: *mut c_void) {
        let function = function.ok_or(INVALID_VALUE)?;
        StreamRef::of(stream)?.submit(Op::Host(function, data as usize))
    }

    fn cuStreamBeginCapture_v2(stream: usize, mode: c_int) {
        capture::begin(&StreamRef::of(stream)?, mode)
    }

    fn cuStreamIsCapturing(stream: usize, status: Option<&mut c_int>) {
        let target = StreamRef::of(stream)?;
        let capture = match &target {
            StreamRef::Null(device) => capture::refuse_legacy(device).map(|()| None)?,
            StreamRef::Stream(stream) => stream.capture(),
        };
        write_out(status, match capture {
            None => status::NONE,
            Some(capture) if capture.is_valid() => status::ACTIVE,
            Some(_) => status::INVALIDATED,
        })
    }
}
