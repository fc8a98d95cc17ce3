//! NVIDIA's driver as far as it is needed before, and beside, burn: which GPUs there are, and whether they can reach each
//! other's memory. Loaded when asked for, by name, in every build: a program for the CPU can say what a machine has.
//!
//! The names looked for are those that burn's CUDA backend tries (cudarc, `get_lib_name_candidates`), so that what is found
//! here is found there, where a missing library is a panic.

mod context;
mod functions;
pub mod probe;

use std::{
    ffi::{CStr, c_int},
    fmt,
    ptr::null_mut,
};

use libloading::Library;

pub use self::context::{Context, Memory, Module};
use self::functions::Functions;

/// A device's address.
pub type Address = u64;
/// What another process opens memory by.
pub type IpcHandle = [u8; 64];

/// Versions that cudarc puts behind a library's name, in its order.
const SUFFIXES: [&str; 7] = ["", ".13", ".12", ".11", ".10", ".9", ".1"];

/// `CUdevice_attribute` of `cuda.h`.
mod attribute {
    pub(super) const MULTIPROCESSORS: i32 = 16;
    pub(super) const COMPUTE_MAJOR: i32 = 75;
    pub(super) const COMPUTE_MINOR: i32 = 76;
}

/// A library that is not there, or not whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotLoaded {
    /// The names that were tried.
    pub tried: Vec<String>,
    /// What the loader said of the last one that was more than absent, else of the last one.
    pub cause: String,
}

impl fmt::Display for NotLoaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "looked for {} on the loader's path: {}", self.tried.join(", "), self.cause)
    }
}

/// A call that the driver refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverError {
    /// The function.
    pub call: &'static str,
    /// `CUresult`.
    pub code: i32,
    /// Its name, e.g. `CUDA_ERROR_NO_DEVICE`.
    pub name: String,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.name, self.code)
    }
}

/// A GPU that this process may use.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Gpu {
    /// Its number among those that are visible.
    pub index: usize,
    /// The part's name.
    pub name: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Compute capability, major and minor.
    pub compute: [u32; 2],
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// The card's own, `GPU-…`.
    pub uuid: String,
}

/// NCCL's names: NVIDIA's packages give it the first alone, which cudarc does not try.
pub const NCCL_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Loads the first of a library's names that there is, and tells which.
///
/// # Errors
/// None of them can be loaded.
pub fn open(stem: &str) -> Result<(Library, String), NotLoaded> {
    open_first(SUFFIXES.iter().map(|suffix| format!("lib{stem}.so{suffix}")).collect())
}

