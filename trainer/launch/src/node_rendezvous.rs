//! Rendezvous of the launchers of a job on several nodes. The launchers connect at node 0's address, assign the ranks, and end
//! together.
//!
//! ```text
//! node 0 listens at --master-addr:--master-port for the launchers (a store with one member per node)
//! node 0          sets  attempt = number of earlier starts         the other nodes use this number: they may have missed a start
//! node R          sets  node/R  = its workers, host name, flags    every node reads all: world size and first ranks
//! node 0          sets  workers = the port of the workers' store   a second store, on a port that the kernel chose
//! node R          sets  failed  = the first failure                every node ends its workers and reports the failure
//! ```
//!
//! At the end the launchers wait for each other in the exit barrier (`exit_barrier/`).
//!
//! Each attempt has its own stores. If an outage of the network breaks a connection, the attempt ends on both sides, and the
//! job may be started again: see [`NodeFailure::of`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use super::announcer::Announcer;
use super::error::{LaunchError, Result, to_json};
use super::listen::{bind, listen_address};
use super::node_failure::{NodeFailure, NodeInfo, RendezvousError};
use super::node_wait::NodeWait;
use super::port;
use super::rendezvous_parameters::RendezvousParameters;
use super::secret::derive;
use super::signals;
use super::thread::start_thread;
use comm::{CommError, ConnectError, ErrorKind, MemberKind, Secret, StoreClient, StoreConfig, StoreServer};

/// Longest request to the store, after which the launcher checks its signals again.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// A launcher's connection to the other launchers.
pub(super) struct NodeRendezvous {
    pub(super) parameters: RendezvousParameters,
    /// By node, once all nodes have joined.
    nodes: Vec<NodeInfo>,
    // Fields are dropped in order: the client must leave before the store is dropped.
    /// The thread that waits for failures of other nodes.
    pub(super) watch: Option<JoinHandle<()>>,
    pub(super) client: Arc<StoreClient>,
    failure: Arc<Mutex<Option<NodeFailure>>>,
    /// Tells the thread `watch` to end.
    pub(super) stop_watch: Arc<AtomicBool>,
    /// A connection ends when the other node has not answered for this long.
    answer_timeout: Duration,
    /// Number of earlier starts of the job.
    pub(super) attempt: usize,
    /// The launchers' store, on node 0.
    pub(super) server: Option<StoreServer>,
}

impl NodeRendezvous {
    /// Connects to the other launchers, and exchanges the nodes' numbers of workers.
    ///
    /// # Errors
    /// Node 0 cannot listen, a node does not join in time, nodes have different flags, or a signal ends the wait.
    pub(super) fn join(
        parameters: &RendezvousParameters,
        secret: &Secret,
        own: &NodeInfo,
        attempt: usize,
        wait: &mut NodeWait<'_>,
    ) -> std::result::Result<Self, RendezvousError> {
        let RendezvousParameters { nnodes, node_rank, ref master_addr, master_port, .. } = *parameters;
        let config = StoreConfig {
            secret: derive(secret, "nodes", 0),
            world_size: nnodes,
            member: MemberKind::Node,
            answer_timeout: wait.timeouts().stall,
        };
        let (server, address) = match node_rank {
            0 => {
                let server = host_store(parameters, &config, wait)?;
                // Connect to the own address, not to the name: the name may resolve to this machine only on other nodes.
                let port = server.local_addr().port();
                let address = match server.local_addr().ip() {
                    all if all.is_unspecified() => port::host_port("127.0.0.1", port),
                    own => port::host_port(&own.to_string(), port),
                };
                (Some(server), address)
            }
            _ => (None, port::host_port(master_addr, master_port)),
        };
        let client = Arc::new(connect(&address, &config, node_rank, attempt, wait)?);
        let mut rendezvous = Self {
            parameters: parameters.clone(),
            nodes: Vec::new(),
            watch: None,
            client,
            failure: Arc::default(),
            stop_watch: Arc::default(),
            answer_timeout: config.answer_timeout,
            attempt,
            server,
        };
        let joined = wait.check_signals().and_then(|()| rendezvous.exchange(own, wait));
        if let Err(error) = joined.and_then(|()| Ok(rendezvous.watch()?)) {
            rendezvous.publish_error(&error);
            rendezvous.leave_before_start();
            return Err(error);
        }
        tracing::info!(
            nnodes,
            node_rank,
            master_addr,
            master_port,
            attempt = rendezvous.attempt,
            "all nodes have joined"
        );
        Ok(rendezvous)
    }

