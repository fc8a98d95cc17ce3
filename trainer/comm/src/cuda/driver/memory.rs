//! Memory of a GPU, which other processes can open (CUDA IPC), and words in host memory that kernels access.

use std::{ffi::c_uint, sync::Arc};

use bytemuck::{NoUninit, Pod};

use super::{Address, Context, DriverResult, IpcHandle, functions::IpcHandleByValue};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

impl Context {
    /// Allocates `bytes` bytes with `cuMemAlloc`. Such memory can be exported.
    ///
    /// # Errors
    /// The driver's error.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> DriverResult<Memory> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: writes one address, which `Memory::drop` frees.
        self.functions.check("cuMemAlloc", unsafe { (self.functions.allocate)(&mut address, bytes) })?;
        Ok(Memory { context: self.clone(), address, bytes, opened: false })
    }

    /// Opens the allocation of another process by its handle, with access from this GPU. `bytes` is the size of the allocation.
    ///
    /// # Errors
    /// The driver's error: the handle was made in this process, or IPC is not available.
    pub fn open(self: &Arc<Self>, handle: IpcHandle, bytes: usize) -> DriverResult<Memory> {
        self.enter()?;
        let mut address = 0;
        let handle = IpcHandleByValue { reserved: handle };
        // SAFETY: writes one address, which `Memory::drop` closes. The driver refuses an invalid handle. The owner keeps the
        // memory until this process has closed it.
        let code = unsafe { (self.functions.ipc_open)(&mut address, handle, LAZY_ENABLE_PEER_ACCESS) };
        self.functions.check("cuIpcOpenMemHandle", code)?;
        Ok(Memory { context: self.clone(), address, bytes, opened: true })
    }
}

/// Memory of a GPU: allocated by this process, or opened from another process.
#[derive(Debug)]
pub struct Memory {
    context: Arc<Context>,
    address: Address,
    bytes: usize,
    opened: bool,
}

impl Memory {
    /// Returns the address of the first byte.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Returns the context of the GPU that accesses the memory.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the handle by which another process opens the driver's whole allocation.
    ///
    /// # Errors
    /// The driver's error.
    pub fn handle(&self) -> DriverResult<IpcHandle> {
        self.context.enter()?;
        let mut handle = IpcHandleByValue { reserved: [0; 64] };
        let functions = &self.context.functions;
        // SAFETY: writes 64 bytes. The address comes from `cuMemAlloc`.
        functions.check("cuIpcGetMemHandle", unsafe { (functions.ipc_get)(&mut handle, self.address) })?;
        Ok(handle.reserved)
    }

    /// Returns the position of this memory, in bytes, in the driver's allocation that [`handle`](Self::handle) exports.
    ///
    /// # Errors
    /// The driver's error.
    #[cfg(feature = "cuda")]
    pub fn offset(&self) -> DriverResult<u64> {
        self.context.enter()?;
        let (mut base, mut size) = (0, 0);
        let functions = &self.context.functions;
        // SAFETY: writes an address and a size. The address belongs to a live allocation.
        let code = unsafe { (functions.address_range)(&mut base, &mut size, self.address) };
        functions.check("cuMemGetAddressRange", code)?;
        Ok(self.address - base)
    }

    /// Sets all bytes to zero and waits until they are.
    ///
    /// # Errors
    /// The driver's error.
    #[cfg(feature = "cuda")]
    pub fn zero(&self) -> DriverResult {
        self.context.enter()?;
        let functions = &self.context.functions;
        // SAFETY: the range is this whole memory.
        functions.check("cuMemsetD8", unsafe { (functions.memset)(self.address, 0, self.bytes) })?;
        // The call may return before the memory is set.
        self.context.synchronize()
    }

