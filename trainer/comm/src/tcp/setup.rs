//! Connects every rank to every other rank. Both ends of each connection prove that they know the job's secret.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::peer::Peer;
use crate::abort::AbortFlag;
use crate::auth::{self, HandshakeError, Hello, Purpose, Secret};
use crate::error::{CommError, ErrorKind, Result, ranks};
use crate::limits;
use crate::store::StoreClient;
use crate::transport::GroupRanks;

/// Unauthenticated peers in a handshake at once. The listener closes further connections.
const MAX_HANDSHAKES: usize = 64;
/// Interval at which waits check the abort flag and the clock.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The settings with which a rank connects to the other ranks.
pub(crate) struct MeshSetup<'a> {
    /// The ranks to connect.
    pub group: &'a GroupRanks,
    pub store: &'a StoreClient,
    pub secret: &'a Secret,
    /// Address to listen on. `None`: the address that reaches the rendezvous.
    pub bind: Option<IpAddr>,
    /// See [`CommConfig::several_hosts`](crate::CommConfig::several_hosts).
    pub several_hosts: bool,
    /// Longest wait for all connections.
    pub limit: Duration,
}

impl MeshSetup<'_> {
    /// Makes a connection to every other rank of the group. Returns the connections by rank in the job of `world_size` ranks. Each
    /// rank dials the lower ranks and accepts connections of the higher ranks. Later, a connection ends when the other host has
    /// not answered for `answer_timeout`.
    pub(super) fn connect(&self, world_size: usize, answer_timeout: Duration) -> Result<Vec<Option<Peer>>> {
        let rank = self.group.global_rank();
        let until = Instant::now() + self.limit;
        let own = self.store.own_address()?;
        let bind = self.bind.unwrap_or(match own {
            IpAddr::V4(own) if self.several_hosts && own.is_loopback() => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(own) if self.several_hosts && own.is_loopback() => Ipv6Addr::UNSPECIFIED.into(),
            own => own,
        });
        let failed = |e: std::io::Error| {
            CommError::setup(format!("rank {rank} cannot listen on {bind}: {e}"))
                .hint("it must be an address of this host")
        };
        let listener = TcpListener::bind(SocketAddr::new(bind, 0)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        // If this rank listens on all addresses, it announces the address that the rendezvous sees.
        let announced = SocketAddr::new(if bind.is_unspecified() { own } else { bind }, port);
        self.store.set(&self.key(rank), announced.to_string().as_bytes())?;

        let mut peers: Vec<Option<Peer>> = (0..world_size).map(|_| None).collect();
        let (sender, arrivals) = channel();
        let (abort, higher) = (self.store.abort_flag(), self.higher().collect::<Vec<_>>());
        let acceptor = Acceptor { listener, secret: self.secret.clone(), rank, world_size, higher, until, abort };
        let acceptor_thread = std::thread::Builder::new()
            .name("comm-accept".into())
            .spawn(move || acceptor.run(&sender))
            .map_err(|e| {
                CommError::setup(format!("rank {rank} cannot start a thread for connections: {e}")).hint(limits::HINT)
            })?;
        for lower in self.group.ranks.iter().copied().filter(|lower| *lower < rank) {
            peers[lower] = Some(self.dial(lower, world_size, until, answer_timeout)?);
        }
        self.receive(&arrivals, &mut peers, until, answer_timeout)?;
        drop(arrivals);
        let _ = acceptor_thread.join();
        Ok(peers)
    }

    /// Returns the key under which `rank` announces its address.
    fn key(&self, rank: usize) -> String {
        format!("tcp/{:x}/{rank}", self.group.id)
    }

    /// Returns the ranks that dial this rank.
    fn higher(&self) -> impl Iterator<Item = usize> {
        self.group.ranks.iter().copied().filter(|rank| *rank > self.group.global_rank())
    }

    fn dial(&self, to: usize, world_size: usize, until: Instant, answer_timeout: Duration) -> Result<Peer> {
        let rank = self.group.global_rank();
        let left = || until.saturating_duration_since(Instant::now());
        let address = String::from_utf8_lossy(&self.store.wait(&self.key(to), left())?).into_owned();
        let failed = |cause: String| {
            CommError::setup(format!("rank {rank} cannot connect to rank {to} at {address}: {cause}"))
                .hint("can this host reach that address, through firewalls and container networks?")
        };
        let mut address: SocketAddr = address.parse().map_err(|_| failed("the text is not an address".into()))?;
        if self.several_hosts && address.ip().is_loopback() {
            // A rank that announces a loopback address is on the store's host.
            address.set_ip(self.store.server_address()?);
        }
        loop {
            self.store.abort_flag().check()?;
            let attempt = || -> std::result::Result<TcpStream, HandshakeError> {
                let broken = |e: std::io::Error| HandshakeError::Broken(e.to_string());
                let hello =
                    Hello::new(Purpose::Mesh, rank, world_size).map_err(|e| HandshakeError::Broken(e.message))?;
                let stream = TcpStream::connect_timeout(&address, left().clamp(POLL_INTERVAL, auth::HANDSHAKE_TIMEOUT))
                    .map_err(broken)?;
                auth::dial(&stream, self.secret, &hello)?;
                Ok(stream)
            };
            match attempt() {
                Ok(stream) => return Peer::new(stream, answer_timeout).map_err(|e| failed(e.to_string())),
                Err(HandshakeError::Unauthenticated(cause)) => return Err(failed(cause.into())),
                Err(HandshakeError::Refused(cause)) => return Err(failed(cause)),
                Err(HandshakeError::Broken(cause)) if left().is_zero() => return Err(failed(cause)),
                Err(HandshakeError::Broken(_)) => std::thread::sleep(POLL_INTERVAL.min(left())),
            }
        }
    }

    /// Receives the connections of the higher ranks.
    fn receive(
        &self,
        arrivals: &Receiver<(usize, TcpStream)>,
        peers: &mut [Option<Peer>],
        until: Instant,
        answer_timeout: Duration,
    ) -> Result<()> {
        let rank = self.group.global_rank();
        let missing = |peers: &[Option<Peer>]| self.higher().filter(|r| peers[*r].is_none()).collect::<Vec<_>>();
        while let Some(missing) = Some(missing(peers)).filter(|m| !m.is_empty()) {
            self.store.abort_flag().check()?;
            match arrivals.recv_timeout(POLL_INTERVAL) {
                Ok((from, stream)) => {
                    let failed = |e: std::io::Error| CommError::setup(format!("connection from rank {from}: {e}"));
                    peers[from] = Some(Peer::new(stream, answer_timeout).map_err(failed)?);
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(_) => {
                    return Err(CommError::new(
                        ErrorKind::Timeout,
                        format!("{} did not connect to rank {rank} within {:.0?}", ranks(&missing), self.limit),
                    )
                    .hint("can those hosts reach this one, through firewalls and container networks?")
                    .blame(missing[0]));
                }
            }
        }
        Ok(())
    }
}

/// Accepts connections until all higher ranks are connected. Each handshake has its own thread and deadline, so an
/// unauthenticated peer that sends nothing delays no other peer.
struct Acceptor {
    listener: TcpListener,
    secret: Secret,
    rank: usize,
    world_size: usize,
    /// The ranks that may connect.
    higher: Vec<usize>,
    until: Instant,
    abort: Arc<AbortFlag>,
}

impl Acceptor {
    fn run(self, arrivals: &Sender<(usize, TcpStream)>) {
        let in_handshake = Arc::new(AtomicUsize::new(0));
        // A rank that lost its connection in the handshake connects again, and must not count twice.
        let arrived = Arc::new(Mutex::new(BTreeSet::new()));
        while arrived.lock().len() < self.higher.len() && Instant::now() < self.until && !self.abort.is_raised() {
            let mut fds = [PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN)];
            let nap = Timespec { tv_sec: 0, tv_nsec: i64::from(POLL_INTERVAL.subsec_nanos()) };
            // Waits are short, since the handshake threads change the number of arrivals meanwhile.
            let _ = poll(&mut fds, Some(&nap));
            loop {
                let stream = match self.listener.accept() {
                    Ok((stream, _)) => stream,
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(_) => {
                        // For example, no file descriptors are left: the connection stays in the listen queue.
                        std::thread::sleep(POLL_INTERVAL);
                        break;
                    }
                };
                if in_handshake.load(Ordering::Acquire) >= MAX_HANDSHAKES {
                    continue;
                }
                in_handshake.fetch_add(1, Ordering::AcqRel);
                let (secret, rank, world_size, higher) =
                    (self.secret.clone(), self.rank, self.world_size, self.higher.clone());
                let (in_handshake_here, arrived, arrivals) = (in_handshake.clone(), arrived.clone(), arrivals.clone());
                let handshake = move || {
                    if stream.set_nonblocking(false).is_ok()
                        && let Ok(hello) =
                            auth::accept(&stream, &secret, |hello| admit(hello, rank, world_size, &higher))
                    {
                        arrived.lock().insert(hello.rank);
                        // The receiver is gone only if set-up has failed already.
                        let _ = arrivals.send((hello.rank as usize, stream));
                    }
                    in_handshake_here.fetch_sub(1, Ordering::AcqRel);
                };
                if std::thread::Builder::new().name("comm-handshake".into()).spawn(handshake).is_err() {
                    in_handshake.fetch_sub(1, Ordering::AcqRel);
                }
            }
        }
    }
}

fn admit(hello: &Hello, rank: usize, world_size: usize, higher: &[usize]) -> std::result::Result<(), String> {
    let from = hello.rank as usize;
    if hello.purpose == Purpose::Mesh && hello.world_size as usize == world_size && higher.contains(&from) {
        return Ok(());
    }
    Err(format!("rank {rank} of {world_size} expects no connection from rank {from} of {}", hello.world_size))
}