    /// Publishes this node's [`NodeInfo`], and reads those of the other nodes.
    fn exchange(&mut self, own: &NodeInfo, wait: &mut NodeWait<'_>) -> std::result::Result<(), RendezvousError> {
        let node_rank = self.parameters.node_rank;
        if node_rank == 0 {
            self.set("attempt", self.attempt.to_string().as_bytes())?;
        }
        let text = to_json("a node's description", own)?;
        self.set(&format!("node/{node_rank}"), text.as_bytes())?;
        let bytes = self.value("attempt", 0, wait)?;
        self.attempt = number(&bytes).ok_or_else(|| other_version(0))?;
        for node in 0..self.parameters.nnodes {
            let bytes = self.value(&format!("node/{node}"), node, wait)?;
            let other: NodeInfo = serde_json::from_slice(&bytes).map_err(|_| other_version(node))?;
            if other.max_restarts != own.max_restarts {
                return Err(LaunchError::usage(
                    format!(
                        "node {node} ({}) was started with --max-restarts {}, node {node_rank} with {}",
                        other.host, other.max_restarts, own.max_restarts
                    ),
                    "start all nodes of a job with the same flags",
                )
                .into());
            }
            self.nodes.push(other);
        }
        Ok(())
    }

    fn set(&self, key: &str, value: &[u8]) -> std::result::Result<(), RendezvousError> {
        self.client.set(key, value).map_err(|error| self.lost(&error))
    }

    /// Waits for the value of a key that `node` sets.
    ///
    /// # Errors
    /// A node is gone or has reported a failure, no node sets the value in time, or a signal ends the wait.
    fn value(&self, key: &str, node: usize, wait: &mut NodeWait<'_>) -> std::result::Result<Vec<u8>, RendezvousError> {
        loop {
            // Read the key first. If workers of another node run already and one has failed, all nodes have to join before they
            // start again together.
            match self.client.wait(key, POLL_INTERVAL) {
                Ok(value) => return Ok(value),
                Err(error) if error.kind != ErrorKind::Timeout => return Err(self.lost(&error)),
                Err(_) => {}
            }
            if let Some(failure) = self.failure() {
                return Err(failure.into());
            }
            // Before all nodes have joined, no thread watches for this key.
            let reported = self.client.get("failed").map_err(|error| self.lost(&error))?;
            if let Some(failure) = reported.and_then(|bytes| serde_json::from_slice::<NodeFailure>(&bytes).ok()) {
                if failure.stopped_by.is_some() {
                    wait.say(&failure.headline());
                }
                return Err(failure.into());
            }
            if wait.is_over() {
                let limit = wait.timeouts().join.as_secs_f64();
                return Err(LaunchError::failed(
                    format!("node {node} did not join at {} within {limit:.0} s", wait.address()),
                    "is the job started on it, with the same --nnodes, --master-addr and --master-port?",
                )
                .into());
            }
            match self.parameters.node_rank {
                // On node 0 the store's announcer prints all missing nodes.
                0 => wait.check_signals()?,
                _ => wait.check_signals_and_notify(&format!("node {node}"), None)?,
            }
        }
    }

    fn lost(&self, error: &CommError) -> RendezvousError {
        self.broken_by(error).into()
    }

    /// Returns the failure for an error of the launchers' store.
    pub(super) fn broken_by(&self, error: &CommError) -> NodeFailure {
        NodeFailure::of(&self.parameters, &self.nodes, self.answer_timeout, error)
    }

    /// Returns the world size and the first rank of this node.
    pub(super) fn world_size_and_first_rank(&self) -> (usize, usize) {
        let workers = |nodes: &[NodeInfo]| nodes.iter().map(|node| node.workers).sum();
        (workers(&self.nodes), workers(&self.nodes[..self.parameters.node_rank]))
    }

    /// Publishes the port of the workers' store. Node 0 calls this function.
    ///
    /// # Errors
    /// A node is gone.
    pub(super) fn publish_port(&self, port: u16) -> std::result::Result<(), RendezvousError> {
        self.set("workers", port.to_string().as_bytes())
    }

    /// Waits for the port of the workers' store. The other nodes call this function.
    ///
    /// # Errors
    /// A node is gone or has reported a failure, node 0 does not set the port in time, or a signal ends the wait.
    pub(super) fn workers_port(&self, wait: &mut NodeWait<'_>) -> std::result::Result<u16, RendezvousError> {
        number(&self.value("workers", 0, wait)?).ok_or_else(|| other_version(0).into())
    }

    /// Starts the thread that waits for failures of other nodes.
    fn watch(&mut self) -> Result<()> {
        let (client, failure, stop) =
            (Arc::clone(&self.client), Arc::clone(&self.failure), Arc::clone(&self.stop_watch));
        let (parameters, nodes, limit) = (self.parameters.clone(), self.nodes.clone(), self.answer_timeout);
        let run = move || {
            let found = loop {
                match client.wait("failed", POLL_INTERVAL) {
                    Ok(bytes) => {
                        let found: Option<NodeFailure> = serde_json::from_slice(&bytes).ok();
                        break found.filter(|failure| failure.node != parameters.node_rank);
                    }
                    Err(error) if error.kind == ErrorKind::Timeout && !stop.load(Ordering::Relaxed) => {}
                    Err(error) if error.kind == ErrorKind::Timeout => return,
                    Err(error) => break Some(NodeFailure::of(&parameters, &nodes, limit, &error)),
                }
            };
            *failure.lock() = found;
        };
        self.watch = Some(start_thread("nodes-watch", "failures of other nodes", run)?);
        Ok(())
    }

