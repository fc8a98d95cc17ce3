//! Operations of image networks with custom kernels and backward passes: where training spends its time.
//!
//! On burn's CPU backend the functions run the kernels of `cpu` for f32 and bf16, which are registered through burn's backend
//! extension with one autodiff step each ([`LayerKernels`]). On an NVIDIA GPU, convolutions, linear layers, batch norm,
//! activations, the loss, scaled and joined channels, a batch's images and the optimizer's step run the kernels of `gpu`
//! ([`ConvKernels`], [`NormKernels`], [`HeadKernels`]). All other operations, devices and element types use burn's operations.
//! Models call the same functions everywhere.
//!
//! A call of [`conv2d`], for example, goes from `functional` through burn's dispatch to `autodiff` (which records the step of the
//! backward pass) and to the kernels: `cpu::flex` or `gpu::backend`. The heads of `cpu/mod.rs` and `gpu/mod.rs` list which file
//! computes what. `deferred` has the steps of batch norms inside GPU convolutions, `channels` those of operations on channels.
//!
//! # Memory order
//!
//! The CPU kernels keep images channels-last in memory (PyTorch's `channels_last`), while the shape stays
//! `[batch, channels, height, width]`. They convert inputs of another order, and burn's operations accept their outputs.
//!
//! # Element types
//!
//! Images and features are f32 or bf16. All sums are f32. Parameters, statistics and their gradients are f32 for both types. f32
//! operands of a convolution or linear layer are rounded to TF32 on a GPU.
//!
//! # Determinism
//!
//! A run repeats bit for bit on the same machine with the same number of threads. Another number of threads changes only the
//! last bits of the weight gradients of convolutions and linear layers: each thread sums a part of the batch, and the parts
//! are added in order. Another instruction set changes the rounding of all results.

#![allow(unsafe_code, reason = "kernels: vector instructions, pointer tables, buffers that tasks share")]

mod accumulate;
mod autodiff;
mod batch_norm;
mod channels;
mod cpu;
#[cfg(feature = "cuda")]
mod deferred;
mod dispatch;
mod extension;
mod features;
mod functional;
mod gather;
#[cfg(feature = "cuda")]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments are bound one by one")]
mod gpu;
mod gpu_conv;
pub mod graph;
mod loss;
mod optimizer;
mod orthogonalize;
pub mod parameter;
mod shape;
mod statistics;
mod sync_batch_norm;
pub mod trace;
#[cfg(feature = "cuda")]
pub mod traffic;
mod update;

pub use batch_norm::{BatchNormOutput, Epilogue, batch_norm_eval, batch_norm_train};
pub use cpu::{CpuIsa, CpuIsaError, tensor_from_blob};
pub use dispatch::{SMALLER_BATCH, to_bf16, upcast};
pub use extension::{
    Activation, BatchNormGrads, ConvGrads, ConvKernels, ConvOptions, HeadKernels, LayerKernels, NormKernels,
    NormOptions, PoolOptions, RunningStats,
};
pub use features::{ConvNormOutput, Features, FollowingNorm, conv_batch_norm, conv2d, fuses_batch_norm};
pub use functional::{
    add, avg_pool2d, concat, divide, flatten, gelu, global_avg_pool, interleave, join_paths, linear, max_pool2d, relu,
    scale_channels, sigmoid, silu, slice_channels, unflatten,
};
pub use gather::{GatherLines, gather_images};
#[cfg(feature = "cuda")]
pub use gpu::compile_ahead;
pub use gpu_conv::{GpuConv, GpuConvError};
pub use loss::{backward, cross_entropy};
pub use optimizer::{ParameterUpdate, StepScalars, UpdateRule, UpdatedParameter};
pub use orthogonalize::orthogonalize;
pub use statistics::{DeviceGather, StatisticsReduce};
pub use update::{ema_update, square_sum, update};
