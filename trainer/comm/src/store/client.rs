//! A rank's end of the control connection.

use std::collections::HashMap;
use std::fmt;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::message::{Push, Request};
use crate::abort::Abort;
use crate::auth::{self, HandshakeError, Hello, Purpose, Secret};
use crate::error::{CommError, ErrorKind, Result, ranks};
use crate::net;
use crate::wire::split_frame;

/// The server answers a wait when its time is up. The client gives up on the server this much later.
const SERVER_GRACE: Duration = Duration::from_secs(5);

enum Reply {
    Value(Option<Vec<u8>>),
    Barrier(Vec<u32>),
}

#[derive(Default)]
struct Inbox {
    replies: HashMap<u64, Reply>,
    /// The activities that other ranks reported, by query.
    doing: HashMap<u64, Vec<(usize, String)>>,
}

type Status = Box<dyn Fn() -> String + Send>;

struct ClientState {
    stream: TcpStream,
    writing: Mutex<()>,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
    abort: Arc<Abort>,
    status: Mutex<Option<Status>>,
    leaving: AtomicBool,
    server: String,
}

/// A rank's control connection: keys, barriers, and news of failures. PyTorch: `TCPStore`. A thread of its own listens, so that
/// a rank that computes or sleeps in a collective still receives and answers.
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
    /// Joins the rendezvous at `address` as `rank` of `world` ranks. Retries until `limit` while no server listens there yet.
    ///
    /// # Errors
    /// [`ErrorKind::Setup`] if no server answers in time, the secret differs, or the server refuses the rank.
    pub fn connect(
        address: impl ToSocketAddrs + fmt::Display,
        secret: &Secret,
        rank: usize,
        world: usize,
        limit: Duration,
    ) -> Result<Self> {
        let until = Instant::now() + limit;
        let stream = loop {
            let last = match Self::attempt(&address, secret, rank, world) {
                Ok(stream) => break stream,
                Err(HandshakeError::Refused(cause)) => {
                    return Err(CommError::setup(format!(
                        "rank {rank} cannot join the rendezvous at {address}: {cause}"
                    ))
                    .hint("all processes of one job, and no others, share its address, secret and world size"));
                }
                Err(HandshakeError::Broken(cause)) => cause,
            };
            if Instant::now() >= until {
                return Err(CommError::setup(format!(
                    "rank {rank} found no rendezvous at {address} within {:.0?}: {last}",
                    limit
                ))
                .hint("is the launcher (or rank 0) running, and does the address lead to its host?"));
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        Self::start(stream, address.to_string(), rank)
    }

    fn attempt(
        address: &impl ToSocketAddrs,
        secret: &Secret,
        rank: usize,
        world: usize,
    ) -> std::result::Result<TcpStream, HandshakeError> {
        let broken = |e: std::io::Error| HandshakeError::Broken(e.to_string());
        let hello = Hello::new(Purpose::Store, rank, world).map_err(|e| HandshakeError::Broken(e.message))?;
        let mut last = HandshakeError::Broken("the address names no host".into());
        for address in address.to_socket_addrs().map_err(broken)? {
            match TcpStream::connect_timeout(&address, auth::HANDSHAKE_LIMIT) {
                Ok(stream) => {
                    stream.set_nodelay(true).map_err(broken)?;
                    net::keepalive(&stream).map_err(broken)?;
                    return auth::dial(&stream, secret, &hello).map(|()| stream);
                }
                Err(e) => last = broken(e),
            }
        }
        Err(last)
    }

    fn start(stream: TcpStream, server: String, rank: usize) -> Result<Self> {
        let shared = Arc::new(ClientState {
            stream,
            writing: Mutex::new(()),
            inbox: Mutex::default(),
            arrived: Condvar::new(),
            abort: Abort::new(),
            status: Mutex::new(None),
            leaving: AtomicBool::new(false),
            server,
        });
        let weak = Arc::downgrade(&shared);
        shared.abort.on_raise(move || {
            if let Some(shared) = weak.upgrade() {
                drop(shared.inbox.lock());
                shared.arrived.notify_all();
            }
        });
        let listener = shared.clone();
        let thread = std::thread::Builder::new()
            .name("comm-control".into())
            .spawn(move || listener.listen())
            .map_err(|e| CommError::setup(format!("rank {rank} cannot start its control thread: {e}")))?;
        Ok(Self { shared, next: AtomicU64::new(1), rank, thread: Some(thread) })
    }

    /// Returns the address of this host that the connection uses. Other hosts can reach this host there.
    ///
    /// # Errors
    /// [`ErrorKind::Setup`] if the system does not know it.
    pub fn own_address(&self) -> Result<std::net::IpAddr> {
        net::own_address(&self.shared.stream)
            .map_err(|e| CommError::setup(format!("rank {} cannot tell its own address: {e}", self.rank)))
    }

    pub(crate) fn abort_flag(&self) -> Arc<Abort> {
        self.shared.abort.clone()
    }

    /// Sets the function that describes this rank's activity when other ranks ask for it.
    pub(crate) fn set_status(&self, status: impl Fn() -> String + Send + 'static) {
        *self.shared.status.lock() = Some(Box::new(status));
    }

    /// Stores `value` under `key`, and replaces the old value.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`] if the server is gone.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.shared.send(&Request::Set { key: key.into(), value: value.into() })
    }

    /// Returns the current value of `key`, if there is one.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`] if the server is gone, [`ErrorKind::Timeout`] if it does not answer, or the error that ended the job.
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
        match self.call(id, &Request::Get { id, key: key.into(), limit_ms }, limit)? {
            Reply::Value(value) => Ok(value),
            Reply::Barrier(_) => Err(self.shared.protocol_error()),
        }
    }

    /// Waits until all ranks of the job have entered the barrier `name`. PyTorch: `monitored_barrier`.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`], which names the ranks that did not come within `limit`.
    pub fn barrier(&self, name: &str, limit: Duration) -> Result<()> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let limit_ms = limit.as_millis() as u64;
        match self.call(id, &Request::Barrier { id, name: name.into(), limit_ms }, limit)? {
            Reply::Barrier(missing) if missing.is_empty() => Ok(()),
            Reply::Barrier(missing) => {
                let missing: Vec<usize> = missing.into_iter().map(|r| r as usize).collect();
                let error = CommError::new(
                    ErrorKind::Timeout,
                    format!(
                        "barrier {name:?}: {} did not come within {limit:.0?} (seen by rank {})",
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
            // If the server is gone too, all ranks have noticed that.
            let _ = self.shared.send(&Request::Abort { error });
        }
    }

    /// Asks all other ranks for their activity. Returns up to `expected` answers that arrive within `limit`, with their ranks. A
    /// process that is stopped or gone does not answer.
    pub(crate) fn query(&self, expected: usize, limit: Duration) -> Vec<(usize, String)> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.shared.inbox.lock().doing.insert(id, Vec::new());
        let sent = self.shared.send(&Request::Query { id });
        let mut inbox = self.shared.inbox.lock();
        let count = |inbox: &Inbox| inbox.doing.get(&id).map_or(0, Vec::len);
        let limit = if sent.is_ok() { limit } else { Duration::ZERO };
        self.shared.arrived.wait_while_for(&mut inbox, |inbox| count(inbox) < expected, limit);
        let mut answers = inbox.doing.remove(&id).unwrap_or_default();
        answers.sort();
        answers
    }

    fn call(&self, id: u64, request: &Request, limit: Duration) -> Result<Reply> {
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
        // A panic is a death: without a goodbye, the server reports it to the other ranks.
        if !std::thread::panicking() {
            self.shared.leaving.store(true, Ordering::Release);
            let _ = self.shared.send(&Request::Goodbye);
        }
        let _ = self.shared.stream.shutdown(Shutdown::Write);
        let _ = self.shared.stream.shutdown(Shutdown::Read);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl ClientState {
    fn send(&self, request: &Request) -> Result<()> {
        let _turn = self.writing.lock();
        (&self.stream).write_all(&request.frame()).map_err(|e| self.server_lost(&e.to_string()))
    }

    fn server_lost(&self, cause: &str) -> CommError {
        CommError::new(ErrorKind::PeerLost, format!("the rendezvous at {} is gone: {cause}", self.server))
            .hint("its process (the launcher, or rank 0) has ended or was killed")
    }

    fn protocol_error(&self) -> CommError {
        CommError::setup(format!("the rendezvous at {} sent an invalid message", self.server))
    }

    fn listen(&self) {
        let (mut buffer, mut chunk) = (Vec::new(), [0u8; 4096]);
        let cause = loop {
            match (&self.stream).read(&mut chunk) {
                Ok(0) => break "the connection was closed".to_owned(),
                Ok(n) => buffer.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => break e.to_string(),
            }
            loop {
                match split_frame(&mut buffer) {
                    Ok(None) => break,
                    Ok(Some(body)) => match Push::decode(&body) {
                        Some(push) => self.take(push),
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
            self.abort.raise(self.server_lost(&cause));
        }
    }

    fn take(&self, push: Push) {
        match push {
            Push::Value { id, value } => drop(self.inbox.lock().replies.insert(id, Reply::Value(value))),
            Push::Barrier { id, missing } => drop(self.inbox.lock().replies.insert(id, Reply::Barrier(missing))),
            Push::Aborted { error } => _ = self.abort.raise(error),
            Push::Ask { asker, id } => {
                let text = self.status.lock().as_ref().map_or_else(|| "is being set up".into(), |status| status());
                // If this fails, the reader notices next.
                let _ = self.send(&Request::Activity { asker, id, text });
            }
            Push::Activity { id, rank, text } => {
                if let Some(answers) = self.inbox.lock().doing.get_mut(&id) {
                    answers.push((rank as usize, text));
                }
            }
        }
        self.arrived.notify_all();
    }
}
