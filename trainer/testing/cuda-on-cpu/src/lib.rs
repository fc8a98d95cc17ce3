//! A stand-in for NVIDIA's driver that runs PTX on the CPU.
//!
//! The functions of `libcuda` are those of [`exports`]; the rest is what stands behind them. It is meant to answer as the real
//! driver does, errors included: what is refused there is to be found here. The functions of `libnccl` are in [`nccl`].
//!
//! | variable | meaning |
//! |---|---|
//! | `CUDA_ON_CPU_GPUS` | how many GPUs the machine has; 1 |
//! | `CUDA_VISIBLE_DEVICES` | which of them a process sees, as with the real driver |
//! | `CUDA_ON_CPU_INIT` | what `cuInit` answers; 0 |
//! | `CUDA_ON_CPU_PEERS` | `works`; `none`: no access between GPUs; `lies`: what kernels write there is lost |
//! | `CUDA_ON_CPU_MEMORY` | bytes of memory of a GPU; 4 GiB |
//! | `CUDA_ON_CPU_CAPABILITY` | compute capability; 8.0 |
//! | `CUDA_ON_CPU_RUN` | `no`: kernels are loaded and launched, and do nothing: for counting launches of large networks |
//! | `CUDA_ON_CPU_LOG` | a file that gets a line for each call |
#![allow(unsafe_code, reason = "a C library")]

mod capture;
pub mod code;
mod context;
mod event;
pub mod exports;
mod handles;
mod ipc;
mod kernel;
mod log;
mod machine;
mod memory;
pub mod module;
pub mod nccl;
mod op;
pub mod ptx;
mod stream;
