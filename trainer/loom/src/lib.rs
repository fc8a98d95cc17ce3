//! The shared-memory protocol of `trainer/src/comm/shm` under loom: counter and schedules are the trainer's own files, the
//! rest of the trainer is not built for it.
//!
//! `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release -p shm-loom`; without `--cfg loom` this is empty.
#![cfg(loom)]
#![allow(unsafe_code, dead_code)]

#[path = "../../src/comm/shm/pipeline.rs"]
mod pipeline;
#[path = "../../src/comm/shm/word.rs"]
mod word;

#[cfg(test)]
mod models;
