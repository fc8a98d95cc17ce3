//! Runs PTX of NVIDIA's compiler and compares sums and products with those of the CPU.
#![allow(unsafe_code, reason = "kernels take pointers")]

use cuda_on_cpu::module::{Function, Module, load};

fn module() -> Module {
    load(include_str!("kernels.ptx")).unwrap()
}

fn function<'a>(module: &'a Module, name: &str) -> &'a Function {
    module.functions.iter().find(|f| f.name == name).unwrap()
}

fn pack(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Returns the bf16 or f16 bits of small integers, which both represent exactly.
fn halves(values: &[f32], bf16: bool) -> Vec<u16> {
    let bits = |v: &f32| match bf16 {
        true => (v.to_bits() >> 16) as u16,
        false if *v == 0.0 => 0,
        false => (((v.to_bits() >> 16) & 0x8000) | ((v.to_bits() & 0x7fff_ffff) - (112 << 23)) >> 13) as u16,
    };
    values.iter().map(bits).collect()
}

fn matrix(count: usize, step: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * step) % 7) as f32 - 3.0).collect()
}

#[test]
fn a_sum_over_blocks_warps_and_lanes() {
    let module = module();
    let sum = function(&module, "sum");
    assert_eq!(sum.parameters, [(0, 8), (8, 8), (16, 4)]);
    let x: Vec<f32> = (0..5000).map(|i| (i % 11) as f32 / 8.0).collect();
    let expected: f64 = x.iter().map(|x| f64::from(*x).exp() * f64::from(*x)).sum();
    let mut y = 0.0_f32;
    let mut parameters = pack(&[x.as_ptr() as u64, &raw mut y as u64]);
    parameters.extend(5000_u32.to_le_bytes());
    // SAFETY: pointers to the arrays that the kernel reads and writes, with their length.
    unsafe { sum.run(&parameters, [3, 1, 1], [96, 1, 1], 12) };
    assert!((f64::from(y) / expected - 1.0).abs() < 1e-5, "{y} {expected}");
}

/// Writes its blocks' numbers in the order in which they run.
const ORDER: &str = "
.version 6.4
.target sm_50
.address_size 64
.visible .entry order(.param .u64 counter, .param .u64 list)
{
    .reg .b32 %r<4>;
    .reg .b64 %d<5>;
    ld.param.u64 %d1, [counter];
    ld.param.u64 %d2, [list];
    atom.global.add.u32 %r1, [%d1], 1;
    mov.u32 %r2, %ctaid.x;
    mul.wide.u32 %d3, %r1, 4;
    add.u64 %d4, %d2, %d3;
    st.global.u32 [%d4], %r2;
    ret;
}
";

fn order() -> Vec<u32> {
    let module = load(ORDER).unwrap();
    let (mut counter, mut list) = (0_u32, vec![u32::MAX; 100]);
    let parameters = pack(&[&raw mut counter as u64, list.as_mut_ptr() as u64]);
    // SAFETY: pointers to a counter, and to one number for each block.
    unsafe { function(&module, "order").run(&parameters, [100, 1, 1], [1, 1, 1], 0) };
    list
}

#[test]
fn blocks_run_in_order_or_shuffled() {
    let ascending: Vec<u32> = (0..100).collect();
    assert_eq!(order(), ascending);
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "shuffled", "--ignored"]).env("CUDA_ON_CPU_SHUFFLE", "7");
    let out = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && stdout.contains("1 passed"), "{stdout}");
}

#[test]
#[ignore = "run by blocks_run_in_order_or_shuffled"]
fn shuffled() {
    if std::env::var_os("CUDA_ON_CPU_SHUFFLE").is_none() {
        return;
    }
    let orders = [order(), order(), order()];
    for order in &orders {
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>(), "every block runs once");
    }
    assert!(orders[0] != orders[1] || orders[1] != orders[2], "{orders:?}");
}

#[test]
fn products_of_tensor_cores() {
    let module = module();
    for (name, columns, bf16) in [("product", 16, true), ("tile", 8, false)] {
        let (a, b) = (matrix(256, 3), matrix(16 * columns, 5));
        let (left, right) = (halves(&a, bf16), halves(&b, bf16));
        let mut c = vec![f32::NAN; 16 * columns];
        let parameters = pack(&[left.as_ptr() as u64, right.as_ptr() as u64, c.as_mut_ptr() as u64]);
        // SAFETY: pointers to matrices of the sizes that the kernel expects.
        unsafe { function(&module, name).run(&parameters, [1; 3], [32, 1, 1], 0) };
        for row in 0..16 {
            for column in 0..columns {
                let expected: f32 = (0..16).map(|k| a[row * 16 + k] * b[column * 16 + k]).sum();
                assert_eq!(c[row * columns + column], expected, "{name} {row} {column}");
            }
        }
    }
}
