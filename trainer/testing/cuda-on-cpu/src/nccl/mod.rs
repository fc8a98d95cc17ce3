//! A stand-in for NCCL: ranks on one machine, each with a GPU of the stand-in driver, that reduce through shared memory.
//!
//! As with NVIDIA's library, a call is enqueued on a stream and returns. If a rank never joins a collective, the streams of
//! the other ranks wait until their communicators are aborted. `NCCL_HOSTID` sets the host identity of a process;
//! `NCCL_DEBUG` prints refusals.

mod collective;
mod comm;
mod data_type;
mod exports;
mod group;
mod segment;

pub(crate) use self::collective::Collective;
pub use self::exports::*;
pub use self::segment::UniqueId;

use std::ffi::{CStr, CString};

use parking_lot::Mutex;

use crate::cu_result::{CuResult, DriverResult, UNKNOWN};
use crate::log;

/// `ncclUnhandledCudaError`.
const UNHANDLED_CUDA: CuResult = 1;
/// `ncclSystemError`.
const SYSTEM: CuResult = 2;
/// `ncclInternalError`.
const INTERNAL: CuResult = 3;
/// `ncclInvalidArgument`.
const INVALID_ARGUMENT: CuResult = 4;
/// `ncclInvalidUsage`.
const INVALID_USAGE: CuResult = 5;
/// `ncclRemoteError`.
const REMOTE: CuResult = 6;

/// Returns NCCL's description of a code.
fn describe(code: CuResult) -> &'static CStr {
    match code {
        0 => c"no error",
        UNHANDLED_CUDA => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        SYSTEM => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        INTERNAL => c"internal error - please report this issue to the NCCL developers",
        INVALID_ARGUMENT => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        INVALID_USAGE => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        REMOTE => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    }
}

/// The last error of this process.
static LAST: Mutex<&'static CStr> = Mutex::new(c"");

/// Records an error for `ncclGetLastError`; returns its code.
fn refuse(code: CuResult, text: &str) -> CuResult {
    log::note(|| format!("({text})"));
    if std::env::var_os("NCCL_DEBUG").is_some_and(|level| !level.is_empty() && level != "VERSION") {
        println!("cuda-on-cpu:{} NCCL WARN {text}", std::process::id());
    }
    // Never freed, because C may still read the previous text. Errors are rare.
    *LAST.lock() = Box::leak(CString::new(text).unwrap_or_default().into_boxed_c_str());
    code
}

/// Converts an error of the driver.
fn driver_error(code: CuResult) -> CuResult {
    let name = crate::cu_result::describe(code).map_or("?", |(name, _)| name.to_str().unwrap_or_default());
    refuse(UNHANDLED_CUDA, &format!("Cuda failure {code} '{name}'"))
}

/// Runs a function as [`log::call`] does, with NCCL's code for a panic.
fn call(name: &str, arguments: &[(&str, u64)], body: impl FnOnce() -> DriverResult) -> CuResult {
    match log::call(name, arguments, body) {
        UNKNOWN => INTERNAL,
        code => code,
    }
}
