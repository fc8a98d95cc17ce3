//! The poll loop of the rendezvous.

use std::collections::HashMap;
use std::fmt;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::MAX_UNAUTHENTICATED;
use super::config::StoreConfig;
use super::connection::{Connection, Disconnect, ReadOutcome};
use super::state::{Outgoing, StoreState};
use crate::error::{CommError, ErrorKind, Result};
use crate::limits;

/// Longest time for which a dropped server still delivers its messages.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// An event that the server reports to its own process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreEvent {
    /// A rank has authenticated and joined.
    Joined(usize),
    /// A rank has said goodbye.
    Left(usize),
    /// A rank's connection ended without a goodbye.
    Lost {
        /// The rank.
        rank: usize,
        /// How the server noticed.
        cause: String,
    },
    /// The job has ended with this error, the first one. The server has sent it to all ranks.
    Aborted(CommError),
    /// A connection was refused.
    Refused {
        /// Address of the other end.
        from: SocketAddr,
        /// Why.
        cause: String,
    },
}

type OnEvent = Box<dyn FnMut(StoreEvent) + Send>;

/// The rendezvous of one job. Dropping the server ends the rendezvous, and aborts the job for ranks that have not said goodbye.
pub struct StoreServer {
    address: SocketAddr,
    commands: Arc<Mutex<Vec<Command>>>,
    /// Number of ranks that are members now, and of ranks that have ever joined.
    member_count: Arc<(Mutex<(usize, usize)>, Condvar)>,
    world_size: usize,
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
    /// Listens on `address` for the members that know the secret. Port 0 lets the kernel choose a port, see
    /// [`StoreServer::local_addr`]. `on_event` is called on the server's thread and must not block.
    ///
    /// # Errors
    /// [`ErrorKind::Setup`] if the server cannot listen on the address.
    pub fn bind(
        address: impl ToSocketAddrs + fmt::Debug,
        config: StoreConfig,
        on_event: impl FnMut(StoreEvent) + Send + 'static,
    ) -> Result<Self> {
        let cannot = |what: &str, e: std::io::Error| {
            let error = CommError::setup(format!("the rendezvous cannot {what} {address:?}: {e}"));
            if limits::is_limit(&e) { error.hint(limits::HINT) } else { error }
        };
        let listener = TcpListener::bind(&address).map_err(|e| match e.kind() {
            _ if limits::is_limit(&e) => cannot("listen on", e),
            std::io::ErrorKind::AddrInUse => cannot("listen on", e)
                .hint("another job has this port: choose another port, or port 0 to let the kernel choose"),
            _ => cannot("listen on", e).hint("it must be an address of this host, and the port must be free"),
        })?;
        listener.set_nonblocking(true).map_err(|e| cannot("set up", e))?;
        let address = listener.local_addr().map_err(|e| cannot("name", e))?;
        let (wakeup, wakeup_reader) = UnixStream::pair().map_err(|e| cannot("set up", e))?;
        wakeup.set_nonblocking(true).map_err(|e| cannot("set up", e))?;
        wakeup_reader.set_nonblocking(true).map_err(|e| cannot("set up", e))?;
        let commands = Arc::new(Mutex::new(Vec::new()));
        let member_count = Arc::new((Mutex::new((0, 0)), Condvar::new()));
        let world_size = config.world_size;
        let served = EventLoop {
            member_count: member_count.clone(),
            listener,
            state: StoreState::new(&config),
            config,
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
        Ok(Self { address, commands, member_count, world_size, wakeup, thread: Some(thread) })
    }

    /// Returns the address of the server, with the port that the kernel chose.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Ends the job: all waits on all ranks return an error with `reason`. Only the first error of a job counts.
    pub fn abort(&self, reason: impl Into<String>) {
        self.command(Command::Abort(CommError::new(ErrorKind::Aborted, reason)));
    }

    /// Waits up to `limit` until all ranks of the job have joined and left. Returns whether all have. A rank that hosts the
    /// server must call this function before it drops the server. Otherwise the other ranks would take the closed connections
    /// for a failure.
    pub fn wait_until_left(&self, limit: Duration) -> bool {
        let (member_count, changed) = &*self.member_count;
        let mut count = member_count.lock();
        let is_incomplete = |(present, joined): &mut (usize, usize)| *present > 0 || *joined < self.world_size;
        changed.wait_while_for(&mut count, is_incomplete, limit);
        *count == (0, self.world_size)
    }

    fn command(&self, command: Command) {
        self.commands.lock().push(command);
        // A full buffer wakes the thread already.
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
    config: StoreConfig,
    state: StoreState,
    connections: HashMap<u64, Connection>,
    next: u64,
    commands: Arc<Mutex<Vec<Command>>>,
    wakeup_reader: UnixStream,
    on_event: OnEvent,
    /// The latest time at which the server stops. Unset until a request to stop.
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
            self.end_broken();
        }
    }

