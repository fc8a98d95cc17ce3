//! Collectives over TCP, between any hosts.
//!
//! Connections form a full mesh: every rank has one connection to every other rank. Each connection is made once, authenticated
//! with the job's secret (`setup.rs`), and shared by all groups of a stream. Bytes are sent in frames (`peer.rs`). One poll loop
//! serves all connections that a step needs (`mesh.rs`). So a rank sends and receives at once, and never waits on one connection
//! while another is ready.
//!
//! # Algorithms, and bytes that a rank sends for S bytes of data over n ranks
//!
//! | collective | up to `SMALL` bytes (`collectives.rs`) | above |
//! |---|---|---|
//! | all_reduce | recursive doubling: log2(n) steps of S | ring: 2(n-1) steps of S/n; on one host, one window of S after another |
//! | reduce | as all_reduce, on a copy | ring reduce-scatter, then parts to the root: (n-1)/n S + S/n |
//! | broadcast | binomial tree | chain, in pieces: S |
//! | all_gather | to each rank directly: (n-1) S/n | ring: n-1 steps of S/n |
//! | gather, scatter, all_to_all, reduce_scatter | directly | directly |
//!
//! Every collective starts by comparing all ranks' calls (`CallComparison`), by recursive doubling. Small data of an all-reduce is
//! reduced in the same messages, so the comparison costs a small all-reduce nothing. Ranks beyond the largest power of two first
//! send their part to a partner, and at the end receive the result from this partner.
//!
//! # Order of summation
//!
//! The order depends on rank numbers only. In recursive doubling both sides add the block of the lower rank first. In the ring,
//! the sum of part q starts at rank q, and all ranks receive the one result. reduce_scatter reduces in rank order. So all ranks
//! have the same bits in every run, in whatever order data arrives. Partial sums of 16-bit floats are sent as f32 and rounded
//! once.

mod collectives;
mod mesh;
mod messages;
mod peer;
mod ring;
mod setup;

pub(crate) use collectives::TcpGroup;
pub(crate) use mesh::Mesh;
pub(crate) use setup::MeshSetup;
