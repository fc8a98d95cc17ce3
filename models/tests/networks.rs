//! The tests of the networks, in one executable: each one more would link all of burn.

mod formula;

mod build;
mod frozen;
mod golden;
mod graph;
mod precision;
mod shared_batch;
mod state;
mod update;
