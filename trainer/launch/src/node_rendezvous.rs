//! Launchers of one job on several nodes: they meet at node 0's address, share the ranks out, and end together.
//!
//! ```text
//! node 0 listens at --master-addr:--master-port for the launchers (a store with one member a node)
//! node R          sets  node/R  = its workers, host name, flags          all read all of them: world and first ranks
//! node 0          sets  workers = the port of the workers' store          another one, on a port that the kernel chose
//! node R          sets  failed  = the first failure, in its words         all end their workers, and say so
//! node R          sets  ended/R when its workers are done                 node 0 waits for all: it hosts both stores
//! ```
//!
//! Each attempt has stores and secrets of its own, derived from the job's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::{LaunchError, Result};
use super::port;
use super::secret::derived;
use super::worker::{bind, listen_address};
use comm::{CommError, ErrorKind, Secret, StoreClient, StoreServer};

/// How long one question to the store may take before the launcher looks at its signals again.
const TURN: Duration = Duration::from_millis(200);

/// This node's place in a job of several.
#[derive(Debug, Clone)]
pub struct Nodes {
    /// `--nnodes`.
    pub nodes: usize,
    /// `--node-rank`.
    pub node_rank: usize,
    /// `--master-addr`: node 0's host.
    pub master_addr: String,
    /// `--master-port`, at which node 0's launcher listens.
    pub master_port: u16,
    /// What all launchers know and nobody else.
    pub secret: Secret,
}

impl Nodes {
    /// Checks what the command line gives. Without a secret anybody who reaches the port could join, so that is refused
    /// unless the address is this machine's loopback.
    ///
    /// # Errors
    /// A number out of range, or no secret.
    pub fn new(
        nodes: usize,
        node_rank: usize,
        master_addr: String,
        master_port: u16,
        secret: Option<Secret>,
    ) -> Result<Self> {
        if node_rank >= nodes {
            return Err(LaunchError::usage(
                format!("--node-rank {node_rank} is not below --nnodes {nodes}"),
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
                    format!("--nnodes {nodes} over {master_addr} needs a secret: anybody could join without one"),
                    "set TRAINER_SECRET to the same words on all nodes, or --secret-file; `openssl rand -hex 32` makes some",
                ));
            }
        };
        Ok(Self { nodes, node_rank, master_addr, master_port, secret })
    }
}

/// What a launcher tells the others about its node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Node {
    pub(super) workers: usize,
    pub(super) host: String,
    pub(super) max_restarts: usize,
}

/// The first failure of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failed {
    pub(super) node: usize,
    pub(super) what: String,
    /// Whether the job may be started again.
    pub(super) again: bool,
}

/// Who is in the job.
#[derive(Clone)]
struct View {
    nodes: Nodes,
    /// By node, once all have come.
    all: Vec<Node>,
}

impl View {
    /// Which node an error of the launchers' store tells of, and how. Its "ranks" are nodes.
    fn lost(&self, error: &CommError) -> (usize, String) {
        match error.culprit {
            Some(node) => {
                let host = self.all.get(node).map_or_else(String::new, |node| format!(" on {}", node.host));
                (node, format!("the launcher of node {node}{host} is gone"))
            }
            None => (0, format!("the launcher of node 0 at {} is gone ({})", self.nodes.master_addr, error.message)),
        }
    }
}

/// A launcher's connection to the others.
pub(super) struct NodeRendezvous {
    view: View,
    // in this order: the goodbye goes out before the store goes away
    watch: Option<JoinHandle<()>>,
    client: Arc<StoreClient>,
    failed: Arc<Mutex<Option<Failed>>>,
    over: Arc<AtomicBool>,
    _server: Option<StoreServer>,
}

/// Why launchers did not come together.
pub(super) enum RendezvousError {
    Failed(LaunchError),
    /// By this signal.
    Interrupted(i32),
}

impl From<LaunchError> for RendezvousError {
    fn from(error: LaunchError) -> Self {
        Self::Failed(error)
    }
}

