//! The poll loop of the rendezvous.

use std::collections::HashMap;
use std::fmt;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::MAX_UNAUTHENTICATED;
use super::connection::{Connection, Incoming};
use super::state::{Outgoing, State};
use crate::auth::Secret;
use crate::error::{CommError, ErrorKind, Result};

/// How long a server that is dropped goes on to deliver what it has to say.
const FLUSH_LIMIT: Duration = Duration::from_millis(500);

/// What the server saw, for whoever hosts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreEvent {
    /// A rank has proved itself and joined.
    Joined(usize),
    /// A rank has said goodbye.
    Left(usize),
    /// A rank's connection ended without a goodbye.
    Lost {
        /// Which.
        rank: usize,
        /// How it was noticed.
        cause: String,
    },
    /// The job has ended with this error, the first one; all ranks are told.
    Aborted(CommError),
    /// Somebody was turned away.
    Refused {
        /// Where it came from.
        from: SocketAddr,
        /// Why.
        cause: String,
    },
}

type OnEvent = Box<dyn FnMut(StoreEvent) + Send>;

/// The rendezvous of one job. Dropping it ends it; ranks that have not said goodbye by then see their job aborted.
pub struct StoreServer {
    address: SocketAddr,
    commands: Arc<Mutex<Vec<Command>>>,
    /// Ranks that have joined and not gone yet, and how many ever joined.
    member_count: Arc<(Mutex<(usize, usize)>, Condvar)>,
    world: usize,
    wakeup: UnixStream,
    thread: Option<JoinHandle<()>>,
}

enum Command {
    Abort(CommError),
    Stop,
}

impl fmt::Debug for StoreServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreServer").field("address", &self.address).finish_non_exhaustive()
    }
}

impl StoreServer {
    /// Listens on `address` (port 0: the kernel chooses one, see [`StoreServer::local_addr`]) for the `world` ranks that
    /// know `secret`. `on_event` is called on the server's thread and must not block.
    ///
    /// # Errors
    /// [`ErrorKind::Setup`] if the address cannot be had.
    pub fn bind(
        address: impl ToSocketAddrs + fmt::Debug,
        secret: Secret,
        world: usize,
        on_event: impl FnMut(StoreEvent) + Send + 'static,
    ) -> Result<Self> {
        let cannot =
            |what: &str, e: std::io::Error| CommError::setup(format!("the rendezvous cannot {what} {address:?}: {e}"));
        let listener = TcpListener::bind(&address).map_err(|e| {
            let taken = e.kind() == std::io::ErrorKind::AddrInUse;
            cannot("listen on", e).hint(if taken {
                "another job has this port: choose another one, or port 0 to have the kernel choose"
            } else {
                "the address must be one of this host's, and the port free"
            })
        })?;
        listener.set_nonblocking(true).map_err(|e| cannot("set up", e))?;
        let address = listener.local_addr().map_err(|e| cannot("name", e))?;
        let (wakeup, wakeup_reader) = UnixStream::pair().map_err(|e| cannot("set up", e))?;
        wakeup.set_nonblocking(true).map_err(|e| cannot("set up", e))?;
        wakeup_reader.set_nonblocking(true).map_err(|e| cannot("set up", e))?;
        let commands = Arc::new(Mutex::new(Vec::new()));
        let member_count = Arc::new((Mutex::new((0, 0)), Condvar::new()));
        let served = EventLoop {
            member_count: member_count.clone(),
            listener,
            secret,
            state: State::new(world),
            connections: HashMap::new(),
            next: 0,
            commands: commands.clone(),
            wakeup_reader,
            on_event: Box::new(on_event),
            stop: None,
        };
        let thread = std::thread::Builder::new()
            .name("comm-store".into())
            .spawn(move || served.run())
            .map_err(|e| cannot("start a thread for", e))?;
        Ok(Self { address, commands, member_count, world, wakeup, thread: Some(thread) })
    }

