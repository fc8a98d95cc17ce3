//! Modules, their kernels, and what a launch has to satisfy.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use crate::code::{Answer, ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_PTX, INVALID_VALUE, NO_BINARY_FOR_GPU, NOT_FOUND};
use crate::handles::Table;
use crate::log::lock;
use crate::machine::{Device, machine};
use crate::memory::{self, Kind};
use crate::module::{self, Function};
use crate::op::Op;
use crate::stream::Target;

/// All modules.
pub(crate) static MODULES: Table<Loaded> = Table::new();
/// All kernels that somebody has asked for.
pub(crate) static KERNELS: Table<Kernel> = Table::new();

/// Threads of a block, at most.
pub(crate) const MOST_THREADS: u32 = 1024;
/// Blocks in each dimension of a grid, at most.
pub(crate) const GRID: [u32; 3] = [i32::MAX as u32, 65535, 65535];
/// Threads in each dimension of a block, at most.
pub(crate) const BLOCK: [u32; 3] = [1024, 1024, 64];
/// Bytes of shared memory that a block has without asking.
pub(crate) const SHARED: i32 = 48 << 10;

/// A module, loaded for one context.
#[derive(Debug)]
pub(crate) struct Loaded {
    module: Arc<module::Module>,
    device: usize,
    /// Handles of its kernels, by name.
    handles: Mutex<HashMap<String, usize>>,
}

/// A kernel of a module.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) function: Function,
    /// Index of its GPU.
    device: usize,
    /// Bytes of dynamic shared memory that a launch may ask for.
    dynamic: AtomicI32,
}

/// What becomes of a text. Compiled once, whoever loads it.
type Compiled = Arc<OnceLock<Option<Arc<module::Module>>>>;
static TEXTS: LazyLock<Mutex<HashMap<Arc<str>, Compiled>>> = LazyLock::new(Mutex::default);

/// `cuModuleLoadData`.
pub(crate) fn load(device: &Device, image: &[u8]) -> Answer<usize> {
    const ELF: &[u8] = b"\x7fELF";
    const FATBIN: &[u8] = &0xBA55_ED50u32.to_le_bytes();
    if image.starts_with(ELF) || image.starts_with(FATBIN) {
        return Err(NO_BINARY_FOR_GPU);
    }
    let text = str::from_utf8(image).map_err(|_| INVALID_PTX)?;
    let (major, minor) = machine()?.capability();
    if target(text).is_some_and(|target| target > major * 10 + minor) {
        eprintln!("cuda-on-cpu: PTX for a newer GPU than {major}.{minor}");
        return Err(INVALID_PTX);
    }
    let compiled = {
        let mut texts = lock(&TEXTS);
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
    Ok(MODULES.add(Arc::new(Loaded { module, device: device.index, handles: Mutex::default() })))
}

/// The capability that PTX is for: `.target sm_80`.
fn target(text: &str) -> Option<i32> {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(".target"))?;
    let digits = line.trim_start().strip_prefix("sm_")?;
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

/// `cuModuleUnload`. Launches that are queued still run.
pub(crate) fn unload(module: usize) -> Answer {
    let module = MODULES.remove(module)?;
    for kernel in lock(&module.handles).values() {
        KERNELS.remove(*kernel)?;
    }
    Ok(())
}

/// `cuModuleGetFunction`.
pub(crate) fn function(module: usize, name: &str) -> Answer<usize> {
    let module = MODULES.get(module)?;
    let mut handles = lock(&module.handles);
    if let Some(handle) = handles.get(name) {
        return Ok(*handle);
    }
    let function = module.module.functions.iter().find(|function| function.name == name).ok_or(NOT_FOUND)?.clone();
    let dynamic = AtomicI32::new(SHARED - (function.shared as i32).min(SHARED));
    let handle = KERNELS.add(Arc::new(Kernel { function, device: module.device, dynamic }));
    handles.insert(name.to_owned(), handle);
    Ok(handle)
}

impl Kernel {
    pub(crate) fn dynamic(&self) -> i32 {
        self.dynamic.load(Ordering::Acquire)
    }

    /// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
    pub(crate) fn set_dynamic(&self, bytes: i32) -> Answer {
        let most = machine()?.shared_optin() - self.function.shared as i32;
        if !(0..=most).contains(&bytes) {
            return Err(INVALID_VALUE);
        }
        self.dynamic.store(bytes, Ordering::Release);
        Ok(())
    }
}

/// A launch, with its parameters.
#[derive(Debug)]
pub(crate) struct Launch {
    kernel: Arc<Kernel>,
    /// Aligned for whatever a kernel takes.
    parameters: Box<[u128]>,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
}

impl Launch {
    fn parameters(&self) -> &[u8] {
        // SAFETY: integers are bytes; there are at least so many.
        unsafe { std::slice::from_raw_parts(self.parameters.as_ptr().cast(), self.kernel.function.parameter_bytes) }
    }

    /// # Safety
    /// What the parameters point to is there.
    pub(crate) unsafe fn run(&self) {
        // SAFETY: by the caller.
        unsafe { self.kernel.function.run(self.parameters(), self.grid, self.block, self.shared) }
    }

    /// Index of its GPU.
    pub(crate) fn device(&self) -> usize {
        self.kernel.device
    }

    /// All aligned words of the parameters: whatever is an address is one of them.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> {
        self.parameters().chunks_exact(8).map(|word| word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }
}

/// Where a launch's parameters are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Parameters {
    /// A pointer for each.
    Each(*const *const u8),
    /// A packed block.
    Packed(*const u8, usize),
    Absent,
}

