//! Collectives of the MPI library that is installed: feature `mpi`, `--backend mpi`, for processes that mpirun started.
//!
//! Reductions, broadcasts and gathers are the library's own (`MPI_Allreduce`, …: `calls.rs`). Around them is what the other
//! transports promise too:
//!
//! - **Mismatches.** Each collective opens with an `MPI_Allgather` of what the ranks call (`call.rs`): if they differ,
//!   all ranks report the same two sides before any data moves.
//! - **Timeouts and aborts.** A call of MPI cannot be taken back, so each group's calls run on a thread of its own
//!   (`runtime.rs`) with buffers of its own, which costs two hand-overs and a copy each way. A rank that gives up leaves that
//!   thread where it is, returns the error, and ends without `MPI_Finalize`, upon which mpirun ends the other ranks. They
//!   have heard the reason by then: the job's rendezvous stays as it is with other transports.
//! - **Errors inside MPI** end the process, as MPI's default error handler does; mpirun then ends the job.
//!
//! | what | how |
//! |---|---|
//! | f32, f64, i32, i64, u8: sum, product | `MPI_Allreduce`, `MPI_Reduce` |
//! | mean | sum, then one division |
//! | f16, bf16, which MPI lacks | widened to f32 on the wire and rounded once |
//! | smallest and largest of floats | gathered and folded here: MPI leaves NaN open |
//! | `reduce_scatter` | `MPI_Alltoall`, folded in rank order |
//! | messages | header and body; a rank that is in a collective instead is noticed by the timeout alone |
//!
//! The order of summation is the library's. It is the same in every run of the same job, and MPI asks of libraries that all
//! ranks get the same bits, which Open MPI's do.
//!
//! Each group is an MPI communicator (`MPI_Comm_create_group` from the world), a duplicate too. Calls of several groups may be
//! under way at once: MPI has to offer `MPI_THREAD_MULTIPLE`, and joining says so where it does not.

mod calls;
mod group;
mod runtime;

pub(crate) use group::MpiGroup;
pub(crate) use runtime::Runtime;