    /// Where it listens, with the port that the kernel chose.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Ends the job: all waits in all ranks return an error with `reason`. The first error of a job is the one that counts.
    pub fn abort(&self, reason: impl Into<String>) {
        self.command(Command::Abort(CommError::new(ErrorKind::Aborted, reason)));
    }

    /// Waits until all ranks of the job have joined and gone again, up to `limit`; returns whether they have. A rank that
    /// hosts the server calls this last: dropping it earlier would look like a death to the others.
    pub fn wait_until_left(&self, limit: Duration) -> bool {
        let (member_count, changed) = &*self.member_count;
        let guard = member_count.lock().unwrap_or_else(PoisonError::into_inner);
        let here = |(present, joined): &mut (usize, usize)| *present > 0 || *joined < self.world;
        let (guard, _) = changed.wait_timeout_while(guard, limit, here).unwrap_or_else(PoisonError::into_inner);
        *guard == (0, self.world)
    }

    fn command(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        // A full wakeup rings already.
        let _ = std::io::Write::write(&mut &self.wakeup, &[1]);
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.command(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct EventLoop {
    member_count: Arc<(Mutex<(usize, usize)>, Condvar)>,
    listener: TcpListener,
    secret: Secret,
    state: State,
    connections: HashMap<u64, Connection>,
    next: u64,
    commands: Arc<Mutex<Vec<Command>>>,
    wakeup_reader: UnixStream,
    on_event: OnEvent,
    /// Set when the server is to end: by then at the latest.
    stop: Option<Instant>,
}

impl EventLoop {
    fn run(mut self) {
        while !self.finished() {
            let ready = self.wait();
            self.run_commands();
            for id in ready {
                self.read(id);
            }
            self.accept();
            let now = Instant::now();
            let out = self.state.tick(now);
            self.deliver(out);
            self.expire(now);
        }
    }

    fn finished(&self) -> bool {
        self.stop.is_some_and(|at| Instant::now() >= at || !self.connections.values().any(Connection::wants_write))
    }

    /// Sleeps until something happens; returns the connections to look at.
    fn wait(&mut self) -> Vec<u64> {
        let deadlines = self.connections.values().filter_map(Connection::deadline);
        let deadline = deadlines.chain(self.state.next_deadline()).chain(self.stop).min();
        let timeout = deadline.map(|at| {
            let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec { tv_sec: left.as_secs().min(3600) as i64, tv_nsec: left.subsec_nanos().into() }
        });
        let ids: Vec<u64> = self.connections.keys().copied().collect();
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.wakeup_reader.as_fd(), PollFlags::IN),
        ];
        for id in &ids {
            let connection = &self.connections[id];
            let mut flags = PollFlags::IN;
            if connection.wants_write() {
                flags |= PollFlags::OUT;
            }
            fds.push(PollFd::from_borrowed_fd(connection.stream.as_fd(), flags));
        }
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return Vec::new();
        }
        ids.into_iter().zip(&fds[2..]).filter(|(_, fd)| !fd.revents().is_empty()).map(|(id, _)| id).collect()
    }

    fn run_commands(&mut self) {
        let mut bytes = [0; 64];
        while matches!(std::io::Read::read(&mut &self.wakeup_reader, &mut bytes), Ok(n) if n > 0) {}
        let commands = std::mem::take(&mut *self.commands.lock().unwrap_or_else(PoisonError::into_inner));
        for command in commands {
            match command {
                Command::Abort(error) => {
                    let out = self.state.abort(error);
                    self.ended(out);
                }
                Command::Stop => self.stop = Some(Instant::now() + FLUSH_LIMIT),
            }
        }
    }

    /// Tells hosts and ranks of the job's first error.
    fn ended(&mut self, out: Option<Outgoing>) {
        if let (Some(out), Some(error)) = (out, self.state.error().cloned()) {
            (self.on_event)(StoreEvent::Aborted(error));
            self.deliver(out);
        }
    }

