//! NVIDIA's library, loaded where it is used. Its functions are looked up here and not through cudarc, which does not try
//! the only name that NVIDIA's packages give it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};
use libloading::{Library as Shared, Symbol};

use super::driver::NCCL_NAMES;
use super::gpu::Gpu;
use super::layout::WireType;
use crate::Communicator;
use crate::abort::Abort;
use crate::error::{CommError, ErrorKind, Result};

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

type Comm = *mut c_void;
type Code = c_int;

/// The library's functions.
pub(super) struct Library {
    shared: Shared,
}

impl Library {
    /// Loads it once for the process.
    ///
    /// # Errors
    /// What was looked for, and what the system says of it.
    pub(super) fn load() -> std::result::Result<&'static Self, String> {
        static LIBRARY: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
        let loaded = LIBRARY.get_or_init(|| {
            let mut tried = Vec::new();
            for name in NCCL_NAMES {
                // SAFETY: NCCL's initialisers only set up its own state.
                match unsafe { Shared::new(name) } {
                    Ok(shared) => return Ok(Library { shared }),
                    Err(error) => tried.push(format!("{name} ({error})")),
                }
            }
            Err(format!("NCCL is not there: tried {}", tried.join(", ")))
        });
        loaded.as_ref().map_err(Clone::clone)
    }

    fn get<F>(&self, name: &'static str) -> Result<Symbol<'_, F>> {
        // SAFETY: the callers give each name the type that nccl.h gives it.
        unsafe { self.shared.get(name.as_bytes()) }.map_err(|e| CommError::setup(format!("NCCL has no {name}: {e}")))
    }

    fn check(&self, name: &'static str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let text = self.get::<unsafe extern "C" fn(Code) -> *const c_char>("ncclGetErrorString")?;
        // SAFETY: NCCL gives static strings for every code.
        let text = unsafe { CStr::from_ptr(text(code)) }.to_string_lossy().into_owned();
        Err(CommError::system(format!("{name}: {text} ({code})")).hint("NCCL_DEBUG=INFO makes NCCL say more"))
    }
}

/// A communicator of NCCL's, on a stream of its own.
pub(super) struct Nccl {
    library: &'static Library,
    gpu: Arc<Gpu>,
    comm: Comm,
    stream: sys::CUstream,
    failed: std::sync::atomic::AtomicBool,
}

// SAFETY: NCCL's communicators may be used from any thread, one at a time; `DeviceGroup` has one owner.
unsafe impl Send for Nccl {}

impl Nccl {
    /// Ranks of `comm`, each with a GPU of its own.
    pub(super) fn new(gpu: &Arc<Gpu>, comm: &Communicator) -> Result<Self> {
        type GetId = unsafe extern "C" fn(*mut UniqueId) -> Code;
        type Init = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> Code;
        let library = Library::load().map_err(CommError::setup)?;
        let mut id = UniqueId([0; 128]);
        let made = if comm.rank() == 0 {
            let get = library.get::<GetId>("ncclGetUniqueId")?;
            // SAFETY: `id` is what nccl.h calls ncclUniqueId: 128 bytes.
            library.check("ncclGetUniqueId", unsafe { get(&mut id) })
        } else {
            Ok(())
        };
        super::window::agree(made, comm)?;
        comm.broadcast(&mut id.0, 0)?;
        gpu.enter()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|e| CommError::system(format!("GPU {}: cuStreamCreate: {e}", gpu.index)))?;
        let mut handle: Comm = null_mut();
        let init = library.get::<Init>("ncclCommInitRank")?;
        // SAFETY: the context is current; all ranks call this with the same id and their own ranks.
        let code = unsafe { init(&mut handle, comm.world() as c_int, id, comm.rank() as c_int) };
        let nccl = Self { library, gpu: gpu.clone(), comm: handle, stream, failed: false.into() };
        super::window::agree(library.check("ncclCommInitRank", code), comm)?;
        Ok(nccl)
    }

    /// Sums `count` elements at `address` over ranks, in place; returns when that is done.
    ///
    /// # Errors
    /// NCCL's, the job's abort, or a timeout.
    pub(super) fn all_reduce(
        &self,
        address: u64,
        count: usize,
        wire: WireType,
        abort: &Abort,
        limit: Duration,
    ) -> Result<()> {
        type AllReduce =
            unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, sys::CUstream) -> Code;
        const SUM: c_int = 0;
        // ncclDataType_t
        let dtype = match wire {
            WireType::F16 => 6,
            WireType::F32 => 7,
            WireType::Bf16 => 9,
        };
        self.gpu.enter()?;
        let call = self.library.get::<AllReduce>("ncclAllReduce")?;
        let at = address as *mut c_void;
        // SAFETY: `count` elements of the caller's window, which no kernel uses meanwhile: it waited for its stream.
        self.library.check("ncclAllReduce", unsafe { call(at, at, count, dtype, SUM, self.comm, self.stream) })?;
        let start = Instant::now();
        loop {
            // SAFETY: the stream lives as long as `self`.
            match unsafe { sys::cuStreamQuery(self.stream) } {
                sys::CUresult::CUDA_SUCCESS => return Ok(()),
                sys::CUresult::CUDA_ERROR_NOT_READY => {}
                code => return Err(CommError::system(format!("GPU {}: NCCL's stream: {code:?}", self.gpu.index))),
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
        // a rank that has given up must not wait for the others
        if let Ok(end) = self.library.get::<End>(if failed { "ncclCommAbort" } else { "ncclCommDestroy" }) {
            // SAFETY: made in `new`, ended once; nothing of it is under way unless it has failed.
            unsafe { end(self.comm) };
        }
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}
