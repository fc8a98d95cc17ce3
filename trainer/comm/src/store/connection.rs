//! One non-blocking connection of the server, from the handshake to the goodbye.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::message::ClientMessage;
use crate::auth::{Challenge, HANDSHAKE_TIMEOUT, HELLO_BYTES, Hello, PROOF_BYTES, Purpose, Secret, encode_refusal};
use crate::net::{self, DisconnectKind};
use crate::wire::{MAX_FRAME, split_frame};

/// Limit of unsent bytes. A member with more unsent bytes no longer reads, so the server ends its connection.
const MAX_OUTBOX: usize = 4 * MAX_FRAME;

enum Phase {
    Hello,
    Proof(Challenge),
    /// Authenticated. The server has not admitted it yet.
    Authenticated(Hello),
    Member(u32),
    /// Refused. The connection ends once the refusal is sent.
    Closing,
}

/// What [`Connection::read`] has found.
pub(super) enum ReadOutcome {
    /// Nothing complete has arrived.
    Nothing,
    /// A peer has authenticated and waits for [`Connection::admit`].
    Authenticated { rank: u32, world_size: u32 },
    /// Requests of a member.
    Requests(Vec<ClientMessage>),
    /// The connection has ended, or the server ends it.
    Ended(Disconnect),
}

/// Why a connection has ended.
#[derive(Clone, Debug)]
pub(super) struct Disconnect {
    pub(super) ending: DisconnectKind,
    /// For messages: `its connection was closed`.
    pub(super) cause: String,
}

impl Disconnect {
    /// Returns the reason for a connection that the server itself ends.
    pub(super) fn refused(cause: impl Into<String>) -> Self {
        Self { ending: DisconnectKind::Failed, cause: cause.into() }
    }
}

pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    phase: Phase,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    /// The connection ends when the other host has not answered for this long.
    limit: Duration,
    pub(super) since: Instant,
    pub(super) said_goodbye: bool,
    /// Why a write failed. Bytes that the peer sent before may still be unread.
    pub(super) write_error: Option<Disconnect>,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, peer: SocketAddr, limit: Duration) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        net::set_peer_timeout(&stream, limit)?;
        Ok(Self {
            stream,
            peer,
            phase: Phase::Hello,
            inbox: Vec::new(),
            outbox: Vec::new(),
            limit,
            since: Instant::now(),
            said_goodbye: false,
            write_error: None,
        })
    }

    pub(super) fn member(&self) -> Option<u32> {
        if let Phase::Member(rank) = self.phase { Some(rank) } else { None }
    }

    /// Returns the time at which the server closes the connection if the peer is not a member by then.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.member().is_none().then(|| self.since + HANDSHAKE_TIMEOUT)
    }

    pub(super) fn wants_write(&self) -> bool {
        !self.outbox.is_empty()
    }

    pub(super) fn is_closing(&self) -> bool {
        matches!(self.phase, Phase::Closing)
    }

    fn broken(&self, error: &std::io::Error) -> Disconnect {
        let ending = DisconnectKind::of(error);
        let cause = match ending {
            DisconnectKind::TimedOut => format!("no answer for {}", net::seconds(self.limit)),
            DisconnectKind::Reset => "its connection was reset".to_owned(),
            DisconnectKind::Closed | DisconnectKind::Failed => format!("its connection broke ({error})"),
        };
        Disconnect { ending, cause }
    }

    /// Sends `bytes` as soon as possible. Stores a failure in [`Connection::write_error`] and does not end the connection: a
    /// rank that has sent an error report may end before the server reads the report.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        if self.write_error.is_none()
            && let Err(why) = self.send(bytes)
        {
            self.outbox.clear();
            self.write_error = Some(why);
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Disconnect> {
        self.outbox.extend_from_slice(bytes);
        self.flush()
    }

    fn flush(&mut self) -> Result<(), Disconnect> {
        while !self.outbox.is_empty() {
            match self.stream.write(&self.outbox) {
                Ok(n) => drop(self.outbox.drain(..n)),
                Err(e) if e.kind() == IoKind::WouldBlock => break,
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) => return Err(self.broken(&e)),
            }
        }
        if self.outbox.len() > MAX_OUTBOX {
            return Err(Disconnect::refused("it no longer reads what it is sent"));
        }
        Ok(())
    }

    /// Admits or refuses a rank that has authenticated.
    pub(super) fn admit(&mut self, rank: u32, refusal: Option<&str>) {
        self.phase = if refusal.is_some() { Phase::Closing } else { Phase::Member(rank) };
        self.push(&encode_refusal(refusal));
    }

    /// Reads what has arrived. The handshake's sizes limit the bytes of an unauthenticated peer, [`MAX_FRAME`] those of a member.
    pub(super) fn read(&mut self, secret: &Secret) -> ReadOutcome {
        let mut chunk = [0u8; 4096];
        let mut closed = None;
        loop {
            let want = match self.phase {
                Phase::Hello => HELLO_BYTES - self.inbox.len(),
                Phase::Proof(_) => PROOF_BYTES - self.inbox.len(),
                Phase::Authenticated(_) | Phase::Closing => 0,
                Phase::Member(_) => chunk.len(),
            };
            if want == 0 {
                break;
            }
            match self.stream.read(&mut chunk[..want]) {
                Ok(0) => {
                    let cause = match self.member() {
                        Some(_) => "its connection was closed",
                        None => "it closed the connection before it had proved the secret",
                    };
                    closed = Some(Disconnect { ending: DisconnectKind::Closed, cause: cause.to_owned() });
                    break;
                }
                Ok(n) => {
                    self.inbox.extend_from_slice(&chunk[..n]);
                    if n == want
                        && self.member().is_none()
                        && let Err(cause) = self.advance(secret)
                    {
                        return ReadOutcome::Ended(cause);
                    }
                }
                Err(e) if e.kind() == IoKind::WouldBlock => break,
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) => {
                    closed = Some(self.broken(&e));
                    break;
                }
            }
        }
        match (&self.phase, closed) {
            (Phase::Member(_), closed) => self.requests(closed),
            (_, Some(cause)) => ReadOutcome::Ended(cause),
            (Phase::Authenticated(hello), None) => {
                ReadOutcome::Authenticated { rank: hello.rank, world_size: hello.world_size }
            }
            _ => ReadOutcome::Nothing,
        }
    }

    /// Handles a complete hello or proof in the inbox.
    fn advance(&mut self, secret: &Secret) -> Result<(), Disconnect> {
        match &self.phase {
            Phase::Hello => {
                let Ok(bytes) = <&[u8; HELLO_BYTES]>::try_from(self.inbox.as_slice()) else { return Ok(()) };
                let hello = Hello::decode(bytes).map_err(Disconnect::refused)?;
                if hello.purpose != Purpose::Store {
                    return Err(Disconnect::refused("it is not a rank's control connection"));
                }
                let challenge = Challenge::new(hello).map_err(|e| Disconnect::refused(e.message))?;
                let reply = challenge.reply(secret);
                self.phase = Phase::Proof(challenge);
                self.inbox.clear();
                self.send(&reply)
            }
            Phase::Proof(challenge) => {
                challenge.check(secret, &self.inbox).map_err(Disconnect::refused)?;
                self.phase = Phase::Authenticated(challenge.hello());
                self.inbox.clear();
                Ok(())
            }
            Phase::Authenticated(_) | Phase::Member(_) | Phase::Closing => Ok(()),
        }
    }

    fn requests(&mut self, closed: Option<Disconnect>) -> ReadOutcome {
        let mut requests = Vec::new();
        loop {
            match split_frame(&mut self.inbox) {
                Ok(None) => break,
                Ok(Some(body)) => match ClientMessage::decode(&body) {
                    Some(ClientMessage::Goodbye) => self.said_goodbye = true,
                    Some(request) => requests.push(request),
                    None => return ReadOutcome::Ended(Disconnect::refused("it sent an invalid message")),
                },
                Err(len) => {
                    let cause = format!("it sent a message of {len} bytes, {MAX_FRAME} at most");
                    return ReadOutcome::Ended(Disconnect::refused(cause));
                }
            }
        }
        // A rank may report an error and exit at once, so handle its requests first. The next read finds the end of the stream
        // again.
        match closed {
            Some(cause) if requests.is_empty() => ReadOutcome::Ended(cause),
            _ => ReadOutcome::Requests(requests),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener};

    use super::*;
    use crate::error::{CommError, ErrorKind};

    #[test]
    fn the_report_of_a_rank_is_read_after_a_failed_write() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut rank = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, peer) = listener.accept().unwrap();
        let mut connection = Connection::new(stream, peer, Duration::from_secs(60)).unwrap();
        connection.phase = Phase::Member(3);
        let report = ClientMessage::Abort { error: CommError::new(ErrorKind::Timeout, "rank 2 did not arrive") };
        rank.write_all(&[report.frame(), ClientMessage::Goodbye.frame()].concat()).unwrap();
        rank.shutdown(Shutdown::Both).unwrap();
        drop(rank);
        // The first bytes are answered by a reset.
        while connection.write_error.is_none() {
            connection.push(&[0; 16]);
        }
        let secret = Secret::random().unwrap();
        let ReadOutcome::Requests(requests) = connection.read(&secret) else { panic!("the report is lost") };
        assert!(matches!(requests.as_slice(), [ClientMessage::Abort { .. }]) && connection.said_goodbye);
        assert!(matches!(connection.read(&secret), ReadOutcome::Ended(_)));
    }
}
