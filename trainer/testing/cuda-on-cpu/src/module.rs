//! PTX, compiled for the CPU by the system's C compiler, and loaded.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use libloading::Library;
use sha2::{Digest as _, Sha256};

use crate::ptx::parse::parse;
use crate::ptx::translate::{Kernel, symbol, translate};

/// A kernel's grid, run: parameters, blocks, threads of a block, bytes of dynamic shared memory, stacks.
type Run = unsafe extern "C" fn(*const u8, *const u32, *const u32, u32, *mut u8);

/// One kernel of a module.
#[derive(Debug, Clone)]
pub struct Function {
    /// Entry point.
    pub name: String,
    /// Offset and size in bytes of each parameter in the packed block that [`Function::run`] takes.
    pub parameters: Vec<(usize, usize)>,
    /// Bytes of that block.
    pub parameter_bytes: usize,
    /// Bytes of shared memory that the kernel declares by itself.
    pub shared: usize,
    run: Run,
}

/// A loaded module. Never unloaded: a stream may still run it.
#[derive(Debug)]
pub struct Module {
    /// Its kernels.
    pub functions: Vec<Function>,
}

/// Stacks of a block's threads, 64 KiB each, of which only what is used becomes memory.
const STACKS: usize = 1024 * 65536;

thread_local! {
    static STACK: Cell<*mut u8> = const { Cell::new(std::ptr::null_mut()) };
}

/// This thread's stacks; they stay until the process ends, as streams do.
fn stacks() -> *mut u8 {
    STACK.with(|cell| {
        if cell.get().is_null() {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new mapping, which nobody else has.
            let made =
                unsafe { libc::mmap(std::ptr::null_mut(), STACKS, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
            assert!(made != libc::MAP_FAILED, "no memory for the stacks of a block's threads");
            cell.set(made.cast());
        }
        cell.get()
    })
}

impl Function {
    /// Runs all blocks, here and now. `parameters` is the packed block, `shared` the bytes of dynamic shared memory.
    ///
    /// # Safety
    /// The kernel accesses what its parameters point to.
    pub unsafe fn run(&self, parameters: &[u8], grid: [u32; 3], block: [u32; 3], shared: u32) {
        // SAFETY: the translated kernel has this signature; the caller answers for what it accesses.
        unsafe { (self.run)(parameters.as_ptr(), grid.as_ptr(), block.as_ptr(), shared, stacks()) }
    }
}

/// Where compiled modules are kept: `CUDA_ON_CPU_CACHE`, or a folder of the user's among temporary files.
fn cache() -> PathBuf {
    match std::env::var_os("CUDA_ON_CPU_CACHE") {
        Some(folder) => folder.into(),
        // SAFETY: asks for a number.
        None => std::env::temp_dir().join(format!("cuda-on-cpu-{}", unsafe { libc::getuid() })),
    }
}

/// `CUDA_ON_CPU_RUN=no`: everything is looked at, and nothing is written to the GPU's memory.
pub(crate) fn idle() -> bool {
    static IDLE: LazyLock<bool> =
        LazyLock::new(|| std::env::var_os("CUDA_ON_CPU_RUN").is_some_and(|value| value == "no"));
    *IDLE
}

unsafe extern "C" fn nothing(_: *const u8, _: *const u32, _: *const u32, _: u32, _: *mut u8) {}

/// Translates PTX to C, compiles that with `CC` or `cc`, and loads it.
///
/// # Errors
/// What is not known in the text, what the compiler says, or what the loader says.
pub fn load(ptx: &str) -> Result<Module, String> {
    let (text, kernels) = translate(&parse(ptx)?)?;
    let function = |kernel: Kernel, run: Run| Function {
        name: kernel.name,
        parameters: kernel.parameters,
        parameter_bytes: kernel.parameter_bytes,
        shared: kernel.shared,
        run,
    };
    if idle() {
        return Ok(Module { functions: kernels.into_iter().map(|kernel| function(kernel, nothing)).collect() });
    }
    let digest = Sha256::digest(text.as_bytes());
    let name: String = digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    let library = cache().join(format!("{name}.so"));
    if !library.exists() {
        compile(&text, &library)?;
    }
    let path = library.display();
    // SAFETY: a library that was compiled from the text above; it has no initialisers.
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

/// Compiles next to where it goes, and renames: other processes may do the same.
fn compile(text: &str, library: &Path) -> Result<(), String> {
    let folder = library.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    // SAFETY: asks for a number.
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
