//! Streams: a queue each, and a thread that works it off. The null stream has neither: what it is given is done at once, on
//! the thread that calls.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::capture::{self, Capture};
use crate::code::{Answer, LAUNCH_FAILED, OPERATING_SYSTEM, STREAM_CAPTURE_UNSUPPORTED};
use crate::context::current;
use crate::handles::{self, Table};
use crate::log::lock;
use crate::machine::Device;
use crate::op::Op;

/// All streams but null streams.
pub(crate) static STREAMS: Table<Stream> = Table::new();

/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const NON_BLOCKING: u32 = 1;

/// Of a stream's thread. Kernels' threads have stacks of their own (`module.rs`).
const STACK: usize = 8 << 20;

/// See the module.
#[derive(Debug)]
pub(crate) struct Stream {
    /// Never another stream's, not even later.
    pub(crate) id: usize,
    pub(crate) device: &'static Device,
    /// Keeps order with the null stream.
    pub(crate) blocking: bool,
    pub(crate) priority: i32,
    pub(crate) flags: u32,
    queue: Mutex<Queue>,
    /// There is something to do.
    given: Condvar,
    /// Something has been done.
    done: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    ops: VecDeque<Op>,
    /// How many it has been given.
    given: u64,
    /// How many of them are done.
    done: u64,
    /// The thread sleeps.
    idle: bool,
    /// How many threads wait for `done`.
    waiting: usize,
    /// No more will come.
    ended: bool,
    capture: Option<Arc<Capture>>,
}

impl Stream {
    /// With a thread of its own.
    pub(crate) fn start(device: &'static Device, flags: u32, priority: i32) -> Answer<Arc<Self>> {
        let stream = Arc::new(Self {
            id: handles::reserve(1),
            device,
            blocking: flags & NON_BLOCKING == 0,
            priority,
            flags,
            queue: Mutex::default(),
            given: Condvar::new(),
            done: Condvar::new(),
        });
        device.add_stream(&stream);
        let worker = stream.clone();
        let thread = thread::Builder::new().name("gpu-on-cpu".into()).stack_size(STACK);
        // nobody joins it: it ends with the stream, or with the process
        thread.spawn(move || worker.work()).map_err(|_| OPERATING_SYSTEM)?;
        Ok(stream)
    }

    fn work(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(op) = queue.ops.pop_front() {
                drop(queue);
                let run = std::panic::AssertUnwindSafe(|| op.run(self.device));
                if std::panic::catch_unwind(run).is_err() {
                    self.device.break_with(LAUNCH_FAILED);
                }
                drop(op);
                queue = lock(&self.queue);
                queue.done += 1;
                if queue.waiting > 0 {
                    self.done.notify_all();
                }
            } else if queue.ended {
                return;
            } else {
                queue.idle = true;
                queue = self.given.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle = false;
            }
        }
    }

    /// Queues what `ops` makes, or adds it to the capture that the stream is in.
    pub(crate) fn submit(&self, ops: impl IntoIterator<Item = Op>) -> Answer {
        self.device.healthy()?;
        let mut queue = lock(&self.queue);
        if let Some(capture) = &queue.capture {
            return ops.into_iter().try_for_each(|op| capture.add(self.id, op));
        }
        self.queue_all(&mut queue, ops);
        Ok(())
    }

    fn queue_all(&self, queue: &mut MutexGuard<'_, Queue>, ops: impl IntoIterator<Item = Op>) {
        let before = queue.ops.len();
        queue.ops.extend(ops);
        queue.given += (queue.ops.len() - before) as u64;
        if queue.idle {
            self.given.notify_one();
        }
    }

    /// Waits for all that the stream has been given up to now.
    pub(crate) fn synchronize(&self) {
        let mut queue = lock(&self.queue);
        let until = queue.given;
        queue.waiting += 1;
        while queue.done < until {
            queue = self.done.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.waiting -= 1;
    }

    pub(crate) fn is_done(&self) -> bool {
        let queue = lock(&self.queue);
        queue.done == queue.given
    }

    /// The capture that it is in.
    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        lock(&self.queue).capture.clone()
    }

    /// Enters a capture, or leaves it; gives the one that it was in.
    pub(crate) fn set_capture(&self, capture: Option<Arc<Capture>>) -> Option<Arc<Capture>> {
        std::mem::replace(&mut lock(&self.queue).capture, capture)
    }

    /// What is queued is still done.
    pub(crate) fn end(&self) {
        if let Some(capture) = self.set_capture(None) {
            capture.invalidate();
        }
        lock(&self.queue).ended = true;
        self.given.notify_one();
    }
}

/// What a `CUstream` is.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    /// Of the current context.
    Null(&'static Device),
    Stream(Arc<Stream>),
}

impl Target {
    /// 0 and 1 are the null stream. So is 2, a thread's own: that has nothing queued either.
    pub(crate) fn of(handle: usize) -> Answer<Self> {
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

    pub(crate) fn submit(&self, op: Op) -> Answer {
        self.submit_all([op])
    }

    pub(crate) fn submit_all(&self, ops: impl IntoIterator<Item = Op>) -> Answer {
        match self {
            Self::Null(device) => {
                capture::refuse_legacy(device)?;
                device.synchronize(true);
                ops.into_iter().for_each(|op| op.run(device));
                device.healthy()
            }
            Self::Stream(stream) => stream.submit(ops),
        }
    }

    pub(crate) fn is_capturing(&self) -> bool {
        matches!(self, Self::Stream(stream) if stream.capture().is_some())
    }

    /// Waits for it. The null stream waits for those that keep order with it.
    pub(crate) fn synchronize(&self) -> Answer {
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
        self.device().healthy()
    }
}
