//! A rank's end of the control connection.

use std::collections::HashMap;
use std::fmt;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::config::StoreConfig;
use super::message::{ClientMessage, ServerMessage};
use crate::abort::AbortFlag;
use crate::error::{CommError, ErrorKind, Result, ranks};
use crate::limits;
use crate::net::{self, DisconnectKind};
use crate::wire::split_frame;

/// The server answers a wait at the latest when the wait's time is over. The client waits this much longer for the answer.
const SERVER_GRACE: Duration = Duration::from_secs(30);

enum Reply {
    Value(Option<Vec<u8>>),
    Barrier(Vec<u32>),
}

#[derive(Default)]
struct Inbox {
    replies: HashMap<u64, Reply>,
    /// The activities that other ranks reported, by query.
    activities: HashMap<u64, Vec<(usize, String)>>,
}

type Status = Box<dyn Fn() -> String + Send>;

struct ClientState {
    stream: TcpStream,
    /// Held while a message is written, so that messages of several threads do not mix.
    writing: Mutex<()>,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
    abort: Arc<AbortFlag>,
    status: Mutex<Option<Status>>,
    leaving: AtomicBool,
    /// Address of the server, for error messages.
    server: String,
    answer_timeout: Duration,
}

/// A rank's control connection: keys, barriers, and failure notifications. PyTorch: `TCPStore`. A dedicated thread receives, so a
/// rank that computes or sleeps in a collective still receives and answers.
pub struct StoreClient {
    shared: Arc<ClientState>,
    next: AtomicU64,
    rank: usize,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for StoreClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreClient").field("server", &self.shared.server).field("rank", &self.rank).finish()
    }
}

impl StoreClient {
    pub(super) fn start(stream: TcpStream, server: String, config: &StoreConfig, rank: usize) -> Result<Self> {
        let shared = Arc::new(ClientState {
            stream,
            writing: Mutex::new(()),
            inbox: Mutex::default(),
            arrived: Condvar::new(),
            abort: AbortFlag::new(),
            status: Mutex::new(None),
            leaving: AtomicBool::new(false),
            server,
            answer_timeout: config.answer_timeout,
        });
        let weak = Arc::downgrade(&shared);
        shared.abort.on_raise(move || {
            if let Some(shared) = weak.upgrade() {
                drop(shared.inbox.lock());
                shared.arrived.notify_all();
            }
        });
        let listener = shared.clone();
        let thread =
            std::thread::Builder::new().name("comm-control".into()).spawn(move || listener.receive_loop()).map_err(
                |e| CommError::setup(format!("rank {rank} cannot start its control thread: {e}")).hint(limits::HINT),
            )?;
        Ok(Self { shared, next: AtomicU64::new(1), rank, thread: Some(thread) })
    }

    /// Returns the address of this host that the connection uses. Other hosts can reach this host at this address.
    ///
    /// # Errors
    /// [`ErrorKind::Setup`] if the system does not know the address.
    pub fn own_address(&self) -> Result<std::net::IpAddr> {
        net::own_address(&self.shared.stream)
            .map_err(|e| CommError::setup(format!("rank {} cannot tell its own address: {e}", self.rank)))
    }

    /// Returns the address of the store's host that the connection uses.
    pub(crate) fn server_address(&self) -> Result<std::net::IpAddr> {
        let address = self.shared.stream.peer_addr();
        let failed = |e| CommError::setup(format!("rank {} cannot tell the address of the store: {e}", self.rank));
        address.map(|address| address.ip()).map_err(failed)
    }

    pub(crate) fn abort_flag(&self) -> Arc<AbortFlag> {
        self.shared.abort.clone()
    }

    /// Sets the function that describes this rank's activity when other ranks ask for it.
    pub(crate) fn set_status(&self, status: impl Fn() -> String + Send + 'static) {
        *self.shared.status.lock() = Some(Box::new(status));
    }

