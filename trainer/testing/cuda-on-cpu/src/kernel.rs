//! Modules, their kernels, and the checks of a launch.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};

use parking_lot::Mutex;

use crate::cu_result::{
    DriverResult, ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_PTX, INVALID_VALUE, NO_BINARY_FOR_GPU, NOT_FOUND,
    UNSUPPORTED_PTX_VERSION,
};
use crate::handles::Table;
use crate::machine::{Device, driver, machine};
use crate::memory::{self, BlockKind};
use crate::module::{self, Function};
use crate::op::Op;
use crate::stream::StreamRef;

/// All loaded modules.
pub(crate) static MODULES: Table<LoadedModule> = Table::new();
/// All kernels that `cuModuleGetFunction` has returned.
pub(crate) static KERNELS: Table<Kernel> = Table::new();

/// Maximum number of threads per block.
pub(crate) const MAX_THREADS: u32 = 1024;
/// Maximum number of blocks in each dimension of a grid.
pub(crate) const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65535, 65535];
/// Maximum number of threads in each dimension of a block.
pub(crate) const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
/// Bytes of shared memory per block without opt-in.
pub(crate) const DEFAULT_SHARED: i32 = 48 << 10;

/// A module, loaded for one context.
#[derive(Debug)]
pub(crate) struct LoadedModule {
    module: Arc<module::Module>,
    device: usize,
    /// Handles of the module's kernels by name.
    handles: Mutex<HashMap<String, usize>>,
}

/// A kernel of a module.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) function: Function,
    /// Index of the kernel's GPU.
    device: usize,
    /// Bytes of dynamic shared memory that a launch may ask for.
    dynamic: AtomicI32,
}

/// Result of compiling a PTX text. Each text is compiled once per process.
type Compiled = Arc<OnceLock<Option<Arc<module::Module>>>>;
static TEXTS: LazyLock<Mutex<HashMap<Arc<str>, Compiled>>> = LazyLock::new(Mutex::default);

/// Implements `cuModuleLoadData`.
pub(crate) fn load(device: &Device, image: &[u8]) -> DriverResult<usize> {
    const ELF: &[u8] = b"\x7fELF";
    const FATBIN: &[u8] = &0xBA55_ED50u32.to_le_bytes();
    if image.starts_with(ELF) || image.starts_with(FATBIN) {
        return Err(NO_BINARY_FOR_GPU);
    }
    let text = str::from_utf8(image).map_err(|_| INVALID_PTX)?;
    if ptx_version(text).is_some_and(|version| version > newest_ptx(driver())) {
        return Err(UNSUPPORTED_PTX_VERSION);
    }
    let (major, minor) = machine()?.capability();
    if target(text).is_some_and(|target| target > major * 10 + minor) {
        eprintln!("cuda-on-cpu: PTX for a newer GPU than {major}.{minor}");
        return Err(INVALID_PTX);
    }
    let compiled = {
        let mut texts = TEXTS.lock();
        match texts.get(text) {
            Some(compiled) => compiled.clone(),
            None => texts.entry(text.into()).or_default().clone(),
        }
    };
    let module = compiled.get_or_init(|| match module::load(text) {
        Ok(module) => Some(Arc::new(module)),
        Err(cause) => {
            eprintln!("cuda-on-cpu: {cause}");
            None
        }
    });
    let module = module.clone().ok_or(INVALID_PTX)?;
    Ok(MODULES.add(Arc::new(LoadedModule { module, device: device.index, handles: Mutex::default() })))
}

/// Returns the newest PTX version of a CUDA version: 8.5 for 12.5 and 12.6, 8.8 for 12.9, 9.0 for 13.0 (PTX ISA, "Release
/// Notes").
fn newest_ptx((major, minor): (i32, i32)) -> (i32, i32) {
    match (major, minor) {
        (13.., _) => (major - 4, minor),
        (12, 6..) => (8, minor - 1),
        (12, _) => (8, minor),
        (11, _) => (7, minor),
        (10, _) => (6, minor + 3),
        _ => (6, 0),
    }
}

/// Returns the version of `.version 9.0`.
fn ptx_version(text: &str) -> Option<(i32, i32)> {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(".version"))?;
    let (major, minor) = line.trim().split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Returns the compute capability of `.target sm_80` as 80.
fn target(text: &str) -> Option<i32> {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(".target"))?;
    let digits = line.trim_start().strip_prefix("sm_")?;
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

/// Implements `cuModuleUnload`. Queued launches still run.
pub(crate) fn unload(module: usize) -> DriverResult {
    let module = MODULES.remove(module)?;
    for kernel in module.handles.lock().values() {
        KERNELS.remove(*kernel)?;
    }
    Ok(())
}

/// Implements `cuModuleGetFunction`.
pub(crate) fn function(module: usize, name: &str) -> DriverResult<usize> {
    let module = MODULES.get(module)?;
    let mut handles = module.handles.lock();
    if let Some(handle) = handles.get(name) {
        return Ok(*handle);
    }
    let function = module.module.functions.iter().find(|function| function.name == name).ok_or(NOT_FOUND)?.clone();
    let dynamic = AtomicI32::new(DEFAULT_SHARED - (function.shared as i32).min(DEFAULT_SHARED));
    let handle = KERNELS.add(Arc::new(Kernel { function, device: module.device, dynamic }));
    handles.insert(name.to_owned(), handle);
    Ok(handle)
}

impl Kernel {
    /// Returns the bytes of dynamic shared memory that a launch may ask for.
    pub(crate) fn dynamic(&self) -> i32 {
        self.dynamic.load(Ordering::Acquire)
    }

