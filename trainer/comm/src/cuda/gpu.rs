//! The driver's calls: memory that other processes can open, words on the host that kernels see, streams. Everything goes to
//! the device's primary context, which is cubecl's too.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::layout::PAGE;
use crate::error::{CommError, Result};

/// An error of the driver's call `name`.
fn failed(index: usize, name: &str, error: DriverError) -> CommError {
    CommError::system(format!("GPU {index}: {name}: {error}"))
}

/// A GPU, by the index that this process has for it.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) index: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: a context may be used from any thread that makes it current, which every method here does first.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver locks by itself.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Retains the primary context of GPU `index`.
    pub(super) fn open(index: usize) -> Result<Arc<Self>> {
        // SAFETY: only tries to load the driver's library.
        if !unsafe { sys::is_culib_present() } {
            return Err(CommError::setup("no NVIDIA driver: libcuda.so is not among the libraries of this system"));
        }
        result::init().map_err(|e| failed(index, "cuInit", e))?;
        let device = result::device::get(index as c_int).map_err(|e| failed(index, "cuDeviceGet", e))?;
        // SAFETY: the device was just given by the driver. The context is released in `drop`.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = context.map_err(|e| failed(index, "cuDevicePrimaryCtxRetain", e))?;
        Ok(Arc::new(Self { index, device, context }))
    }

    fn failed(&self, name: &str, error: DriverError) -> CommError {
        failed(self.index, name, error)
    }

    /// Makes the context this thread's.
    pub(super) fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained for as long as `self` lives.
        unsafe { result::ctx::set_current(self.context) }.map_err(|e| self.failed("cuCtxSetCurrent", e))
    }

    /// What identifies the GPU on every host and in every process.
    pub(super) fn uuid(&self) -> Result<[u8; 16]> {
        uuid(self.device).map_err(|e| self.failed("cuDeviceGetUuid", e))
    }

    /// Compute capability.
    pub(super) fn capability(&self) -> Result<(u32, u32)> {
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        let ask = |attribute| {
            // SAFETY: plain queries of a device that exists.
            let value = unsafe { result::device::get_attribute(self.device, attribute) };
            value.map(|v| v as u32).map_err(|e| self.failed("cuDeviceGetAttribute", e))
        };
        Ok((ask(MAJOR)?, ask(MINOR)?))
    }

    /// Whether the driver offers access to the memory of the GPU with this UUID; `None` if this process does not see it.
    pub(super) fn can_access(&self, other: [u8; 16]) -> Result<Option<bool>> {
        if self.uuid()? == other {
            return Ok(Some(true));
        }
        let count = result::device::get_count().map_err(|e| self.failed("cuDeviceGetCount", e))?;
        for index in 0..count {
            let device = result::device::get(index).map_err(|e| self.failed("cuDeviceGet", e))?;
            if uuid(device).map_err(|e| self.failed("cuDeviceGetUuid", e))? == other {
                let mut answer: c_int = 0;
                // SAFETY: both devices were given by the driver; `answer` outlives the call.
                let code = unsafe { sys::cuDeviceCanAccessPeer(&mut answer, self.device, device) };
                code.result().map_err(|e| self.failed("cuDeviceCanAccessPeer", e))?;
                return Ok(Some(answer != 0));
            }
        }
        Ok(None)
    }

    /// Waits for all work on the GPU that this process has given it.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.enter()?;
        result::ctx::synchronize().map_err(|e| self.failed("cuCtxSynchronize", e))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; whatever was allocated here holds an Arc of `self`.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

