//! The rendezvous: one small server per job, and one control connection per rank. It is like PyTorch's `TCPStore`, with a secret
//! and with failure notifications.
//!
//! The server holds keys and values (addresses, file-descriptor numbers), barriers that name missing ranks, and the first error
//! of the job. The server also knows which ranks are alive: whatever ends a rank's process, the kernel closes the rank's
//! connection, and the server reports the failure to all other ranks within one poll. The server runs in the launcher, or in
//! rank 0 if another launcher started the job.
//!
//! One thread polls all connections. An unauthenticated peer has [`auth::HANDSHAKE_TIMEOUT`](super::auth) to prove the secret,
//! and a buffer of a few hundred bytes. At most [`MAX_UNAUTHENTICATED`] such peers are connected; the server closes the oldest
//! first. So unauthenticated peers can neither delay nor crash the members.
//!
//! - `config.rs`: the settings that the server and its clients share
//! - `message.rs`: the messages and their encoding
//! - `state.rs`: the server's state and its answers, without sockets
//! - `connection.rs`: one non-blocking socket with its buffers
//! - `server.rs`: the poll loop
//! - `connect.rs`: connects a rank to the server
//! - `client.rs`: a rank's end of the connection, with a thread that receives

mod client;
mod config;
mod connect;
mod connection;
mod message;
mod server;
mod state;

pub use client::StoreClient;
pub use config::{MemberKind, StoreConfig};
pub use connect::ConnectError;
pub use server::{StoreEvent, StoreServer};

/// Maximum number of connections that have not authenticated yet.
const MAX_UNAUTHENTICATED: usize = 64;
