//! Collectives between the processes of a job: what `torch.distributed` and its backends are to PyTorch. The crate knows
//! bytes, element counts and element types. It does not know models.
//!
//! | `torch.distributed` | here |
//! |---|---|
//! | `init_process_group` | [`join`], or [`solo`] for one process |
//! | `ProcessGroup` | [`Communicator`] |
//! | `new_group` | [`Communicator::group`]; `None` for ranks outside of the group |
//! | `get_rank`, `get_world_size` | [`Communicator::rank`], [`Communicator::world_size`] |
//! | `all_reduce(async_op=True)` and its `Work` | [`Communicator::all_reduce_async`] and [`Work`]; likewise other collectives |
//! | `send`, `recv`, `isend`, `irecv` | [`Communicator::send`], `recv`, `isend`, `irecv` |
//! | `all_gather_into_tensor`, `reduce_scatter_tensor`, `all_to_all_single` | `all_gather`, `reduce_scatter`, `all_to_all` |
//! | `all_to_all_single` with split sizes | [`Communicator::all_to_all_v`] |
//! | `all_gather_object` (lengths differ) | [`Communicator::all_gather_v`], for elements |
//! | `average_gradients` of the tutorial | [`Communicator::average_gradients`] |
//! | `TCPStore` | [`StoreServer`] and [`StoreClient`], with a secret and with failure notifications |
//! | backends gloo, mpi, nccl | [`TransportKind`]: `shm`, `tcp`, `mpi`; for GPUs [`cuda`]: custom kernels or NCCL |
//! | NCCL's registered buffers | [`SharedArray`] |
//! | `monitored_barrier`, `TORCH_DISTRIBUTED_DEBUG=DETAIL` | always on: see below |
//!
//! Differences: `send` and `recv` have a tag of 64 bits; [`Communicator::duplicate`] is `MPI_Comm_dup`; an error ends the job,
//! so no call succeeds after a call failed.
//!
//! # Guarantees
//!
//! - A reduction has the same bits on every rank and in every run; with the MPI backend, this depends on the MPI library.
//! - If ranks call different collectives, all ranks return the same error, which names both calls. Every wait has a timeout.
//! - The first error on any rank ends the job on all ranks at once: a mismatch, a timeout, a dead rank, an abort.
//! - The kernel frees all resources when the processes end, also after SIGKILL: shared memory has no name, and sockets belong to
//!   processes.
//!
//! # Code map, from the top
//!
//! - `communicator.rs`, `groups.rs`: [`Communicator`], which checks arguments, keeps the order of calls, and reports errors to
//!   all ranks. `async_calls.rs`, `queue.rs`: asynchronous calls. `point_to_point.rs`: point-to-point messages, and the collectives
//!   that are built on messages. `gather_v.rs`: arrays whose lengths differ. `shared_array.rs`: [`SharedArray`] arrays.
//! - `process.rs`: the state that all groups of a process share, and the path of an error to all ranks.
//! - `transport.rs`: the trait of a transport. `shm/` works on one host, `tcp/` between any hosts, `solo.rs` for one rank, `mpi/`
//!   over the MPI library (feature `mpi`).
//! - `call.rs`: compares the calls of all ranks. `message_header.rs`: compares a send with its receive.
//! - `rendezvous.rs`: joins the job and makes its communicator. `store/`: the rendezvous and the control connection, which
//!   reports dead ranks and errors. `auth.rs`: the secret that keeps unauthenticated peers out.
//! - `kernels.rs`, `widen.rs`, `dtype.rs`: reductions on the CPU.
//! - `system/`: what differs between Linux and macOS. On macOS, `no_shm.rs` replaces `shm/`, and `private_node_memory.rs`
//!   replaces `node_memory.rs`.
//! - [`cuda`]: collectives on GPUs. Ranks connect over a communicator first.
//! - [`mod@bench`]: the measurements of `trainer bench allreduce`.
//!
//! `unsafe` is allowed in `shm/`, `cuda/`, `node_memory.rs` and `fault_signals.rs`, and for single calls in `system/`.
//! [`cuda::driver`] lists NVIDIA GPUs in every build.

#![warn(clippy::missing_errors_doc)]

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
compile_error!("the crates comm, launch and trainer need Linux or macOS");
#[cfg(all(not(target_os = "linux"), any(feature = "cuda", feature = "mpi")))]
compile_error!("the features cuda and mpi need Linux");

mod abort;
mod aligned;
mod async_calls;
mod auth;
pub mod bench;
mod call;
mod communicator;
pub mod cuda;
mod deadline;
mod dtype;
mod error;
#[allow(unsafe_code)]
pub mod fault_signals;
mod first_failure;
pub mod fnv;
mod gather_v;
mod groups;
pub mod hex;
pub mod host;
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "only `shm` has all arrays in one process"))]
mod kernels;
pub mod limits;
mod message_header;
#[cfg(feature = "mpi")]
mod mpi;
mod net;
#[cfg_attr(target_os = "linux", allow(unsafe_code))]
#[cfg_attr(not(target_os = "linux"), path = "private_node_memory.rs")]
mod node_memory;
mod point_to_point;
mod process;
mod queue;
mod rendezvous;
mod shared_array;
#[cfg_attr(target_os = "linux", allow(unsafe_code))]
#[cfg_attr(not(target_os = "linux"), path = "no_shm.rs")]
mod shm;
mod solo;
mod store;
mod system;
mod tcp;
mod transport;
mod widen;
mod wire;

pub use auth::Secret;
pub use call::OpType;
pub use communicator::Communicator;
pub use dtype::{DType, Element, ReduceOp};
pub use error::{CommError, ErrorKind, Result};
pub use gather_v::Gathered;
#[cfg(feature = "mpi")]
pub use mpi::mpi_thread_support;
pub use node_memory::{NodeBytes, NodeMemory};
pub use queue::Work;
pub use rendezvous::{CommConfig, TransportKind, join, join_through, solo};
pub use shared_array::SharedArray;
pub use store::{ConnectError, MemberKind, StoreClient, StoreConfig, StoreEvent, StoreServer};
#[cfg(target_os = "linux")]
pub use system::peer_user;
pub use widen::{round_to_16_bits, widen_16_bits};
