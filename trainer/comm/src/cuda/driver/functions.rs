//! The entry points of `libcuda` that this crate uses, with the symbol names of the current `cuda.h`.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};

use libloading::Library;

use super::{Address, DriverError, DriverResult, IpcHandle, innermost};

/// Declares the functions, and the code that looks them up.
macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// Entry points of `libcuda`, with the types of `cuda.h`.
        #[derive(Debug, Clone, Copy)]
        #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "memory windows and streams need the feature `cuda`"))]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            /// Looks all functions up in `library`.
            ///
            /// # Errors
            /// The first function that is missing, and the loader's message.
            pub(super) fn of(library: &Library) -> Result<Self, String> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the symbol's type is that of its declaration in cuda.h.
                        let symbol = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                        *symbol.map_err(|error| format!("it has no {}: {}", $symbol, innermost(&error)))?
                    },)*
                })
            }
        }
    };
}

functions! {
    init = "cuInit" (c_uint);
    error_name = "cuGetErrorName" (c_int, *mut *const c_char);
    driver_version = "cuDriverGetVersion" (*mut c_int);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_memory = "cuDeviceTotalMem_v2" (*mut usize, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    device_uuid = "cuDeviceGetUuid_v2" (*mut [u8; 16], c_int);
    device_can_access_peer = "cuDeviceCanAccessPeer" (*mut c_int, c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int);
    release = "cuDevicePrimaryCtxRelease_v2" (c_int);
    set_current = "cuCtxSetCurrent" (*mut c_void);
    synchronize = "cuCtxSynchronize" ();
    enable_peer = "cuCtxEnablePeerAccess" (*mut c_void, c_uint);
    disable_peer = "cuCtxDisablePeerAccess" (*mut c_void);
    allocate = "cuMemAlloc_v2" (*mut Address, usize);
    free = "cuMemFree_v2" (Address);
    to_host = "cuMemcpyDtoH_v2" (*mut c_void, Address, usize);
    to_device = "cuMemcpyHtoD_v2" (Address, *const c_void, usize);
    load_module = "cuModuleLoadData" (*mut *mut c_void, *const c_void);
    unload_module = "cuModuleUnload" (*mut c_void);
    function = "cuModuleGetFunction" (*mut *mut c_void, *mut c_void, *const c_char);
    launch = "cuLaunchKernel" (
        *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void, *mut *mut c_void
    );
    memset = "cuMemsetD8_v2" (Address, c_uchar, usize);
    address_range = "cuMemGetAddressRange_v2" (*mut Address, *mut usize, Address);
    host_allocate = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost" (*mut c_void);
    host_address = "cuMemHostGetDevicePointer_v2" (*mut Address, *mut c_void, c_uint);
    stream_create = "cuStreamCreate" (*mut *mut c_void, c_uint);
    stream_destroy = "cuStreamDestroy_v2" (*mut c_void);
    stream_wait_event = "cuStreamWaitEvent" (*mut c_void, *mut c_void, c_uint);
    event_create = "cuEventCreate" (*mut *mut c_void, c_uint);
    event_destroy = "cuEventDestroy_v2" (*mut c_void);
    event_record = "cuEventRecord" (*mut c_void, *mut c_void);
    stream_query = "cuStreamQuery" (*mut c_void);
    stream_wait_value = "cuStreamWaitValue64_v2" (*mut c_void, Address, u64, c_uint);
    stream_write_value = "cuStreamWriteValue64_v2" (*mut c_void, Address, u64, c_uint);
    ipc_get = "cuIpcGetMemHandle" (*mut IpcHandleByValue, Address);
    ipc_open = "cuIpcOpenMemHandle_v2" (*mut Address, IpcHandleByValue, c_uint);
    ipc_close = "cuIpcCloseMemHandle" (Address);
}

/// `CUipcMemHandle`, which C passes by value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct IpcHandleByValue {
    pub(super) reserved: IpcHandle,
}

/// Entries of `CUdevice_attribute`.
mod attribute {
    pub(super) const MULTIPROCESSORS: i32 = 16;
    pub(super) const COMPUTE_MODE: i32 = 20;
    pub(super) const KERNEL_EXEC_TIMEOUT: i32 = 17;
    pub(super) const COMPUTE_MAJOR: i32 = 75;
    pub(super) const COMPUTE_MINOR: i32 = 76;
    #[cfg(feature = "cuda")]
    pub(super) const CAN_USE_64_BIT_STREAM_MEM_OPS: i32 = 122;
}