    /// Stores `value` under `key`, and replaces the old value.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`], [`ErrorKind::NoAnswer`] or [`ErrorKind::Reset`] if the server is gone.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.shared.send(&ClientMessage::Set { key: key.into(), value: value.into() })
    }

    /// Returns the current value of `key`, if there is one.
    ///
    /// # Errors
    /// As [`StoreClient::set`]; [`ErrorKind::Timeout`] if the server does not answer; or the error that ended the job.
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.value(key, Duration::ZERO)
    }

    /// Returns the value of `key`; waits up to `limit` until a rank sets it.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] after `limit`, or the error that ended the job.
    pub fn wait(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        self.value(key, limit)?.ok_or_else(|| {
            CommError::new(ErrorKind::Timeout, format!("rank {} waited {limit:.0?} for key {key:?}", self.rank))
        })
    }

    fn value(&self, key: &str, limit: Duration) -> Result<Option<Vec<u8>>> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let limit_ms = limit.as_millis() as u64;
        match self.call(id, &ClientMessage::Get { id, key: key.into(), limit_ms }, limit)? {
            Reply::Value(value) => Ok(value),
            Reply::Barrier(_) => Err(self.shared.protocol_error()),
        }
    }

    /// Waits until all ranks of the job have entered the barrier `name`. PyTorch: `monitored_barrier`.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`], which names the ranks that did not arrive within `limit`.
    pub fn barrier(&self, name: &str, limit: Duration) -> Result<()> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let limit_ms = limit.as_millis() as u64;
        match self.call(id, &ClientMessage::Barrier { id, name: name.into(), limit_ms }, limit)? {
            Reply::Barrier(missing) if missing.is_empty() => Ok(()),
            Reply::Barrier(missing) => {
                let missing: Vec<usize> = missing.into_iter().map(|r| r as usize).collect();
                let error = CommError::new(
                    ErrorKind::Timeout,
                    format!(
                        "barrier {name:?}: {} did not arrive within {limit:.0?} (seen by rank {})",
                        ranks(&missing),
                        self.rank
                    ),
                )
                .hint("the logs of the missing ranks say where they are")
                .blame(missing[0]);
                self.abort(error.clone());
                Err(error)
            }
            Reply::Value(_) => Err(self.shared.protocol_error()),
        }
    }

    /// Ends the job with `error` on all ranks, including this one. Only the first error of a job counts.
    pub(crate) fn abort(&self, error: CommError) {
        if self.shared.abort.raise(error.clone()) {
            // If the send fails, the server is gone, and all ranks notice that.
            let _ = self.shared.send(&ClientMessage::Abort { error });
        }
    }

    /// Asks all other ranks for their activity. Returns up to `expected` answers that arrive within `limit`, with their ranks. A
    /// process that is stopped or gone does not answer.
    pub(crate) fn query(&self, expected: usize, limit: Duration) -> Vec<(usize, String)> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.shared.inbox.lock().activities.insert(id, Vec::new());
        let sent = self.shared.send(&ClientMessage::Query { id });
        let mut inbox = self.shared.inbox.lock();
        let count = |inbox: &Inbox| inbox.activities.get(&id).map_or(0, Vec::len);
        let limit = if sent.is_ok() { limit } else { Duration::ZERO };
        self.shared.arrived.wait_while_for(&mut inbox, |inbox| count(inbox) < expected, limit);
        let mut answers = inbox.activities.remove(&id).unwrap_or_default();
        answers.sort();
        answers
    }

    fn call(&self, id: u64, request: &ClientMessage, limit: Duration) -> Result<Reply> {
        self.shared.abort.check()?;
        self.shared.send(request)?;
        let until = Instant::now() + limit + SERVER_GRACE;
        let mut inbox = self.shared.inbox.lock();
        loop {
            if let Some(reply) = inbox.replies.remove(&id) {
                return Ok(reply);
            }
            self.shared.abort.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(CommError::new(
                    ErrorKind::Timeout,
                    format!("the rendezvous at {} does not answer rank {}", self.shared.server, self.rank),
                ));
            }
            self.shared.arrived.wait_for(&mut inbox, left);
        }
    }
}

