//! A stand-in for NVIDIA's driver that runs PTX on the CPU.
//!
//! [`exports`] has the functions of `libcuda`; the other modules implement them. The stand-in returns what the real driver
//! returns, errors included, so that a call which a GPU machine would refuse fails here too. [`nccl`] has the functions of
//! `libnccl`, and [`nvrtc`] passes calls of `libnvrtc` on.
//!
//! - `CUDA_ON_CPU_GPUS`: number of GPUs in the machine; default 1
//! - `CUDA_VISIBLE_DEVICES`: GPUs that a process sees, as with the real driver
//! - `CUDA_ON_CPU_INIT`: return code of `cuInit`; default 0
//! - `CUDA_ON_CPU_DRIVER`: CUDA version of the driver, which refuses newer PTX; default 13.2
//! - `CUDA_ON_CPU_PEERS`: `works` (default); `none`: no peer access; `lies`: peer access is offered, but writes of kernels to a
//!   peer are lost
//! - `CUDA_ON_CPU_IPC`: `works` (default); `refused`: handles of memory cannot be made or opened, as in many containers and
//!   virtual machines
//! - `CUDA_ON_CPU_MODE`: compute mode that GPUs report: `default` or `exclusive`; a second process is not refused
//! - `CUDA_ON_CPU_DISPLAY`: `yes`: GPUs drive a display, so the driver reports a time limit for kernels
//! - `CUDA_ON_CPU_WAITS`: `few` (default); `all`: loading and unloading a module, allocating memory, and opening memory of
//!   another process wait for all work of this process on the GPU, as a real driver may. Freeing memory always waits
//! - `CUDA_ON_CPU_MEMORY`: bytes of memory per GPU; default 4 GiB
//! - `CUDA_ON_CPU_CAPABILITY`: compute capability; default 8.0
//! - `CUDA_ON_CPU_NCCL`: `works` (default); `stuck`: `ncclCommInitRank` does not return. For `run.sh`: `no`: the library is
//!   missing; `dev`: there is `libnccl.so` beside `libnccl.so.2`, as in NVIDIA's development package
//! - `CUDA_ON_CPU_NVRTC`: path of NVIDIA's `libnvrtc`. For `run.sh`: default that of the Python package; `direct`: programs load
//!   the package's library, not this one's functions, so that compilation takes its real time
//! - `CUDA_ON_CPU_RUN`: `no`: kernels are loaded and launched but not executed, for counting the launches of large networks
//! - `CUDA_ON_CPU_FAULT`: `NAME:CODE`: a kernel whose name contains NAME leaves the sticky error CODE, e.g. `conv:700`
//! - `CUDA_ON_CPU_SHUFFLE`: a seed: the blocks of a launch start in another order each time, and in other orders in other
//!   processes
//! - `CUDA_ON_CPU_TF32`: `exact`: matrix instructions do not round f32 to TF32, although every GPU does. A difference from the
//!   CPU that remains is a mistake
//! - `CUDA_ON_CPU_LOG`: a file that receives one line per call
#![allow(unsafe_code, reason = "a C library")]

mod branches;
mod capture;
mod context;
pub mod cu_result;
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
pub mod nvrtc;
mod op;
pub mod ptx;
mod stream;
