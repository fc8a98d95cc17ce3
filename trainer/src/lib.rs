//! The trainer: command line, configuration, engine, strategies and reports.
//!
//! `ARCHITECTURE.md` shows the modules in layers. A module imports only from layers below its own, which `tests/layers.rs`
//! checks. [`main`] is the whole program. Only `program`, `diagnostics`, [`commands`] and [`run`] use flags, and
//! [`config`] only the type of `--data-dir`. [`engine`] counts epochs.
//! Only rank 0 has a [`report::Reporter`].

#![deny(clippy::print_stdout, clippy::print_stderr, reason = "`console` writes to the screen")]

pub mod cli;
pub mod commands;
pub mod config;
pub mod console;
pub mod device;
pub mod diagnostics;
pub mod engine;
pub mod failure;
pub mod files;
pub mod loss;
pub mod optim;
pub mod program;
pub mod report;
pub mod run;
pub mod signals;
pub mod snapshot;
pub mod state_file;
pub mod strategy;
pub mod text;
pub mod timeline;
pub mod weights;

pub use program::main;