impl Drop for StoreClient {
    fn drop(&mut self) {
        // A rank that panics has failed. It sends no goodbye, so the server reports the failure to the other ranks.
        if !std::thread::panicking() {
            self.shared.leaving.store(true, Ordering::Release);
            let _ = self.shared.send(&ClientMessage::Goodbye);
        }
        let _ = self.shared.stream.shutdown(Shutdown::Write);
        let _ = self.shared.stream.shutdown(Shutdown::Read);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl ClientState {
    fn send(&self, request: &ClientMessage) -> Result<()> {
        let _guard = self.writing.lock();
        (&self.stream).write_all(&request.frame()).map_err(|e| {
            let error = self.server_lost(DisconnectKind::of(&e), &e.to_string());
            // The kernel reports the cause only once, here. The receiving thread would only see a closed connection.
            self.abort.raise(error.clone());
            error
        })
    }

    fn server_lost(&self, ending: DisconnectKind, cause: &str) -> CommError {
        let server = &self.server;
        match ending {
            DisconnectKind::TimedOut => CommError::new(
                ErrorKind::NoAnswer,
                format!("no answer from the rendezvous at {server} for {}", net::seconds(self.answer_timeout)),
            )
            .hint(net::OUTAGE_HINT),
            DisconnectKind::Reset => CommError::new(
                ErrorKind::Reset,
                format!("the rendezvous at {server} is gone: it has reset the connection"),
            )
            .hint("its process (the launcher, or rank 0) has ended, or the network was down for too long"),
            DisconnectKind::Closed | DisconnectKind::Failed => {
                CommError::new(ErrorKind::PeerLost, format!("the rendezvous at {server} is gone: {cause}"))
                    .hint("its process (the launcher, or rank 0) has ended or was killed")
            }
        }
    }

    fn protocol_error(&self) -> CommError {
        CommError::setup(format!("the rendezvous at {} sent an invalid message", self.server))
    }

    fn receive_loop(&self) {
        let (mut buffer, mut chunk) = (Vec::new(), [0u8; 4096]);
        let (ending, cause) = loop {
            match (&self.stream).read(&mut chunk) {
                Ok(0) => break (DisconnectKind::Closed, "the connection was closed".to_owned()),
                Ok(n) => buffer.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => break (DisconnectKind::of(&e), e.to_string()),
            }
            loop {
                match split_frame(&mut buffer) {
                    Ok(None) => break,
                    Ok(Some(body)) => match ServerMessage::decode(&body) {
                        Some(message) => self.handle(message),
                        None => {
                            self.abort.raise(self.protocol_error());
                            return;
                        }
                    },
                    Err(_) => {
                        self.abort.raise(self.protocol_error());
                        return;
                    }
                }
            }
        };
        if !self.leaving.load(Ordering::Acquire) {
            // A thread that is sending may have received the cause. Wait until it has raised the error.
            drop(self.writing.lock());
            self.abort.raise(self.server_lost(ending, &cause));
        }
    }

    fn handle(&self, message: ServerMessage) {
        match message {
            ServerMessage::Value { id, value } => drop(self.inbox.lock().replies.insert(id, Reply::Value(value))),
            ServerMessage::Barrier { id, missing } => {
                drop(self.inbox.lock().replies.insert(id, Reply::Barrier(missing)))
            }
            ServerMessage::Aborted { error } => _ = self.abort.raise(error),
            ServerMessage::Ask { asker, id } => {
                let text = self.status.lock().as_ref().map_or_else(|| "is being set up".into(), |status| status());
                // If the send fails, the next read of this thread fails too and raises the error.
                let _ = self.send(&ClientMessage::Activity { asker, id, text });
            }
            ServerMessage::Activity { id, rank, text } => {
                if let Some(answers) = self.inbox.lock().activities.get_mut(&id) {
                    answers.push((rank as usize, text));
                }
            }
        }
        self.arrived.notify_all();
    }
}
