//! A stream beside the calling thread's stream, for launches that overlap with the thread's later work: [`ForkedStream`].
//!
//! cubecl can order two of its streams, but not while one of them is recorded as a CUDA graph: cubecl then waits on the CPU for
//! events of the recording, which CUDA forbids. So this stream is CUDA's own, and events order it and the thread's stream. In a
//! recording, the first event makes the stream a branch of the graph, and the last event joins the branch
//! (<https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cross-stream-dependencies-and-events>).
//!
//! cubecl exposes its streams only on its device thread, and launches only on its own streams. While the launches of
//! [`ForkedStream::run`] are submitted, cubecl's stream of the calling thread therefore has the handle of this stream. So cubecl
//! compiles, reports and records the launches like all others, and allocates their memory on the thread's stream.

use std::cell::RefCell;
use std::sync::Arc;

use burn::backend::StreamId;
use cubecl::client::Client;
use cubecl::cuda::CudaRuntime;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::{BufferBinding, Handle};
use cubecl_server::runtime::Runtime;
use cubecl_server::stream::WriteScoped;
use parking_lot::Mutex;

use super::driver::{Context, DriverError, DriverResult, Event, Stream};
use crate::error::Result;

type CudaServer = <CudaRuntime as Runtime>::Server;

/// See the module.
pub(super) struct ForkedStream {
    server: DeviceHandle<CudaServer>,
    fork: Arc<Fork>,
    /// The memory of the launches since the last join. cubecl neither moves it nor uses it again.
    memory: RefCell<Vec<BufferBinding>>,
}

struct Fork {
    gpu: Arc<Context>,
    stream: Stream,
    event: Event,
    /// The handle of cubecl's stream while cubecl launches on this stream.
    hidden: Mutex<usize>,
    /// The first error of the driver.
    failed: Mutex<Option<DriverError>>,
}

impl ForkedStream {
    /// Makes a stream on the GPU of `client`.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn new(client: &Client, gpu: &Arc<Context>) -> Result<Self> {
        let made = gpu.stream().and_then(|stream| Ok((stream, gpu.event()?)));
        let (stream, event) = made.map_err(|error| gpu.failed(&error))?;
        let fork = Fork { gpu: gpu.clone(), stream, event, hidden: Mutex::new(0), failed: Mutex::new(None) };
        let server = DeviceHandle::new(client.service_id().device);
        Ok(Self { server, fork: Arc::new(fork), memory: RefCell::default() })
    }

    /// Runs `launch`, whose launches use `memory`. They run after all work that the calling thread has submitted so far.
    /// [`join`](Self::join) orders the thread's later work after them.
    pub(super) fn run<'a>(&self, memory: impl Iterator<Item = &'a Handle>, launch: impl FnOnce()) {
        self.memory.borrow_mut().extend(memory.map(|handle| handle.clone().binding()));
        let (id, fork) = (StreamId::current(), self.fork.clone());
        self.server.submit(move |server| fork.enter(server, id));
        launch();
        let fork = self.fork.clone();
        self.server.submit(move |server| fork.leave(server, id));
        // The other ranks' launches wait for this one.
        self.server.flush_queue();
    }

    /// Orders all later work of the calling thread after the launches.
    pub(super) fn join(&self) {
        let memory = std::mem::take(&mut *self.memory.borrow_mut());
        if memory.is_empty() {
            return;
        }
        let (id, fork) = (StreamId::current(), self.fork.clone());
        self.server.submit(move |server| {
            fork.join(server, id);
            drop(memory);
        });
    }

    /// Returns the first error of the driver, if there was one.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn check(&self) -> Result<()> {
        let failed = self.fork.failed.lock().clone();
        failed.map_or(Ok(()), |error| Err(self.fork.gpu.failed(&error)))
    }
}

/// These methods run on cubecl's device thread, where the work of each stream is submitted in order.
impl Fork {
    fn enter(&self, server: &mut CudaServer, id: StreamId) {
        let stream = server.write_streams().try_stream_mut(&id).expect("the thread has allocated memory on its stream");
        // SAFETY: both are streams of the GPU's primary context, which cubecl uses too.
        self.keep(unsafe { self.event.record(stream.sys.cast()).and_then(|()| self.event.order(self.stream.raw())) });
        *self.hidden.lock() = std::mem::replace(&mut stream.sys, self.stream.raw().cast()) as usize;
    }

    fn leave(&self, server: &mut CudaServer, id: StreamId) {
        let stream = server.write_streams().try_stream_mut(&id).expect("the stream of `enter`");
        stream.sys = *self.hidden.lock() as *mut _;
    }

    fn join(&self, server: &mut CudaServer, id: StreamId) {
        let stream = server.write_streams().try_stream_mut(&id).expect("the stream of `enter`");
        // SAFETY: as in `enter`.
        self.keep(unsafe { self.event.record(self.stream.raw()).and_then(|()| self.event.order(stream.sys.cast())) });
    }

    fn keep(&self, result: DriverResult) {
        if let Err(error) = result {
            self.failed.lock().get_or_insert(error);
        }
    }
}
