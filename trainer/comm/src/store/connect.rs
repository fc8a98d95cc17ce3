//! Connects a rank to the server.

use std::fmt;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::client::StoreClient;
use super::config::StoreConfig;
use crate::auth::{self, HandshakeError, Hello, Purpose};
use crate::error::{CommError, Result};
use crate::net;

/// Why one attempt to join a rendezvous failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectError {
    /// No server answers at the address, or the connection broke. Another attempt may succeed.
    Unreachable(String),
    /// The host name cannot be resolved. Another attempt may succeed.
    Unresolved(String),
    /// The server, or this process, has not proved that it belongs to the job.
    Unauthenticated(String),
    /// The server belongs to the job and refuses this member.
    Refused(String),
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Unreachable(cause) | Self::Unresolved(cause) | Self::Unauthenticated(cause) | Self::Refused(cause)) =
            self;
        f.write_str(cause)
    }
}

impl StoreClient {
    /// Joins the rendezvous at `address` as `rank`. Retries until `limit` while no server listens there yet.
    ///
    /// # Errors
    /// [`Setup`](crate::ErrorKind::Setup) if no server answers in time, the secret differs, or the server refuses the rank.
    pub fn connect(
        address: impl ToSocketAddrs + fmt::Display,
        config: &StoreConfig,
        rank: usize,
        limit: Duration,
    ) -> Result<Self> {
        let until = Instant::now() + limit;
        loop {
            let last = match Self::try_connect(&address, config, rank)? {
                Ok(client) => return Ok(client),
                Err(ConnectError::Unreachable(cause) | ConnectError::Unresolved(cause)) => cause,
                Err(refused) => {
                    return Err(CommError::setup(format!(
                        "{} {rank} cannot join the rendezvous at {address}: {refused}",
                        config.member
                    ))
                    .hint("all processes of one job, and no others, share its address, secret and world size"));
                }
            };
            if Instant::now() >= until {
                return Err(CommError::setup(format!(
                    "{} {rank} found no rendezvous at {address} within {limit:.0?}: {last}",
                    config.member
                ))
                .hint("is the launcher (or rank 0) running, and does the address lead to its host?"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Tries once to join the rendezvous at `address` as `rank`. Returns within seconds. The inner error is the reason of a
    /// failed attempt.
    ///
    /// # Errors
    /// [`Setup`](crate::ErrorKind::Setup) if this process cannot start a thread for the connection.
    pub fn try_connect(
        address: impl ToSocketAddrs + fmt::Display,
        config: &StoreConfig,
        rank: usize,
    ) -> Result<std::result::Result<Self, ConnectError>> {
        let resolved: Vec<SocketAddr> = match address.to_socket_addrs() {
            Ok(resolved) => resolved.collect(),
            Err(error) => return Ok(Err(ConnectError::Unresolved(format!("cannot resolve {address}: {error}")))),
        };
        match Self::dial(&resolved, config, rank) {
            Ok(stream) => Self::start(stream, address.to_string(), config, rank).map(Ok),
            Err(HandshakeError::Broken(cause)) => Ok(Err(ConnectError::Unreachable(cause))),
            Err(HandshakeError::Unauthenticated(cause)) => Ok(Err(ConnectError::Unauthenticated(cause.to_owned()))),
            Err(HandshakeError::Refused(cause)) => Ok(Err(ConnectError::Refused(cause))),
        }
    }

    fn dial(
        addresses: &[SocketAddr],
        config: &StoreConfig,
        rank: usize,
    ) -> std::result::Result<TcpStream, HandshakeError> {
        let broken = |e: std::io::Error| HandshakeError::Broken(e.to_string());
        let hello =
            Hello::new(Purpose::Store, rank, config.world_size).map_err(|e| HandshakeError::Broken(e.message))?;
        let mut last = HandshakeError::Broken("the address names no host".into());
        for address in addresses {
            match TcpStream::connect_timeout(address, auth::HANDSHAKE_TIMEOUT) {
                Ok(stream) => {
                    stream.set_nodelay(true).map_err(broken)?;
                    net::set_peer_timeout(&stream, config.answer_timeout).map_err(broken)?;
                    return auth::dial(&stream, &config.secret, &hello).map(|()| stream);
                }
                Err(e) => last = broken(e),
            }
        }
        Err(last)
    }
}