    /// Sets `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
    pub(crate) fn set_dynamic(&self, bytes: i32) -> DriverResult {
        let most = machine()?.shared_optin() - self.function.shared as i32;
        if !(0..=most).contains(&bytes) {
            return Err(INVALID_VALUE);
        }
        self.dynamic.store(bytes, Ordering::Release);
        Ok(())
    }
}

/// A launch with its parameters.
#[derive(Debug)]
pub(crate) struct Launch {
    kernel: Arc<Kernel>,
    /// The packed parameters, aligned for every type of parameter.
    parameters: Box<[u128]>,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
}

impl Launch {
    /// Returns the kernel's name.
    pub(crate) fn name(&self) -> &str {
        &self.kernel.function.name
    }

    fn parameters(&self) -> &[u8] {
        // SAFETY: integers are plain bytes, and the allocation has at least this many.
        unsafe { std::slice::from_raw_parts(self.parameters.as_ptr().cast(), self.kernel.function.parameter_bytes) }
    }

    /// Runs the kernel on the calling thread.
    ///
    /// # Safety
    /// The memory that the parameters point to is valid.
    pub(crate) unsafe fn run(&self) {
        // SAFETY: required of the caller.
        unsafe { self.kernel.function.run(self.parameters(), self.grid, self.block, self.shared) }
    }

    /// Returns the index of the launch's GPU.
    pub(crate) fn device(&self) -> usize {
        self.kernel.device
    }

    /// Returns all aligned words of the parameters. Every address among the parameters is one of them.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> {
        self.parameters().chunks_exact(8).map(|word| word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }
}

/// How a launch's parameters are passed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Parameters {
    /// One pointer per parameter.
    Each(*const *const u8),
    /// One packed block and its bytes.
    Packed(*const u8, usize),
    Absent,
}

/// Implements `cuLaunchKernel`.
///
/// # Safety
/// The number and the sizes of the parameters are those of the kernel.
pub(crate) unsafe fn launch(
    kernel: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: usize,
    parameters: Parameters,
) -> DriverResult {
    let target = StreamRef::of(stream)?;
    let kernel = KERNELS.get(kernel)?;
    if kernel.device != target.device().index {
        return Err(INVALID_HANDLE);
    }
    let within = |is: [u32; 3], most: [u32; 3]| is.iter().zip(most).all(|(is, most)| (1..=most).contains(is));
    let threads: u64 = block.iter().map(|dimension| u64::from(*dimension)).product();
    if !within(grid, MAX_GRID) || !within(block, MAX_BLOCK) || threads > u64::from(MAX_THREADS) {
        return Err(INVALID_VALUE);
    }
    if i64::from(shared) > i64::from(kernel.dynamic()) {
        return Err(INVALID_VALUE);
    }
    // SAFETY: required of the caller.
    let parameters = unsafe { pack(&kernel.function, parameters)? };
    let launch = Launch { kernel, parameters, grid, block, shared };
    check_access(&launch, target.device())?;
    target.submit(Op::Kernel(Arc::new(launch)))
}

/// Copies the parameters into a packed block.
///
/// # Safety
/// As for [`launch`].
unsafe fn pack(function: &Function, parameters: Parameters) -> DriverResult<Box<[u128]>> {
    let mut block = vec![0u128; function.parameter_bytes.div_ceil(size_of::<u128>())].into_boxed_slice();
    let to = block.as_mut_ptr().cast::<u8>();
    match parameters {
        Parameters::Absent if function.parameters.is_empty() => {}
        Parameters::Absent => return Err(INVALID_VALUE),
        Parameters::Each(each) => {
            for (index, (offset, bytes)) in function.parameters.iter().enumerate() {
                // SAFETY: the caller passes one pointer per parameter.
                let from = unsafe { each.add(index).read() };
                if from.is_null() || offset + bytes > function.parameter_bytes {
                    return Err(INVALID_VALUE);
                }
                // SAFETY: inside the block and inside the caller's parameter.
                unsafe { std::ptr::copy_nonoverlapping(from, to.add(*offset), *bytes) };
            }
        }
        Parameters::Packed(from, bytes) => {
            let needed = function.parameters.iter().map(|(offset, bytes)| offset + bytes).max().unwrap_or(0);
            if from.is_null() || bytes < needed || needed > function.parameter_bytes {
                return Err(INVALID_VALUE);
            }
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from, to, needed) };
        }
    }
    Ok(block)
}

/// Refuses parameters that point to memory which the GPU cannot access. The real driver reports a sticky error instead when
/// the kernel accesses that memory.
fn check_access(launch: &Launch, device: &Device) -> DriverResult {
    let blocks = memory::blocks();
    let parameters = launch.parameters();
    for (offset, _) in launch.kernel.function.parameters.iter().filter(|(_, bytes)| *bytes == 8) {
        let Some(word) = parameters.get(*offset..offset + 8).and_then(|word| word.try_into().ok()) else { continue };
        let Some(block) = memory::block_at(&blocks, u64::from_le_bytes(word) as usize) else { continue };
        let has_access = match &block.kind {
            BlockKind::Host => true,
            BlockKind::Opened { opener, .. } => *opener == device.physical,
            BlockKind::Own { .. } | BlockKind::Pool => false,
        };
        if !has_access && block.physical != device.physical && !device.peers.lock().contains(&block.physical) {
            eprintln!("cuda-on-cpu: {} has no access to memory of GPU {}", launch.kernel.function.name, block.physical);
            return Err(ILLEGAL_ADDRESS);
        }
    }
    Ok(())
}