/// Calls whose results are plain values. `device` is a `CUdevice` that [`handle`](Functions::handle) returned.
impl Functions {
    /// Turns the result code of `call` into an error with the code's name.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> DriverResult {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: if the code is known, the call writes a pointer to a string that is never freed.
        let known = unsafe { (self.error_name)(code, &mut name) } == 0 && !name.is_null();
        let name = match known {
            // SAFETY: as above: a C string that lives as long as the process.
            true => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            false => "unknown error".to_owned(),
        };
        Err(DriverError { call, code, name })
    }

    /// Returns the `int` that `write` writes.
    fn number(&self, call: &'static str, write: impl FnOnce(*mut c_int) -> c_int) -> DriverResult<i32> {
        let mut number = 0;
        self.check(call, write(&mut number))?;
        Ok(number)
    }

    /// Returns the newest CUDA version that the driver supports, `1000 * major + 10 * minor`.
    pub(super) fn version(&self) -> DriverResult<i32> {
        // SAFETY: writes one int.
        self.number("cuDriverGetVersion", |to| unsafe { (self.driver_version)(to) })
    }

    /// Returns the number of GPUs that this process sees.
    pub(super) fn count(&self) -> DriverResult<usize> {
        // SAFETY: writes one int.
        let count = self.number("cuDeviceGetCount", |to| unsafe { (self.device_count)(to) })?;
        Ok(count.max(0) as usize)
    }

    /// Returns the `CUdevice` of the GPU `index`.
    pub(super) fn handle(&self, index: usize) -> DriverResult<c_int> {
        // SAFETY: writes one int. The driver refuses an index that is out of range.
        self.number("cuDeviceGet", |to| unsafe { (self.device)(to, index as c_int) })
    }

    /// Returns the GPU's name.
    pub(super) fn name(&self, device: c_int) -> DriverResult<String> {
        let mut name = [0u8; 256];
        // SAFETY: the call writes at most 255 bytes and a zero into the 256 bytes.
        let code = unsafe { (self.device_name)(name.as_mut_ptr().cast(), 255, device) };
        self.check("cuDeviceGetName", code)?;
        Ok(CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned())
    }

    /// Returns the bytes of the GPU's memory.
    pub(super) fn memory_bytes(&self, device: c_int) -> DriverResult<u64> {
        let mut memory = 0usize;
        // SAFETY: writes one size_t.
        self.check("cuDeviceTotalMem", unsafe { (self.device_memory)(&mut memory, device) })?;
        Ok(memory as u64)
    }

    /// Returns the GPU's UUID.
    pub(super) fn uuid(&self, device: c_int) -> DriverResult<[u8; 16]> {
        let mut uuid = [0u8; 16];
        // SAFETY: writes 16 bytes.
        self.check("cuDeviceGetUuid", unsafe { (self.device_uuid)(&mut uuid, device) })?;
        Ok(uuid)
    }

    fn attribute(&self, attribute: c_int, device: c_int) -> DriverResult<u32> {
        // SAFETY: writes one int.
        let code = |to| unsafe { (self.device_attribute)(to, attribute, device) };
        self.number("cuDeviceGetAttribute", code).map(|value| value as u32)
    }

    /// Returns the compute capability, major and minor.
    pub(super) fn compute_capability(&self, device: c_int) -> DriverResult<[u32; 2]> {
        let [major, minor] = [attribute::COMPUTE_MAJOR, attribute::COMPUTE_MINOR];
        Ok([self.attribute(major, device)?, self.attribute(minor, device)?])
    }

    /// Returns the number of streaming multiprocessors.
    pub(super) fn multiprocessors(&self, device: c_int) -> DriverResult<u32> {
        self.attribute(attribute::MULTIPROCESSORS, device)
    }

    /// Returns whether the GPU's compute mode is `CU_COMPUTEMODE_EXCLUSIVE_PROCESS`.
    pub(super) fn is_exclusive(&self, device: c_int) -> DriverResult<bool> {
        const EXCLUSIVE_PROCESS: u32 = 3;
        Ok(self.attribute(attribute::COMPUTE_MODE, device)? == EXCLUSIVE_PROCESS)
    }

    /// Returns whether the driver ends kernels that run for long, as it does on GPUs with a display.
    pub(super) fn limits_kernels(&self, device: c_int) -> DriverResult<bool> {
        Ok(self.attribute(attribute::KERNEL_EXEC_TIMEOUT, device)? != 0)
    }

    /// Returns whether streams can wait for words of 64 bits, and write them.
    #[cfg(feature = "cuda")]
    pub(super) fn supports_stream_mem_ops(&self, device: c_int) -> DriverResult<bool> {
        Ok(self.attribute(attribute::CAN_USE_64_BIT_STREAM_MEM_OPS, device)? != 0)
    }

    /// Returns whether the driver reports access from `device` to the memory of `peer`.
    pub(super) fn can_access_peer(&self, device: c_int, peer: c_int) -> DriverResult<bool> {
        // SAFETY: writes one int.
        let code = |to| unsafe { (self.device_can_access_peer)(to, device, peer) };
        Ok(self.number("cuDeviceCanAccessPeer", code)? != 0)
    }
}
