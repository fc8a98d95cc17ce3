//! Modules: PTX, translated to C, compiled by the system's C compiler, and loaded.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use libloading::Library;
use sha2::{Digest as _, Sha256};

use crate::ptx::parse::parse;
use crate::ptx::translate::{Kernel, symbol, translate};

/// Runs a kernel's grid. Arguments: parameters, blocks, threads per block, bytes of dynamic shared memory, stacks.
type Run = unsafe extern "C" fn(*const u8, *const u32, *const u32, u32, *mut u8);

/// One kernel of a module.
#[derive(Debug, Clone)]
pub struct Function {
    /// Entry point.
    pub name: String,
    /// Offset and size in bytes of each parameter in the packed block that [`Function::run`] takes.
    pub parameters: Vec<(usize, usize)>,
    /// Bytes of the packed block.
    pub parameter_bytes: usize,
    /// Bytes of static shared memory.
    pub shared: usize,
    run: Run,
}

/// A loaded module. It is never unloaded, because a stream may still run it.
#[derive(Debug)]
pub struct Module {
    /// The module's kernels.
    pub functions: Vec<Function>,
}

/// Bytes of the stacks of a block's fibers: 1024 stacks of 64 KiB. The kernel allocates pages when they are used.
const STACKS: usize = 1024 * 65536;

thread_local! {
    static STACK: Cell<*mut u8> = const { Cell::new(std::ptr::null_mut()) };
}

/// Returns this thread's stacks. They are kept until the process ends.
fn stacks() -> *mut u8 {
    STACK.with(|cell| {
        if cell.get().is_null() {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new mapping, which nobody else uses.
            let made =
                unsafe { libc::mmap(std::ptr::null_mut(), STACKS, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
            assert!(made != libc::MAP_FAILED, "no memory for the stacks of a block's threads");
            cell.set(made.cast());
        }
        cell.get()
    })
}

impl Function {
    /// Runs all blocks on the calling thread. `parameters` is the packed block, `shared` the bytes of dynamic shared memory.
    ///
    /// # Safety
    /// The memory that the parameters point to is valid.
    pub unsafe fn run(&self, parameters: &[u8], grid: [u32; 3], block: [u32; 3], shared: u32) {
        // SAFETY: the translated kernel has this signature; the caller is responsible for the memory that it accesses.
        unsafe { (self.run)(parameters.as_ptr(), grid.as_ptr(), block.as_ptr(), shared, stacks()) }
    }
}

/// Returns the folder of compiled modules: `CUDA_ON_CPU_CACHE`, or a per-user folder in the temporary folder.
fn cache() -> PathBuf {
    match std::env::var_os("CUDA_ON_CPU_CACHE") {
        Some(folder) => folder.into(),
        // SAFETY: `getuid` has no preconditions.
        None => std::env::temp_dir().join(format!("cuda-on-cpu-{}", unsafe { libc::getuid() })),
    }
}

/// `CUDA_ON_CPU_RUN=no`: all calls are checked, but nothing is written to a GPU's memory.
pub(crate) fn kernels_disabled() -> bool {
    static DISABLED: LazyLock<bool> =
        LazyLock::new(|| std::env::var_os("CUDA_ON_CPU_RUN").is_some_and(|value| value == "no"));
    *DISABLED
}

/// `CUDA_ON_CPU_TF32=exact`: matrix instructions do not round f32 to TF32.
fn tf32_is_exact() -> bool {
    static EXACT: LazyLock<bool> =
        LazyLock::new(|| std::env::var_os("CUDA_ON_CPU_TF32").is_some_and(|value| value == "exact"));
    *EXACT
}

unsafe extern "C" fn do_nothing(_: *const u8, _: *const u32, _: *const u32, _: u32, _: *mut u8) {}

/// Translates PTX to C, compiles the C with `CC` or `cc`, and loads the library.
///
/// # Errors
/// PTX that is not supported, or an error of the compiler or the loader.
pub fn load(ptx: &str) -> Result<Module, String> {
    let (mut text, kernels) = translate(&parse(ptx)?)?;
    if tf32_is_exact() {
        text.insert_str(0, "#define TF32_EXACT\n");
    }
    let function = |kernel: Kernel, run: Run| Function {
        name: kernel.name,
        parameters: kernel.parameters,
        parameter_bytes: kernel.parameter_bytes,
        shared: kernel.shared,
        run,
    };
    if kernels_disabled() {
        return Ok(Module { functions: kernels.into_iter().map(|kernel| function(kernel, do_nothing)).collect() });
    }
    let digest = Sha256::digest(text.as_bytes());
    let name: String = digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    let library = cache().join(format!("{name}.so"));
    if !library.exists() {
        compile(&text, &library)?;
    }
    let path = library.display();
    // SAFETY: the library was compiled from the text above and has no initialisers.
    let loaded = unsafe { Library::new(&library) }.map_err(|e| format!("{path}: {e}"))?;
    let functions = kernels.into_iter().map(|kernel| {
        let entry = format!("run_{}\0", symbol(&kernel.name));
        // SAFETY: the translation defines it with this type.
        let run = *unsafe { loaded.get::<Run>(entry.as_bytes()) }.map_err(|e| format!("{path}: {e}"))?;
        Ok(function(kernel, run))
    });
    let functions = functions.collect::<Result<_, String>>()?;
    std::mem::forget(loaded);
    Ok(Module { functions })
}

/// Compiles into a temporary file in the same folder and renames it, because other processes may compile the same text.
fn compile(text: &str, library: &Path) -> Result<(), String> {
    let folder = library.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    // SAFETY: `gettid` has no preconditions.
    let own = format!("{}-{}", std::process::id(), unsafe { libc::gettid() });
    let (source, made) = (library.with_extension(format!("{own}.c")), library.with_extension(format!("{own}.so")));
    std::fs::write(&source, text).map_err(|e| format!("{}: {e}", source.display()))?;
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let flags =
        ["-O1", "-shared", "-fPIC", "-w", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv"];
    let run = Command::new(&compiler).args(flags).arg(&source).arg("-o").arg(&made).arg("-lm").output();
    let run = run.map_err(|e| format!("{}: {e}", compiler.display()))?;
    if !run.status.success() {
        let said = String::from_utf8_lossy(&run.stderr);
        let said: String = said.lines().filter(|line| line.contains("error")).take(5).collect::<Vec<_>>().join("\n");
        return Err(format!("{} refuses {}:\n{said}", compiler.display(), source.display()));
    }
    std::fs::rename(&made, library).map_err(|e| format!("{}: {e}", library.display()))?;
    let _ = std::fs::remove_file(&source);
    Ok(())
}
