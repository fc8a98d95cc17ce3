//! Streams and events.

use std::{
    ffi::{c_int, c_uint, c_void},
    ptr::null_mut,
    sync::Arc,
};

use super::{Address, Context, DriverResult};

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: c_int = 600;
/// `CU_STREAM_NON_BLOCKING`: the stream does not synchronize with the null stream.
const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

impl Context {
    /// Creates a stream that does not synchronize with the null stream.
    ///
    /// # Errors
    /// The driver's error.
    pub fn stream(self: &Arc<Self>) -> DriverResult<Stream> {
        self.enter()?;
        let mut stream = null_mut();
        // SAFETY: writes one pointer, which `Stream::drop` destroys.
        let code = unsafe { (self.functions.stream_create)(&mut stream, NON_BLOCKING) };
        self.functions.check("cuStreamCreate", code)?;
        Ok(Stream { context: self.clone(), stream })
    }

    /// Creates an event without a time.
    ///
    /// # Errors
    /// The driver's error.
    pub fn event(self: &Arc<Self>) -> DriverResult<Event> {
        self.enter()?;
        let mut event = null_mut();
        // SAFETY: writes one pointer, which `Event::drop` destroys.
        let code = unsafe { (self.functions.event_create)(&mut event, DISABLE_TIMING) };
        self.functions.check("cuEventCreate", code)?;
        Ok(Event { context: self.clone(), event })
    }
}

/// A CUDA stream.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    stream: *mut c_void,
}

// SAFETY: any thread may use a stream; the driver has its own locks.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Returns the `CUstream`, which is valid while this value lives.
    pub fn raw(&self) -> *mut c_void {
        self.stream
    }

    /// Returns whether all work on the stream is done. Does not wait.
    ///
    /// # Errors
    /// The driver's error, also one of the work.
    pub fn is_done(&self) -> DriverResult<bool> {
        // SAFETY: the stream lives as long as `self`.
        match unsafe { (self.context.functions.stream_query)(self.stream) } {
            NOT_READY => Ok(false),
            code => self.context.functions.check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Makes later work of the stream wait until the word at `address` is at least `value`. The CPU does not wait.
    ///
    /// # Errors
    /// The driver's error.
    pub fn wait_value(&self, address: Address, value: u64) -> DriverResult {
        const GREATER_OR_EQUAL: c_uint = 0;
        let functions = &self.context.functions;
        self.context.enter()?;
        // SAFETY: the driver refuses an address that the GPU cannot read. The caller keeps the word while the stream has work.
        let code = unsafe { (functions.stream_wait_value)(self.stream, address, value, GREATER_OR_EQUAL) };
        functions.check("cuStreamWaitValue64", code)
    }

    /// Enqueues a write of `value` to the word at `address`. The write runs when all earlier work of the stream is done and
    /// visible.
    ///
    /// # Errors
    /// The driver's error.
    pub fn write_value(&self, address: Address, value: u64) -> DriverResult {
        const WITH_BARRIER: c_uint = 0;
        let functions = &self.context.functions;
        self.context.enter()?;
        // SAFETY: as above.
        let code = unsafe { (functions.stream_write_value)(self.stream, address, value, WITH_BARRIER) };
        functions.check("cuStreamWriteValue64", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created by `Context::stream`, destroyed once.
            let _ = unsafe { (self.context.functions.stream_destroy)(self.stream) };
        }
    }
}

/// A CUDA event.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    event: *mut c_void,
}

// SAFETY: any thread may use an event; the driver has its own locks.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Records the event behind all work of `stream`.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// `stream` is a stream of the event's context.
    pub unsafe fn record(&self, stream: *mut c_void) -> DriverResult {
        let functions = &self.context.functions;
        self.context.enter()?;
        // SAFETY: required of the caller.
        functions.check("cuEventRecord", unsafe { (functions.event_record)(self.event, stream) })
    }

    /// Orders later work of `stream` after the event. The CPU does not wait.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// `stream` is a stream of the event's context.
    pub unsafe fn order(&self, stream: *mut c_void) -> DriverResult {
        let functions = &self.context.functions;
        self.context.enter()?;
        // SAFETY: required of the caller.
        functions.check("cuStreamWaitEvent", unsafe { (functions.stream_wait_event)(stream, self.event, 0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created by `Context::event`, destroyed once.
            let _ = unsafe { (self.context.functions.event_destroy)(self.event) };
        }
    }
}
