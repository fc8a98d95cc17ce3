//! The driver's error codes, with the names and numbers of `cuda.h`.

use std::ffi::{CStr, c_int};

/// Return code of a driver function; 0 is success.
pub type CuResult = c_int;

/// Result of the inner functions.
pub type DriverResult<T = ()> = Result<T, CuResult>;

macro_rules! codes {
    ($($name:ident = $code:literal $text:literal;)*) => {
        $(
            #[doc = $text]
            pub const $name: CuResult = $code;
        )*

        /// Returns the name and the description of a code; `None` for an unknown code.
        pub fn describe(code: CuResult) -> Option<(&'static CStr, &'static CStr)> {
            let (name, text) = match code {
                0 => ("CUDA_SUCCESS\0", "no error\0"),
                $($code => (concat!("CUDA_ERROR_", stringify!($name), "\0"), concat!($text, "\0")),)*
                _ => return None,
            };
            let c = |text: &'static str| CStr::from_bytes_with_nul(text.as_bytes()).unwrap_or_default();
            Some((c(name), c(text)))
        }
    };
}

codes! {
    INVALID_VALUE = 1 "invalid argument";
    OUT_OF_MEMORY = 2 "out of memory";
    NOT_INITIALIZED = 3 "initialization error";
    DEINITIALIZED = 4 "driver shutting down";
    NO_DEVICE = 100 "no CUDA-capable device is detected";
    INVALID_DEVICE = 101 "invalid device ordinal";
    INVALID_IMAGE = 200 "device kernel image is invalid";
    INVALID_CONTEXT = 201 "invalid device context";
    NO_BINARY_FOR_GPU = 209 "no kernel image is available for execution on the device";
    PEER_ACCESS_UNSUPPORTED = 217 "peer access is not supported between these two devices";
    INVALID_PTX = 218 "a PTX JIT compilation failed";
    UNSUPPORTED_PTX_VERSION = 222 "the provided PTX was compiled with an unsupported toolchain.";
    OPERATING_SYSTEM = 304 "OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400 "invalid resource handle";
    ILLEGAL_STATE = 401 "the operation cannot be performed in the present state";
    NOT_FOUND = 500 "named symbol not found";
    NOT_READY = 600 "device not ready";
    ILLEGAL_ADDRESS = 700 "an illegal memory access was encountered";
    PEER_ACCESS_ALREADY_ENABLED = 704 "peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705 "peer access has not been enabled";
    CONTEXT_IS_DESTROYED = 709 "context is destroyed";
    LAUNCH_FAILED = 719 "unspecified launch failure";
    NOT_SUPPORTED = 801 "operation not supported";
    SYSTEM_NOT_READY = 802 "system not yet initialized";
    SYSTEM_DRIVER_MISMATCH = 803 "system has unsupported display driver / cuda driver combination";
    STREAM_CAPTURE_UNSUPPORTED = 900 "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901 "operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE = 902 "operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED = 903 "capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED = 904 "capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION = 905 "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906 "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907 "operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD = 908 "attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN = 999 "unknown error";
}
