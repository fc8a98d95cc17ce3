//! NVIDIA's compilers in tests, without a GPU. Included with `#[path]` in a crate that includes `shared` too.

use std::path::PathBuf;
use std::process::{Command, Output};

use crate::shared::skip_or_fail;

/// NVRTC, which compiles CUDA C++ to PTX. `TRAINER_TEST_NVRTC` is the path of libnvrtc, or `wheel`: that of the package
/// nvidia-cuda-nvrtc in the Python of `TRAINER_TEST_PYTHON`.
pub struct Nvrtc {
    library: String,
    folder: tempfile::TempDir,
}

fn python() -> String {
    std::env::var("TRAINER_TEST_PYTHON").unwrap_or_else(|_| "python3".into())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeeds(what: &str, command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{what}: {command:?}: {e}"));
    assert!(output.status.success(), "{what}: {}", text(&output.stderr));
    output
}

impl Nvrtc {
    /// Returns NVRTC; `None`, with a message, if it is missing.
    pub fn find() -> Option<Self> {
        let Ok(library) = std::env::var("TRAINER_TEST_NVRTC") else {
            skip_or_fail("NVRTC", "TRAINER_TEST_NVRTC is not set to the path of libnvrtc or to `wheel`");
            return None;
        };
        Some(Self { library, folder: tempfile::tempdir().unwrap() })
    }

    /// Compiles sources to PTX for an architecture: `compute_80`, or `sm_80` to assemble the PTX too, which takes as long again.
    /// Each source has a name for messages.
    ///
    /// # Panics
    ///
    /// With NVRTC's messages, when a source has errors.
    pub fn compile(&self, sources: &[(String, String)], arch: &str) -> Vec<String> {
        let files: Vec<_> = sources
            .iter()
            .map(|(name, source)| {
                let file = self.folder.path().join(format!("{arch}-{name}.cu").replace(['/', ' '], "-"));
                std::fs::write(&file, source).unwrap();
                file
            })
            .collect();
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).ancestors().find_map(|folder| {
            let script = folder.join("trainer/testing/nvrtc.py");
            script.exists().then_some(script)
        });
        let mut command = Command::new(python());
        command.arg(script.expect("the repository has nvrtc.py")).args([&self.library, arch]).args(&files);
        succeeds(arch, &mut command);
        files.iter().map(|file| std::fs::read_to_string(file.with_extension("cu.ptx")).unwrap()).collect()
    }
}

/// Returns how often PTX has an instruction.
pub fn count(ptx: &str, instruction: &str) -> usize {
    ptx.lines().filter(|line| line.trim_start().starts_with(instruction)).count()
}
