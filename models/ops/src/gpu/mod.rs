//! Kernels for NVIDIA GPUs, written with CubeCL, for operations that take burn many launches or many passes over
//! memory: batch norm with its epilogue, activations, grouped convolutions, and the optimizer's step.
//!
//! The kernels see images as matrices with one row of channels per pixel, the memory order of burn's convolutions on a
//! GPU. burn's ReLU returns another order (its masked fill follows the shape, not the memory), which the next
//! convolution must convert back.
//!
//! Builds with burn's fusion do not use these kernels, because a tensor may then be a pending operation that only burn
//! can execute.

mod activation;
mod backend;
mod conv;
mod direct;
mod direct_kernels;
mod gather;
mod implicit_gemm;
mod loss;
mod norm;
mod norm_kernels;
mod norm_moments;
mod rows;
mod squares;
mod update;
mod weight_kernels;

pub(crate) use gather::gather_images;
pub(crate) use squares::square_sum;
pub(crate) use update::{ema_update, update};
