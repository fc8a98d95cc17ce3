//! What is done on one GPU: memory, its handles for other processes, kernels.

use std::{
    ffi::{CStr, CString, c_int, c_uint, c_void},
    ptr::null_mut,
};

use super::{Address, Driver, DriverResult, IpcHandle, functions::IpcHandleByValue};

/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
const PEER_ACCESS_ALREADY_ENABLED: c_int = 704;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

/// A GPU's primary context, held.
#[derive(Debug)]
pub struct Context<'a> {
    pub(super) driver: &'a Driver,
    pub(super) device: c_int,
    pub(super) context: *mut c_void,
}

impl Context<'_> {
    /// Makes it this thread's: what follows is done on its GPU.
    fn enter(&self) -> DriverResult {
        // SAFETY: the context is retained.
        self.driver.done("cuCtxSetCurrent", unsafe { (self.driver.functions.set_current)(self.context) })
    }

    /// Memory of `bytes` bytes, of `cuMemAlloc`.
    ///
    /// # Errors
    /// The driver's.
    pub fn allocate(&self, bytes: usize) -> DriverResult<Memory<'_>> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: writes one address, which `Memory::drop` frees.
        self.driver.done("cuMemAlloc", unsafe { (self.driver.functions.allocate)(&mut address, bytes) })?;
        Ok(Memory { context: self, address, bytes, opened: false })
    }

    /// Lets kernels of this GPU use the memory of `other`'s.
    ///
    /// # Errors
    /// The driver's.
    pub fn enable_peer_access(&self, other: &Context<'_>) -> DriverResult {
        self.enter()?;
        // SAFETY: both contexts are retained.
        let code = unsafe { (self.driver.functions.enable_peer)(other.context, 0) };
        match code {
            PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => self.driver.done("cuCtxEnablePeerAccess", code),
        }
    }

    /// Takes back what [`Context::enable_peer_access`] gave.
    ///
    /// # Errors
    /// The driver's.
    pub fn disable_peer_access(&self, other: &Context<'_>) -> DriverResult {
        self.enter()?;
        // SAFETY: both contexts are retained; nothing of this thread's uses the memory any more.
        self.driver.done("cuCtxDisablePeerAccess", unsafe { (self.driver.functions.disable_peer)(other.context) })
    }

    /// Memory of another process, by its handle.
    ///
    /// # Errors
    /// The driver's: the handle is of this same process, or IPC is not to be had.
    pub fn open(&self, handle: IpcHandle, bytes: usize) -> DriverResult<Memory<'_>> {
        self.enter()?;
        let mut address = 0;
        let handle = IpcHandleByValue { reserved: handle };
        // SAFETY: writes one address, which `Memory::drop` closes; a handle that is none is refused.
        let code = unsafe { (self.driver.functions.ipc_open)(&mut address, handle, LAZY_ENABLE_PEER_ACCESS) };
        self.driver.done("cuIpcOpenMemHandle", code)?;
        Ok(Memory { context: self, address, bytes, opened: true })
    }

    /// Compiles PTX for this GPU.
    ///
    /// # Errors
    /// The driver's.
    pub fn module(&self, ptx: &CStr) -> DriverResult<Module<'_>> {
        self.enter()?;
        let mut module = null_mut();
        // SAFETY: a C string of PTX; writes one pointer, which `Module::drop` unloads.
        let code = unsafe { (self.driver.functions.load_module)(&mut module, ptx.as_ptr().cast()) };
        self.driver.done("cuModuleLoadData", code)?;
        Ok(Module { context: self, module })
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        // SAFETY: retained once by `Driver::context`; what was made in it borrows it, and is gone.
        let _ = unsafe { (self.driver.functions.release)(self.device) };
    }
}

/// Memory of a GPU: this process's own, or another's.
#[derive(Debug)]
pub struct Memory<'a> {
    context: &'a Context<'a>,
    address: Address,
    bytes: usize,
    opened: bool,
}

