//! The parts of the machine besides its GPUs: processor, kernel module, MPI.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde::Serialize;

use crate::device;
use crate::report::environment::Environment;

/// The processor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Cpu {
    /// Model name, if the system reports one.
    pub model: Option<String>,
    /// Cores that this process may use.
    pub cores: usize,
    /// Instructions that the kernels use.
    pub kernels: &'static str,
    /// Memory of the machine.
    pub memory_bytes: Option<u64>,
}

impl Cpu {
    pub(super) fn detect() -> Self {
        let environment = Environment::detect("");
        Self {
            model: environment.cpu,
            cores: environment.cores.unwrap_or(1),
            kernels: device::cpu_kernels(),
            memory_bytes: environment.memory_bytes,
        }
    }
}

/// A launcher of MPI programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Mpi {
    /// The program.
    pub path: PathBuf,
    /// First line that it prints for `--version`.
    pub version: Option<String>,
    /// Thread support of the MPI library that this build uses, or why it is unknown.
    pub threads: String,
}

/// Starts MPI in another process, and returns its thread support.
fn mpi_threads() -> String {
    if !cfg!(feature = "mpi") {
        return "thread support unknown, as this build has no MPI".into();
    }
    super::child::ask(&["--mpi-threads"]).unwrap_or_else(|error| format!("MPI does not start: {error}"))
}

/// Finds `mpirun` or `mpiexec` in `PATH`.
pub(super) fn mpi() -> Result<Mpi, String> {
    const NAMES: [&str; 2] = ["mpirun", "mpiexec"];
    let path = env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = env::split_paths(&path).collect();
    let found =
        NAMES.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name))).find(|path| path.is_file());
    let path = found.ok_or_else(|| format!("looked for {} in PATH", NAMES.join(" and ")))?;
    Ok(Mpi { version: first_line(&path), path, threads: mpi_threads() })
}

fn first_line(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some(text.lines().next()?.trim().to_owned()).filter(|line| !line.is_empty())
}

/// Returns the version of NVIDIA's kernel module, if the module is loaded.
pub(super) fn kernel_module() -> Option<String> {
    let text = fs::read_to_string("/sys/module/nvidia/version")
        .or_else(|_| fs::read_to_string("/proc/driver/nvidia/version"))
        .ok()?;
    module_version(&text)
}

/// Returns the first word that is a version, e.g. of `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Release …`.
fn module_version(text: &str) -> Option<String> {
    let version = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    text.split_whitespace().find(version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_modules_version_is_read_from_both_files() {
        assert_eq!(module_version("580.159.03\n").as_deref(), Some("580.159.03"));
        let line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (a@b)\nGCC version: 13.3";
        assert_eq!(module_version(line).as_deref(), Some("570.86.10"));
        assert_eq!(module_version("NVRM version: none"), None);
    }
}