    /// Ends the connections to which the server can no longer write. First reads what their ranks have sent.
    fn end_broken(&mut self) {
        while let Some((&id, _)) = self.connections.iter().find(|(_, connection)| connection.write_error.is_some()) {
            self.read(id);
        }
    }

    fn finished(&self) -> bool {
        self.stop.is_some_and(|at| Instant::now() >= at || !self.connections.values().any(Connection::wants_write))
    }

    /// Sleeps until something happens. Returns the connections to read.
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
        let commands = std::mem::take(&mut *self.commands.lock());
        for command in commands {
            match command {
                Command::Abort(error) => {
                    let out = self.state.abort(error);
                    self.ended(out);
                }
                Command::Stop => self.stop = Some(Instant::now() + FLUSH_TIMEOUT),
            }
        }
    }

    /// Reports the job's first error to the server's own process and to the ranks.
    fn ended(&mut self, out: Option<Outgoing>) {
        if let (Some(out), Some(error)) = (out, self.state.error().cloned()) {
            (self.on_event)(StoreEvent::Aborted(error));
            self.deliver(out);
        }
    }

    fn read(&mut self, id: u64) {
        loop {
            let Some(connection) = self.connections.get_mut(&id) else { return };
            connection.push(&[]);
            if connection.is_closing() && !connection.wants_write() {
                return self.disconnect(id, Disconnect::refused(""));
            }
            match connection.read(&self.config.secret) {
                ReadOutcome::Nothing => return self.end_if_broken(id),
                ReadOutcome::Ended(why) => {
                    // The kernel reports the cause only once. If a write failed first, the write has the cause.
                    let why = connection.write_error.take().unwrap_or(why);
                    return self.disconnect(id, why);
                }
                ReadOutcome::Authenticated { rank, world_size } => self.admit(id, rank, world_size),
                ReadOutcome::Requests(requests) => {
                    let Some(rank) = connection.member() else { return };
                    if requests.is_empty() {
                        return self.end_if_broken(id);
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

    /// Ends a connection to which the server can no longer write.
    fn end_if_broken(&mut self, id: u64) {
        if let Some(why) = self.connections.get_mut(&id).and_then(|connection| connection.write_error.take()) {
            self.disconnect(id, why);
        }
    }

    fn admit(&mut self, id: u64, rank: u32, world_size: u32) {
        let refusal = self.state.admit(rank, world_size).err();
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let from = connection.peer;
        connection.admit(rank, refusal.as_deref());
        match refusal {
            Some(cause) => (self.on_event)(StoreEvent::Refused { from, cause }),
            None => {
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

    /// Ends a connection: after a goodbye, after a failure, or because an unauthenticated peer is refused.
    fn disconnect(&mut self, id: u64, why: Disconnect) {
        let Some(connection) = self.connections.remove(&id) else { return };
        if connection.member().is_some() {
            self.count(|(present, _)| *present -= 1);
        }
        let Disconnect { ending, cause } = why;
        match connection.member() {
            None if connection.is_closing() => {}
            None => (self.on_event)(StoreEvent::Refused { from: connection.peer, cause }),
            Some(rank) if connection.said_goodbye => {
                self.state.goodbye(rank);
                (self.on_event)(StoreEvent::Left(rank as usize));
            }
            Some(rank) => {
                (self.on_event)(StoreEvent::Lost { rank: rank as usize, cause: cause.clone() });
                let out = self.state.lost(rank, ending, &cause);
                self.ended(out);
            }
        }
    }

    fn count(&self, change: impl FnOnce(&mut (usize, usize))) {
        change(&mut self.member_count.0.lock());
        self.member_count.1.notify_all();
    }

    fn deliver(&mut self, out: Outgoing) {
        for (rank, message) in out {
            if let Some(connection) = self.connections.values_mut().find(|c| c.member() == Some(rank)) {
                connection.push(&message.frame());
            }
        }
    }

    fn accept(&mut self) {
        loop {
            let (stream, peer) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    // For example, no file descriptors are left. The connection then stays in the listen queue, and without this
                    // sleep `poll` would return at once again and again.
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            };
            let unauthenticated = self.connections.iter().filter(|(_, c)| c.member().is_none());
            if unauthenticated.clone().count() >= MAX_UNAUTHENTICATED
                && let Some(id) = unauthenticated.min_by_key(|(_, c)| c.since).map(|(id, _)| *id)
            {
                self.disconnect(id, Disconnect::refused("too many unauthenticated connections at once"));
            }
            match Connection::new(stream, peer, self.config.answer_timeout) {
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
            self.disconnect(id, Disconnect::refused("it did not authenticate in time"));
        }
    }
}
