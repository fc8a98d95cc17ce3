//! NVRTC compiles the convolutions of GPUs, without a GPU, and ptxas assembles them without spilled registers.

#[allow(dead_code, reason = "each test program uses a part")]
#[path = "../../../trainer/testing/shared.rs"]
mod shared;

#[path = "../../../trainer/testing/nvrtc.rs"]
mod nvrtc;

#[path = "../../../trainer/testing/ptxas.rs"]
mod ptxas;

// The source needs no GPU runtime, which this crate has with the feature `cuda` only.
#[allow(dead_code, reason = "the launches use the other part")]
#[path = "../src/gpu/implicit_gemm/source.rs"]
mod source;

use self::nvrtc::{Nvrtc, count};
use self::ptxas::Ptxas;
use self::source::{ConvKernel, Division, Pass, Tile};

/// Kernels of all passes, tiles and element types, with the longest accesses, and those of a network's first convolution.
fn kernels() -> Vec<ConvKernel> {
    let mut kernels = Vec::new();
    for pass in [Pass::Forward, Pass::DataGradient, Pass::WeightGradient] {
        for bf16 in [false, true] {
            let kernel = |tile, window, stride, [windows, other]: [usize; 2]| ConvKernel {
                pass,
                tile,
                bf16,
                window: [window; 2],
                stride: [stride; 2],
                dilation: [1, 1],
                vectors: [windows, other, if pass == Pass::WeightGradient { 2 } else { other }],
                bias: false,
                relu: false,
                moments: pass == Pass::Forward && stride == 2,
            };
            let longest = if bf16 { 8 } else { 4 };
            for tile in Tile::ALL {
                kernels.push(kernel(tile, 3, 2, [longest; 2]));
            }
            // Few channels: 8 bytes are one access of the larger tiles, less than that of the small one.
            kernels.push(kernel(Tile::choose(1 << 17, 64, 1, false), 3, 1, [longest / 2; 2]));
            kernels.push(kernel(Tile::choose(1 << 17, 64, 1, true), 7, 2, [1, longest]));
        }
    }
    kernels
}

/// Compiles all kernels for a compute capability and calls `each` with their PTX.
fn compile_all(arch: &str, each: impl Fn(&ConvKernel, &str)) {
    let Some(nvrtc) = Nvrtc::find() else { return };
    for kernel in kernels() {
        let ptx = nvrtc.compile(&format!("{kernel:?}"), &kernel.source(), arch);
        assert!(ptx.contains(&format!(".entry {}(", kernel.entry_point())), "{kernel:?}");
        // A tile's depth takes two steps.
        let products = 2 * kernel.tile.rows * kernel.tile.columns / (16 * 8) / (kernel.tile.threads() as usize / 32);
        let instruction = if kernel.bf16 { "mma.sync.aligned.m16n8k16" } else { "mma.sync.aligned.m16n8k8" };
        assert_eq!(count(&ptx, instruction), products, "{kernel:?}, {arch}");
        // 16 bytes past the first cache, or less through it.
        let copies = count(&ptx, "cp.async.cg.shared.global") + count(&ptx, "cp.async.ca.shared.global");
        assert!(copies > 0, "{kernel:?}, {arch}");
        each(&kernel, &ptx);
    }
}

#[test]
fn every_convolution_compiles_for_ampere() {
    compile_all("sm_80", |_, _| {});
}

#[test]
fn every_convolution_compiles_for_blackwell() {
    compile_all("sm_100", |_, _| {});
}

#[test]
fn every_convolution_compiles_for_hopper_without_spilled_registers() {
    let ptxas = Ptxas::find();
    compile_all("sm_90a", |kernel, ptx| {
        let Some(ptxas) = &ptxas else { return };
        let resources = ptxas.resources(ptx, "sm_90a");
        let ConvKernel { pass, tile, bf16, vectors, .. } = kernel;
        println!("{pass:?} {}x{} bf16 {bf16} vectors {vectors:?}: {resources:?}", tile.rows, tile.columns);
        assert_eq!(resources.spilled, 0, "{kernel:?}: {resources:?}");
        assert!(resources.shared <= 48 << 10, "{kernel:?}: {resources:?}");
    });
}

#[test]
fn division_by_multiplication_is_exact() {
    for divisor in (1..2000).chain([4095, 4096, 4097, 65_535, (1 << 30) - 1, 1 << 30]) {
        let division = Division::by(divisor);
        let numbers = (0..200).flat_map(|i| [i, i * divisor, i * divisor + divisor - 1, (1 << 31) - 1 - i]);
        for n in numbers.filter(|&n| n < 1 << 31) {
            assert_eq!(division.apply(n as u32), (n / divisor) as u32, "{n} / {divisor}");
        }
    }
}
