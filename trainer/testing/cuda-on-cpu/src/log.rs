//! `CUDA_ON_CPU_LOG`: a line for each call. And what every call goes through, whether it is logged or not.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::code::{Answer, Code, UNKNOWN};

static LOG: LazyLock<Option<File>> = LazyLock::new(|| {
    let path = std::env::var_os("CUDA_ON_CPU_LOG")?;
    let file = OpenOptions::new().create(true).append(true).open(&path);
    file.inspect_err(|error| eprintln!("cuda-on-cpu: {}: {error}", path.display())).ok()
});

thread_local! {
    /// What the call that is being made adds to its line.
    static NOTES: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Adds to the line of the call that is being made: an address it has given out, say.
pub(crate) fn note(text: impl FnOnce() -> String) {
    if LOG.is_some() {
        // a thread that is ending has no notes left; its calls are logged without
        let _ = NOTES.try_with(|notes| write!(notes.borrow_mut(), " {}", text()));
    }
}

/// Runs a function of the driver: no panic gets out to C, and a line gets into the log.
pub(crate) fn call(name: &str, arguments: &[(&str, u64)], body: impl FnOnce() -> Answer) -> Code {
    let code = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code,
        Err(_) => UNKNOWN,
    };
    if let Some(mut file) = LOG.as_ref() {
        let mut line = format!("{} {:?} {name}(", std::process::id(), std::thread::current().id());
        for (index, (name, value)) in arguments.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            // what is large is an address
            let _ = match value {
                0..0x1_0000_0000 => write!(line, "{comma}{name} {value}"),
                _ => write!(line, "{comma}{name} {value:#x}"),
            };
        }
        let notes = NOTES.try_with(|notes| std::mem::take(&mut *notes.borrow_mut())).unwrap_or_default();
        let _ = writeln!(line, "){notes} = {code}");
        // one write: lines of several processes do not mix
        let _ = file.write_all(line.as_bytes());
    }
    code
}

/// Arguments as they are logged.
pub(crate) trait Argument {
    /// Its value, or its address.
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

/// A panic that is caught at the border must not make every later call panic too.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
