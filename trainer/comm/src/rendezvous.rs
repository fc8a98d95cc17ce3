//! Joins the job and makes its communicator, like `init_process_group`.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use super::auth::Secret;
use super::communicator::Communicator;
use super::error::{CommError, Result};
use super::process::Process;
use super::store::{StoreClient, StoreConfig};

/// How ranks exchange data: a backend of `torch.distributed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportKind {
    /// Shared memory, on one host. Needs Linux.
    Shm,
    /// TCP connections, between any hosts.
    Tcp,
    /// The installed MPI library, for processes that its mpirun started. Needs the feature `mpi`.
    Mpi,
}

impl TransportKind {
    /// Whether this system has [`TransportKind::Shm`].
    pub const HAS_SHM: bool = cfg!(target_os = "linux");

    /// Returns the fastest transport that connects all ranks. `on_one_host`: all ranks are on one host.
    pub fn best(on_one_host: bool) -> Self {
        Self::best_of(Self::HAS_SHM, on_one_host)
    }

    fn best_of(has_shm: bool, on_one_host: bool) -> Self {
        if has_shm && on_one_host { Self::Shm } else { Self::Tcp }
    }

    /// Checks that this build has the transport.
    ///
    /// # Errors
    /// [`Usage`](super::ErrorKind::Usage), with a hint that says what to do.
    pub fn built(self) -> Result<()> {
        self.built_with(Self::HAS_SHM, cfg!(feature = "mpi"))
    }

    fn built_with(self, has_shm: bool, has_mpi: bool) -> Result<()> {
        match self {
            Self::Shm if !has_shm => Err(Self::needs_linux()),
            Self::Mpi if !has_mpi => Err(CommError::usage("this build has no mpi backend").hint(
                "build with `--features mpi`, which needs an MPI library's headers and libclang; or use shm or tcp",
            )),
            Self::Shm | Self::Tcp | Self::Mpi => Ok(()),
        }
    }

    /// Returns the error for [`TransportKind::Shm`] where there is none.
    pub(crate) fn needs_linux() -> CommError {
        CommError::usage("the shm backend needs Linux").hint("use tcp")
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TransportKind::Shm => "shm",
            TransportKind::Tcp => "tcp",
            TransportKind::Mpi => "mpi",
        })
    }
}

impl FromStr for TransportKind {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "shm" => Ok(TransportKind::Shm),
            "tcp" => Ok(TransportKind::Tcp),
            "mpi" => Ok(TransportKind::Mpi),
            other => Err(format!("{other:?} is not a transport between CPUs: use shm, tcp or mpi")),
        }
    }
}

/// The settings with which a rank joins its job.
#[derive(Clone, Debug)]
pub struct CommConfig {
    /// This rank, from 0.
    pub rank: usize,
    /// Number of ranks in the job (the world size).
    pub world_size: usize,
    /// `host:port` of the [`StoreServer`](super::StoreServer).
    pub store: String,
    /// The job's secret.
    pub secret: Secret,
    /// Transport of data.
    pub transport: TransportKind,
    /// Longest wait for another rank inside a collective. Time during which this process is stopped (SIGSTOP) does not count.
    pub timeout: Duration,
    /// Longest wait for all ranks to join and connect.
    pub connect_timeout: Duration,
    /// Address on which `tcp` listens for other ranks. By default, the address that reaches the store.
    pub bind: Option<IpAddr>,
    /// Whether ranks are on several hosts. A rank that reaches the store through a loopback address then listens on all
    /// addresses: the host of the store may map its own name to a loopback address (127.0.1.1 in Debian's `/etc/hosts`).
    pub several_hosts: bool,
}

impl CommConfig {
    /// Sets the defaults: 10 minutes for a wait in a collective, 5 minutes for all ranks to join and connect.
    pub fn new(
        rank: usize,
        world_size: usize,
        store: impl Into<String>,
        secret: Secret,
        transport: TransportKind,
    ) -> Self {
        Self {
            rank,
            world_size,
            store: store.into(),
            secret,
            transport,
            timeout: Duration::from_secs(600),
            connect_timeout: Duration::from_secs(300),
            bind: None,
            several_hosts: false,
        }
    }
}

/// Joins the job: connects to the store, waits for all ranks in a barrier whose error names missing ranks, and then sets the
/// transport up. PyTorch: `init_process_group`.
///
/// # Errors
/// [`Usage`](super::ErrorKind::Usage), [`Setup`](super::ErrorKind::Setup) or [`Timeout`](super::ErrorKind::Timeout). All other
/// ranks that have joined return the same error.
pub fn join(config: &CommConfig) -> Result<Communicator> {
    let (rank, world_size) = (config.rank, config.world_size);
    if rank >= world_size {
        return Err(CommError::usage(format!("there is no rank {rank} in a job of {world_size}"))
            .hint("ranks count from 0: RANK must be below WORLD_SIZE"));
    }
    let server = StoreConfig { answer_timeout: config.timeout, ..StoreConfig::new(config.secret.clone(), world_size) };
    let store = StoreClient::connect(&config.store, &server, rank, config.connect_timeout)?;
    join_through(store, config)
}

/// Does what [`join`] does, over an existing control connection. The launcher's workers have such a connection.
///
/// # Errors
/// As [`join`].
pub fn join_through(store: StoreClient, config: &CommConfig) -> Result<Communicator> {
    let (rank, world_size) = (config.rank, config.world_size);
    let key_of = |rank: usize| format!("transport/{rank}");
    store.set(&key_of(rank), config.transport.to_string().as_bytes())?;
    store.barrier("join", config.connect_timeout)?;
    let transport_of_rank_0 = store.wait(&key_of(0), config.connect_timeout)?;
    let mut process =
        Process::new(rank, world_size, config.transport, config.timeout, config.connect_timeout, Some(store));
    process.bind = config.bind;
    process.several_hosts = config.several_hosts;
    process.secret = Some(config.secret.clone());
    if transport_of_rank_0 != config.transport.to_string().as_bytes() {
        let other = String::from_utf8_lossy(&transport_of_rank_0).into_owned();
        let error = format!("rank {rank} uses the backend {}, and rank 0 uses {other}", config.transport);
        let hint = "start all ranks with the same backend: parallel.backend or --backend";
        return Err(process.fail(CommError::usage(error).hint(hint)));
    }
    Communicator::for_world(process)
}

/// Makes a job of one rank, which needs no rendezvous.
///
/// # Errors
/// None in practice. The return type is the same as that of [`join`].
pub fn solo() -> Result<Communicator> {
    let limit = Duration::from_secs(1);
    Communicator::for_world(Process::new(0, 1, TransportKind::Shm, limit, limit, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_shared_memory_tcp_connects_the_ranks_of_a_host() {
        assert_eq!(TransportKind::best_of(true, true), TransportKind::Shm);
        for (has_shm, on_one_host) in [(true, false), (false, true), (false, false)] {
            assert_eq!(TransportKind::best_of(has_shm, on_one_host), TransportKind::Tcp);
        }
    }

    #[test]
    fn a_missing_transport_is_refused_with_a_hint() {
        let error = TransportKind::Shm.built_with(false, true).unwrap_err();
        assert_eq!((error.message.as_str(), error.hint.as_str()), ("the shm backend needs Linux", "use tcp"));
        assert!(TransportKind::Mpi.built_with(true, false).unwrap_err().hint.contains("--features mpi"));
        for kind in [TransportKind::Shm, TransportKind::Tcp, TransportKind::Mpi] {
            kind.built_with(true, true).unwrap();
        }
        TransportKind::Tcp.built_with(false, false).unwrap();
    }
}
