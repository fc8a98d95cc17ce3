//! Rendezvous of the launchers of a job on several nodes: they meet at node 0's address, assign the ranks, and end together.
//!
//! ```text
//! node 0 listens at --master-addr:--master-port for the launchers (a store with one member per node)
//! node R          sets  node/R  = its workers, host name, flags    every node reads all: world size and first ranks
//! node 0          sets  workers = the port of the workers' store   a second store, on a port that the kernel chose
//! node R          sets  failed  = the first failure                every node ends its workers and reports the failure
//! node R          sets  ended/R when its workers are done          node 0 waits for all: it hosts both stores
//! ```
//!
//! Each attempt has its own stores, and its own secrets derived from the job's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::error::{LaunchError, Result};
use super::port;
use super::secret::{self, derive};
use super::worker::{bind, listen_address};
use comm::{CommError, ErrorKind, Secret, StoreClient, StoreServer};

/// Longest request to the store, after which the launcher checks its signals again.
const POLL: Duration = Duration::from_millis(200);

/// Where and how the launchers of several nodes meet, as in torchrun's class of this name.
#[derive(Debug, Clone)]
pub struct RendezvousParameters {
    /// `--nnodes`.
    pub nnodes: usize,
    /// `--node-rank`.
    pub node_rank: usize,
    /// `--master-addr`: host of node 0.
    pub master_addr: String,
    /// `--master-port`: where node 0's launcher listens.
    pub master_port: u16,
    /// Secret that only the launchers of the job know.
    pub secret: Secret,
}

impl RendezvousParameters {
    /// Checks the values of the command line. A secret is required unless the address is this machine's loopback: without one,
    /// any process that reaches the port could join.
    ///
    /// # Errors
    /// A number is out of range, or there is no secret.
    pub fn new(
        nnodes: usize,
        node_rank: usize,
        master_addr: String,
        master_port: u16,
        secret: Option<Secret>,
    ) -> Result<Self> {
        if node_rank >= nnodes {
            return Err(LaunchError::usage(
                format!("--node-rank {node_rank} is not below --nnodes {nnodes}"),
                "nodes count from 0: the first of two is --node-rank 0, the second --node-rank 1",
            ));
        }
        if master_port == 0 {
            return Err(LaunchError::usage(
                "--master-port 0: the other nodes could not know the port",
                "choose a free port of node 0, the same on all nodes",
            ));
        }
        let loopback = master_addr == "localhost"
            || master_addr.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback());
        let secret = match secret {
            Some(secret) => secret,
            None if loopback => Secret::from_words(&["loopback", &master_addr, &master_port.to_string()]),
            None => {
                return Err(LaunchError::usage(
                    format!("--nnodes {nnodes} over {master_addr} needs a secret: anybody could join without one"),
                    secret::HINT,
                ));
            }
        };
        Ok(Self { nnodes, node_rank, master_addr, master_port, secret })
    }
}

/// What a launcher tells the other launchers about its node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeInfo {
    pub(super) workers: usize,
    pub(super) host: String,
    pub(super) max_restarts: usize,
}

/// The first failure of a job, as its node reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeFailure {
    pub(super) node: usize,
    pub(super) what: String,
    /// Whether the job may be started again.
    #[serde(rename = "again")]
    pub(super) restartable: bool,
}

/// A launcher's connection to the other launchers.
pub(super) struct NodeRendezvous {
    parameters: RendezvousParameters,
    /// By node, once all nodes have joined.
    nodes: Vec<NodeInfo>,
    // The order of these fields matters: the client leaves before the store is dropped
    watch: Option<JoinHandle<()>>,
    client: Arc<StoreClient>,
    failure: Arc<Mutex<Option<NodeFailure>>>,
    over: Arc<AtomicBool>,
    _server: Option<StoreServer>,
}

/// Why launchers did not meet.
pub(super) enum RendezvousError {
    Failed(LaunchError),
    /// A user's signal has interrupted the wait.
    Interrupted(i32),
}

impl From<LaunchError> for RendezvousError {
    fn from(error: LaunchError) -> Self {
        Self::Failed(error)
    }
}

