//! The binding to libcuda: lists GPUs, tests whether they can access each other's memory, and shares memory between processes.
//! Every build contains this binding. The library is loaded at run time, by name, so a CPU build can also report the machine's
//! GPUs.
//!
//! The file names are the same that burn's CUDA backend tries (cudarc, `get_lib_name_candidates`). So a library that is found
//! here is found by burn too, and burn does not panic.

mod compiler;
mod context;
mod functions;
mod memory;
pub mod probe;
#[cfg(feature = "cuda")]
mod stream;

use std::{ffi::c_int, ptr::null_mut, sync::Arc};

use libloading::Library;

use self::functions::Functions;
pub use self::{
    compiler::Compiler,
    context::{Context, Module},
    memory::Memory,
};
#[cfg(feature = "cuda")]
pub use self::{
    memory::HostWords,
    stream::{Event, Stream},
};

/// A device address.
pub type Address = u64;
/// Handle by which another process opens an allocation (CUDA IPC).
pub type IpcHandle = [u8; 64];

/// Suffixes that cudarc appends to a library's name, in its order.
const SUFFIXES: [&str; 7] = ["", ".13", ".12", ".11", ".10", ".9", ".1"];

/// A library that is missing or incomplete.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("looked for {} on the loader's path: {cause}", .tried.join(", "))]
pub struct NotLoaded {
    /// The names that were tried.
    pub tried: Vec<String>,
    /// The loader's message about the last file that exists and cannot be loaded. If no file exists, the message about the last
    /// name.
    pub cause: String,
}

/// A driver call that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code})")]
pub struct DriverError {
    /// The function.
    pub call: &'static str,
    /// `CUresult`.
    pub code: i32,
    /// Its name, e.g. `CUDA_ERROR_NO_DEVICE`.
    pub name: String,
}

/// A GPU that this process may use.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Gpu {
    /// Index among the GPUs that this process sees.
    pub index: usize,
    /// Product name.
    pub name: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Compute capability, major and minor.
    pub compute: [u32; 2],
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// UUID of the card, `GPU-…`.
    pub uuid: String,
    /// Whether only one process may use the GPU (`nvidia-smi -c EXCLUSIVE_PROCESS`).
    pub exclusive: bool,
    /// Whether the driver ends kernels that run for some seconds, as it does on GPUs with a display.
    pub limits_kernels: bool,
}

/// File names of NCCL. NVIDIA's packages install only the first, which cudarc does not try.
pub const NCCL_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Loads the first library that exists among `lib{stem}.so` and cudarc's suffixes. Returns the library and its name.
///
/// # Errors
/// None of them can be loaded.
pub fn open(stem: &str) -> Result<(Library, String), NotLoaded> {
    open_first(SUFFIXES.iter().map(|suffix| format!("lib{stem}.so{suffix}")).collect())
}

/// Loads the first of these files that exists. Returns the library and the name.
///
/// # Errors
/// None of them can be loaded.
pub fn open_first(tried: Vec<String>) -> Result<(Library, String), NotLoaded> {
    let mut cause = String::new();
    for name in &tried {
        // SAFETY: the constructors of NVIDIA's libraries are made to run in dlopen and require nothing of the caller.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok((library, name.clone())),
            Err(error) => {
                let text = innermost(&error);
                if cause.is_empty() || !text.contains("No such file") {
                    cause = text;
                }
            }
        }
    }
    Err(NotLoaded { tried, cause })
}

/// Returns the message of the innermost error, which is the system's message.
pub(super) fn innermost(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

/// Returns the version that a library reports through a function with `numbers` parameters of type `int*`, one or two: NVRTC's
/// and NCCL's. `None` if it has no such function.
pub fn version(library: &Library, symbol: &str, numbers: usize) -> Option<Vec<i32>> {
    let mut found = [0 as c_int; 2];
    let [first, second] = &mut found;
    let status = match numbers {
        // SAFETY: `nvrtcResult nvrtcVersion(int*, int*)`. Both numbers outlive the call.
        2 => unsafe {
            let call = library.get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(symbol.as_bytes()).ok()?;
            call(first, second)
        },
        // SAFETY: `ncclResult_t ncclGetVersion(int*)`. The number outlives the call.
        _ => unsafe {
            let call = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(symbol.as_bytes()).ok()?;
            call(first)
        },
    };
    (status == 0).then(|| found[..numbers.clamp(1, 2)].to_vec())
}

/// Result of a call to the driver.
pub type DriverResult<T = ()> = Result<T, DriverError>;

/// The driver, loaded and initialised.
#[derive(Debug)]
pub struct Driver {
    functions: Functions,
    /// The file name under which it was found.
    pub library: String,
}

/// Why there is no [`Driver`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoDriver {
    /// The library is missing.
    NotLoaded(NotLoaded),
    /// `cuInit` failed: there is no GPU, no GPU is visible, or the kernel module has another version.
    Refused {
        /// The library's file name.
        library: String,
        /// Its error.
        error: DriverError,
    },
}

