//! Kernels for NVIDIA GPUs, for operations that take burn many launches or many passes over memory: convolutions with the batch
//! norms around them, batch norm with its epilogue, activations, global average pooling, the sums of a bias's gradient,
//! squeeze-and-excitation, the concatenation of two images, the loss, a batch's images, and the optimizer's step. Also CUDA graphs
//! of whole steps, and the memory that feeds them. The kernels are written with CubeCL, except the convolutions on tensor cores,
//! which are CUDA C++ ([`implicit_gemm`]).
//!
//! - Entry: `backend` implements the traits of `crate::extension`, `crate::deferred` and `crate::channels` for burn's CUDA backend.
//! - Convolution: `conv` chooses. `implicit_gemm` runs on tensor cores. `direct`, `direct_kernels`, `weight_gradient` and
//!   `weight_kernels` are depthwise convolutions and narrow groups, `depthwise_norms` the depthwise ones with deferred batch norms
//!   around them.
//! - Batch norm: `norm`, `norm_kernels`, `norm_moments` and `norm_backward`. Deferred batch norms: `deferred`, `deferred_apply`,
//!   `deferred_gradient` and `norm_input_gradient`. `side_results` passes moments, sums and gradients from one operation to the
//!   next.
//! - Other layers: `activation`, `head`, `scale`, `join`, `loss`, `gather`.
//! - Optimizer: `update`, `parameter_batch`, `squares`, and `bf16_weights` for the rounded copies of weights.
//! - CUDA graphs: `graph`, and `feed` for a graph's inputs and results.
//! - Shared code: `rows` (tensors as matrices, launch geometry), `block_sums`, `counters`, `storage`, `traffic`.
//!
//! # Where a convolution is computed
//!
//! The forward pass is `backend`, then `conv::forward`, or `deferred::conv_norm_forward` with a batch norm in training behind it.
//! Both call `implicit_gemm::forward`, which launches `implicit_gemm/conv.cu` (`compute_tile` of the pass `FORWARD`): `operands.cu`
//! copies the windows and filters to shared memory, and `product.cu` multiplies them on tensor cores. Depthwise convolutions are in
//! `direct_kernels`, or in `depthwise_norms` with a batch norm in training. The gradients are `conv::backward`, then
//! `implicit_gemm::gradients`.
//!
//! # Tests
//!
//! `models/ops/tests/conv_lowering.rs` compiles `implicit_gemm` without a GPU. `benches/gpu_check --ops` compares all operations
//! with the CPU's, on a GPU or on the stand-in for NVIDIA's driver (`benches/gpu_check/on_cpu.sh`).
//!
//! # Memory order
//!
//! The kernels see images as matrices with one row of channels per pixel. Activations have a kernel because burn's ReLU returns
//! its result in another memory order (its masked fill follows the shape), which the next convolution would have to convert.

mod activation;
mod backend;
pub(crate) mod bf16_weights;
mod block_sums;
mod conv;
mod counters;
mod deferred;
mod deferred_apply;
mod deferred_gradient;
mod depthwise_norms;
mod direct;
mod direct_kernels;
pub(crate) mod feed;
mod gather;
pub(crate) mod graph;
mod head;
mod implicit_gemm;
mod join;
mod loss;
mod norm;
mod norm_backward;
mod norm_input_gradient;
mod norm_kernels;
mod norm_moments;
mod parameter_batch;
mod rows;
mod scale;
mod side_results;
mod squares;
mod storage;
pub(crate) mod traffic;
mod update;
mod weight_gradient;
mod weight_kernels;

pub(crate) use deferred::{defers_norm, reads_deferred};
pub(crate) use gather::gather_images;
pub use implicit_gemm::compile_ahead;
pub(crate) use squares::square_sum;
pub(crate) use update::{ema_update, supports, update};