impl NodeRendezvous {
    /// Meets the other launchers within `limit`.
    ///
    /// # Errors
    /// Node 0 cannot listen, a node does not join in time, nodes have different flags, or `interrupted` returns a signal.
    pub(super) fn join(
        parameters: &RendezvousParameters,
        own: &NodeInfo,
        attempt: usize,
        limit: Duration,
        interrupted: &mut dyn FnMut() -> Option<i32>,
    ) -> std::result::Result<Self, RendezvousError> {
        let until = Instant::now() + limit;
        let RendezvousParameters { nnodes, node_rank, ref master_addr, master_port, .. } = *parameters;
        let secret = derive(&parameters.secret, "nodes", attempt);
        let server = match node_rank {
            0 => {
                let host = listen_address(master_addr, true);
                Some(bind(&host, master_port, &secret, nnodes, |_| {})?)
            }
            _ => None,
        };
        let address = port::joined(master_addr, master_port);
        let client = loop {
            if let Some(signal) = interrupted() {
                return Err(RendezvousError::Interrupted(signal));
            }
            match StoreClient::connect(address.as_str(), &secret, node_rank, nnodes, POLL) {
                Ok(client) => break Arc::new(client),
                // Node 0 may still be in the previous attempt, which has another secret
                Err(error) if Instant::now() >= until || (attempt == 0 && error.message.contains("secret")) => {
                    return Err(cannot_join(node_rank, &error).into());
                }
                Err(_) => std::thread::sleep(POLL / 4),
            }
        };
        let mut rendezvous = Self {
            parameters: parameters.clone(),
            nodes: Vec::new(),
            watch: None,
            client,
            failure: Arc::default(),
            over: Arc::default(),
            _server: server,
        };
        let text = serde_json::to_vec(own).map_err(|error| LaunchError::failed(error.to_string(), ""))?;
        rendezvous.client.set(&format!("node/{node_rank}"), &text).map_err(|error| rendezvous.lost(&error))?;
        for node in 0..nnodes {
            let bytes = rendezvous.value(&format!("node/{node}"), until, interrupted)?;
            let other: NodeInfo = serde_json::from_slice(&bytes).map_err(|_| {
                LaunchError::failed(
                    format!("node {node} runs another version of this program"),
                    "install the same on all",
                )
            })?;
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
            rendezvous.nodes.push(other);
        }
        rendezvous.watch()?;
        tracing::info!(nnodes, node_rank, master_addr, master_port, attempt, "all nodes have joined");
        Ok(rendezvous)
    }

    /// Waits for the value of a key; checks for signals meanwhile.
    fn value(
        &self,
        key: &str,
        until: Instant,
        interrupted: &mut dyn FnMut() -> Option<i32>,
    ) -> std::result::Result<Vec<u8>, RendezvousError> {
        loop {
            if let Some(signal) = interrupted() {
                return Err(RendezvousError::Interrupted(signal));
            }
            match self.client.wait(key, POLL) {
                Ok(value) => return Ok(value),
                Err(error) if error.kind == ErrorKind::Timeout && Instant::now() < until => {}
                Err(error) if error.kind == ErrorKind::Timeout => {
                    let who =
                        key.strip_prefix("node/").map_or_else(|| "node 0".to_owned(), |node| format!("node {node}"));
                    return Err(LaunchError::failed(
                        format!(
                            "{who} did not come to {}:{} in time",
                            self.parameters.master_addr, self.parameters.master_port
                        ),
                        "is the job started on it, with the same --nnodes, --master-addr and --master-port?",
                    )
                    .into());
                }
                Err(error) => return Err(self.lost(&error).into()),
            }
        }
    }

    fn lost(&self, error: &CommError) -> LaunchError {
        let (_, what) = lost(&self.parameters, &self.nodes, error);
        LaunchError::failed(what, "its launcher has ended or was killed, or the network is down")
    }

    /// Returns the world size and the first rank of this node.
    pub(super) fn world(&self) -> (usize, usize) {
        let workers = |nodes: &[NodeInfo]| nodes.iter().map(|node| node.workers).sum();
        (workers(&self.nodes), workers(&self.nodes[..self.parameters.node_rank]))
    }

    /// Node 0: publishes the port of the workers' store.
    ///
    /// # Errors
    /// A node is gone.
    pub(super) fn publish_port(&self, port: u16) -> Result<()> {
        self.client.set("workers", port.to_string().as_bytes()).map_err(|error| self.lost(&error))
    }