impl Memory<'_> {
    /// Where it is.
    pub fn address(&self) -> Address {
        self.address
    }

    /// What another process opens it by.
    ///
    /// # Errors
    /// The driver's.
    pub fn handle(&self) -> DriverResult<IpcHandle> {
        self.context.enter()?;
        let mut handle = IpcHandleByValue { reserved: [0; 64] };
        let functions = &self.context.driver.functions;
        // SAFETY: writes 64 bytes; the address is of `cuMemAlloc`.
        self.context.driver.done("cuIpcGetMemHandle", unsafe { (functions.ipc_get)(&mut handle, self.address) })?;
        Ok(handle.reserved)
    }

    /// Copies its first bytes to the host.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// When more is asked for than there is.
    pub fn read(&self, to: &mut [u32]) -> DriverResult {
        assert!(size_of_val(to) <= self.bytes, "no more than there is");
        self.context.enter()?;
        let functions = &self.context.driver.functions;
        // SAFETY: both sides have that many bytes.
        let code = unsafe { (functions.to_host)(to.as_mut_ptr().cast(), self.address, size_of_val(to)) };
        self.context.driver.done("cuMemcpyDtoH", code)
    }

    /// Fills its first bytes from the host.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// When more is given than there is room.
    pub fn write(&self, from: &[u32]) -> DriverResult {
        assert!(size_of_val(from) <= self.bytes, "no more than there is");
        self.context.enter()?;
        let functions = &self.context.driver.functions;
        // SAFETY: both sides have that many bytes.
        let code = unsafe { (functions.to_device)(self.address, from.as_ptr().cast(), size_of_val(from)) };
        self.context.driver.done("cuMemcpyHtoD", code)
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        let functions = &self.context.driver.functions;
        if self.context.enter().is_ok() {
            let give_back = if self.opened { functions.ipc_close } else { functions.free };
            // SAFETY: made, or opened, by this value's own constructor, and no kernel runs on it: launches are waited for.
            let _ = unsafe { give_back(self.address) };
        }
    }
}

/// Compiled kernels.
#[derive(Debug)]
pub struct Module<'a> {
    context: &'a Context<'a>,
    module: *mut c_void,
}

impl Module<'_> {
    /// Runs `kernel(address, count, seed, result)` over `count` elements, and waits for it.
    ///
    /// # Errors
    /// The driver's.
    pub fn run(&self, kernel: &str, address: Address, count: u32, seed: u32, result: Address) -> DriverResult {
        const THREADS: u32 = 256;
        let (driver, functions) = (self.context.driver, &self.context.driver.functions);
        self.context.enter()?;
        let name = CString::new(kernel).unwrap_or_default();
        let mut function = null_mut();
        // SAFETY: the module is loaded; writes one pointer.
        let code = unsafe { (functions.function)(&mut function, self.module, name.as_ptr()) };
        driver.done("cuModuleGetFunction", code)?;
        let (mut address, mut count, mut seed, mut result) = (address, count, seed, result);
        let mut parameters: [*mut c_void; 4] =
            [(&raw mut address).cast(), (&raw mut count).cast(), (&raw mut seed).cast(), (&raw mut result).cast()];
        let blocks = count.div_ceil(THREADS).max(1);
        // SAFETY: the kernels of `probe.rs` take these four parameters, which are copied before the call returns; the
        // callers' memory lives until the kernel has ended, which is waited for below.
        let code = unsafe {
            let (parameters, none) = (parameters.as_mut_ptr(), null_mut());
            (functions.launch)(function, blocks, 1, 1, THREADS, 1, 1, 0, null_mut(), parameters, none)
        };
        driver.done("cuLaunchKernel", code)?;
        // SAFETY: the context is this thread's.
        driver.done("cuCtxSynchronize", unsafe { (functions.synchronize)() })
    }
}

impl Drop for Module<'_> {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: loaded by `Context::module`; its kernels have ended.
            let _ = unsafe { (self.context.driver.functions.unload_module)(self.module) };
        }
    }
}
