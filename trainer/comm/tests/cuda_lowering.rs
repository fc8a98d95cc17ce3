//! NVRTC compiles every kernel, without a GPU, and the PTX has the memory accesses that the protocol needs.

#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../../testing/shared.rs"]
mod shared;

use std::path::PathBuf;
use std::process::Command;

use comm::cuda::layout::WireType;
use comm::cuda::protocol::Kernel;
use comm::cuda::source::{KernelVariant, PARTS};

/// `TRAINER_TEST_NVRTC` is the path of libnvrtc, or `wheel`: that of the package nvidia-cuda-nvrtc in the Python of
/// `TRAINER_TEST_PYTHON`.
struct Nvrtc {
    library: String,
    python: String,
    folder: tempfile::TempDir,
}

impl Nvrtc {
    fn find() -> Option<Self> {
        let Ok(library) = std::env::var("TRAINER_TEST_NVRTC") else {
            shared::skip_or_fail("NVRTC", "TRAINER_TEST_NVRTC is not set to the path of libnvrtc or to `wheel`");
            return None;
        };
        let python = std::env::var("TRAINER_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
        Some(Self { library, python, folder: tempfile::tempdir().unwrap() })
    }

    fn compile(&self, variant: &KernelVariant, arch: &str) -> String {
        let source = self.folder.path().join(format!("{variant:?}.cu"));
        std::fs::write(&source, variant.source()).unwrap();
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/cuda_support/nvrtc.py");
        let output = Command::new(&self.python).arg(script).args([&self.library, arch]).arg(&source).output().unwrap();
        assert!(output.status.success(), "{variant:?}, {arch}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

fn count(ptx: &str, instruction: &str) -> usize {
    ptx.lines().filter(|line| line.trim_start().starts_with(instruction)).count()
}

#[test]
fn every_kernel_compiles_and_has_its_accesses() {
    let Some(nvrtc) = Nvrtc::find() else { return };
    for arch in ["sm_80", "sm_90"] {
        for kernel in Kernel::ALL {
            for wire in WireType::ALL {
                let variant = KernelVariant { kernel, wire, world: 8, parts: 8 };
                let ptx = nvrtc.compile(&variant, arch);
                let at_least = |instruction: &str, times: usize| {
                    let found = count(&ptx, instruction);
                    assert!(found >= times, "{variant:?}, {arch}: {found} {instruction}, not {times}");
                };
                assert!(ptx.contains(&format!(".entry {}(", kernel.name())), "{variant:?}");
                let meetings = if kernel == Kernel::TwoShot { 2 } else { 1 };
                at_least("st.release.sys.global.u64", meetings);
                at_least("ld.acquire.sys.global.u64", meetings);
                // Two for each meeting, one at the beginning.
                at_least("bar.sync", 2 * meetings + 1);
                at_least("ld.relaxed.sys.global.u64", meetings + 1);
                // Packs are read and written in one access.
                at_least("ld.global.v4", 2);
                at_least("st.global.v4", 2);
                assert_eq!(count(&ptx, "ld.global.nc"), 0, "{variant:?}: past the caches that keep in step");
            }
        }
    }
}

#[test]
fn every_world_and_number_of_tensors_compiles() {
    let Some(nvrtc) = Nvrtc::find() else { return };
    for world in 2..=8 {
        nvrtc.compile(&KernelVariant { kernel: Kernel::TwoShot, wire: WireType::Bf16, world, parts: 2 }, "sm_90");
    }
    for parts in PARTS {
        nvrtc.compile(&KernelVariant { kernel: Kernel::OneShot, wire: WireType::F32, world: 2, parts }, "sm_80");
    }
    for kernel in [Kernel::Probe, Kernel::Order] {
        // cubecl's name for Hopper.
        let ptx = nvrtc.compile(&KernelVariant { kernel, wire: WireType::F32, world: 8, parts: 2 }, "sm_90a");
        assert!(count(&ptx, "st.release.sys") >= 1 && count(&ptx, "ld.acquire.sys") >= 1, "{}", kernel.name());
    }
}
