//! Kernels for NVIDIA GPUs, written with CubeCL, for what burn's operations take many launches or many passes over memory:
//! batch norm with what follows it, activations, grouped convolutions, and the optimizer's step.
//!
//! Images are rows of channels here, a row a pixel: the order in which burn's convolutions read and write on a GPU. A ReLU of
//! burn's leaves another order (a masked fill walks the shape, not the memory), which the next convolution has to undo.
//!
//! In builds with burn's fusion these kernels are not used: there a tensor is a promise that only burn can keep.

mod activation;
mod backend;
mod conv;
mod direct;
mod direct_kernels;
mod norm;
mod norm_kernels;
mod rows;
mod update;
mod weight_kernels;

pub(super) use update::{follow, step};
