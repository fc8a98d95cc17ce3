//! NVRTC compiles the convolutions of GPUs, without a GPU, and ptxas assembles them with few or no spilled registers.

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

use std::cell::RefCell;

use self::nvrtc::{Nvrtc, count};
use self::ptxas::Ptxas;
use self::source::{Activation, ConvKernel, ConvProduct, Division, NormSums, Pass, Tile};

/// Products of all passes, tiles and element types, with the longest accesses, and those of a network's first convolution. The
/// batch norms before and after some of them are separate operations, those of others are part of the products.
fn products() -> Vec<ConvProduct> {
    let mut products = Vec::new();
    for pass in [Pass::Forward, Pass::DataGradient, Pass::WeightGradient] {
        for bf16 in [false, true] {
            let product = |tile, window, stride, [windows, other]: [usize; 2]| ConvProduct {
                pass,
                tile,
                bf16,
                window: [window; 2],
                stride: [stride; 2],
                dilation: [1, 1],
                diagonal: None,
                vectors: [windows, other, if pass == Pass::WeightGradient { 2 } else { other }],
                bias: false,
                relu: false,
                moments: pass == Pass::Forward && stride == 2,
                statistics: false,
                input: None,
                norm_gradient: false,
                split: pass == Pass::WeightGradient,
                add: pass == Pass::DataGradient && stride == 2,
                norm: (pass == Pass::DataGradient).then_some(NormSums {
                    activation: Activation::Relu,
                    from_output: stride == 2,
                    masked: false,
                    residual: false,
                }),
            };
            let longest = if bf16 { 8 } else { 4 };
            for tile in Tile::ALL {
                let separate = product(tile, 3, 2, [longest; 2]);
                products.extend([separate, fused(separate)]);
            }
            // Few channels: 8 bytes are one access of the larger tiles, less than that of the small one.
            products.push(product(Tile::choose(1 << 17, 64, 1, false), 3, 1, [longest / 2; 2]));
            // Several narrow groups.
            let narrow = ConvProduct {
                diagonal: Some([8, 8]),
                ..product(Tile::choose(1 << 17, 64, 1, false), 3, 2, [longest; 2])
            };
            let odd = ConvProduct {
                diagonal: Some([3, 3]),
                ..product(Tile::choose(1 << 17, 48, 1, true), 3, 1, [longest, 1])
            };
            products.extend([narrow, fused(narrow), ConvProduct { vectors: [longest, 1, 1], ..odd }]);
            let first = product(Tile::choose(1 << 17, 64, 1, true), 7, 2, [1, longest]);
            products.push(ConvProduct { norm_gradient: pass == Pass::WeightGradient, ..first });
        }
    }
    products
}

/// Returns a product with the batch norms before and after the convolution.
fn fused(product: ConvProduct) -> ConvProduct {
    ConvProduct {
        statistics: product.moments,
        input: (product.pass != Pass::DataGradient).then_some(Activation::Silu),
        norm_gradient: product.pass != Pass::Forward,
        norm: product.norm.map(|norm| NormSums { masked: true, residual: true, ..norm }),
        ..product
    }
}

/// All products alone, and both gradients in one kernel.
fn kernels() -> Vec<ConvKernel> {
    let products = products();
    let of_pass = |pass: Pass| products.iter().copied().filter(move |product| product.pass == pass);
    let pairs = of_pass(Pass::WeightGradient).zip(of_pass(Pass::DataGradient)).map(|(weight, data)| {
        let masked = data.norm.is_some_and(|norm| norm.masked);
        let norm = NormSums { activation: Activation::Silu, from_output: false, masked, residual: false };
        let data = ConvProduct { norm: Some(norm), ..data };
        ConvKernel { first: weight, second: Some(data) }
    });
    // The convolution after a residual block whose shortcut has a batch norm.
    let after_blocks = of_pass(Pass::WeightGradient)
        .zip(of_pass(Pass::DataGradient))
        .filter(|(_, data)| data.norm.is_some_and(|norm| norm.residual))
        .map(|(weight, data)| ConvKernel { first: weight, second: Some(data) });
    products.iter().map(|&first| ConvKernel { first, second: None }).chain(pairs).chain(after_blocks).collect()
}

