//! The CPU kernels, on burn-flex tensors of f32 and bf16.

mod activation;
mod allocator;
mod arena;
mod batch_norm;
mod blob;
mod channels;
mod col2im;
mod concat;
mod conv;
mod convert;
mod depthwise;
mod element;
mod flex;
mod flex_channels;
mod fold_taps;
mod group_conv;
mod group_kernel;
mod group_weight_grad;
mod grouped;
mod igemm;
mod igemm_matrix;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod kernel_amx;
#[cfg(target_arch = "x86_64")]
mod kernel_x86;
mod level;
mod loss;
mod max_pool;
mod micro_kernel;
mod packing;
mod packing_matrix;
mod panels;
mod parallel;
#[cfg(test)]
mod reference;
mod simd;
pub(super) mod symmetric;
mod tensor;
pub(super) mod update;
mod vector;
#[cfg(target_arch = "x86_64")]
mod vector_x86;
mod weight_grad;
mod weight_grad_matrix;
mod winograd;
mod winograd_channels;
mod winograd_grad;
mod winograd_tile;

pub use blob::tensor_from_blob;
pub use level::{CpuIsa, CpuIsaError};
