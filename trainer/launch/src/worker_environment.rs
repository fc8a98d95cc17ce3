//! The environment variables of the workers of one attempt. PyTorch sets them in `LocalElasticAgent._start_workers`.

use std::ffi::OsString;

use super::environment;
use super::{secret, worker};
use comm::Secret;

/// The parameters of a job that become the environment variables of a node's workers.
pub(super) struct WorkerEnvironment {
    pub(super) world_size: usize,
    /// Number of nodes.
    pub(super) nodes: usize,
    /// Rank of the first worker of this node.
    pub(super) first_rank: usize,
    /// Number of workers of this node.
    pub(super) local_world_size: usize,
    /// Index of this node.
    pub(super) node: usize,
    pub(super) attempt: usize,
    /// Host and port of the workers' rendezvous.
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) secret: Secret,
}

impl WorkerEnvironment {
    /// Returns the environment variables of a worker that is this program.
    pub(super) fn of_this_program(&self, local_rank: usize) -> Vec<(String, OsString)> {
        let own = [
            (environment::WORKER, std::process::id().to_string()),
            (worker::ATTEMPT, self.attempt.to_string()),
            // Only processes of this user can read a variable. All users can read a command line.
            (secret::VARIABLE, self.secret.to_hex()),
        ];
        self.common(local_rank).into_iter().chain(own.map(entry)).collect()
    }

    /// Returns the environment variables of a worker that is any program: those of torchrun's workers (PyTorch:
    /// `torch.distributed.elastic.agent.server.local_elastic_agent`), and the secret, for programs that use
    /// [`crate::init`].
    pub(super) fn of_any_program(
        &self,
        local_rank: usize,
        run_id: &str,
        max_restarts: usize,
    ) -> Vec<(String, OsString)> {
        let rank = self.first_rank + local_rank;
        let like_torchrun = [
            ("ROLE_NAME", "default".to_owned()),
            ("ROLE_RANK", rank.to_string()),
            ("ROLE_WORLD_SIZE", self.world_size.to_string()),
            ("GROUP_WORLD_SIZE", self.nodes.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", self.attempt.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", max_restarts.to_string()),
            ("TORCHELASTIC_RUN_ID", run_id.to_owned()),
            // With `False`, rank 0 creates PyTorch's store at MASTER_PORT.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
            (secret::VARIABLE, self.secret.to_hex()),
        ];
        let async_errors = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
        let by_default = std::env::var_os(async_errors).is_none().then(|| (async_errors, "1".to_owned()));
        let threads = (threads_of_any_program(self.local_world_size)).map(|threads| (THREADS, threads.to_owned()));
        self.common(local_rank)
            .into_iter()
            .chain(like_torchrun.into_iter().chain(by_default).chain(threads).map(entry))
            .collect()
    }

    fn common(&self, local_rank: usize) -> Vec<(String, OsString)> {
        [
            ("RANK", (self.first_rank + local_rank).to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_WORLD_SIZE", self.local_world_size.to_string()),
            ("GROUP_RANK", self.node.to_string()),
            ("MASTER_ADDR", self.host.clone()),
            ("MASTER_PORT", self.port.to_string()),
        ]
        .map(entry)
        .to_vec()
    }
}

fn entry((name, value): (&str, String)) -> (String, OsString) {
    (name.to_owned(), value.into())
}

/// The variable with the number of OpenMP threads. PyTorch uses OpenMP on CPUs.
const THREADS: &str = "OMP_NUM_THREADS";

/// Returns the value of `OMP_NUM_THREADS` for a worker, as torchrun sets it: 1 if there are several workers and the user has
/// not set the variable. `None` leaves the variable unchanged.
pub(super) fn threads_of_any_program(local_world_size: usize) -> Option<&'static str> {
    (local_world_size > 1 && std::env::var_os(THREADS).is_none()).then_some("1")
}

/// Variables that workers of any program must not inherit, since they describe this launcher's own role in a job.
pub(super) const NOT_INHERITED: [&str; 4] =
    [environment::WORKER, worker::ATTEMPT, worker::FAILURE_FILE, crate::hosts::NODE];