/// Compiles one of `step` kernels for an architecture and calls `each` with their PTX.
fn compile(arch: &str, step: usize, each: impl Fn(&ConvKernel, &str)) {
    let Some(nvrtc) = Nvrtc::find() else { return };
    let kernels: Vec<_> = kernels().into_iter().step_by(step).collect();
    let sources: Vec<_> =
        kernels.iter().enumerate().map(|(index, kernel)| (index.to_string(), kernel.source())).collect();
    for (kernel, ptx) in kernels.iter().zip(nvrtc.compile(&sources, arch)) {
        assert!(ptx.contains(&format!(".entry {}(", kernel.entry_point())), "{kernel:?}");
        // A tile's depth takes two steps.
        let products = kernel
            .products()
            .map(|ConvProduct { tile, .. }| 2 * tile.rows * tile.columns / (16 * 8) / (tile.threads() as usize / 32));
        let instruction = if kernel.first.bf16 { "mma.sync.aligned.m16n8k16" } else { "mma.sync.aligned.m16n8k8" };
        assert_eq!(count(&ptx, instruction), products.sum::<usize>(), "{kernel:?}, {arch}");
        // 16 bytes past the first cache, or less through it.
        let copies = count(&ptx, "cp.async.cg.shared.global") + count(&ptx, "cp.async.ca.shared.global");
        assert!(copies > 0, "{kernel:?}, {arch}");
        each(kernel, &ptx);
    }
}

/// Returns the bytes of registers that a thread of the kernel may spill. Kernels of both gradients have 128 registers, see
/// `ConvKernel::source`.
fn most_spilled(kernel: &ConvKernel) -> u32 {
    if kernel.second.is_some() { 96 } else { 0 }
}

/// Compiling all kernels takes a minute, and the source is the same for all architectures: all for one, a part for the others. The
/// number is prime, so the parts have all passes, tiles and element types.
const PART: usize = 5;

#[test]
fn convolutions_compile_for_ampere() {
    assert!(!kernels().iter().any(|kernel| kernel.source().contains("__CUDA_ARCH__")), "one source for all");
    compile("compute_80", PART, |_, _| {});
}

#[test]
fn convolutions_compile_for_blackwell() {
    let ptxas = Ptxas::find();
    compile("compute_100", PART, |kernel, ptx| {
        let Some(ptxas) = &ptxas else { return };
        let resources = ptxas.resources(ptx, "sm_100");
        assert!(resources.spilled <= most_spilled(kernel) && resources.shared <= 48 << 10, "{kernel:?}: {resources:?}");
    });
}

#[test]
fn every_convolution_compiles_for_hopper_with_few_spilled_registers() {
    let (ptxas, spills) = (Ptxas::find(), RefCell::new(Vec::new()));
    compile("compute_90a", 1, |kernel, ptx| {
        let Some(ptxas) = &ptxas else { return };
        let resources = ptxas.resources(ptx, "sm_90a");
        for ConvProduct { pass, tile, bf16, vectors, statistics, norm_gradient, norm, .. } in kernel.products() {
            let fused = if statistics || norm_gradient { " with batch norm" } else { "" };
            let fused = if norm.is_some_and(|norm| norm.residual) { " with two batch norms" } else { fused };
            print!("{pass:?} {}x{} bf16 {bf16} vectors {vectors:?}{fused}; ", tile.rows, tile.columns);
        }
        println!("{resources:?}");
        assert!(resources.shared <= 48 << 10, "{kernel:?}: {resources:?}");
        if resources.spilled > most_spilled(kernel) {
            spills.borrow_mut().push(format!("{kernel:?}: {resources:?}"));
        }
    });
    assert!(spills.borrow().is_empty(), "{:#?}", spills.borrow());
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