    /// The other nodes: wait for the port of the workers' store.
    ///
    /// # Errors
    /// A node is gone, the port does not come within `limit`, or `interrupted` returns a signal.
    pub(super) fn workers_port(
        &self,
        limit: Duration,
        interrupted: &mut dyn FnMut() -> Option<i32>,
    ) -> std::result::Result<u16, RendezvousError> {
        let bytes = self.value("workers", Instant::now() + limit, interrupted)?;
        let port = std::str::from_utf8(&bytes).ok().and_then(|text| text.parse().ok());
        port.ok_or_else(|| {
            LaunchError::failed("node 0 runs another version of this program", "install the same").into()
        })
    }

    /// Starts the thread that waits for failures of other nodes.
    fn watch(&mut self) -> Result<()> {
        let (client, failure, over) = (Arc::clone(&self.client), Arc::clone(&self.failure), Arc::clone(&self.over));
        let (parameters, nodes) = (self.parameters.clone(), self.nodes.clone());
        let run = move || {
            let found = loop {
                match client.wait("failed", POLL) {
                    Ok(bytes) => {
                        let found: Option<NodeFailure> = serde_json::from_slice(&bytes).ok();
                        break found.filter(|failure| failure.node != parameters.node_rank);
                    }
                    Err(error) if error.kind == ErrorKind::Timeout && !over.load(Ordering::Relaxed) => {}
                    Err(error) if error.kind == ErrorKind::Timeout => return,
                    Err(error) => {
                        let (node, what) = lost(&parameters, &nodes, &error);
                        break Some(NodeFailure { node, what, restartable: false });
                    }
                }
            };
            *failure.lock() = found;
        };
        let thread = std::thread::Builder::new().name("nodes-watch".into()).spawn(run);
        self.watch = Some(thread.map_err(|error| LaunchError::failed(error.to_string(), "see `ulimit -a`"))?);
        Ok(())
    }

    /// Returns the failure of another node, if there is one.
    pub(super) fn failure(&self) -> Option<NodeFailure> {
        self.failure.lock().clone()
    }

    /// Tells the other nodes about a failure on this node.
    pub(super) fn publish_failure(&self, what: &str, restartable: bool) {
        let failure = NodeFailure { node: self.parameters.node_rank, what: what.to_owned(), restartable };
        if let (None, Ok(text)) = (self.failure(), serde_json::to_vec(&failure)) {
            // If the store is gone, the other nodes know already
            let _ = self.client.set("failed", &text);
        }
    }

    /// Tells the other nodes that this node's workers are done. Node 0 then waits until all nodes are done, a node has failed,
    /// or `interrupted` returns a signal.
    pub(super) fn finish(&self, interrupted: &mut dyn FnMut() -> Option<i32>) {
        let _ = self.client.set(&format!("ended/{}", self.parameters.node_rank), b"");
        if self.parameters.node_rank > 0 {
            return;
        }
        for node in 0..self.parameters.nnodes {
            while self.failure().is_none() && interrupted().is_none() {
                match self.client.wait(&format!("ended/{node}"), POLL) {
                    Err(error) if error.kind == ErrorKind::Timeout => {}
                    _ => break,
                }
            }
        }
    }
}

impl Drop for NodeRendezvous {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(watch) = self.watch.take() {
            let _ = watch.join();
        }
    }
}

/// Returns the node that an error of the launchers' store names, and a description. The store's "ranks" are nodes.
fn lost(parameters: &RendezvousParameters, nodes: &[NodeInfo], error: &CommError) -> (usize, String) {
    match error.culprit {
        Some(node) => {
            let host = nodes.get(node).map_or_else(String::new, |node| format!(" on {}", node.host));
            (node, format!("the launcher of node {node}{host} is gone"))
        }
        None => (0, format!("the launcher of node 0 at {} is gone ({})", parameters.master_addr, error.message)),
    }
}

fn cannot_join(node_rank: usize, error: &CommError) -> LaunchError {
    let message = format!("node {node_rank} cannot join node 0: {}", error.message);
    let hint = if error.message.contains("secret") {
        "give all nodes the same secret: --secret-file FILE, or TRAINER_SECRET"
    } else {
        "is the job started on node 0, do --master-addr and --master-port lead there, and does the firewall let it through?"
    };
    LaunchError::failed(message, hint)
}
