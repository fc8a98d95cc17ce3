//! The wrapper around every call, and its log: `CUDA_ON_CPU_LOG` names a file that receives one line per call.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;

use crate::cu_result::{CuResult, DriverResult, UNKNOWN};

static LOG: LazyLock<Option<File>> = LazyLock::new(|| {
    let path = std::env::var_os("CUDA_ON_CPU_LOG")?;
    let file = OpenOptions::new().create(true).append(true).open(&path);
    file.inspect_err(|error| eprintln!("cuda-on-cpu: {}: {error}", path.display())).ok()
});

thread_local! {
    /// Text that the current call adds to its line.
    static NOTES: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Adds text to the line of the current call, such as an address that it returns.
pub(crate) fn note(text: impl FnOnce() -> String) {
    if LOG.is_some() {
        // A thread that is ending has no notes left. Its calls are logged without them.
        let _ = NOTES.try_with(|notes| write!(notes.borrow_mut(), " {}", text()));
    }
}

/// Runs a driver function: catches panics, which must not unwind into C, and writes a line to the log.
pub(crate) fn call(name: &str, arguments: &[(&str, u64)], body: impl FnOnce() -> DriverResult) -> CuResult {
    let code = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code,
        Err(_) => UNKNOWN,
    };
    if let Some(mut file) = LOG.as_ref() {
        let mut line = format!("{} {:?} {name}(", std::process::id(), std::thread::current().id());
        for (index, (name, value)) in arguments.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            // Large numbers are addresses.
            let _ = match value {
                0..0x1_0000_0000 => write!(line, "{comma}{name} {value}"),
                _ => write!(line, "{comma}{name} {value:#x}"),
            };
        }
        let notes = NOTES.try_with(|notes| std::mem::take(&mut *notes.borrow_mut())).unwrap_or_default();
        let _ = writeln!(line, "){notes} = {code}");
        // One write per line, so that lines of several processes do not mix.
        let _ = file.write_all(line.as_bytes());
    }
    code
}

/// Arguments that can be logged.
pub(crate) trait Argument {
    /// Returns the value, or the address of a pointer.
    fn number(&self) -> u64;
}

macro_rules! numbers {
    ($($type:ty)*) => { $(impl Argument for $type { fn number(&self) -> u64 { *self as u64 } })* };
}
numbers!(u8 u16 u32 i32 u64 usize);

impl Argument for Option<crate::op::HostFunction> {
    fn number(&self) -> u64 {
        self.map_or(0, |function| function as usize as u64)
    }
}

impl<T> Argument for *const T {
    fn number(&self) -> u64 {
        *self as u64
    }
}

impl<T> Argument for *mut T {
    fn number(&self) -> u64 {
        *self as u64
    }
}

impl<T> Argument for Option<&mut T> {
    fn number(&self) -> u64 {
        self.as_ref().map_or(0, |at| std::ptr::from_ref::<T>(at) as u64)
    }
}

impl<T> Argument for Option<&T> {
    fn number(&self) -> u64 {
        self.map_or(0, |at| std::ptr::from_ref(at) as u64)
    }
}
