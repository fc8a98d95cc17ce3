//! Collectives between the processes of a job.
//!
//! Knows bytes, counts and types of elements, not tensors of a model. From the top:
//!
//! - [`Communicator`] (`communicator.rs`, `groups.rs`): what a rank calls; checks arguments, keeps the order, tells all
//!   ranks of errors. [`Work`] is a call that goes on while the rank computes (`queue.rs`).
//! - [`Shared`] (`shared.rs`): arrays that all-reduce fastest, as other ranks can reach them.
//! - `transport.rs`: what a transport has to do; `shm/` for one host, `tcp/` for any, `solo.rs` for one rank,
//!   `mpi/` for the library that mpirun belongs to (feature `mpi`).
//! - `call.rs`: how ranks make sure that they call the same; `message.rs` for sends and receives.
//! - [`join`] (`rendezvous.rs`): from the launcher's settings to a communicator; `store/` is the private rendezvous and the
//!   control connection over which deaths and errors are told; `auth.rs` the secret that keeps strangers out.
//! - `kernels.rs`, `dtype.rs`: the reductions.
//! - [`cuda`]: collectives on GPUs, beside all this: ranks meet over a communicator first.
//! - [`mod@bench`]: the measurements of `trainer bench allreduce`.
//!
//! # What holds
//!
//! - A reduction has the same bits on every rank and in every run.
//! - Ranks that call different things all get the same error, naming both sides. Nothing waits without a limit.
//! - The first error anywhere ends the job everywhere, at once: a mismatch, a timeout, a death, an abort.
//! - Nothing is left behind by any way of ending: shared memory has no name, sockets belong to processes.
//!
//! `unsafe` is in `shm/` and `cuda/` alone. [`cuda::driver`] asks NVIDIA's driver what GPUs there are, in any build.

mod abort;
mod auth;
pub mod bench;
mod call;
mod communicator;
pub mod cuda;
mod dtype;
mod error;
mod groups;
pub mod host;
mod kernels;
mod message;
#[cfg(feature = "mpi")]
mod mpi;
mod net;
mod process;
mod queue;
mod rendezvous;
mod shared;
#[allow(unsafe_code)]
mod shm;
mod solo;
mod store;
mod tcp;
mod transport;
mod wire;

pub use auth::Secret;
pub use call::OpKind;
pub use communicator::{Communicator, Gathered};
pub use dtype::{DType, Element, ReduceOp};
pub use error::{CommError, ErrorKind, Result};
pub use queue::Work;
pub use rendezvous::{CommConfig, TransportKind, join, join_through, solo};
pub use shared::Shared;
pub use store::{StoreClient, StoreEvent, StoreServer};
