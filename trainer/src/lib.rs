//! The trainer's parts, top to bottom: command line → configuration → engine → strategy → optimizer.
//!
//! `ARCHITECTURE.md` has the map. Nothing below [`commands`] reads flags or the environment; nothing below [`engine`]
//! knows of epochs; only rank 0 has a [`report`].

pub mod cli;
pub mod commands;
pub mod config;
pub mod device;
pub mod engine;
pub mod failure;
pub mod files;
pub mod loss;
pub mod optim;
pub mod report;
pub mod signals;
pub mod snapshot;
pub mod state_file;
pub mod strategy;
pub mod text;
pub mod timeline;
pub mod weights;