    /// Returns the address of byte `at`, and checks that the `bytes` bytes from there are in bounds.
    fn at(&self, at: usize, bytes: usize) -> Address {
        let end = at.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "bytes {at}..+{bytes} are outside of {} bytes", self.bytes);
        self.address + at as Address
    }

    /// Copies the values at byte `at` to the host. No kernel may write them meanwhile.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn read<T: Pod>(&self, at: usize, to: &mut [T]) -> DriverResult {
        let from = self.at(at, size_of_val(to));
        self.context.enter()?;
        let functions = &self.context.functions;
        // SAFETY: both sides have that many bytes, and any bytes are a valid `T`.
        let code = unsafe { (functions.to_host)(to.as_mut_ptr().cast(), from, size_of_val(to)) };
        functions.check("cuMemcpyDtoH", code)
    }

    /// Copies values from the host to byte `at`, and waits until they are there. No kernel may access them meanwhile.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn write<T: NoUninit>(&self, at: usize, from: &[T]) -> DriverResult {
        let to = self.at(at, size_of_val(from));
        self.context.enter()?;
        let functions = &self.context.functions;
        // SAFETY: both sides have that many bytes.
        let code = unsafe { (functions.to_device)(to, from.as_ptr().cast(), size_of_val(from)) };
        functions.check("cuMemcpyHtoD", code)?;
        // A copy from pageable memory may return before the data has arrived.
        self.context.synchronize()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let functions = &self.context.functions;
        if self.context.enter().is_ok() {
            let release = if self.opened { functions.ipc_close } else { functions.free };
            // SAFETY: this value's constructor allocated or opened the memory. The owner drops this value only when no kernel
            // uses the memory: `probe.rs` waits for launches, `window.rs` waits for the device and for all ranks.
            let _ = unsafe { release(self.address) };
        }
    }
}

#[cfg(feature = "cuda")]
pub use host_words::HostWords;

#[cfg(feature = "cuda")]
mod host_words {
    use std::{
        ffi::c_uint,
        ptr::null_mut,
        sync::{
            Arc,
            atomic::{AtomicU64, Ordering},
        },
    };

    use super::{Address, Context, DriverResult};

    /// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
    const PORTABLE_AND_MAPPED: c_uint = 1 | 2;

    /// 64-bit words in host memory that kernels read and write.
    #[derive(Debug)]
    pub struct HostWords {
        context: Arc<Context>,
        words: *const AtomicU64,
        len: usize,
        address: Address,
    }

    // SAFETY: all access goes through atomics, and the memory is freed once.
    unsafe impl Send for HostWords {}
    // SAFETY: as above.
    unsafe impl Sync for HostWords {}

    impl HostWords {
        /// Allocates `len` words, all zero.
        ///
        /// # Errors
        /// The driver's error.
        pub fn zeroed(context: &Arc<Context>, len: usize) -> DriverResult<Self> {
            context.enter()?;
            let (functions, mut host) = (&context.functions, null_mut());
            // SAFETY: writes one pointer, which `drop` frees.
            let code = unsafe { (functions.host_allocate)(&mut host, 8 * len, PORTABLE_AND_MAPPED) };
            functions.check("cuMemHostAlloc", code)?;
            let mut words = Self { context: context.clone(), words: host.cast(), len, address: 0 };
            // SAFETY: an allocation of that size, aligned to a page, that no other code knows of yet.
            unsafe { host.cast::<u64>().write_bytes(0, len) };
            // SAFETY: the memory of the call above.
            let code = unsafe { (functions.host_address)(&mut words.address, host, 0) };
            functions.check("cuMemHostGetDevicePointer", code)?;
            Ok(words)
        }

        /// Returns the address that kernels use.
        pub fn address(&self) -> Address {
            self.address
        }

        fn words(&self) -> &[AtomicU64] {
            // SAFETY: `len` initialised, aligned words that live as long as `self`. Kernels access them with 64-bit accesses at
            // system scope.
            unsafe { std::slice::from_raw_parts(self.words, self.len) }
        }

        /// Reads all words.
        pub fn read(&self) -> Vec<u64> {
            self.words().iter().map(|word| word.load(Ordering::Acquire)).collect()
        }

        /// Sets one word.
        pub fn set(&self, index: usize, value: u64) {
            if let Some(word) = self.words().get(index) {
                word.store(value, Ordering::Release);
            }
        }
    }

    impl Drop for HostWords {
        fn drop(&mut self) {
            if self.context.enter().is_ok() {
                // SAFETY: allocated in `zeroed`, and freed once, after the device has done all work that uses it (`window.rs`).
                let _ = unsafe { (self.context.functions.host_free)(self.words.cast_mut().cast()) };
            }
        }
    }
}
