//! A machine of two small GPUs, and calls that are easier to read than the driver's own.
#![allow(unsafe_code, dead_code, reason = "tests of a C library; no test uses all of this")]

use std::ffi::c_void;
use std::process::{Command, Output};
use std::sync::Once;

use parking_lot::{Mutex, MutexGuard};

use cuda_on_cpu::code::Code;
use cuda_on_cpu::exports::*;

pub(crate) const MEMORY: usize = 32 << 20;

/// Makes GPU 0 current. One test at a time: captures and allocations are the whole process's business.
pub(crate) fn gpu() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    static READY: Once = Once::new();
    let guard = ONE.lock();
    READY.call_once(|| {
        let defaults = [("CUDA_ON_CPU_GPUS", "2".to_owned()), ("CUDA_ON_CPU_MEMORY", MEMORY.to_string())];
        for (name, value) in defaults {
            if std::env::var_os(name).is_none() {
                // SAFETY: tests begin here; no other thread of theirs reads the environment meanwhile.
                unsafe { std::env::set_var(name, value) };
            }
        }
        assert_eq!(cuInit(0), 0);
        for device in 0..give(|count| cuDeviceGetCount(count)) {
            give(|context| cuDevicePrimaryCtxRetain(context, device));
        }
    });
    enter(0);
    guard
}

/// Makes a GPU's context current.
pub(crate) fn enter(device: i32) {
    let context = give(|context| cuDevicePrimaryCtxRetain(context, device));
    assert_eq!(cuCtxSetCurrent(context), 0);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(device), 0);
}

/// What a call gives that has to go well.
#[track_caller]
pub(crate) fn give<T: Default>(call: impl FnOnce(Option<&mut T>) -> Code) -> T {
    let mut value = T::default();
    assert_eq!(call(Some(&mut value)), 0);
    value
}

/// The error of a call that gives something.
pub(crate) fn refused<T: Default>(call: impl FnOnce(Option<&mut T>) -> Code) -> Code {
    call(Some(&mut T::default()))
}

pub(crate) fn allocate(bytes: usize) -> usize {
    give(|address| cuMemAlloc_v2(address, bytes))
}

pub(crate) fn stream() -> usize {
    give(|stream| cuStreamCreate(stream, 1))
}

pub(crate) fn event() -> usize {
    give(|event| cuEventCreate(event, 0))
}

pub(crate) fn upload(to: usize, bytes: &[u8]) {
    // SAFETY: a slice's memory.
    assert_eq!(unsafe { cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len()) }, 0);
}

pub(crate) fn upload_async(to: usize, bytes: &[u8], stream: usize) -> Code {
    // SAFETY: a slice's memory, which the call reads.
    unsafe { cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), stream) }
}

pub(crate) fn copy_async(to: usize, from: usize, bytes: usize, stream: usize) -> Code {
    // SAFETY: GPUs' memory is checked by the call.
    unsafe { cuMemcpyDtoDAsync_v2(to, from, bytes, stream) }
}

pub(crate) fn download<const N: usize>(from: usize) -> [u8; N] {
    let mut bytes = [0; N];
    // SAFETY: an array's memory.
    assert_eq!(unsafe { cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, N) }, 0);
    bytes
}

/// Something that a stream waits for until it is opened.
#[derive(Debug)]
pub(crate) struct Gate(&'static (Mutex<bool>, std::sync::Condvar));

impl Gate {
    /// Puts it on a stream.
    pub(crate) fn on(stream: usize) -> Self {
        unsafe extern "C" fn wait(gate: *mut c_void) {
            // SAFETY: a gate is never freed.
            let (is_open, changed) = unsafe { &*gate.cast::<(Mutex<bool>, std::sync::Condvar)>() };
            let _open = changed.wait_while(is_open.lock().unwrap(), |is_open| !*is_open).unwrap();
        }
        let gate: &'static (Mutex<bool>, std::sync::Condvar) = Box::leak(Box::default());
        let argument = std::ptr::from_ref(gate).cast_mut().cast();
        // SAFETY: as above.
        assert_eq!(unsafe { cuLaunchHostFunc(stream, Some(wait), argument) }, 0);
        Self(gate)
    }

    pub(crate) fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // a test that has failed must not leave a stream behind that others wait for
        self.open();
    }
}

/// Runs an ignored test of this program in a process of its own.
pub(crate) fn process(test: &str, environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"]);
    command.env("CHILD", "1").envs(environment.iter().copied()).output().unwrap()
}

/// Whether this is such a process.
pub(crate) fn is_child() -> bool {
    std::env::var_os("CHILD").is_some()
}
