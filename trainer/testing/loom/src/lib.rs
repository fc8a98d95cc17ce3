//! Runs the protocols of `trainer/comm/src/shm` and `trainer/comm/src/cuda` under loom. Counters, schedules and flags are the
//! source files of the crate `comm`; nothing else of that crate is built.
//!
//! `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release -p shm-loom`. Without `--cfg loom` this crate is
//! empty.
#![cfg(loom)]
#![allow(unsafe_code, dead_code)]

#[path = "../../../comm/src/shm/pipeline.rs"]
mod pipeline;
#[path = "../../../comm/src/cuda/protocol.rs"]
mod protocol;
#[path = "../../../comm/src/shm/word.rs"]
mod word;

#[cfg(test)]
mod models;
#[cfg(test)]
mod windows;
