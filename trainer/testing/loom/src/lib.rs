//! The protocols of `trainer/comm/src/shm` and `trainer/comm/src/cuda` under loom: counter, schedules and flags are the
//! trainer's own files, the rest of the trainer is not built for it.
//!
//! `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release -p shm-loom`; without `--cfg loom` this is empty.
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
