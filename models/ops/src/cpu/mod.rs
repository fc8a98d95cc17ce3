//! The CPU kernels, on burn-flex tensors of f32 and bf16.
//!
//! - Entry: `flex` and `flex_channels` implement the traits of `crate::extension` and `crate::channels` for burn-flex; `tensor` and
//!   `blob` are its tensors.
//! - Convolution: `conv` chooses the algorithm. `igemm`, `igemm_amx` and `fold_taps` are the implicit GEMM, `weight_grad` and
//!   `weight_grad_amx` its weight gradient, `col2im` is the data gradient of inputs with few channels. `winograd*` are 3x3
//!   convolutions, `depthwise` convolutions of single channels, `group_*` narrow groups, and `merge_groups` merges groups into
//!   wider ones.
//! - Micro-kernels: `kernel` is the interface. `micro_kernel` has the generic loops, `kernel_x86` and `kernel_amx` the instruction
//!   sets, `vector` and `vector_x86` the vectors. `packing`, `packing_amx` and `panels` are the layout of packed operands.
//! - Choice of the instruction set: `cpu_isa`, and `multiversion` for loops that the compiler vectorises.
//! - Other layers: `batch_norm`, `activation`, `channels`, `concat`, `max_pool`, `loss`.
//! - Optimizer: `update`, and for Muon `matrix` and `symmetric`.
//! - Memory, threads, element types: `allocator`, `free_ranges`, `parallel`, `element`, `convert`.
//! - Tests: `conv_tests` compares all passes of convolutions with sums in f64, on every instruction set of the processor.
//!   `models/ops/tests/ops.rs` and `bf16.rs` compare all operations with burn's in f32 and f64, with autodiff.
//!
//! # Where a convolution is computed
//!
//! The forward pass is `flex::conv_forward`, then `conv::forward`, which takes the first line that fits. A linear layer is a 1x1
//! convolution of images of one pixel. f32 images never use AMX: on such a processor they have the kernels of AVX-512.
//!
//! | convolution | kernels | bf16 images with AMX |
//! |---|---|---|
//! | depthwise | `depthwise` | the same |
//! | 3x3 of stride 1, one group, channels in multiples of 16 (32 for bf16 with AVX512-BF16) | `winograd` | `igemm_amx` |
//! | groups of 5 to 8 channels and more than one tap; narrower ones are merged first | `group_conv` | merged up to 32 channels; above 16 `igemm_amx` |
//! | all others | `igemm` | `igemm_amx`; `igemm` below 16 input channels per group |
//!
//! `winograd` and `igemm` multiply with `micro_kernel::tile`, which `kernel_x86` compiles for AVX-512 (12 rows x 32 columns of f32)
//! and AVX2, and `kernel` for other processors. `igemm_amx` multiplies with `kernel_amx`. The data gradient has the same choice,
//! and `col2im` for one group of fewer than 16 input channels, if windows are wider than a pixel. The weight gradients are
//! `depthwise`, `winograd_grad`, `group_weight_grad`, and `weight_grad` with `weight_grad_amx`.

mod activation;
mod allocator;
mod batch_norm;
mod blob;
mod channels;
mod col2im;
mod concat;
mod conv;
#[cfg(test)]
mod conv_tests;
mod convert;
mod cpu_isa;
mod depthwise;
mod element;
mod flex;
mod flex_channels;
mod fold_taps;
mod free_ranges;
mod group_conv;
mod group_kernel;
mod group_weight_grad;
mod igemm;
mod igemm_amx;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod kernel_amx;
#[cfg(target_arch = "x86_64")]
mod kernel_x86;
mod loss;
pub(super) mod matrix;
mod max_pool;
mod merge_groups;
mod micro_kernel;
mod multiversion;
mod packing;
mod packing_amx;
mod panels;
mod parallel;
pub(super) mod symmetric;
mod tensor;
pub(super) mod update;
mod vector;
#[cfg(target_arch = "x86_64")]
mod vector_x86;
mod weight_grad;
mod weight_grad_amx;
mod winograd;
mod winograd_channels;
mod winograd_grad;
mod winograd_tile;

pub use blob::tensor_from_blob;
pub use cpu_isa::{CpuIsa, CpuIsaError};
