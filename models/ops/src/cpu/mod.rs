//! The operations on burn-flex tensors.

mod activation;
mod batch_norm;
mod channels;
mod conv;
mod depthwise;
mod flex;
mod foreign;
mod grouped;
mod igemm;
mod join;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod kernel_x86;
mod max_pool;
mod memory;
mod panels;
mod parallel;
#[cfg(test)]
mod reference;
mod scatter;
mod shape;
mod simd;
mod tensor;
pub(super) mod update;
mod weight_grad;
mod widen;
mod winograd;
mod winograd_grad;
mod winograd_tile;

pub use foreign::tensor_over;
