//! [`init`]: makes a program a rank of the job that its launcher has started, like `init_process_group`.

use std::ops::Deref;
use std::time::Duration;

use super::environment::{self, LauncherChoice, Role, Variables, WorkerRole, detect};
use super::error::{LaunchError, Result};
use super::worker::{self, JoinTimeouts, NOTICE_INTERVAL, ShutdownBarrier, Worker};
use super::worker_status::WorkerStatus;
use comm::{CommConfig, Communicator, TransportKind};

/// Longest wait, at shutdown, of the process that hosts the store for the other ranks.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);
/// Exit code of a rank that cannot connect to the others.
const FAILED: u8 = 1;

/// Joins the job that `trainer launch`, torchrun, mpirun or srun has started, with the defaults of [`InitOptions`]. Without a
/// launcher the job has one rank. PyTorch: `init_process_group` with `init_method="env://"`.
///
/// ```no_run
/// let group = launch::init()?;
/// let mut data = vec![group.rank() as f32; 10];
/// group.all_reduce(&mut data, comm::ReduceOp::Sum)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The launcher's variables contradict each other, the other ranks do not join in time, or a transport cannot be set up.
pub fn init() -> Result<ProcessGroup> {
    InitOptions::default().init()
}

/// How a program joins its job.
#[derive(Debug, Clone, Copy)]
pub struct InitOptions {
    /// The transport of data, PyTorch's `backend`. `None`: shared memory if all ranks are on one host, else TCP.
    pub transport: Option<TransportKind>,
    /// Longest wait for another rank in a collective.
    pub timeout: Duration,
    /// Longest wait for all ranks to join.
    pub join: Duration,
}

impl Default for InitOptions {
    fn default() -> Self {
        Self { transport: None, timeout: Duration::from_secs(600), join: Duration::from_secs(300) }
    }
}

impl InitOptions {
    /// Does what [`init`] does, with these options.
    ///
    /// # Errors
    /// As [`init`].
    pub fn init(self) -> Result<ProcessGroup> {
        let variables = environment::variables();
        if let Some(transport) = self.transport {
            transport.built().map_err(|error| LaunchError::usage(error.message, error.hint))?;
        }
        match detect(&variables, LauncherChoice::Auto, None)? {
            Role::Worker(role) => {
                let timeouts = JoinTimeouts { join: self.join, answer: self.timeout, notice: NOTICE_INTERVAL };
                let transport = self.transport.unwrap_or_else(|| best_transport(&role));
                ProcessGroup::join(&role, &variables, transport, timeouts)
            }
            Role::Launcher => ProcessGroup::alone(),
            Role::KubeflowLauncher(_) => Err(LaunchError::usage(
                "Kubeflow's variables (PET_…) start one process per pod, and nothing has started this pod's ranks",
                "start the program with `trainer launch --nnodes N --node-rank R … -- PROGRAM`, or with torchrun",
            )),
        }
    }
}

/// Returns the default transport: shared memory if all ranks are on one host that runs Linux, else TCP.
pub fn best_transport(role: &WorkerRole) -> TransportKind {
    TransportKind::best(role.local_world_size == role.world_size)
}

/// A rank's membership in its job. The value dereferences to the [`Communicator`] of all ranks. Dropping the value leaves the
/// job. The drop on rank 0 may wait up to a minute for the other ranks.
#[derive(Debug)]
pub struct ProcessGroup {
    // Fields are dropped in order: the connection must be closed before rank 0 waits for the other ranks.
    comm: Communicator,
    status: WorkerStatus,
    local_rank: usize,
    local_world_size: usize,
    shutdown: ShutdownAtDrop,
}

impl ProcessGroup {
    /// Joins the job of `role`, and waits for the other ranks. Call this function from the main thread.
    ///
    /// # Errors
    /// The other ranks do not join in time, or belong to another job.
    pub fn join(
        role: &WorkerRole,
        variables: &Variables,
        transport: TransportKind,
        timeouts: JoinTimeouts,
    ) -> Result<Self> {
        let status = worker::attach(role, variables)?;
        let joined = Worker::join(role, variables, status.clone(), timeouts)?;
        let secret = joined.secret.clone();
        // The control connection exists already, so the address is not used.
        let mut config = CommConfig::new(role.rank, role.world_size, "", secret, transport);
        config.timeout = timeouts.answer;
        config.several_hosts = role.local_world_size < role.world_size;
        status.set_status(format_args!("connecting over {transport}"));
        let (client, shutdown) = joined.into_parts();
        let comm = comm::join_through(client, &config).map_err(|error| {
            status.record_comm_error(&error);
            LaunchError { code: FAILED, ..LaunchError::failed(error.message, error.hint) }
        })?;
        tracing::info!(rank = role.rank, world_size = role.world_size, %transport, "created the process group");
        let (local_rank, local_world_size) = (role.local_rank, role.local_world_size);
        Ok(Self { comm, status, local_rank, local_world_size, shutdown: ShutdownAtDrop(Some(shutdown)) })
    }

    /// Makes the group of a program without a launcher.
    fn alone() -> Result<Self> {
        let failed = |message: String| LaunchError::failed(message, "see `ulimit -a`");
        let comm = comm::solo().map_err(|error| failed(error.message))?;
        let status = WorkerStatus::detached().map_err(|error| failed(error.to_string()))?;
        Ok(Self { comm, status, local_rank: 0, local_world_size: 1, shutdown: ShutdownAtDrop(None) })
    }

    /// Returns this rank's index on its host, which is also the index of its GPU.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Returns the number of ranks on this host.
    pub fn local_world_size(&self) -> usize {
        self.local_world_size
    }

    /// Returns the status, through which the rank reports to this program's launcher.
    pub fn status(&self) -> &WorkerStatus {
        &self.status
    }

    /// Splits the group. Drop the communicator before you wait for the barrier.
    pub fn into_parts(mut self) -> (Communicator, WorkerStatus, Option<ShutdownBarrier>) {
        let shutdown = self.shutdown.0.take();
        (self.comm, self.status, shutdown)
    }

    /// Leaves the job, as dropping the group does.
    pub fn leave(self) {}
}

impl Deref for ProcessGroup {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        &self.comm
    }
}

#[derive(Debug)]
struct ShutdownAtDrop(Option<ShutdownBarrier>);

impl Drop for ShutdownAtDrop {
    fn drop(&mut self) {
        if let Some(shutdown) = self.0.take() {
            shutdown.wait(SHUTDOWN_TIMEOUT);
        }
    }
}