/// `cuLaunchKernel`.
///
/// # Safety
/// The parameters are as many, and as long, as the kernel's.
pub(crate) unsafe fn launch(
    kernel: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: usize,
    parameters: Parameters,
) -> Answer {
    let target = Target::of(stream)?;
    let kernel = KERNELS.get(kernel)?;
    if kernel.device != target.device().index {
        return Err(INVALID_HANDLE);
    }
    let within = |is: [u32; 3], most: [u32; 3]| is.iter().zip(most).all(|(is, most)| (1..=most).contains(is));
    let threads: u64 = block.iter().map(|dimension| u64::from(*dimension)).product();
    if !within(grid, GRID) || !within(block, BLOCK) || threads > u64::from(MOST_THREADS) {
        return Err(INVALID_VALUE);
    }
    if i64::from(shared) > i64::from(kernel.dynamic()) {
        return Err(INVALID_VALUE);
    }
    // SAFETY: by the caller.
    let parameters = unsafe { packed(&kernel.function, parameters)? };
    let launch = Launch { kernel, parameters, grid, block, shared };
    reaches_all(&launch, target.device())?;
    target.submit(Op::Kernel(Arc::new(launch)))
}

/// # Safety
/// As for [`launch`].
unsafe fn packed(function: &Function, parameters: Parameters) -> Answer<Box<[u128]>> {
    let mut block = vec![0u128; function.parameter_bytes.div_ceil(size_of::<u128>())].into_boxed_slice();
    let to = block.as_mut_ptr().cast::<u8>();
    match parameters {
        Parameters::Absent if function.parameters.is_empty() => {}
        Parameters::Absent => return Err(INVALID_VALUE),
        Parameters::Each(each) => {
            for (index, (offset, bytes)) in function.parameters.iter().enumerate() {
                // SAFETY: there is a pointer for each parameter, by the caller.
                let from = unsafe { each.add(index).read() };
                if from.is_null() || offset + bytes > function.parameter_bytes {
                    return Err(INVALID_VALUE);
                }
                // SAFETY: inside of the block, and of the caller's parameter.
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

/// Refuses parameters that point to memory which the GPU has no access to. The real one ends the context then, as soon as
/// the kernel goes there.
fn reaches_all(launch: &Launch, device: &Device) -> Answer {
    let blocks = memory::blocks();
    let parameters = launch.parameters();
    for (offset, _) in launch.kernel.function.parameters.iter().filter(|(_, bytes)| *bytes == 8) {
        let Some(word) = parameters.get(*offset..offset + 8).and_then(|word| word.try_into().ok()) else { continue };
        let Some(block) = memory::around(&blocks, u64::from_le_bytes(word) as usize) else { continue };
        let reaches = match &block.kind {
            Kind::Host => true,
            Kind::Opened { opener, .. } => *opener == device.physical,
            Kind::Own { .. } | Kind::Pool => false,
        };
        if !reaches && block.physical != device.physical && !lock(&device.peers).contains(&block.physical) {
            eprintln!("cuda-on-cpu: {} has no access to memory of GPU {}", launch.kernel.function.name, block.physical);
            return Err(ILLEGAL_ADDRESS);
        }
    }
    Ok(())
}