fn uuid(device: sys::CUdevice) -> std::result::Result<[u8; 16], DriverError> {
    let mut uuid = MaybeUninit::<sys::CUuuid>::uninit();
    // SAFETY: the call fills `uuid` if it succeeds, and only then is it read.
    let uuid = unsafe {
        sys::cuDeviceGetUuid_v2(uuid.as_mut_ptr(), device).result()?;
        uuid.assume_init()
    };
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// Bytes of a handle as it travels: CUDA's own and the offset of the memory in what it exports.
pub(super) const HANDLE: usize = 64 + 8;

/// Memory of the GPU in whole pages, zeroed, which other processes may open.
pub(super) struct DeviceMemory {
    gpu: Arc<Gpu>,
    pub(super) address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates, zeroes, and waits until the zeros are there: nobody can have a handle before.
    pub(super) fn zeroed(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        gpu.enter()?;
        let bytes = bytes.next_multiple_of(PAGE);
        // SAFETY: the context is current; freed in `drop`.
        let address = unsafe { result::malloc_sync(bytes) };
        let address = address.map_err(|e| gpu.failed(&format!("cuMemAlloc of {bytes} bytes"), e))?;
        let memory = Self { gpu: gpu.clone(), address, bytes };
        // SAFETY: the whole allocation, which nobody else knows of.
        unsafe { result::memset_d8_sync(address, 0, bytes) }.map_err(|e| gpu.failed("cuMemsetD8", e))?;
        // the call may return before the memory is set
        gpu.synchronize()?;
        Ok(memory)
    }

    /// The handle with which other processes open it.
    pub(super) fn export(&self) -> Result<[u8; HANDLE]> {
        self.gpu.enter()?;
        let (mut base, mut size) = (0, 0);
        let mut handle = MaybeUninit::<sys::CUipcMemHandle>::uninit();
        // SAFETY: the address is that of a live allocation; the calls fill what they are given if they succeed.
        let handle = unsafe {
            sys::cuMemGetAddressRange_v2(&mut base, &mut size, self.address)
                .result()
                .map_err(|e| self.gpu.failed("cuMemGetAddressRange", e))?;
            sys::cuIpcGetMemHandle(handle.as_mut_ptr(), self.address)
                .result()
                .map_err(|e| self.gpu.failed("cuIpcGetMemHandle", e))?;
            handle.assume_init()
        };
        let mut card = [0; HANDLE];
        card.iter_mut().zip(handle.reserved).for_each(|(to, from)| *to = from as u8);
        // a handle stands for the driver's whole allocation, of which this may be a part
        card[64..].copy_from_slice(&(self.address - base).to_le_bytes());
        Ok(card)
    }

    fn inside(&self, at: usize, bytes: usize) -> Result<u64> {
        match at.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.address + at as u64),
            _ => Err(CommError::system(format!("bytes {at}..+{bytes} are outside of a window of {}", self.bytes))),
        }
    }

    /// Copies to the host; the caller has made sure that nothing writes there.
    pub(super) fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        self.gpu.enter()?;
        let from = self.inside(at, to.len())?;
        // SAFETY: inside of a live allocation (checked above), and `to` outlives the synchronous copy.
        unsafe { result::memcpy_dtoh_sync(to, from) }.map_err(|e| self.gpu.failed("cuMemcpyDtoH", e))
    }

    /// Copies from the host; the caller has made sure that nobody reads there.
    pub(super) fn write(&self, at: usize, from: &[u8]) -> Result<()> {
        self.gpu.enter()?;
        let to = self.inside(at, from.len())?;
        // SAFETY: inside of a live allocation (checked above), and `from` outlives the copy.
        unsafe { result::memcpy_htod_sync(to, from) }.map_err(|e| self.gpu.failed("cuMemcpyHtoD", e))?;
        // from pageable memory the call may return before the data is there
        self.gpu.synchronize()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: allocated in `zeroed`, and freed once. The owner drops it after all ranks have closed their views.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Another process's memory.
pub(super) struct PeerMemory {
    gpu: Arc<Gpu>,
    base: u64,
    pub(super) address: u64,
}

impl PeerMemory {
    /// Opens memory that another process has exported, with access from this GPU.
    pub(super) fn open(gpu: &Arc<Gpu>, card: &[u8; HANDLE]) -> Result<Self> {
        gpu.enter()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        handle.reserved.iter_mut().zip(card).for_each(|(to, from)| *to = *from as _);
        let mut offset = [0; 8];
        offset.copy_from_slice(&card[64..]);
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut base = 0;
        // SAFETY: the handle was made by the driver in another process, which keeps the memory until this is closed.
        let code = unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, handle, flags) };
        code.result().map_err(|e| gpu.failed("cuIpcOpenMemHandle", e))?;
        Ok(Self { gpu: gpu.clone(), base, address: base + u64::from_le_bytes(offset) })
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: opened in `open`, and closed once, after the device has done what uses it (`window.rs`).
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.base) };
        }
    }
}

/// Words of the host's memory that kernels read and write.
pub(super) struct HostWords {
    gpu: Arc<Gpu>,
    words: *const AtomicU64,
    len: usize,
    /// Where kernels find them.
    pub(super) address: u64,
}

// SAFETY: the memory is only accessed through atomics, and freed once.
unsafe impl Send for HostWords {}
// SAFETY: as above.
unsafe impl Sync for HostWords {}

impl HostWords {
    /// `len` words, all zero.
    pub(super) fn zeroed(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        gpu.enter()?;
        // SAFETY: the context is current; freed in `drop`.
        let host =
            unsafe { result::malloc_host(8 * len, sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE) };
        let host = host.map_err(|e| gpu.failed("cuMemHostAlloc", e))?;
        let mut words = Self { gpu: gpu.clone(), words: host.cast(), len, address: 0 };
        // SAFETY: an allocation of that size, page-aligned, which nobody else knows of yet.
        unsafe { host.cast::<u64>().write_bytes(0, len) };
        // SAFETY: memory of the call above.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut words.address, host, 0) };
        code.result().map_err(|e| gpu.failed("cuMemHostGetDevicePointer", e))?;
        Ok(words)
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: `len` initialised, aligned words that live as long as `self`; kernels access them with 64-bit accesses at
        // system scope.
        unsafe { std::slice::from_raw_parts(self.words, self.len) }
    }

    /// All of them.
    pub(super) fn read(&self) -> Vec<u64> {
        self.words().iter().map(|word| word.load(Ordering::Acquire)).collect()
    }

    /// Sets one.
    pub(super) fn set(&self, index: usize, value: u64) {
        if let Some(word) = self.words().get(index) {
            word.store(value, Ordering::Release);
        }
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: allocated in `zeroed`, and freed once, after the device has done what uses it (`window.rs`).
            let _ = unsafe { result::free_host(self.words.cast_mut().cast()) };
        }
    }
}