    fn read(&mut self, id: u64) {
        loop {
            let Some(connection) = self.connections.get_mut(&id) else { return };
            if let Err(cause) = connection.flush() {
                return self.disconnect(id, cause);
            }
            if connection.is_closing() && !connection.wants_write() {
                return self.disconnect(id, String::new());
            }
            match connection.read(&self.secret) {
                Incoming::Nothing => return,
                Incoming::Over(cause) => return self.disconnect(id, cause),
                Incoming::Authenticated { rank, world } => self.admit(id, rank, world),
                Incoming::Requests(requests) => {
                    let Some(rank) = connection.member() else { return };
                    if requests.is_empty() {
                        return;
                    }
                    for request in requests {
                        let had = self.state.error().is_some();
                        let out = self.state.handle(rank, request, Instant::now());
                        if let (false, Some(error)) = (had, self.state.error().cloned()) {
                            (self.on_event)(StoreEvent::Aborted(error));
                        }
                        self.deliver(out);
                    }
                }
            }
        }
    }

    fn admit(&mut self, id: u64, rank: u32, world: u32) {
        let refusal = self.state.admit(rank, world).err();
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let from = connection.peer;
        let sent = connection.admit(rank, refusal.as_deref());
        match (refusal, sent) {
            (Some(cause), _) => (self.on_event)(StoreEvent::Refused { from, cause }),
            (None, Err(cause)) => self.disconnect(id, cause),
            (None, Ok(())) => {
                self.count(|(present, joined)| {
                    *present += 1;
                    *joined += 1;
                });
                let out = self.state.join(rank);
                (self.on_event)(StoreEvent::Joined(rank as usize));
                self.deliver(out);
            }
        }
    }

    /// A connection is at its end: a goodbye, a death, or a stranger turned away.
    fn disconnect(&mut self, id: u64, cause: String) {
        let Some(connection) = self.connections.remove(&id) else { return };
        if connection.member().is_some() {
            self.count(|(present, _)| *present -= 1);
        }
        match connection.member() {
            None if connection.is_closing() => {}
            None => (self.on_event)(StoreEvent::Refused { from: connection.peer, cause }),
            Some(rank) if connection.said_goodbye => {
                self.state.goodbye(rank);
                (self.on_event)(StoreEvent::Left(rank as usize));
            }
            Some(rank) => {
                (self.on_event)(StoreEvent::Lost { rank: rank as usize, cause: cause.clone() });
                let out = self.state.lost(rank, &cause);
                self.ended(out);
            }
        }
    }

    fn count(&self, change: impl FnOnce(&mut (usize, usize))) {
        change(&mut self.member_count.0.lock().unwrap_or_else(PoisonError::into_inner));
        self.member_count.1.notify_all();
    }

    fn deliver(&mut self, out: Outgoing) {
        let mut broken = Vec::new();
        for (rank, push) in out {
            if let Some((id, connection)) = self.connections.iter_mut().find(|(_, c)| c.member() == Some(rank))
                && let Err(cause) = connection.send(&push.frame())
            {
                broken.push((*id, cause));
            }
        }
        for (id, cause) in broken {
            self.disconnect(id, cause);
        }
    }

    fn accept(&mut self) {
        loop {
            let (stream, peer) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    // Out of file descriptors, say: the connection stays in the queue and must not make this loop spin.
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            };
            let unauthenticated = self.connections.iter().filter(|(_, c)| c.member().is_none());
            if unauthenticated.clone().count() >= MAX_UNAUTHENTICATED
                && let Some(id) = unauthenticated.min_by_key(|(_, c)| c.since).map(|(id, _)| *id)
            {
                self.disconnect(id, "too many unproved connections at once".into());
            }
            match Connection::new(stream, peer) {
                Ok(connection) => drop(self.connections.insert(self.next, connection)),
                Err(e) => (self.on_event)(StoreEvent::Refused { from: peer, cause: e.to_string() }),
            }
            self.next += 1;
        }
    }

    fn expire(&mut self, now: Instant) {
        let late = |c: &Connection| c.deadline().is_some_and(|at| at <= now);
        let late: Vec<u64> = self.connections.iter().filter(|(_, c)| late(c)).map(|(id, _)| *id).collect();
        for id in late {
            self.disconnect(id, "it did not prove itself in time".into());
        }
    }
}
