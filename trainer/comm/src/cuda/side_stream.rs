//! A stream beside the calling thread's stream, for launches that overlap with the thread's later work: [`SideStream`].
//!
//! cubecl can order two of its streams, but not while one of them is captured as a CUDA graph: cubecl then waits on the CPU for
//! events of the capture, which CUDA forbids. So this stream is CUDA's own, and events order it and the thread's stream. In a
//! capture, the first event makes the stream a branch of the graph, and the last event joins the branch
//! (<https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cross-stream-dependencies-and-events>).
//!
//! cubecl exposes its streams only on its device thread, and launches only on its own streams. Therefore [`SideStream::run`] puts
//! the handle of this stream into cubecl's stream object of the calling thread while it submits the launches, and then restores the
//! original handle. So cubecl compiles, reports and records the launches like all others, and allocates their memory on the
//! thread's stream.

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

use super::driver::{Context, DriverResult, Event, Stream};
use crate::error::{CommError, Result};

type CudaServer = <CudaRuntime as Runtime>::Server;

/// A stream beside cubecl's stream of the calling thread.
pub(super) struct SideStream {
    server: DeviceHandle<CudaServer>,
    state: Arc<SideStreamState>,
    /// The memory of the launches since the last join. cubecl neither moves it nor uses it again.
    memory: RefCell<Vec<BufferBinding>>,
}

struct SideStreamState {
    gpu: Arc<Context>,
    stream: Stream,
    event: Event,
    /// The original handle of cubecl's stream, kept while the handle of this stream replaces it.
    original_stream: Mutex<Option<usize>>,
    /// The first error.
    failed: Mutex<Option<CommError>>,
}

impl SideStream {
    /// Makes a stream on the GPU of `client`.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn new(client: &Client, gpu: &Arc<Context>) -> Result<Self> {
        let made = gpu.stream().and_then(|stream| Ok((stream, gpu.event()?)));
        let (stream, event) = made.map_err(|error| gpu.failed(&error))?;
        let state = SideStreamState {
            gpu: gpu.clone(),
            stream,
            event,
            original_stream: Mutex::default(),
            failed: Mutex::default(),
        };
        let server = DeviceHandle::new(client.service_id().device);
        Ok(Self { server, state: Arc::new(state), memory: RefCell::default() })
    }

    /// Runs `launch`, whose launches use `memory`. They run after all work that the calling thread has submitted so far.
    /// [`join`](Self::join) orders the thread's later work after them.
    pub(super) fn run<'a>(&self, memory: impl Iterator<Item = &'a Handle>, launch: impl FnOnce()) {
        self.memory.borrow_mut().extend(memory.map(|handle| handle.clone().binding()));
        let (id, state) = (StreamId::current(), self.state.clone());
        self.server.submit(move |server| state.redirect_launches(server, id));
        launch();
        let state = self.state.clone();
        self.server.submit(move |server| state.restore_stream(server, id));
        // The other ranks' launches wait for this one.
        self.server.flush_queue();
    }

    /// Orders all later work of the calling thread after the launches.
    pub(super) fn join(&self) {
        let memory = std::mem::take(&mut *self.memory.borrow_mut());
        if memory.is_empty() {
            return;
        }
        let (id, state) = (StreamId::current(), self.state.clone());
        self.server.submit(move |server| {
            state.join(server, id);
            drop(memory);
        });
    }

    /// Returns the first error of the launches, if there was one.
    ///
    /// # Errors
    /// The driver's error, or that cubecl has no stream for the calling thread.
    pub(super) fn check(&self) -> Result<()> {
        self.state.failed.lock().clone().map_or(Ok(()), Err)
    }
}

/// These methods run on cubecl's device thread, where the work of each stream is submitted in order.
impl SideStreamState {
    fn redirect_launches(&self, server: &mut CudaServer, id: StreamId) {
        // Without its stream, cubecl launches on a new one. The results are then not used, since `check` returns an error.
        let Some(stream) = server.write_streams().try_stream_mut(&id) else { return self.keep(no_stream()) };
        // SAFETY: both are streams of the GPU's primary context, which cubecl uses too.
        self.check(unsafe { self.event.record(stream.sys.cast()).and_then(|()| self.event.order(self.stream.raw())) });
        *self.original_stream.lock() = Some(std::mem::replace(&mut stream.sys, self.stream.raw().cast()) as usize);
    }

    fn restore_stream(&self, server: &mut CudaServer, id: StreamId) {
        let Some(handle) = self.original_stream.lock().take() else { return };
        let Some(stream) = server.write_streams().try_stream_mut(&id) else { return self.keep(no_stream()) };
        stream.sys = handle as *mut _;
    }

    fn join(&self, server: &mut CudaServer, id: StreamId) {
        let Some(stream) = server.write_streams().try_stream_mut(&id) else { return self.keep(no_stream()) };
        // SAFETY: as in `redirect_launches`.
        self.check(unsafe { self.event.record(self.stream.raw()).and_then(|()| self.event.order(stream.sys.cast())) });
    }

    fn check(&self, result: DriverResult) {
        if let Err(error) = result {
            self.keep(self.gpu.failed(&error));
        }
    }

    fn keep(&self, error: CommError) {
        self.failed.lock().get_or_insert(error);
    }
}

fn no_stream() -> CommError {
    CommError::system("cubecl has no stream for the thread that sums gradients")
        .hint("please report this; parallel.backend = \"nccl\" does not use the thread's stream")
}
