//! Collectives of the installed MPI library: feature `mpi`, `--backend mpi`, for processes that mpirun started.
//!
//! Reductions, broadcasts and gathers are the library's (`MPI_Allreduce`, …: `calls.rs`). The code around them gives the
//! guarantees of the other transports:
//!
//! - **Mismatches.** Each collective starts with an `MPI_Allgather` of all ranks' calls (`call.rs`). If they differ, all ranks
//!   report the same two sides before any data moves.
//! - **Timeouts and aborts.** A call of MPI cannot be cancelled. So each group's calls run on a thread of its own (`runtime.rs`)
//!   with its own buffers, which costs two hand-overs and a copy each way. A rank that gives up leaves that thread blocked,
//!   returns the error, and ends without `MPI_Finalize`; mpirun then ends the other ranks. They have the reason by then: the
//!   rendezvous works as with other transports.
//! - **Errors inside MPI** end the process, as MPI's default error handler does. mpirun then ends the job.
//!
//! | what | how |
//! |---|---|
//! | f32, f64, i32, i64, u8: sum, product | `MPI_Allreduce`, `MPI_Reduce` |
//! | mean | sum, then one division |
//! | f16, bf16, which MPI lacks | widened to f32 on the wire and rounded once |
//! | minimum and maximum of floats | gathered and reduced here: MPI does not define them for NaN |
//! | `reduce_scatter` | `MPI_Alltoall`, reduced in rank order |
//! | messages | header and body; only the timeout notices a peer that is in a collective instead |
//!
//! The library chooses the order of summation. It is the same in every run of the same job. MPI advises libraries to give all
//! ranks the same bits, which Open MPI does.
//!
//! Each group, and each duplicate, is an MPI communicator (`MPI_Comm_create_group` from the world). Calls of several groups may
//! run at once, so MPI must provide `MPI_THREAD_MULTIPLE`; joining fails if it does not.

mod calls;
mod group;
mod runtime;

pub(crate) use group::MpiGroup;
pub(crate) use runtime::Runtime;
pub use runtime::mpi_thread_support;
