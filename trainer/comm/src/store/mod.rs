//! The private rendezvous: one small server a job, one control connection a rank.
//!
//! The server holds keys and values (addresses, file-descriptor numbers), barriers that name who is missing, the first
//! error of the job, and knows which ranks are alive: a rank's death closes its connection, whatever killed it, and is told
//! to all others within a poll. It runs in the launcher, or in rank 0 where there is no launcher of ours.
//!
//! One thread polls all connections. Strangers get [`auth::HANDSHAKE_LIMIT`](super::auth) to prove the secret, a few
//! hundred bytes of buffer and one of [`MAX_UNAUTHENTICATED`] places, of which the oldest is given up first; they can neither
//! stall nor crash what members do.
//!
//! - `message.rs`: what goes over the wire
//! - `state.rs`: what the server knows and answers, without sockets
//! - `connection.rs`: one non-blocking socket with its buffers
//! - `server.rs`: the poll loop
//! - `client.rs`: a rank's end, with a thread that listens for bad news

mod client;
mod connection;
mod message;
mod server;
mod state;

pub use client::StoreClient;
pub use server::{StoreEvent, StoreServer};

/// Connections that have not proved themselves yet, at most.
const MAX_UNAUTHENTICATED: usize = 64;
