//! Streams. Each stream has a queue and a thread that executes the queue. The null stream has neither: its operations run at
//! once on the calling thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::capture::{self, Capture};
use crate::context::current;
use crate::cu_result::{DriverResult, LAUNCH_FAILED, OPERATING_SYSTEM, STREAM_CAPTURE_UNSUPPORTED};
use crate::handles::{self, Table};
use crate::machine::Device;
use crate::op::Op;

/// All streams except null streams.
pub(crate) static STREAMS: Table<Stream> = Table::new();

/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const NON_BLOCKING: u32 = 1;

/// Stack size of a stream's thread in bytes. The fibers of kernels have separate stacks (`module.rs`).
const STACK: usize = 8 << 20;

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    /// Unique: ids are never reused.
    pub(crate) id: usize,
    pub(crate) device: &'static Device,
    /// Whether the stream synchronizes with the null stream.
    pub(crate) blocking: bool,
    pub(crate) priority: i32,
    pub(crate) flags: u32,
    queue: Mutex<Queue>,
    /// Signalled when an operation was submitted, or the stream was destroyed.
    work_available: Condvar,
    /// Signalled when an operation has finished and a thread waits for that.
    progress: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    ops: VecDeque<Op>,
    /// Number of operations submitted.
    submitted: u64,
    /// Number of operations finished.
    finished: u64,
    /// Whether the stream's thread sleeps.
    idle: bool,
    /// Number of threads that wait for `progress`.
    waiting: usize,
    /// Whether the stream was destroyed; the thread ends when the queue is empty.
    destroyed: bool,
    capture: Option<Arc<Capture>>,
}

impl Stream {
    /// Creates a stream and starts its thread.
    pub(crate) fn start(device: &'static Device, flags: u32, priority: i32) -> DriverResult<Arc<Self>> {
        let stream = Arc::new(Self {
            id: handles::reserve(1),
            device,
            blocking: flags & NON_BLOCKING == 0,
            priority,
            flags,
            queue: Mutex::default(),
            work_available: Condvar::new(),
            progress: Condvar::new(),
        });
        device.add_stream(&stream);
        let worker = stream.clone();
        let thread = thread::Builder::new().name("gpu-on-cpu".into()).stack_size(STACK);
        // Nobody joins the thread: it ends with the stream or with the process.
        thread.spawn(move || worker.run_queue()).map_err(|_| OPERATING_SYSTEM)?;
        Ok(stream)
    }

    fn run_queue(&self) {
        let mut queue = self.queue.lock();
        loop {
            if let Some(op) = queue.ops.pop_front() {
                drop(queue);
                let run = std::panic::AssertUnwindSafe(|| op.run(self.device));
                if std::panic::catch_unwind(run).is_err() {
                    self.device.set_fault(LAUNCH_FAILED);
                }
                drop(op);
                queue = self.queue.lock();
                queue.finished += 1;
                if queue.waiting > 0 {
                    self.progress.notify_all();
                }
            } else if queue.destroyed {
                return;
            } else {
                queue.idle = true;
                self.work_available.wait(&mut queue);
                queue.idle = false;
            }
        }
    }

    /// Queues operations, or adds them to the stream's capture. The iterator runs under the queue's lock.
    pub(crate) fn submit(&self, ops: impl IntoIterator<Item = Op>) -> DriverResult {
        self.device.check_fault()?;
        let mut queue = self.queue.lock();
        if let Some(capture) = &queue.capture {
            return ops.into_iter().try_for_each(|op| capture.add(self.id, op));
        }
        self.queue_all(&mut queue, ops);
        Ok(())
    }

    fn queue_all(&self, queue: &mut MutexGuard<'_, Queue>, ops: impl IntoIterator<Item = Op>) {
        let before = queue.ops.len();
        queue.ops.extend(ops);
        queue.submitted += (queue.ops.len() - before) as u64;
        if queue.idle {
            self.work_available.notify_one();
        }
    }

    /// Waits for all operations submitted so far.
    pub(crate) fn synchronize(&self) {
        let mut queue = self.queue.lock();
        let until = queue.submitted;
        queue.waiting += 1;
        while queue.finished < until {
            self.progress.wait(&mut queue);
        }
        queue.waiting -= 1;
    }

    /// Returns whether all submitted operations have finished.
    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.queue.lock();
        queue.finished == queue.submitted
    }

    /// Returns the capture that the stream is part of.
    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        self.queue.lock().capture.clone()
    }

    /// Sets or clears the stream's capture; returns the previous one.
    pub(crate) fn set_capture(&self, capture: Option<Arc<Capture>>) -> Option<Arc<Capture>> {
        std::mem::replace(&mut self.queue.lock().capture, capture)
    }

    /// Destroys the stream. Operations that are queued are still executed.
    pub(crate) fn destroy(&self) {
        if let Some(capture) = self.set_capture(None) {
            capture.invalidate();
        }
        self.queue.lock().destroyed = true;
        self.work_available.notify_one();
    }
}

/// The stream that a `CUstream` refers to.
#[derive(Debug, Clone)]
pub(crate) enum StreamRef {
    /// The null stream of the current context.
    Null(&'static Device),
    Stream(Arc<Stream>),
}

impl StreamRef {
    /// Resolves a handle. 0 and 1 are the null stream. 2, the per-thread default stream, is treated as the null stream: it
    /// has no queue either.
    pub(crate) fn of(handle: usize) -> DriverResult<Self> {
        let current = current()?;
        match handle {
            0..=2 => Ok(Self::Null(current)),
            handle => {
                let stream = STREAMS.get(handle)?;
                stream.device.usable()?;
                Ok(Self::Stream(stream))
            }
        }
    }

    pub(crate) fn device(&self) -> &'static Device {
        match self {
            Self::Null(device) => device,
            Self::Stream(stream) => stream.device,
        }
    }

    pub(crate) fn submit(&self, op: Op) -> DriverResult {
        self.submit_all([op])
    }

    pub(crate) fn submit_all(&self, ops: impl IntoIterator<Item = Op>) -> DriverResult {
        match self {
            Self::Null(device) => {
                capture::refuse_legacy(device)?;
                device.synchronize(true);
                ops.into_iter().for_each(|op| op.run(device));
                device.check_fault()
            }
            Self::Stream(stream) => stream.submit(ops),
        }
    }

    pub(crate) fn is_capturing(&self) -> bool {
        matches!(self, Self::Stream(stream) if stream.capture().is_some())
    }

    /// Waits for the stream. The null stream waits for the streams that synchronize with it.
    pub(crate) fn synchronize(&self) -> DriverResult {
        match self {
            Self::Null(device) => {
                capture::refuse_legacy(device)?;
                device.synchronize(true);
            }
            Self::Stream(stream) => {
                if let Some(capture) = stream.capture() {
                    capture.invalidate();
                    return Err(STREAM_CAPTURE_UNSUPPORTED);
                }
                stream.synchronize();
            }
        }
        self.device().check_fault()
    }
}