    /// Returns the failure of another node, if there is one.
    pub(super) fn failure(&self) -> Option<NodeFailure> {
        self.failure.lock().clone()
    }

    /// Reports to the other nodes why this node leaves the rendezvous. Otherwise they would wait for it.
    pub(super) fn publish_error(&self, error: &RendezvousError) {
        match error {
            RendezvousError::Failed(error) => {
                self.publish_failure(error.message.lines().next().unwrap_or_default(), false);
            }
            RendezvousError::Interrupted(signal) => self.publish_stop(*signal),
            RendezvousError::Lost(_) => return,
        }
        if self.server.is_some() && self.nodes.len() < self.parameters.nnodes {
            // The store ends with this launcher, and the other nodes ask it once per `POLL_INTERVAL`. After a restart they may still
            // be joining.
            std::thread::sleep(if self.attempt == 0 { 3 } else { 10 } * POLL_INTERVAL);
        }
    }

    /// Reports a failure on this node to the other nodes.
    pub(super) fn publish_failure(&self, what: &str, restartable: bool) {
        self.publish(what.to_owned(), None, restartable);
    }

    /// Reports to the other nodes that a signal stops the job.
    pub(super) fn publish_stop(&self, signal: i32) {
        self.publish(format!("stopped by {}", signals::name(signal)), Some(signal), false);
    }

    fn publish(&self, what: String, stopped_by: Option<i32>, restartable: bool) {
        let node = self.parameters.node_rank;
        let failure = NodeFailure { node, what, stopped_by, restartable, broken: None };
        if let (None, Ok(text)) = (self.failure(), serde_json::to_vec(&failure)) {
            // If the store is gone, the other nodes have noticed it already.
            let _ = self.client.set("failed", &text);
        }
    }
}

impl Drop for NodeRendezvous {
    fn drop(&mut self) {
        self.join_watch();
    }
}

/// Starts the launchers' store on node 0.
fn host_store(parameters: &RendezvousParameters, config: &StoreConfig, wait: &NodeWait<'_>) -> Result<StoreServer> {
    let (timeouts, screen) = (wait.timeouts(), wait.screen());
    let RendezvousParameters { nnodes, ref master_addr, master_port, .. } = *parameters;
    let host = listen_address(master_addr, true, |note| screen.say(note));
    let announcer = Announcer {
        say: screen.message_writer(),
        member: MemberKind::Node,
        world_size: nnodes,
        place: port::host_port(master_addr, master_port),
        interval: timeouts.notice,
        limit: timeouts.join,
    };
    bind(&host, master_port, config.clone(), announcer.start()?)
}

/// Joins the launchers' store. If the address cannot be resolved, prints this at once and tries again: the name may be
/// mistyped, or may appear later (Kubernetes).
fn connect(
    address: &str,
    config: &StoreConfig,
    node_rank: usize,
    attempt: usize,
    wait: &mut NodeWait<'_>,
) -> std::result::Result<StoreClient, RendezvousError> {
    let mut unresolved = String::new();
    loop {
        let tried = StoreClient::try_connect(address, config, node_rank);
        let refused = match tried.map_err(LaunchError::from)? {
            Ok(client) => return Ok(client),
            Err(refused) => refused,
        };
        let may_change = match &refused {
            ConnectError::Unreachable(_) => true,
            ConnectError::Unresolved(cause) => {
                if unresolved != *cause {
                    wait.say(&format!("note: {cause}; trying again"));
                    unresolved.clone_from(cause);
                }
                true
            }
            // After an outage node 0 may not have noticed yet that this node has left the previous attempt.
            ConnectError::Refused(_) => attempt > 0,
            ConnectError::Unauthenticated(_) => false,
        };
        if wait.is_over() || !may_change {
            return Err(cannot_join(node_rank, wait.address(), &refused).into());
        }
        match attempt {
            0 => wait.check_signals_and_notify("node 0", Some(&refused.to_string()))?,
            _ => wait.defer_signal_and_notify("node 0", Some(&refused.to_string()))?,
        }
        std::thread::sleep(POLL_INTERVAL / 4);
    }
}

fn number<T: std::str::FromStr>(bytes: &[u8]) -> Option<T> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

fn other_version(node: usize) -> LaunchError {
    LaunchError::failed(format!("node {node} runs another version of this program"), "install the same on all nodes")
}

fn cannot_join(node_rank: usize, place: &str, refused: &ConnectError) -> LaunchError {
    let hint = match refused {
        ConnectError::Unauthenticated(_) => {
            "give all nodes the same secret: --secret-file FILE, or TRAINER_SECRET; and the same version of this program"
        }
        ConnectError::Refused(_) => "start each node of the job once, with the same --nnodes and its own --node-rank",
        ConnectError::Unreachable(_) | ConnectError::Unresolved(_) => {
            "is the job started on node 0, do --master-addr and --master-port lead there, and does the firewall let it \
             through?"
        }
    };
    LaunchError::failed(format!("node {node_rank} cannot join node 0 at {place}: {refused}"), hint)
}
