//! The binding to NCCL, which is loaded when it is needed.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use libloading::{Library as Shared, Symbol};

use super::driver::{Context, NCCL_NAMES, Stream};
use super::layout::WireType;
use crate::Communicator;
use crate::abort::Abort;
use crate::error::{CommError, ErrorKind, Result};

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

type Comm = *mut c_void;
type Code = c_int;

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

    fn check(&self, name: &'static str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let text = self.get::<unsafe extern "C" fn(Code) -> *const c_char>("ncclGetErrorString")?;
        // SAFETY: NCCL returns a static string for every code.
        let text = unsafe { CStr::from_ptr(text(code)) }.to_string_lossy().into_owned();
        Err(CommError::system(format!("{name}: {text} ({code})")).hint("NCCL_DEBUG=INFO makes NCCL report more"))
    }
}

/// A communicator of NCCL on its own stream.
pub(super) struct Nccl {
    library: &'static Library,
    gpu: Arc<Context>,
    comm: Comm,
    stream: Stream,
    failed: std::sync::atomic::AtomicBool,
}

// SAFETY: any thread may use NCCL's communicators, one thread at a time. `DeviceGroup` is their only owner.
unsafe impl Send for Nccl {}

impl Nccl {
    /// Connects the ranks of `comm`, each with its own GPU.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) without the library; errors of NCCL, as [`System`](ErrorKind::System).
    pub(super) fn new(gpu: &Arc<Context>, comm: &Communicator) -> Result<Self> {
        type GetId = unsafe extern "C" fn(*mut UniqueId) -> Code;
        type Init = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> Code;
        let library = Library::load().map_err(CommError::setup)?;
        let mut id = UniqueId([0; 128]);
        let made = if comm.rank() == 0 {
            let get = library.get::<GetId>("ncclGetUniqueId")?;
            // SAFETY: `id` has the size of ncclUniqueId in nccl.h, 128 bytes.
            library.check("ncclGetUniqueId", unsafe { get(&mut id) })
        } else {
            Ok(())
        };
        super::window::agree(made, comm)?;
        comm.broadcast(&mut id.0, 0)?;
        let stream = gpu.stream().map_err(|error| gpu.failed(&error))?;
        let mut handle: Comm = null_mut();
        let init = library.get::<Init>("ncclCommInitRank")?;
        // SAFETY: the context is current. All ranks call this with the same id and their own ranks.
        let code = unsafe { init(&mut handle, comm.world() as c_int, id, comm.rank() as c_int) };
        let nccl = Self { library, gpu: gpu.clone(), comm: handle, stream, failed: false.into() };
        super::window::agree(library.check("ncclCommInitRank", code), comm)?;
        Ok(nccl)
    }

    /// Sums `count` elements at `address` over ranks, in place. Returns when that is done.
    ///
    /// # Errors
    /// Errors of NCCL, the job's abort, or a timeout after `limit`.
    pub(super) fn all_reduce(
        &self,
        address: u64,
        count: usize,
        wire: WireType,
        abort: &Abort,
        limit: Duration,
    ) -> Result<()> {
        type AllReduce =
            unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Code;
        const SUM: c_int = 0;
        // ncclDataType_t
        let dtype = match wire {
            WireType::F16 => 6,
            WireType::F32 => 7,
            WireType::Bf16 => 9,
        };
        self.gpu.enter().map_err(|error| self.gpu.failed(&error))?;
        let call = self.library.get::<AllReduce>("ncclAllReduce")?;
        let at = address as *mut c_void;
        // SAFETY: `count` elements of the caller's window. No kernel uses them, since the caller has waited for its stream.
        let code = unsafe { call(at, at, count, dtype, SUM, self.comm, self.stream.raw()) };
        self.library.check("ncclAllReduce", code)?;
        let start = Instant::now();
        loop {
            if self.stream.is_done().map_err(|error| self.gpu.failed(&error))? {
                return Ok(());
            }
            let result = abort.check().and_then(|()| match start.elapsed() > limit {
                true => {
                    Err(CommError::new(ErrorKind::Timeout, format!("NCCL did not finish a sum within {limit:.1?}")))
                }
                false => Ok(()),
            });
            if result.is_err() {
                self.failed.store(true, std::sync::atomic::Ordering::Relaxed);
                return result;
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        type End = unsafe extern "C" fn(Comm) -> Code;
        let failed = self.failed.load(std::sync::atomic::Ordering::Relaxed);
        if self.comm.is_null() || self.gpu.enter().is_err() {
            return;
        }
        // A rank that has given up must not wait for the others.
        if let Ok(end) = self.library.get::<End>(if failed { "ncclCommAbort" } else { "ncclCommDestroy" }) {
            // SAFETY: made in `new`, ended once. It has no work in progress unless it has failed.
            unsafe { end(self.comm) };
        }
    }
}
