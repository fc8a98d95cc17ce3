//! NVRTC compiles every kernel, without a GPU, and the PTX has the memory accesses that the protocol needs.

#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../../testing/shared.rs"]
mod shared;

#[path = "../../testing/nvrtc.rs"]
mod nvrtc;

use comm::cuda::layout::WireType;
use comm::cuda::protocol::Kernel;
use comm::cuda::source::{KernelVariant, SOURCE_COUNTS};

use self::nvrtc::{Nvrtc, count};

fn compile(nvrtc: &Nvrtc, variants: &[KernelVariant], arch: &str) -> Vec<String> {
    let sources: Vec<_> = variants.iter().map(|variant| (format!("{variant:?}"), variant.source())).collect();
    nvrtc.compile(&sources, arch)
}

#[test]
fn every_kernel_compiles_and_has_its_accesses() {
    let Some(nvrtc) = Nvrtc::find() else { return };
    let variants: Vec<_> = Kernel::ALL
        .into_iter()
        .flat_map(|kernel| WireType::ALL.map(|wire| KernelVariant { kernel, wire, world_size: 8, max_sources: 8 }))
        .collect();
    for arch in ["sm_80", "sm_90"] {
        for (variant, ptx) in variants.iter().zip(compile(&nvrtc, &variants, arch)) {
            let at_least = |instruction: &str, times: usize| {
                let found = count(&ptx, instruction);
                assert!(found >= times, "{variant:?}, {arch}: {found} {instruction}, not {times}");
            };
            assert!(ptx.contains(&format!(".entry {}(", variant.kernel.name())), "{variant:?}");
            let barriers = if variant.kernel == Kernel::TwoShot { 2 } else { 1 };
            at_least("st.release.sys.global.u64", barriers);
            at_least("ld.acquire.sys.global.u64", barriers);
            // Two for each device barrier, one in `begin_launch`.
            at_least("bar.sync", 2 * barriers + 1);
            at_least("ld.relaxed.sys.global.u64", barriers + 1);
            // Packs are read and written in one access.
            at_least("ld.global.v4", 2);
            at_least("st.global.v4", 2);
            assert_eq!(count(&ptx, "ld.global.nc"), 0, "{variant:?}: loads through the non-coherent cache");
        }
    }
}

#[test]
fn every_world_and_number_of_tensors_compiles() {
    let Some(nvrtc) = Nvrtc::find() else { return };
    let of_world =
        |world_size| KernelVariant { kernel: Kernel::TwoShot, wire: WireType::Bf16, world_size, max_sources: 2 };
    compile(&nvrtc, &(2..=8).map(of_world).collect::<Vec<_>>(), "sm_90");
    let of_sources =
        |max_sources| KernelVariant { kernel: Kernel::OneShot, wire: WireType::F32, world_size: 2, max_sources };
    compile(&nvrtc, &SOURCE_COUNTS.into_iter().map(of_sources).collect::<Vec<_>>(), "sm_80");
    let probes = [Kernel::Probe, Kernel::Order].map(|kernel| KernelVariant {
        kernel,
        wire: WireType::F32,
        world_size: 8,
        max_sources: 2,
    });
    // cubecl's name for Hopper.
    for (variant, ptx) in probes.iter().zip(compile(&nvrtc, &probes, "sm_90a")) {
        assert!(count(&ptx, "st.release.sys") >= 1 && count(&ptx, "ld.acquire.sys") >= 1, "{variant:?}");
    }
}
