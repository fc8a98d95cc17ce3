//! A stand-in for NCCL: ranks on one machine, each with a GPU of the stand-in for the driver, that add up through a file in
//! memory.
//!
//! As with NVIDIA's library a call is enqueued on a stream and returns. A rank that never comes makes the others' streams
//! wait until their own communicators are aborted. `NCCL_HOSTID` says which host a process takes itself to be on, and
//! `NCCL_DEBUG` makes refusals visible.

mod collective;
mod comm;
mod exports;
mod group;
mod meeting;
mod number;

pub(crate) use self::collective::Call;
pub use self::exports::*;
pub use self::meeting::UniqueId;

use std::ffi::{CStr, CString};
use std::sync::Mutex;

use crate::code::{Answer, Code, UNKNOWN};
use crate::log::{self, lock};

/// `ncclUnhandledCudaError`.
const UNHANDLED_CUDA: Code = 1;
/// `ncclSystemError`.
const SYSTEM: Code = 2;
/// `ncclInternalError`.
const INTERNAL: Code = 3;
/// `ncclInvalidArgument`.
const INVALID_ARGUMENT: Code = 4;
/// `ncclInvalidUsage`.
const INVALID_USAGE: Code = 5;
/// `ncclRemoteError`.
const REMOTE: Code = 6;

/// What a code means, in NCCL's words.
fn describe(code: Code) -> &'static CStr {
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

/// The last refusal of this process.
static LAST: Mutex<&'static CStr> = Mutex::new(c"");

/// An error, which `ncclGetLastError` tells from now on.
fn refuse(code: Code, text: &str) -> Code {
    log::note(|| format!("({text})"));
    if std::env::var_os("NCCL_DEBUG").is_some_and(|level| !level.is_empty() && level != "VERSION") {
        println!("cuda-on-cpu:{} NCCL WARN {text}", std::process::id());
    }
    // never freed, as C may still read the one before; errors are few
    *lock(&LAST) = Box::leak(CString::new(text).unwrap_or_default().into_boxed_c_str());
    code
}

/// An error of the driver's.
fn of_driver(code: Code) -> Code {
    let name = crate::code::describe(code).map_or("?", |(name, _)| name.to_str().unwrap_or_default());
    refuse(UNHANDLED_CUDA, &format!("Cuda failure {code} '{name}'"))
}

/// As [`log::call`], with NCCL's code for a panic.
fn call(name: &str, arguments: &[(&str, u64)], body: impl FnOnce() -> Answer) -> Code {
    match log::call(name, arguments, body) {
        UNKNOWN => INTERNAL,
        code => code,
    }
}
