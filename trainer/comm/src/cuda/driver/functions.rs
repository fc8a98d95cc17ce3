//! The entry points of `libcuda` that are used, by the names that its header gives them today.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use super::{Address, IpcHandle, innermost};

/// Declares the functions that are used, and how they are looked up.
macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// Entry points of `libcuda`, with the types of `cuda.h`.
        #[derive(Debug, Clone, Copy)]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
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
    can_access_peer = "cuDeviceCanAccessPeer" (*mut c_int, c_int, c_int);
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