impl NodeRendezvous {
    /// Meets the other launchers, within `limit`.
    pub(super) fn open(
        nodes: &Nodes,
        own: &Node,
        attempt: usize,
        limit: Duration,
        interrupted: &mut dyn FnMut() -> Option<i32>,
    ) -> std::result::Result<Self, RendezvousError> {
        let until = Instant::now() + limit;
        let secret = derived(&nodes.secret, "nodes", attempt);
        let server = match nodes.node_rank {
            0 => {
                let host = listen_address(&nodes.master_addr, true);
                Some(bind(&host, nodes.master_port, &secret, nodes.nodes, |_| {})?)
            }
            _ => None,
        };
        let address = port::joined(&nodes.master_addr, nodes.master_port);
        let client = loop {
            if let Some(signal) = interrupted() {
                return Err(RendezvousError::Interrupted(signal));
            }
            match StoreClient::connect(address.as_str(), &secret, nodes.node_rank, nodes.nodes, TURN) {
                Ok(client) => break Arc::new(client),
                // node 0 may still be at the attempt before, whose secret is another
                Err(error) if Instant::now() >= until || (attempt == 0 && error.message.contains("secret")) => {
                    return Err(cannot_join(nodes, &error).into());
                }
                Err(_) => std::thread::sleep(TURN / 4),
            }
        };
        let mut link = Self {
            view: View { nodes: nodes.clone(), all: Vec::new() },
            watch: None,
            client,
            failed: Arc::default(),
            over: Arc::default(),
            _server: server,
        };
        let text = serde_json::to_vec(own).map_err(|error| LaunchError::failed(error.to_string(), ""))?;
        link.client.set(&format!("node/{}", nodes.node_rank), &text).map_err(|error| link.lost(&error))?;
        for node in 0..nodes.nodes {
            let bytes = link.value(&format!("node/{node}"), until, interrupted)?;
            let other: Node = serde_json::from_slice(&bytes).map_err(|_| {
                LaunchError::failed(
                    format!("node {node} runs another version of this program"),
                    "install the same on all",
                )
            })?;
            if other.max_restarts != own.max_restarts {
                return Err(LaunchError::usage(
                    format!(
                        "node {node} ({}) was started with --max-restarts {}, node {} with {}",
                        other.host, other.max_restarts, nodes.node_rank, own.max_restarts
                    ),
                    "start all nodes of a job with the same flags",
                )
                .into());
            }
            link.view.all.push(other);
        }
        link.watch()?;
        Ok(link)
    }

    /// Waits for a key, in turns.
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
            match self.client.wait(key, TURN) {
                Ok(value) => return Ok(value),
                Err(error) if error.kind == ErrorKind::Timeout && Instant::now() < until => {}
                Err(error) if error.kind == ErrorKind::Timeout => {
                    let who =
                        key.strip_prefix("node/").map_or_else(|| "node 0".to_owned(), |node| format!("node {node}"));
                    return Err(LaunchError::failed(
                        format!(
                            "{who} did not come to {}:{} in time",
                            self.view.nodes.master_addr, self.view.nodes.master_port
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
        LaunchError::failed(self.view.lost(error).1, "its launcher has ended or was killed, or the network is down")
    }

    /// Ranks of the job, and the first one of this node.
    pub(super) fn world(&self) -> (usize, usize) {
        let workers = |nodes: &[Node]| nodes.iter().map(|node| node.workers).sum();
        (workers(&self.view.all), workers(&self.view.all[..self.view.nodes.node_rank]))
    }

    /// Node 0: tells where the workers' store is.
    pub(super) fn publish(&self, port: u16) -> Result<()> {
        self.client.set("workers", port.to_string().as_bytes()).map_err(|error| self.lost(&error))
    }

    /// The other nodes: hears it.
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

    /// Listens for failures elsewhere.
    fn watch(&mut self) -> Result<()> {
        let (client, failed, over) = (Arc::clone(&self.client), Arc::clone(&self.failed), Arc::clone(&self.over));
        let (own, view) = (self.view.nodes.node_rank, self.view.clone());
        let run = move || {
            let found = loop {
                match client.wait("failed", TURN) {
                    Ok(bytes) => {
                        break serde_json::from_slice(&bytes).ok().filter(|failed: &Failed| failed.node != own);
                    }
                    Err(error) if error.kind == ErrorKind::Timeout && !over.load(Ordering::Relaxed) => {}
                    Err(error) if error.kind == ErrorKind::Timeout => return,
                    Err(error) => {
                        let (node, what) = view.lost(&error);
                        break Some(Failed { node, what, again: false });
                    }
                }
            };
            *failed.lock().unwrap_or_else(PoisonError::into_inner) = found;
        };
        let thread = std::thread::Builder::new().name("nodes-watch".into()).spawn(run);
        self.watch = Some(thread.map_err(|error| LaunchError::failed(error.to_string(), "see `ulimit -a`"))?);
        Ok(())
    }

    /// The failure of another node, once there is one.
    pub(super) fn failure(&self) -> Option<Failed> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Tells the other nodes of a failure on this one. A store that is gone has told them.
    pub(super) fn tell(&self, what: &str, again: bool) {
        let failed = Failed { node: self.view.nodes.node_rank, what: what.to_owned(), again };
        if let (None, Ok(text)) = (self.failure(), serde_json::to_vec(&failed)) {
            let _ = self.client.set("failed", &text);
        }
    }

    /// This node's workers are done. Node 0 stays until all nodes have said so, one has failed, or `interrupted`.
    pub(super) fn finish(&self, interrupted: &mut dyn FnMut() -> Option<i32>) {
        let _ = self.client.set(&format!("ended/{}", self.view.nodes.node_rank), b"");
        if self.view.nodes.node_rank > 0 {
            return;
        }
        for node in 0..self.view.nodes.nodes {
            while self.failure().is_none() && interrupted().is_none() {
                match self.client.wait(&format!("ended/{node}"), TURN) {
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

fn cannot_join(nodes: &Nodes, error: &CommError) -> LaunchError {
    let message = format!("node {} cannot join node 0: {}", nodes.node_rank, error.message);
    let hint = if error.message.contains("secret") {
        "set TRAINER_SECRET (or --secret-file) to the same words on all nodes"
    } else {
        "is the job started on node 0, do --master-addr and --master-port lead there, and does the firewall let it through?"
    };
    LaunchError::failed(message, hint)
}