impl Driver {
    /// Loads the driver and initialises it. Makes no context and uses no memory of a GPU.
    ///
    /// # Errors
    /// The library is missing, or `cuInit` fails.
    pub fn load() -> Result<Self, NoDriver> {
        let (opened, library) = open("cuda").map_err(NoDriver::NotLoaded)?;
        let functions = Functions::of(&opened)
            .map_err(|cause| NoDriver::NotLoaded(NotLoaded { tried: vec![library.clone()], cause }))?;
        // Never unload the library: `functions` points into it, and burn keeps it loaded until the process ends anyway.
        std::mem::forget(opened);
        let driver = Self { functions, library };
        // SAFETY: `cuInit(0)` may be called any number of times.
        match driver.functions.check("cuInit", unsafe { (functions.init)(0) }) {
            Ok(()) => Ok(driver),
            Err(error) => Err(NoDriver::Refused { library: driver.library, error }),
        }
    }

    /// Returns the newest CUDA version that the driver supports, major and minor.
    ///
    /// # Errors
    /// The driver's error.
    pub fn cuda_version(&self) -> DriverResult<[i32; 2]> {
        let version = self.functions.version()?;
        Ok([version / 1000, version % 1000 / 10])
    }

    /// Returns the number of GPUs that this process sees, which `CUDA_VISIBLE_DEVICES` limits.
    ///
    /// # Errors
    /// The driver's error.
    pub fn count(&self) -> DriverResult<usize> {
        self.functions.count()
    }

    /// Describes the GPU `index`.
    ///
    /// # Errors
    /// The driver's error.
    pub fn gpu(&self, index: usize) -> DriverResult<Gpu> {
        let (functions, device) = (&self.functions, self.functions.handle(index)?);
        Ok(Gpu {
            index,
            name: functions.name(device)?,
            memory_bytes: functions.memory_bytes(device)?,
            uuid: uuid_text(&functions.uuid(device)?),
            compute: functions.compute_capability(device)?,
            multiprocessors: functions.multiprocessors(device)?,
            exclusive: functions.is_exclusive(device)?,
            limits_kernels: functions.limits_kernels(device)?,
        })
    }

    /// Returns whether the driver reports access from GPU `one` to the memory of GPU `other`.
    ///
    /// # Errors
    /// The driver's error.
    pub fn can_access_peer(&self, one: usize, other: usize) -> DriverResult<bool> {
        self.functions.can_access_peer(self.functions.handle(one)?, self.functions.handle(other)?)
    }

    /// Retains the primary context of GPU `index`, which burn uses too.
    ///
    /// # Errors
    /// The driver's error.
    pub fn context(&self, index: usize) -> DriverResult<Arc<Context>> {
        let (functions, device) = (self.functions, self.functions.handle(index)?);
        let mut context = null_mut();
        // SAFETY: writes one pointer, which `Context::drop` releases.
        functions.check("cuDevicePrimaryCtxRetain", unsafe { (functions.retain)(&mut context, device) })?;
        Ok(Arc::new(Context { index, functions, device, context }))
    }
}

/// Formats a UUID as `nvidia-smi -L` and `CUDA_VISIBLE_DEVICES` do: `GPU-8-4-4-4-12`.
fn uuid_text(bytes: &[u8; 16]) -> String {
    let hex = crate::hex::encode(bytes);
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_reported_with_all_its_names() {
        let missing = open("trainer-has-no-such-library").unwrap_err();
        assert_eq!(missing.tried.len(), SUFFIXES.len());
        let text = missing.to_string();
        assert!(text.contains("libtrainer-has-no-such-library.so, ") && text.contains(".so.13"), "{text}");
        assert!(text.contains("No such file"), "{text}");
    }

    #[test]
    fn a_library_without_the_drivers_functions_is_refused() {
        let (libc, name) = open_any(&["libc.so.6"]);
        let cause = Functions::of(&libc).unwrap_err();
        assert!(cause.contains("cuInit"), "{name}: {cause}");
        assert_eq!(version(&libc, "nvrtcVersion", 2), None);
    }

    fn open_any(names: &[&str]) -> (Library, String) {
        let found = names.iter().find_map(|name| {
            // SAFETY: the C library is loaded already.
            Some((unsafe { Library::new(*name) }.ok()?, (*name).to_owned()))
        });
        found.expect("the C library")
    }

    #[test]
    fn uuids_are_written_as_nvidia_smi_does() {
        let bytes: [u8; 16] = std::array::from_fn(|i| 0x10 + i as u8);
        assert_eq!(uuid_text(&bytes), "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f");
    }
}
