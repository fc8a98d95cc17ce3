//! The binding to NCCL. The library is loaded at run time, when a route needs it.
//!
//! NCCL runs on a separate stream beside the stream of the launches, and the CPU waits for neither stream. A CUDA event could order
//! the two streams, but cubecl exposes its streams only on its own thread (`side_stream.rs`). So two words in host memory order the
//! streams:
//!
//! 1. A kernel after the pack writes the first word. NCCL's stream waits for this word (`cuStreamWaitValue64`) before the sum.
//! 2. After the sum, NCCL's stream writes the second word (`cuStreamWriteValue64`). A kernel of one block waits for this word
//!    before the gather.
//!
//! All work is submitted in the order of execution. So streams that share a hardware queue may delay each other, but cannot
//! deadlock. After an abort of the job, the host and the kernels set the first word (`order_body` in `kernels/collectives.cu`
//! explains why both do). So NCCL's stream waits for no launch, and only `ncclCommAbort` must end its sums.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use libloading::{Library as Shared, Symbol};

use super::driver::{Address, Context, NCCL_NAMES, Stream};
use super::layout::{WireType, word};
use crate::Communicator;
use crate::abort::AbortFlag;
use crate::error::{CommError, Result};

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

type Comm = *mut c_void;
type NcclResult = c_int;

/// The loaded library.
pub(super) struct Library {
    shared: Shared,
}

impl Library {
    /// Loads the library once for the process.
    ///
    /// # Errors
    /// The names that were tried, and the loader's messages.
    pub(super) fn load() -> std::result::Result<&'static Self, String> {
        static LIBRARY: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
        let loaded = LIBRARY.get_or_init(|| {
            let mut tried = Vec::new();
            for name in NCCL_NAMES {
                // SAFETY: NCCL's initialisers only set up NCCL's own state.
                match unsafe { Shared::new(name) } {
                    Ok(shared) => return Ok(Library { shared }),
                    Err(error) => tried.push(format!("{name} ({error})")),
                }
            }
            Err(format!("NCCL is missing: tried {}", tried.join(", ")))
        });
        loaded.as_ref().map_err(Clone::clone)
    }

    fn get<F>(&self, name: &'static str) -> Result<Symbol<'_, F>> {
        // SAFETY: the callers give each name the type that nccl.h declares.
        unsafe { self.shared.get(name.as_bytes()) }.map_err(|e| CommError::setup(format!("NCCL has no {name}: {e}")))
    }

    fn check(&self, name: &'static str, code: NcclResult) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let text = self.get::<unsafe extern "C" fn(NcclResult) -> *const c_char>("ncclGetErrorString")?;
        // SAFETY: NCCL returns a static string for every code.
        let text = unsafe { CStr::from_ptr(text(code)) }.to_string_lossy().into_owned();
        Err(CommError::system(format!("{name}: {text} ({code})")).hint(hint()))
    }
}

/// Returns what a user can do after an error of NCCL.
fn hint() -> String {
    /// NCCL needs about ten megabytes per pair of ranks without peer access. Docker's default for the whole of /dev/shm is 64 MB.
    const ENOUGH: u64 = 512 << 20;
    let small =
        rustix::fs::statvfs("/dev/shm").ok().map(|shm| shm.f_bavail * shm.f_frsize).filter(|free| *free < ENOUGH);
    match small {
        None => "NCCL_DEBUG=INFO makes NCCL report more".into(),
        Some(free) => format!(
            "NCCL_DEBUG=INFO makes NCCL report more; /dev/shm has {} MB left, which may be too little for NCCL: start the container \
             with --shm-size=1g or --ipc=host",
            free >> 20
        ),
    }
}

/// A communicator of NCCL on its own stream.
pub(super) struct Nccl {
    library: &'static Library,
    gpu: Arc<Context>,
    comm: Comm,
    stream: Stream,
    abort: Arc<AbortFlag>,
}

// SAFETY: any thread may use NCCL's communicators, one thread at a time. `DeviceGroup` is their only owner.
unsafe impl Send for Nccl {}

impl Nccl {
    /// Connects the ranks of `comm`, each with its own GPU.
    ///
    /// # Errors
    /// [`Setup`](crate::ErrorKind::Setup) without the library, or if NCCL fails on any rank, or does not connect
    /// within half of the job's timeout.
    pub(super) fn new(gpu: &Arc<Context>, comm: &Communicator) -> Result<Self> {
        type GetId = unsafe extern "C" fn(*mut UniqueId) -> NcclResult;
        let library = Library::load().map_err(CommError::setup)?;
        let mut id = UniqueId([0; 128]);
        let made = if comm.rank() == 0 {
            // SAFETY: `id` has the size of ncclUniqueId in nccl.h, 128 bytes.
            let mut get_id = |get: GetId| library.check("ncclGetUniqueId", unsafe { get(&mut id) });
            library.get::<GetId>("ncclGetUniqueId").and_then(|get| get_id(*get))
        } else {
            Ok(())
        };
        super::window::agree(made, comm)?;
        comm.broadcast(&mut id.0, 0)?;
        let process = &comm.inner.process;
        let ordered = gpu.supports_stream_mem_ops().map_err(|error| gpu.failed(&error)).and_then(|able| match able {
            true => gpu.stream().map_err(|error| gpu.failed(&error)),
            false => Err(CommError::setup(format!(
                "GPU {} has no memory operations of streams (cuStreamWaitValue64), which order NCCL's work",
                gpu.index
            ))
            .hint("parallel.backend = \"shm\" sums in the host's memory")),
        });
        let stream = super::window::agree(ordered, comm)?;
        // Half of the timeout of the exchange that follows, so that all ranks reach the exchange in time.
        let made = library.connect(gpu, id, comm.world_size(), comm.rank(), &process.abort, process.timeout / 2);
        let connected = made.map(|comm| Self { library, gpu: gpu.clone(), comm, stream, abort: process.abort.clone() });
        super::window::agree(connected, comm)
    }

