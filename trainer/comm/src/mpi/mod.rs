//! Collectives of the installed MPI library: feature `mpi`, `--backend mpi`, for processes that mpirun started.
//!
//! The library runs reductions, broadcasts and gathers (`MPI_Allreduce`, …: `calls.rs`). The code around these calls provides
//! the same guarantees as the other transports:
//!
//! - **Mismatches.** Each collective starts with an `MPI_Allgather` of all ranks' calls (`call.rs`). If they differ, all ranks
//!   report the same two sides before any data moves.
//! - **Timeouts and aborts.** A call of MPI cannot be cancelled. So each group's calls run on a dedicated thread (`runtime.rs`)
//!   with dedicated buffers. A call then costs two switches between threads, and a copy in each direction. After a timeout or
//!   an abort a rank leaves the thread blocked, returns the error, and ends without `MPI_Finalize`. mpirun then ends the other
//!   ranks. These ranks already know the error, since the rendezvous works as with other transports.
//! - **Errors inside MPI** end the process, as MPI's default error handler does. mpirun then ends the job.
//!
//! | what | how |
//! |---|---|
//! | f32, f64, i32, i64, u8: sum, product | `MPI_Allreduce`, `MPI_Reduce` |
//! | mean | sum, then one division |
//! | f16, bf16, which MPI lacks | widened to f32 on the wire and rounded once |
//! | minimum and maximum of floats | gathered and reduced here: MPI does not define them for NaN |
//! | `reduce_scatter` | `MPI_Alltoall`, reduced in rank order |
//! | messages | header and body; if the peer is in a collective instead, only the timeout ends the wait |
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
