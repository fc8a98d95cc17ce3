//! The rendezvous: one small server per job, and one control connection per rank. Like PyTorch's `TCPStore`, with a secret and
//! with news of failures.
//!
//! The server holds keys and values (addresses, file-descriptor numbers), barriers that name missing ranks, and the first error
//! of the job. It knows which ranks are alive: a rank's death closes its connection, whatever killed it, and the server reports
//! it to all other ranks within one poll. The server runs in the launcher, or in rank 0 if another launcher started the job.
//!
//! One thread polls all connections. An unauthenticated peer has [`auth::HANDSHAKE_LIMIT`](super::auth) to prove the secret, a
//! few hundred bytes of buffer, and one of [`MAX_UNAUTHENTICATED`] places, of which the oldest is closed first. Such peers can
//! neither delay nor crash what members do.
//!
//! - `config.rs`: what the server and its clients share
//! - `message.rs`: the messages and their encoding
//! - `state.rs`: what the server knows and answers, without sockets
//! - `connection.rs`: one non-blocking socket with its buffers
//! - `server.rs`: the poll loop
//! - `connect.rs`: how a rank reaches the server
//! - `client.rs`: a rank's end, with a thread that listens for news

mod client;
mod config;
mod connect;
mod connection;
mod message;
mod server;
mod state;

pub use client::StoreClient;
pub use config::{Member, StoreConfig};
pub use connect::ConnectError;
pub use server::{StoreEvent, StoreServer};

/// Most connections that have not authenticated yet.
const MAX_UNAUTHENTICATED: usize = 64;
