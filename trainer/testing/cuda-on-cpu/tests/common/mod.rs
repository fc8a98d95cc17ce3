//! A machine with two small GPUs, and helpers around the driver's functions.
#![allow(unsafe_code, dead_code, reason = "tests of a C library; no test uses all helpers")]

use std::ffi::c_void;
use std::process::{Command, Output};
use std::sync::Once;
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::{Condvar, Mutex, MutexGuard};

use cuda_on_cpu::cu_result::CuResult;
use cuda_on_cpu::exports::*;

pub(crate) const MEMORY: usize = 32 << 20;

/// Makes GPU 0 current and locks the driver for one test, because captures and allocations concern the whole process.
pub(crate) fn gpu() -> MutexGuard<'static, ()> {
    static DRIVER: Mutex<()> = Mutex::new(());
    static READY: Once = Once::new();
    let guard = DRIVER.lock();
    READY.call_once(|| {
        let defaults = [("CUDA_ON_CPU_GPUS", "2".to_owned()), ("CUDA_ON_CPU_MEMORY", MEMORY.to_string())];
        for (name, value) in defaults {
            if std::env::var_os(name).is_none() {
                // SAFETY: every test begins here, under the lock, so no other thread reads the environment meanwhile.
                unsafe { std::env::set_var(name, value) };
            }
        }
        assert_eq!(cuInit(0), 0);
        for device in 0..get(|count| cuDeviceGetCount(count)) {
            get(|context| cuDevicePrimaryCtxRetain(context, device));
        }
    });
    set_current(0);
    guard
}

/// Makes a GPU's context current.
pub(crate) fn set_current(device: i32) {
    let context = get(|context| cuDevicePrimaryCtxRetain(context, device));
    assert_eq!(cuCtxSetCurrent(context), 0);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(device), 0);
}

/// Returns the output argument of a call that must succeed.
#[track_caller]
pub(crate) fn get<T: Default>(call: impl FnOnce(Option<&mut T>) -> CuResult) -> T {
    let mut value = T::default();
    assert_eq!(call(Some(&mut value)), 0);
    value
}

/// Returns the error code of a call with an output argument.
pub(crate) fn error_of<T: Default>(call: impl FnOnce(Option<&mut T>) -> CuResult) -> CuResult {
    call(Some(&mut T::default()))
}

pub(crate) fn allocate(bytes: usize) -> usize {
    get(|address| cuMemAlloc_v2(address, bytes))
}

pub(crate) fn stream() -> usize {
    get(|stream| cuStreamCreate(stream, 1))
}

pub(crate) fn event() -> usize {
    get(|event| cuEventCreate(event, 0))
}

pub(crate) fn upload(to: usize, bytes: &[u8]) {
    // SAFETY: the memory of a slice.
    assert_eq!(unsafe { cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len()) }, 0);
}

pub(crate) fn upload_async(to: usize, bytes: &[u8], stream: usize) -> CuResult {
    // SAFETY: the memory of a slice, which the call reads before it returns.
    unsafe { cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), stream) }
}

pub(crate) fn copy_async(to: usize, from: usize, bytes: usize, stream: usize) -> CuResult {
    // SAFETY: the call checks memory of GPUs.
    unsafe { cuMemcpyDtoDAsync_v2(to, from, bytes, stream) }
}

pub(crate) fn download<const N: usize>(from: usize) -> [u8; N] {
    let mut bytes = [0; N];
    // SAFETY: the memory of an array.
    assert_eq!(unsafe { cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, N) }, 0);
    bytes
}

/// A host function in a stream that blocks the stream until [`Gate::open`].
#[derive(Debug)]
pub(crate) struct Gate(&'static (Mutex<bool>, Condvar));

impl Gate {
    /// Submits a gate to a stream.
    pub(crate) fn on(stream: usize) -> Self {
        unsafe extern "C" fn wait(gate: *mut c_void) {
            // SAFETY: a gate is never freed.
            let (is_open, changed) = unsafe { &*gate.cast::<(Mutex<bool>, Condvar)>() };
            changed.wait_while(&mut is_open.lock(), |is_open| !*is_open);
        }
        let gate: &'static (Mutex<bool>, Condvar) = Box::leak(Box::default());
        let argument = std::ptr::from_ref(gate).cast_mut().cast();
        // SAFETY: as above.
        assert_eq!(unsafe { cuLaunchHostFunc(stream, Some(wait), argument) }, 0);
        Self(gate)
    }

    pub(crate) fn open(&self) {
        *self.0.0.lock() = true;
        self.0.1.notify_all();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // A failed test must not leave a blocked stream behind, which other tests would wait for.
        self.open();
    }
}

/// Submits a host function to a stream; the receiver gets a message when the stream executes the function.
pub(crate) fn signal(stream: usize) -> Receiver<()> {
    unsafe extern "C" fn send(sender: *mut c_void) {
        // SAFETY: the sender below, which this function owns from here on.
        let sender = unsafe { Box::from_raw(sender.cast::<Sender<()>>()) };
        let _ = sender.send(());
    }
    let (sender, reached) = channel();
    let sender = Box::into_raw(Box::new(sender));
    // SAFETY: `send` runs once.
    assert_eq!(unsafe { cuLaunchHostFunc(stream, Some(send), sender.cast()) }, 0);
    reached
}

/// Runs an ignored test of this program in a separate process.
pub(crate) fn process(test: &str, environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"]);
    command.env("CHILD", "1").envs(environment.iter().copied()).output().unwrap()
}

/// Asserts that a process of this program has run one test, which passed. Without a test of the name it would end with 0 too.
#[track_caller]
pub(crate) fn assert_one_test_passed(who: &str, out: &Output) {
    let stdout = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && stdout.contains("1 passed"), "{who}: {stdout}");
}

/// Returns whether this process was started by [`process`].
pub(crate) fn is_child() -> bool {
    std::env::var_os("CHILD").is_some()
}
