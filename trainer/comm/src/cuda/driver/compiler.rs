//! NVRTC, the library that compiles CUDA C++ to PTX at run time. burn's backend compiles all its kernels with it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};

use libloading::Library;

use super::{NotLoaded, open};

/// `nvrtcProgram`.
type Program = *mut c_void;

/// NVRTC, loaded. Functions are looked up at each call, which is fast enough: `trainer doctor` compiles one kernel.
#[derive(Debug)]
pub struct Compiler {
    library: Library,
}

impl Compiler {
    /// Loads NVRTC by the names that cudarc tries.
    ///
    /// # Errors
    /// The names that were tried.
    pub fn load() -> Result<Self, NotLoaded> {
        Ok(Self { library: open("nvrtc")?.0 })
    }

    /// Compiles CUDA C++ to PTX for GPUs of a compute capability. Headers are searched in `include` and in its subfolder `cccl`.
    ///
    /// # Errors
    /// The compiler's messages, or the name of a function that the library lacks.
    pub fn compile(&self, source: &CStr, [major, minor]: [u32; 2], include: &Path) -> Result<CString, String> {
        let include = include.display();
        let options = [
            format!("--gpu-architecture=compute_{major}{minor}"),
            format!("--include-path={include}"),
            format!("--include-path={include}/cccl"),
        ];
        let options = options.map(|option| CString::new(option).unwrap_or_default());
        let pointers = options.each_ref().map(|option| option.as_ptr());
        let mut program: Program = null_mut();
        // SAFETY: the signatures are those of nvrtc.h. Strings and `program` outlive the calls; no headers are passed.
        unsafe {
            let create = self.function::<unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                *const *const c_char,
                *const *const c_char,
            ) -> c_int>("nvrtcCreateProgram")?;
            check(
                "nvrtcCreateProgram",
                create(&mut program, source.as_ptr(), c"doctor.cu".as_ptr(), 0, null(), null()),
            )?;
        }
        let ptx = self.compiled(program, &pointers);
        // SAFETY: the program was created above, and is not used any more.
        unsafe {
            let destroy = self.function::<unsafe extern "C" fn(*mut Program) -> c_int>("nvrtcDestroyProgram")?;
            destroy(&mut program);
        }
        ptx
    }

    fn compiled(&self, program: Program, options: &[*const c_char]) -> Result<CString, String> {
        // SAFETY: the signature is that of nvrtc.h, and the options are C strings that outlive the call.
        let code = unsafe {
            let compile = self.function::<unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int>(
                "nvrtcCompileProgram",
            )?;
            compile(program, options.len() as c_int, options.as_ptr())
        };
        if code != 0 {
            let log = self.text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
            let log = log.to_string_lossy();
            let line = log.lines().find(|line| line.contains("error")).or(log.lines().next()).unwrap_or("no message");
            return Err(format!("nvrtcCompileProgram: {} ({code})", line.trim()));
        }
        self.text(program, "nvrtcGetPTXSize", "nvrtcGetPTX")
    }

    /// Returns a text of the program. The function `length_of` writes the text's length with the final zero, `copy` writes the
    /// text.
    fn text(&self, program: Program, length_of: &'static str, copy: &'static str) -> Result<CString, String> {
        let mut length = 0usize;
        // SAFETY: the signatures are those of nvrtc.h, and there is room for the text.
        let bytes = unsafe {
            let length_of_text = self.function::<unsafe extern "C" fn(Program, *mut usize) -> c_int>(length_of)?;
            check(length_of, length_of_text(program, &mut length))?;
            let mut bytes = vec![0u8; length.max(1)];
            let copy_text = self.function::<unsafe extern "C" fn(Program, *mut c_char) -> c_int>(copy)?;
            check(copy, copy_text(program, bytes.as_mut_ptr().cast()))?;
            bytes
        };
        Ok(CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_owned())
    }

    /// Returns a function of the library.
    ///
    /// # Safety
    /// `F` is the function's type.
    unsafe fn function<F: Copy>(&self, name: &str) -> Result<F, String> {
        // SAFETY: required of the caller.
        unsafe { self.library.get::<F>(name.as_bytes()) }
            .map(|found| *found)
            .map_err(|_| format!("NVRTC has no {name}"))
    }
}

fn check(call: &str, code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{call} failed with {code}")) }
}
