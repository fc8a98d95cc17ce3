//! Kernels for NVIDIA GPUs, for operations that take burn many launches or many passes over memory: convolutions with the batch
//! norms around them, batch norm with its epilogue, activations, global average pooling, the sums of a bias's gradient,
//! squeeze-and-excitation, the concatenation of two images, the loss, a batch's images, and the optimizer's step. Also CUDA graphs of
//! whole steps, and the memory that feeds them. The kernels are written with CubeCL, except the convolutions on tensor cores, which
//! are CUDA C++ ([`implicit_gemm`]).
//!
//! The kernels see images as matrices with one row of channels per pixel. Activations have a kernel because burn's ReLU returns
//! its result in another memory order (its masked fill follows the shape), which the next convolution would have to convert.

mod activation;
mod apply_kernels;
mod backend;
mod block_sums;
mod conv;
pub(crate) mod copies;
mod counters;
mod deferred;
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
mod weight_kernels;

pub(crate) use deferred::{defers_norm, reads_deferred};
pub(crate) use gather::gather_images;
pub use implicit_gemm::compile_ahead;
pub(crate) use squares::square_sum;
pub(crate) use update::{accepts, ema_update, update};
