//! Streams.

use std::ffi::{c_int, c_uint, c_void};

use super::{HostFunction, exports, put};
use crate::capture;
use crate::code::{Answer, INVALID_VALUE, NOT_READY, STREAM_CAPTURE_UNSUPPORTED};
use crate::context::current;
use crate::event::EVENTS;
use crate::op::Op;
use crate::stream::{NON_BLOCKING, STREAMS, Stream, Target};

/// `CUstreamCaptureStatus`.
mod status {
    use std::ffi::c_int;

    pub(super) const NONE: c_int = 0;
    pub(super) const ACTIVE: c_int = 1;
    pub(super) const INVALIDATED: c_int = 2;
}

fn create(to: Option<&mut usize>, flags: c_uint, priority: c_int) -> Answer {
    let device = current()?;
    let to = to.filter(|_| flags & !NON_BLOCKING == 0).ok_or(INVALID_VALUE)?;
    put(Some(to), STREAMS.add(Stream::start(device, flags, priority.clamp(-5, 0))?))
}

exports! {
    fn cuStreamCreate(stream: Option<&mut usize>, flags: c_uint) {
        create(stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(stream: Option<&mut usize>, flags: c_uint, priority: c_int) {
        create(stream, flags, priority)
    }

    fn cuStreamGetPriority(stream: usize, priority: Option<&mut c_int>) {
        match Target::of(stream)? {
            Target::Null(_) => put(priority, 0),
            Target::Stream(stream) => put(priority, stream.priority),
        }
    }

    fn cuStreamGetFlags(stream: usize, flags: Option<&mut c_uint>) {
        match Target::of(stream)? {
            Target::Null(_) => put(flags, 0),
            Target::Stream(stream) => put(flags, stream.flags),
        }
    }

    fn cuStreamGetCtx(stream: usize, context: Option<&mut usize>) {
        put(context, Target::of(stream)?.device().context())
    }

    /// What it has got is still done.
    fn cuStreamDestroy_v2(stream: usize) {
        current()?;
        STREAMS.remove(stream)?.end();
        Ok(())
    }

    fn cuStreamSynchronize(stream: usize) {
        Target::of(stream)?.synchronize()
    }

    fn cuStreamQuery(stream: usize) {
        let target = Target::of(stream)?;
        if let Target::Stream(stream) = &target {
            if let Some(capture) = stream.capture() {
                capture.invalidate();
                return Err(STREAM_CAPTURE_UNSUPPORTED);
            }
            capture::refuse_unsafe()?;
            if !stream.is_done() {
                return Err(NOT_READY);
            }
        }
        target.device().healthy()
    }

    fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) {
        let target = Target::of(stream)?;
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        capture::wait(&target, &EVENTS.get(event)?)
    }

    unsafe fn cuLaunchHostFunc(stream: usize, function: Option<HostFunction>, data: *mut c_void) {
        let function = function.ok_or(INVALID_VALUE)?;
        Target::of(stream)?.submit(Op::Host(function, data as usize))
    }

    fn cuStreamBeginCapture_v2(stream: usize, mode: c_int) {
        capture::begin(&Target::of(stream)?, mode)
    }

    fn cuStreamIsCapturing(stream: usize, status: Option<&mut c_int>) {
        let target = Target::of(stream)?;
        let capture = match &target {
            Target::Null(device) => capture::refuse_legacy(device).map(|()| None)?,
            Target::Stream(stream) => stream.capture(),
        };
        put(status, match capture {
            None => status::NONE,
            Some(capture) if capture.is_valid() => status::ACTIVE,
            Some(_) => status::INVALIDATED,
        })
    }
}
