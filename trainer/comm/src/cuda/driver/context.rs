//! A GPU's primary context, and the kernels in it.

use std::{
    ffi::{CStr, CString, c_int, c_uint, c_void},
    ptr::null_mut,
    sync::Arc,
};

use super::{Address, DriverResult, functions::Functions};

/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
const PEER_ACCESS_ALREADY_ENABLED: c_int = 704;

/// A GPU's primary context, which this value retains. burn uses the same context.
#[derive(Debug)]
pub struct Context {
    /// Index of the GPU among the GPUs that this process sees.
    pub index: usize,
    pub(super) functions: Functions,
    pub(super) device: c_int,
    pub(super) context: *mut c_void,
}

// SAFETY: any thread may use a context that it makes current, which every method here does first.
unsafe impl Send for Context {}
// SAFETY: as above. The driver has its own locks.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// The driver's error.
    pub fn enter(&self) -> DriverResult {
        // SAFETY: the context is retained.
        self.functions.check("cuCtxSetCurrent", unsafe { (self.functions.set_current)(self.context) })
    }

    /// Waits for all work that this process has submitted to the GPU.
    ///
    /// # Errors
    /// The driver's error, also one of earlier work.
    pub fn synchronize(&self) -> DriverResult {
        self.enter()?;
        // SAFETY: the context is current on this thread.
        self.functions.check("cuCtxSynchronize", unsafe { (self.functions.synchronize)() })
    }

    /// Returns the GPU's UUID, which is the same in every process.
    ///
    /// # Errors
    /// The driver's error.
    #[cfg(feature = "cuda")]
    pub fn uuid(&self) -> DriverResult<[u8; 16]> {
        self.functions.uuid(self.device)
    }

    /// Returns the compute capability, major and minor.
    ///
    /// # Errors
    /// The driver's error.
    #[cfg(feature = "cuda")]
    pub fn compute_capability(&self) -> DriverResult<[u32; 2]> {
        self.functions.compute_capability(self.device)
    }

    /// Returns whether streams of this GPU can wait for words of 64 bits, and write them.
    ///
    /// # Errors
    /// The driver's error.
    #[cfg(feature = "cuda")]
    pub fn supports_stream_mem_ops(&self) -> DriverResult<bool> {
        self.functions.supports_stream_mem_ops(self.device)
    }

    /// Returns whether the driver reports access from this GPU to the memory of the GPU with the UUID `other`; `None` if this
    /// process does not see that GPU.
    ///
    /// # Errors
    /// The driver's error.
    #[cfg(feature = "cuda")]
    pub fn can_access(&self, other: [u8; 16]) -> DriverResult<Option<bool>> {
        if self.uuid()? == other {
            return Ok(Some(true));
        }
        for index in 0..self.functions.count()? {
            let device = self.functions.handle(index)?;
            if self.functions.uuid(device)? == other {
                return self.functions.can_access_peer(self.device, device).map(Some);
            }
        }
        Ok(None)
    }

    /// Lets kernels of this GPU access the memory of `other`'s GPU.
    ///
    /// # Errors
    /// The driver's error. Access that is already enabled is not an error.
    pub fn enable_peer_access(&self, other: &Context) -> DriverResult {
        self.enter()?;
        // SAFETY: both contexts are retained.
        let code = unsafe { (self.functions.enable_peer)(other.context, 0) };
        match code {
            PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => self.functions.check("cuCtxEnablePeerAccess", code),
        }
    }

    /// Revokes the access that [`Context::enable_peer_access`] granted.
    ///
    /// # Errors
    /// The driver's error.
    pub fn disable_peer_access(&self, other: &Context) -> DriverResult {
        self.enter()?;
        // SAFETY: both contexts are retained. No work of this thread uses the memory any more.
        self.functions.check("cuCtxDisablePeerAccess", unsafe { (self.functions.disable_peer)(other.context) })
    }

    /// Compiles PTX for this GPU.
    ///
    /// # Errors
    /// The driver's error.
    pub fn module(self: &Arc<Self>, ptx: &CStr) -> DriverResult<Module> {
        self.enter()?;
        let mut module = null_mut();
        // SAFETY: a C string of PTX. The call writes one pointer, which `Module::drop` unloads.
        let code = unsafe { (self.functions.load_module)(&mut module, ptx.as_ptr().cast()) };
        self.functions.check("cuModuleLoadData", code)?;
        Ok(Module { context: self.clone(), module })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `Driver::context`. Everything made in the context holds an `Arc` of it and is gone.
        let _ = unsafe { (self.functions.release)(self.device) };
    }
}

/// Compiled kernels.
#[derive(Debug)]
pub struct Module {
    context: Arc<Context>,
    module: *mut c_void,
}

impl Module {
    /// Runs `kernel(address, count, seed, result)` over `count` elements, and waits for it.
    ///
    /// # Errors
    /// The driver's error.
    pub fn run(&self, kernel: &str, address: Address, count: u32, seed: u32, result: Address) -> DriverResult {
        const THREADS: u32 = 256;
        let functions = &self.context.functions;
        self.context.enter()?;
        let name = CString::new(kernel).unwrap_or_default();
        let mut function = null_mut();
        // SAFETY: the module is loaded. The call writes one pointer.
        let code = unsafe { (functions.function)(&mut function, self.module, name.as_ptr()) };
        functions.check("cuModuleGetFunction", code)?;
        let (mut address, mut count, mut seed, mut result) = (address, count, seed, result);
        let mut parameters: [*mut c_void; 4] =
            [(&raw mut address).cast(), (&raw mut count).cast(), (&raw mut seed).cast(), (&raw mut result).cast()];
        let blocks: c_uint = count.div_ceil(THREADS).max(1);
        // SAFETY: the kernels of `probe.rs` take these four parameters, which are copied before the call returns. The
        // caller's memory lives until the kernel has ended, which the code below waits for.
        let code = unsafe {
            let (parameters, none) = (parameters.as_mut_ptr(), null_mut());
            (functions.launch)(function, blocks, 1, 1, THREADS, 1, 1, 0, null_mut(), parameters, none)
        };
        functions.check("cuLaunchKernel", code)?;
        self.context.synchronize()
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: loaded by `Context::module`. Its kernels have ended.
            let _ = unsafe { (self.context.functions.unload_module)(self.module) };
        }
    }
}