/// Loads the first of these that there is, and tells which.
///
/// # Errors
/// None of them can be loaded.
pub fn open_first(tried: Vec<String>) -> Result<(Library, String), NotLoaded> {
    let mut cause = String::new();
    for name in &tried {
        // SAFETY: the constructors of NVIDIA's libraries are written to be run by dlopen, and have no requirements of ours.
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

/// What the system itself said: the loader's words stand behind a general one.
pub(super) fn innermost(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

/// The version that a library reports through a function of one or two `int*`: NVRTC's and NCCL's.
pub fn version(library: &Library, symbol: &str, numbers: usize) -> Option<Vec<i32>> {
    let mut found = [0 as c_int; 2];
    let [first, second] = &mut found;
    let status = match numbers {
        // SAFETY: `nvrtcResult nvrtcVersion(int*, int*)`; both numbers outlive the call.
        2 => unsafe {
            let call = library.get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(symbol.as_bytes()).ok()?;
            call(first, second)
        },
        // SAFETY: `ncclResult_t ncclGetVersion(int*)`; the number outlives the call.
        _ => unsafe {
            let call = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(symbol.as_bytes()).ok()?;
            call(first)
        },
    };
    (status == 0).then(|| found[..numbers.clamp(1, 2)].to_vec())
}

type DriverResult<T = ()> = Result<T, DriverError>;

/// The driver, loaded and initialised.
#[derive(Debug)]
pub struct Driver {
    functions: Functions,
    /// The name it was found under.
    pub library: String,
}

/// Why there is no [`Driver`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoDriver {
    /// No library.
    NotLoaded(NotLoaded),
    /// It is there and refuses: no GPU, or none visible, or a kernel module of another version.
    Refused {
        /// The library's name.
        library: String,
        /// What it said.
        error: DriverError,
    },
}

impl Driver {
    /// Loads the driver and initialises it; no context is made, no memory of a GPU is taken.
    ///
    /// # Errors
    /// It is not there, or refuses.
    pub fn load() -> Result<Self, NoDriver> {
        let (opened, library) = open("cuda").map_err(NoDriver::NotLoaded)?;
        let functions = Functions::of(&opened)
            .map_err(|cause| NoDriver::NotLoaded(NotLoaded { tried: vec![library.clone()], cause }))?;
        // the functions stay for as long as the process: burn's own handle does too
        std::mem::forget(opened);
        let driver = Self { functions, library };
        // SAFETY: `cuInit(0)` may be called any number of times.
        match driver.done("cuInit", unsafe { (functions.init)(0) }) {
            Ok(()) => Ok(driver),
            Err(error) => Err(NoDriver::Refused { library: driver.library, error }),
        }
    }

    fn done(&self, call: &'static str, code: c_int) -> DriverResult {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: the pointer is written, where the code is known, with that of a string that is never freed.
        let known = unsafe { (self.functions.error_name)(code, &mut name) } == 0 && !name.is_null();
        let name = match known {
            // SAFETY: as above: a C string for good.
            true => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            false => "unknown error".to_owned(),
        };
        Err(DriverError { call, code, name })
    }

    /// An `int` that a function writes.
    fn number(&self, call: &'static str, write: impl FnOnce(*mut c_int) -> c_int) -> DriverResult<i32> {
        let mut number = 0;
        self.done(call, write(&mut number))?;
        Ok(number)
    }

    /// The newest CUDA that the driver serves, major and minor.
    ///
    /// # Errors
    /// The driver's.
    pub fn cuda_version(&self) -> DriverResult<[i32; 2]> {
        // SAFETY: writes one int.
        let version = self.number("cuDriverGetVersion", |to| unsafe { (self.functions.driver_version)(to) })?;
        Ok([version / 1000, version % 1000 / 10])
    }

    /// How many GPUs this process sees, after `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// The driver's.
    pub fn count(&self) -> DriverResult<usize> {
        // SAFETY: writes one int.
        let count = self.number("cuDeviceGetCount", |to| unsafe { (self.functions.device_count)(to) })?;
        Ok(count.max(0) as usize)
    }

    fn handle(&self, index: usize) -> DriverResult<c_int> {
        // SAFETY: writes one int; an index that is out of range is refused.
        self.number("cuDeviceGet", |to| unsafe { (self.functions.device)(to, index as c_int) })
    }

    /// What the driver says of the GPU `index`.
    ///
    /// # Errors
    /// The driver's.
    pub fn gpu(&self, index: usize) -> DriverResult<Gpu> {
        let device = self.handle(index)?;
        let mut name = [0u8; 256];
        // SAFETY: at most 255 bytes and a zero are written into the 256.
        let code = unsafe { (self.functions.device_name)(name.as_mut_ptr().cast(), 255, device) };
        self.done("cuDeviceGetName", code)?;
        let mut memory = 0usize;
        // SAFETY: writes one size_t.
        self.done("cuDeviceTotalMem", unsafe { (self.functions.device_memory)(&mut memory, device) })?;
        let mut uuid = [0u8; 16];
        // SAFETY: writes 16 bytes.
        self.done("cuDeviceGetUuid", unsafe { (self.functions.device_uuid)(&mut uuid, device) })?;
        let attribute = |which: c_int| {
            // SAFETY: writes one int.
            let code = |to| unsafe { (self.functions.device_attribute)(to, which, device) };
            self.number("cuDeviceGetAttribute", code).map(|value| value as u32)
        };
        Ok(Gpu {
            index,
            name: CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned(),
            memory_bytes: memory as u64,
            compute: [attribute(attribute::COMPUTE_MAJOR)?, attribute(attribute::COMPUTE_MINOR)?],
            multiprocessors: attribute(attribute::MULTIPROCESSORS)?,
            uuid: uuid_text(&uuid),
        })
    }

    /// Whether the driver says that GPU `one` reaches the memory of GPU `other`.
    ///
    /// # Errors
    /// The driver's.
    pub fn can_access_peer(&self, one: usize, other: usize) -> DriverResult<bool> {
        let (one, other) = (self.handle(one)?, self.handle(other)?);
        // SAFETY: writes one int.
        let code = |to| unsafe { (self.functions.can_access_peer)(to, one, other) };
        Ok(self.number("cuDeviceCanAccessPeer", code)? != 0)
    }

    /// The primary context of a GPU, which burn uses as well.
    ///
    /// # Errors
    /// The driver's.
    pub fn context(&self, index: usize) -> DriverResult<Context<'_>> {
        let device = self.handle(index)?;
        let mut context = null_mut();
        // SAFETY: writes one pointer; released in `Context::drop`.
        self.done("cuDevicePrimaryCtxRetain", unsafe { (self.functions.retain)(&mut context, device) })?;
        Ok(Context { driver: self, device, context })
    }
}

/// `GPU-8-4-4-4-12`, as `nvidia-smi -L` and `CUDA_VISIBLE_DEVICES` have it.
fn uuid_text(bytes: &[u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_told_by_all_its_names() {
        let missing = open("trainer-has-no-such-library").unwrap_err();
        assert_eq!(missing.tried.len(), SUFFIXES.len());
        let text = missing.to_string();
        assert!(text.contains("libtrainer-has-no-such-library.so, ") && text.contains(".so.13"), "{text}");
        assert!(text.contains("No such file"), "{text}");
    }

    #[test]
    fn a_library_without_the_drivers_functions_is_no_driver() {
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