    /// Enqueues the sum over ranks of `count` elements at `address`, in place. The stream first waits for the launch's
    /// signal that the slot is packed, and at the end signals that the slot is summed. `words` is the address of the [`word`]s.
    ///
    /// # Errors
    /// Errors of the driver or of NCCL. If the sum never ends, the launch that waits for the sum reports a fault.
    pub(super) fn all_reduce(
        &self,
        address: Address,
        count: usize,
        wire: WireType,
        words: Address,
        launch_number: u64,
    ) -> Result<()> {
        type AllReduce =
            unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> NcclResult;
        const SUM: c_int = 0;
        // ncclDataType_t
        let dtype = match wire {
            WireType::F16 => 6,
            WireType::F32 => 7,
            WireType::Bf16 => 9,
        };
        let word = |index: usize| words + (index * size_of::<u64>()) as Address;
        let call = self.library.get::<AllReduce>("ncclAllReduce")?;
        self.stream.wait_value(word(word::PACKED), launch_number).map_err(|error| self.gpu.failed(&error))?;
        let at = address as *mut c_void;
        // SAFETY: `count` elements of the caller's window, which lives until the group is closed. NCCL accesses them between the
        // two signals, when no kernel does. `wait_value` has made the context current.
        let code = unsafe { call(at, at, count, dtype, SUM, self.comm, self.stream.raw()) };
        self.library.check("ncclAllReduce", code)?;
        self.stream.write_value(word(word::SUMMED), launch_number).map_err(|error| self.gpu.failed(&error))
    }

    /// Returns an error if NCCL has noticed one asynchronously, such as a dead rank. Does not wait.
    ///
    /// # Errors
    /// NCCL's error.
    pub(super) fn check(&self) -> Result<()> {
        type GetError = unsafe extern "C" fn(Comm, *mut NcclResult) -> NcclResult;
        /// `ncclInProgress`.
        const IN_PROGRESS: NcclResult = 7;
        let mut error = 0;
        let get = self.library.get::<GetError>("ncclCommGetAsyncError")?;
        // SAFETY: a live communicator. The call writes one number.
        self.library.check("ncclCommGetAsyncError", unsafe { get(self.comm, &mut error) })?;
        if error == IN_PROGRESS { Ok(()) } else { self.library.check("NCCL", error) }
    }

    /// Returns whether the stream's work ends within a second. The stream of the launches has already seen the end of the last
    /// sum, so only the tail of NCCL's work may be left.
    fn ends(&self) -> bool {
        const LIMIT: Duration = Duration::from_secs(1);
        let start = Instant::now();
        while start.elapsed() < LIMIT {
            match self.stream.is_done() {
                Ok(false) => std::thread::yield_now(),
                done => return done.is_ok(),
            }
        }
        false
    }
}

impl Library {
    /// Calls `ncclCommInitRank` on a thread, since the call waits for all ranks without a timeout and cannot be cancelled. If
    /// the call does not return, its thread stays until the process ends.
    fn connect(
        &'static self,
        gpu: &Arc<Context>,
        id: UniqueId,
        world_size: usize,
        rank: usize,
        abort: &AbortFlag,
        limit: Duration,
    ) -> Result<Comm> {
        type Init = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> NcclResult;
        /// Interval at which the abort flag is checked.
        const POLL_INTERVAL: Duration = Duration::from_millis(50);
        let init = self.get::<Init>("ncclCommInitRank")?;
        let (sender, receiver) = channel();
        let gpu = gpu.clone();
        let call = move || {
            let made = gpu.enter().map_err(|error| gpu.failed(&error)).map(|()| {
                let mut handle: Comm = null_mut();
                // SAFETY: the context is current. All ranks call this with the same id and their own ranks.
                let code = unsafe { init(&mut handle, world_size as c_int, id, rank as c_int) };
                (handle as usize, code)
            });
            // Nobody listens after the limit.
            let _ = sender.send(made);
        };
        let thread = std::thread::Builder::new().name("nccl-init".into()).spawn(call);
        thread.map_err(|error| {
            CommError::system(format!("cannot start a thread for ncclCommInitRank: {error}")).hint("see `ulimit -u`")
        })?;
        let start = Instant::now();
        loop {
            match receiver.recv_timeout(POLL_INTERVAL) {
                Ok(made) => {
                    let (handle, code) = made?;
                    self.check("ncclCommInitRank", code)?;
                    return Ok(handle as Comm);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(CommError::system("the thread of ncclCommInitRank has died"));
                }
                Err(RecvTimeoutError::Timeout) => abort.check()?,
            }
            if start.elapsed() > limit {
                return Err(CommError::setup(format!(
                    "ncclCommInitRank did not connect {world_size} ranks within {limit:.1?}"
                ))
                .hint(
                    "NCCL_DEBUG=INFO shows where NCCL waits; NCCL_SOCKET_IFNAME names the network interface that all \
                         hosts reach; the limit is half of parallel.timeout_s",
                ));
            }
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        type End = unsafe extern "C" fn(Comm) -> NcclResult;
        if self.comm.is_null() || self.gpu.enter().is_err() {
            return;
        }
        // After an abort, or while sums are unfinished, `ncclCommDestroy` could wait for other ranks forever.
        let failed = self.abort.is_raised() || !self.ends();
        if let Ok(end) = self.library.get::<End>(if failed { "ncclCommAbort" } else { "ncclCommDestroy" }) {
            // SAFETY: made in `new`, ended once. It has no work in progress unless it has failed.
            unsafe { end(self.comm) };
        }
    }
}
