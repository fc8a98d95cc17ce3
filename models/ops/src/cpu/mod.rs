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
//! - Tests of all convolutions: `conv_tests`.

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
