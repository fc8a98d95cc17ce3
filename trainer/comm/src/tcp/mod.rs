//! Collectives over TCP, between any hosts.
//!
//! Connections form a full mesh: every rank has one connection to every other rank, made once, authenticated with the job's
//! secret (`setup.rs`), and shared by all groups. Bytes travel in frames (`peer.rs`). One poll loop serves all connections that
//! a step needs (`mesh.rs`), so a rank sends and receives at once and never waits on one connection while another is ready.
//!
//! # Algorithms, and bytes that a rank sends for S bytes of data over n ranks
//!
//! | collective | up to [`SMALL`](collectives) | above |
//! |---|---|---|
//! | all_reduce | recursive doubling: log2(n) steps of S | ring: 2(n-1) steps of S/n; on one host, one window of S after another |
//! | reduce | as all_reduce, on a copy | ring reduce-scatter, then parts to the root: (n-1)/n S + S/n |
//! | broadcast | binomial tree | chain, in pieces: S |
//! | all_gather | to each rank directly: (n-1) S/n | ring: n-1 steps of S/n |
//! | gather, scatter, all_to_all, reduce_scatter | directly | directly |
//!
//! Every collective starts with an agreement (`Agreement`): recursive doubling over the calls, and over the data itself if it
//! is small, so small all-reduces cost nothing extra. Ranks beyond the largest power of two send their part to a partner first
//! and receive the result from it last.
//!
//! # Order of summation
//!
//! It depends on rank numbers only. Recursive doubling adds the lower block to the higher block on both sides. The ring starts
//! part q at rank q, and all ranks receive the one result. reduce_scatter reduces in rank order. So all ranks have the same
//! bits in every run, whatever arrives first. 16-bit floats travel as f32 while they are partial sums, and are rounded once.

mod collectives;
mod mesh;
mod messages;
mod peer;
mod ring;
mod setup;

pub(crate) use collectives::TcpGroup;
pub(crate) use mesh::Mesh;
pub(crate) use setup::MeshSetup;
