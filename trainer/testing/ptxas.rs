//! NVIDIA's assembler in tests. Included with `#[path]`, as `nvrtc`.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shared::skip_or_fail;

/// `ptxas` of the package nvidia-cuda-nvcc in the Python of `TRAINER_TEST_PYTHON`.
pub struct Ptxas {
    program: PathBuf,
    folder: tempfile::TempDir,
}

/// The resources of a multiprocessor that a kernel needs.
#[derive(Debug, Clone, Copy)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of shared memory per block.
    pub shared: u32,
    /// Bytes that a thread writes to memory for lack of registers.
    pub spilled: u32,
}

impl Ptxas {
    /// Returns ptxas; `None`, with a message, if it is missing.
    pub fn find() -> Option<Self> {
        let python = std::env::var("TRAINER_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
        let look =
            "import glob, sys; print(*[p for root in sys.path for p in glob.glob(f'{root}/nvidia/*/bin/ptxas')][:1])";
        let output = Command::new(python).args(["-c", look]).output().ok();
        let found = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
        if found.is_empty() {
            skip_or_fail("ptxas", "the Python of TRAINER_TEST_PYTHON has no package nvidia-cuda-nvcc");
            return None;
        }
        Some(Self { program: found.into(), folder: tempfile::tempdir().unwrap() })
    }

    /// Assembles the only kernel of `ptx`.
    ///
    /// # Panics
    ///
    /// With ptxas's messages, when it fails.
    pub fn resources(&self, ptx: &str, arch: &str) -> Resources {
        let path = |name: &str| self.folder.path().join(name);
        std::fs::write(path("kernel.ptx"), ptx).unwrap();
        let output = Command::new(&self.program)
            .args(["-v", &format!("-arch={arch}"), "-o"])
            .args([path("kernel.cubin"), path("kernel.ptx")])
            .output()
            .unwrap();
        let report = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{}: {report}", Path::new(&self.program).display());
        let before = |what: &str| -> u32 {
            let words: Vec<&str> = report.split_whitespace().collect();
            let unit: Vec<&str> = what.split(' ').collect();
            let at = words
                .windows(unit.len())
                .position(|found| found.iter().zip(&unit).all(|(found, unit)| found.trim_end_matches(',') == *unit));
            at.map_or(0, |at| words[at - 1].parse().unwrap_or_else(|_| panic!("{what}: {report}")))
        };
        let resources = Resources {
            registers: before("registers"),
            shared: before("bytes smem"),
            spilled: before("bytes spill stores"),
        };
        assert!(resources.registers > 0, "{report}");
        resources
    }
}
