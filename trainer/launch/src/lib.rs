//! From one command to many processes, and back to one exit code.
//!
//! ```text
//!   trainer --cpus 4 ─▶ Job::run                                     (job.rs)
//!      │  Ctrl-C, SIGTERM …  ─▶ Supervisor ◀─ pidfds, beats, store   (supervisor.rs, signals.rs)
//!      │                          │  │
//!      │   StoreServer ◀──────────┼──┼──── rendezvous, deaths, abort (comm/store)
//!      │      ▲                   │  │
//!      │      │  page of memory ◀─┘  └──▶ logs/rank-N/, screen       (status_page.rs; output.rs, terminal_lines.rs)
//!      ▼      │      │
//!   trainer --cpus 4, with TRAINER_WORKER, RANK, …, for each rank    (process.rs, cores.rs)
//!      worker::attach ─▶ Attached::join ─▶ Worker                    (worker.rs, worker_status.rs)
//! ```
//!
//! The same program with the same arguments is launcher and worker; [`detect`] tells which from the environment, and knows
//! the workers of torchrun, Slurm, MPI and Kubeflow too (`environment/`). `node_rendezvous.rs` joins launchers on several machines.
//!
//! # What a worker of ours has
//!
//! | what | how |
//! |---|---|
//! | its place | `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `GROUP_RANK`, `MASTER_ADDR`, `MASTER_PORT` |
//! | its launcher | `TRAINER_WORKER`, the process id; it dies with it (parent-death signal and pidfd) |
//! | the job's secret | `TRAINER_SECRET`, fresh for each attempt; never on a command line |
//! | its attempt | `TRAINER_ATTEMPT`, from 0 to `--max-restarts` |
//! | where to say why it failed | `TRAINER_FAILURE_FILE`, `logs/rank-N/error.json`; panics write it by themselves |
//! | a page shared with its launcher | standard input, until [`worker::attach`] puts `/dev/null` there |
//! | cores and threads | its affinity, inherited; `RAYON_NUM_THREADS`, unless the user has set it |
//! | a process group | its own: a terminal's Ctrl-C goes to the launcher, which decides |
//!
//! # How a job ends
//!
//! All workers exit with 0: so does the launcher. One fails, is silent for longer than the timeout, or another node reports
//! so: the store tells all ranks, which leave their collectives at once; the launcher reports the root cause with what the
//! worker was doing and its last lines, ends the others (SIGTERM, then SIGKILL) and exits with 3, or starts all again. A
//! signal asks the workers for a checkpoint and the same exit code, 128 + n, which is the launcher's as well; a second one
//! kills them. The launcher itself is killed: the kernel kills its workers. Memory that is shared has no name in any file
//! system, sockets and processes end with the group: there is nothing to clean up.

pub mod cores;
pub mod environment;
mod error;
pub mod failure_report;
mod job;
mod node_rendezvous;
mod output;
pub mod port;
mod process;
mod report;
pub mod secret;
pub mod signals;
mod status_page;
mod supervisor;
mod terminal_lines;
pub mod worker;
mod worker_status;

pub use environment::{Launcher, Request, Role, detect};
pub use error::{LaunchError, Result, USAGE, WORKER_DIED};
pub use job::Job;
pub use node_rendezvous::Nodes;
pub use worker::{Attached, Worker};
pub use worker_status::WorkerStatus;
