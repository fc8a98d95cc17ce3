//! Starts one process per rank on a node, supervises the processes, and ends with one exit code. This is the work of torchrun:
//! an elastic agent (here [`LaunchConfig::run`]), a rendezvous of nodes, a worker group with a fixed number of ranks, restarts
//! of the whole group, and an `error.json` of each worker that failed.
//!
//! ```text
//!   trainer --cpus 4 ─▶ LaunchConfig::run                            (launcher.rs)
//!      │  Ctrl-C, SIGTERM …  ─▶ Supervisor ◀─ pidfds, heartbeats, store   (supervisor, signals.rs)
//!      │                          │  │
//!      │   StoreServer ◀──────────┼──┼──── rendezvous, deaths, abort (comm/store)
//!      │      ▲                   │  │
//!      │      │     StatusPage ◀──┘  └──▶ logs/rank-N/, screen       (status_page.rs; screen.rs, output.rs, terminal_lines.rs)
//!      ▼      │      │
//!   trainer --cpus 4, with TRAINER_WORKER, RANK, …, for each rank    (process.rs, cores.rs)
//!      worker::attach ─▶ Worker::join                                (worker.rs, worker_status.rs)
//! ```
//!
//! Launcher and workers run the same program with the same arguments. [`detect`] decides from the environment variables whether
//! this process is a launcher or a worker. It also recognises the workers of torchrun, Slurm, MPI and LSF, and Kubeflow's pods
//! (`environment/`).
//!
//! Workers may also run any other program ([`AnyProgram`]), which gets torchrun's variables. A program that calls [`init`]
//! becomes a rank of its launcher's job. [`SshLauncher`] starts the launchers of several hosts over ssh (`ssh_launcher.rs`,
//! `agent.rs`).
//!
//! `node_rendezvous.rs` connects the launchers of several machines, which end together (`exit_barrier/`).
//! `rank_rendezvous.rs` connects the ranks. During a long wait, `announcer.rs` prints which peers were refused and which are
//! missing. `local_secret.rs` shares a secret between processes of one user on one host. `system/` has the functions that differ
//! on macOS.
//!
//! Failures: a worker writes `error.json` (`failure_report.rs`), and launchers tell each other about failed nodes
//! (`node_failure.rs`). `job_failure.rs` finds the root cause and writes the text for the screen.
//!
//! # What a worker gets from this launcher
//!
//! | what | how |
//! |---|---|
//! | rank and rendezvous | `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `GROUP_RANK`, `MASTER_ADDR`, `MASTER_PORT` |
//! | its launcher | `TRAINER_WORKER`, a process id. The worker dies with its launcher (parent-death signal and pidfd) |
//! | the job's secret | `TRAINER_SECRET`, a new one for each attempt; never on a command line |
//! | its attempt | `TRAINER_ATTEMPT`, from 0 to `--max-restarts` |
//! | where to report a failure | `TRAINER_FAILURE_FILE`, `logs/rank-N/error.json`. A panic writes it too ([`explain_panics`]) |
//! | a page shared with its launcher | standard input, until [`worker::attach`] replaces it with `/dev/null` |
//! | cores and threads | an inherited affinity mask; `RAYON_NUM_THREADS`, unless the user has set it |
//! | a process group | its own: a terminal's Ctrl-C goes to the launcher, which decides what to do |
//!
//! # How a job ends
//!
//! - **All workers exit with 0.** The launcher exits with 0 too, with several nodes when the workers of all nodes are done.
//! - **A failure.** A worker fails, or sends no heartbeats for longer than the timeout, or another node reports a failure. The
//!   store then notifies all ranks, which leave their collectives at once. The launcher reports the root cause with the
//!   worker's last status and last lines, ends the other workers (SIGTERM, then SIGKILL), and exits with 3 or restarts all
//!   workers.
//! - **A signal.** The launcher asks the workers to save a checkpoint. The workers exit with 128 + n, and so does the launcher. If a
//!   worker of the node does not train yet ([`WorkerStatus::set_training`]), the launcher ends the workers with SIGTERM, and the
//!   other nodes stop too. A second signal kills the workers, and the other nodes stop too. A SIGHUP never counts as the second
//!   signal, since a closing terminal sends several.
//! - **The launcher is killed.** The kernel kills its workers.
//!
//! In all cases nothing is left to clean up: shared memory has no name in any file system, and the kernel closes the sockets.

#![deny(clippy::print_stdout, clippy::print_stderr, reason = "`screen::Screen` writes to the screen")]

mod agent;
mod announcer;
mod any_program;
pub mod console;
pub mod cores;
pub mod environment;
mod error;
mod exit_barrier;
mod failure_report;
pub mod helper;
pub mod hosts;
mod job_failure;
mod job_secret;
mod launch_attempt;
mod launcher;
mod listen;
#[cfg_attr(not(target_os = "linux"), path = "no_local_secret.rs")]
mod local_secret;
mod node_failure;
mod node_rendezvous;
mod node_wait;
mod output;
mod port;
mod process;
mod process_group;
mod rank_rendezvous;
mod remote_host;
mod rendezvous_parameters;
mod screen;
pub mod secret;
pub mod shell;
pub mod signals;
mod ssh;
mod ssh_launcher;
mod status_page;
mod supervisor;
mod system;
mod terminal_lines;
mod thread;
pub mod worker;
mod worker_environment;
mod worker_status;

#[cfg(test)]
#[path = "../../testing/shared.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod shared;

pub use any_program::{AnyProgram, find_program};
pub use environment::{LauncherChoice, Role, detect};
pub use error::{LaunchError, Result, USAGE, WORKER_DIED};
pub use launcher::{JobFolder, LaunchConfig, OnSignal, Timeouts};
pub use process_group::{InitOptions, ProcessGroup, best_transport, init};
pub use rendezvous_parameters::RendezvousParameters;
pub use ssh_launcher::SshLauncher;
pub use system::set_parent_death_signal;
pub use worker::{JoinTimeouts, NOTICE_INTERVAL, Worker};
pub use worker_status::{ExplainPanic, WorkerStatus, explain_panics};
