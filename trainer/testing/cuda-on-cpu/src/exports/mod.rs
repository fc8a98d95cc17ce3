//! The functions of `libcuda`, with the types of `cuda.h`: handles are numbers, what a function writes is a reference that C
//! may leave out.
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

use crate::code::{Answer, INVALID_VALUE};

/// Defines functions that C calls. Bodies answer with a `Result`; what else a call needs is in [`crate::log::call`].
macro_rules! exports {
    () => {};
    ($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block $($rest:tt)*) => {
        $(#[$doc])*
        #[doc = concat!("`", stringify!($name), "` of `cuda.h`.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) -> $crate::code::Code {
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
        /// What the pointers point to has to be there, as `cuda.h` has it.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $crate::code::Code {
            let arguments = [$((stringify!($argument), $crate::log::Argument::number(&$argument))),*];
            $crate::log::call(stringify!($name), &arguments, || $body)
        }
        exports! { $($rest)* }
    };
}
use exports;

/// Writes what a function gives.
fn put<T: std::fmt::Debug>(to: Option<&mut T>, value: T) -> Answer {
    let to = to.ok_or(INVALID_VALUE)?;
    crate::log::note(|| format!("-> {value:x?}"));
    *to = value;
    Ok(())
}

/// Writes a C string into `room` bytes at `to`, cut to them.
///
/// # Safety
/// There are so many.
unsafe fn put_text(to: *mut std::ffi::c_char, room: i32, text: &str) -> Answer {
    let room = usize::try_from(room).map_err(|_| INVALID_VALUE)?;
    if to.is_null() || room == 0 {
        return Err(INVALID_VALUE);
    }
    let bytes = text.len().min(room - 1);
    // SAFETY: by the caller.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), bytes);
        to.add(bytes).write(0);
    }
    Ok(())
}
