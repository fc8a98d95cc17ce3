//! The functions of `libnvrtc` that programs of this project call. They pass the calls on to NVIDIA's library, whose path is in
//! `CUDA_ON_CPU_NVRTC`, and ask it for PTX only.
//!
//! cubecl names a GPU (`sm_80`), for which NVRTC assembles the PTX, and then takes the PTX. For the virtual architecture
//! (`compute_80`) the PTX is the same, and compilation takes half of the time.
#![allow(non_snake_case, reason = "the names of nvrtc.h")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::LazyLock;

use crate::log;

/// `NVRTC_ERROR_INTERNAL_ERROR`.
const INTERNAL: c_int = 11;

static NVRTC: LazyLock<Option<libloading::Library>> = LazyLock::new(|| {
    let path = std::env::var_os("CUDA_ON_CPU_NVRTC").unwrap_or_default();
    // SAFETY: loading NVRTC runs only its own initialisers.
    let library = unsafe { libloading::Library::new(&path) };
    library.inspect_err(|error| eprintln!("cuda-on-cpu: CUDA_ON_CPU_NVRTC: {error}")).ok()
});

/// Defines functions that C calls and that NVIDIA's library executes.
macro_rules! forward {
    ($(fn $name:ident($($argument:ident: $type:ty),*);)*) => { $(
        #[doc = concat!("`", stringify!($name), "` of `nvrtc.h`.")]
        ///
        /// # Safety
        ///
        /// As in `nvrtc.h`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            let Some(library) = NVRTC.as_ref() else { return INTERNAL };
            // SAFETY: the signature is that of nvrtc.h, and the caller has made sure of the arguments.
            unsafe {
                match library.get::<unsafe extern "C" fn($($type),*) -> c_int>(stringify!($name)) {
                    Ok(function) => function($($argument),*),
                    Err(_) => INTERNAL,
                }
            }
        }
    )* };
}

forward! {
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int);
    fn nvrtcCreateProgram(
        program: *mut usize, source: *const c_char, name: *const c_char, headers: c_int, texts: *const *const c_char,
        names: *const *const c_char
    );
    fn nvrtcDestroyProgram(program: *mut usize);
    fn nvrtcGetPTXSize(program: usize, size: *mut usize);
    fn nvrtcGetPTX(program: usize, ptx: *mut c_char);
    fn nvrtcGetProgramLogSize(program: usize, size: *mut usize);
    fn nvrtcGetProgramLog(program: usize, log: *mut c_char);
}

/// `nvrtcCompileProgram` of `nvrtc.h`, for a virtual architecture. The log has the options that the program has chosen.
///
/// # Safety
///
/// As in `nvrtc.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(program: usize, count: c_int, options: *const *const c_char) -> c_int {
    // SAFETY: as in nvrtc.h, `options` has `count` C strings.
    let chosen: Vec<&CStr> = unsafe { (0..count as usize).map(|index| CStr::from_ptr(*options.add(index))).collect() };
    log::call("nvrtcCompileProgram", &[("program", program as u64)], || {
        log::note(|| format!("{chosen:?}"));
        let library = NVRTC.as_ref().ok_or(INTERNAL)?;
        let options: Vec<CString> = chosen.iter().map(|option| virtual_architecture(option)).collect();
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        type Compile = unsafe extern "C" fn(usize, c_int, *const *const c_char) -> c_int;
        // SAFETY: the signature is that of nvrtc.h, and the caller has made sure of `program`.
        let code = unsafe {
            let compile = library.get::<Compile>("nvrtcCompileProgram").map_err(|_| INTERNAL)?;
            compile(program, count, options.as_ptr())
        };
        if code == 0 { Ok(()) } else { Err(code) }
    })
}

/// Returns an option, with `compute_` for `sm_` in the architecture.
fn virtual_architecture(option: &CStr) -> CString {
    let text = option.to_bytes();
    match text.strip_prefix(b"--gpu-architecture=sm_") {
        Some(version) => CString::new([b"--gpu-architecture=compute_", version].concat()).unwrap_or_default(),
        None => option.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::virtual_architecture;

    #[test]
    fn only_the_architecture_becomes_virtual() {
        assert_eq!(*virtual_architecture(c"--gpu-architecture=sm_90a"), *c"--gpu-architecture=compute_90a");
        assert_eq!(*virtual_architecture(c"--include-path=/opt/sm_80"), *c"--include-path=/opt/sm_80");
    }
}
