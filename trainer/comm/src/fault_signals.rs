//! Handles SIGSEGV and SIGBUS that another process sends, and returns which signals this process ignores.
//!
//! Rust's runtime catches both signals, to report a stack overflow. For any other address the runtime's handler restores the
//! default action and returns. The faulting instruction then runs again and ends the process. A signal that `kill` sends has no
//! faulting instruction, so the process would continue. The handler here ends the process in this case, and passes real faults
//! to the runtime's handler.

use std::io;
use std::mem::{MaybeUninit, transmute};
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{SA_ONSTACK, SA_SIGINFO, SIG_DFL, SIG_IGN, SIGBUS, SIGSEGV, c_int, c_void, sigaction, siginfo_t};

/// A handler with `SA_SIGINFO`.
type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

/// The handlers of Rust's runtime for SIGSEGV and SIGBUS. 0: none.
static RUNTIME_HANDLERS: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// Installs the handlers: a SIGSEGV or SIGBUS that another process sends then ends this process, as a fault does. Call this
/// function once, at the start.
///
/// # Errors
/// The kernel refuses a handler.
pub fn install_handlers() -> io::Result<()> {
    for (signal, runtime) in [SIGSEGV, SIGBUS].into_iter().zip(&RUNTIME_HANDLERS) {
        let mut action = MaybeUninit::<sigaction>::zeroed();
        // SAFETY: both pointers are null or point to a `sigaction`. Zeros are a valid one: the default action, no flags.
        let old = unsafe {
            if sigaction(signal, std::ptr::null(), action.as_mut_ptr()) != 0 {
                return Err(io::Error::last_os_error());
            }
            action.assume_init()
        };
        if old.sa_sigaction == SIG_DFL || old.sa_flags & SA_SIGINFO == 0 {
            // The default action ends the process already. A handler without `SA_SIGINFO` is not the runtime's.
            continue;
        }
        runtime.store(old.sa_sigaction, Ordering::Relaxed);
        let handler: Handler = on_signal;
        // Keeps the runtime's flags and its alternate stack: a thread that has overflowed its stack has no other stack.
        let new = sigaction { sa_sigaction: handler as usize, sa_flags: old.sa_flags | SA_SIGINFO | SA_ONSTACK, ..old };
        // SAFETY: `new` is complete, and `on_signal` calls only functions that are safe in a handler.
        if unsafe { sigaction(signal, &new, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Returns whether this process ignores `signal`. A process inherits ignored signals from its parent.
pub fn is_ignored(signal: i32) -> bool {
    let mut action = MaybeUninit::<sigaction>::zeroed();
    // SAFETY: as above. Without a new action the call only reads. An unknown signal is an error, and then the zeros stay.
    let action = unsafe {
        sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    action.sa_sigaction == SIG_IGN
}

extern "C" fn on_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with `SA_SIGINFO`.
    let sent = unsafe { (*info).si_code } <= 0;
    let runtime = RUNTIME_HANDLERS[usize::from(signal == SIGBUS)].load(Ordering::Relaxed);
    if sent || runtime == 0 {
        // SAFETY: both functions are safe in a handler. The signal is blocked here, so the raised one ends the process when this
        // function returns.
        unsafe {
            libc::signal(signal, SIG_DFL);
            libc::raise(signal);
        }
        return;
    }
    // SAFETY: `install_handlers` stored the address of a handler with `SA_SIGINFO`, whose type is `Handler`.
    let runtime: Handler = unsafe { transmute(runtime) };
    runtime(signal, info, context);
}
