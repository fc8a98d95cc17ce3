//! The functions of `libcuda`, with the types of `cuda.h`. Handles are numbers; output arguments are optional references.
#![allow(non_snake_case, reason = "the names of cuda.h")]

mod context;
mod copy;
mod device;
mod event;
mod graph;
mod kernel;
mod memory;
mod stream;
mod tools;

pub use self::{context::*, copy::*, device::*, event::*, graph::*, kernel::*, memory::*, stream::*, tools::*};
pub use crate::ipc::IpcHandle;
pub use crate::op::HostFunction;

use crate::cu_result::{DriverResult, INVALID_VALUE};

/// Defines functions that C calls. Bodies return a `Result`; [`crate::log::call`] does what every call needs.
macro_rules! exports {
    () => {};
    ($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block $($rest:tt)*) => {
        $(#[$doc])*
        #[doc = concat!("`", stringify!($name), "` of `cuda.h`.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) -> $crate::cu_result::CuResult {
            let arguments = [$((stringify!($argument), $crate::log::Argument::number(&$argument))),*];
            $crate::log::call(stringify!($name), &arguments, || $body)
        }
        exports! { $($rest)* }
    };
    ($(#[$doc:meta])* unsafe fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block $($rest:tt)*) => {
        $(#[$doc])*
        #[doc = concat!("`", stringify!($name), "` of `cuda.h`.")]
        ///
        /// # Safety
        /// The pointers satisfy the documentation of `cuda.h`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $crate::cu_result::CuResult {
            let arguments = [$((stringify!($argument), $crate::log::Argument::number(&$argument))),*];
            $crate::log::call(stringify!($name), &arguments, || $body)
        }
        exports! { $($rest)* }
    };
}
use exports;

/// Writes an output argument.
fn write_out<T: std::fmt::Debug>(to: Option<&mut T>, value: T) -> DriverResult {
    let to = to.ok_or(INVALID_VALUE)?;
    crate::log::note(|| format!("-> {value:x?}"));
    *to = value;
    Ok(())
}

/// Writes a C string into `room` bytes at `to`, truncated to fit.
///
/// # Safety
/// `to` has room for `room` bytes.
unsafe fn write_text(to: *mut std::ffi::c_char, room: i32, text: &str) -> DriverResult {
    let room = usize::try_from(room).map_err(|_| INVALID_VALUE)?;
    if to.is_null() || room == 0 {
        return Err(INVALID_VALUE);
    }
    let bytes = text.len().min(room - 1);
    // SAFETY: required of the caller.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), bytes);
        to.add(bytes).write(0);
    }
    Ok(())
}
