//! The trainer's modules, in layers. A module imports only from layers below its own:
//!
//! ```text
//! commands                                            one file per subcommand
//! weights                                             weights of other programs
//! engine                                              a run: epochs, evaluation, checkpoints
//! strategy, report                                    a step on one or several devices; the run's files and screen
//! optim, device, timeline, snapshot                   optimizers; devices; spans of time; the contents of a checkpoint
//! loss, state_file, failure, signals                  cross-entropy; safetensors; errors for the user; SIGINT and SIGTERM
//! cli, config, files, text                            flags; the plan; atomic writes; numbers and bytes as text
//! ```
//!
//! `ARCHITECTURE.md` has the map of all crates. Only [`commands`] reads flags. [`engine`] counts epochs. Only rank 0 has a
//! [`report::Reporter`].

pub mod cli;
pub mod commands;
pub mod config;
pub mod device;
pub mod diagnostics;
pub mod engine;
pub mod failure;
pub mod files;
pub mod loss;
pub mod optim;
pub mod report;
pub mod run;
pub mod signals;
pub mod snapshot;
pub mod state_file;
pub mod strategy;
pub mod text;
pub mod timeline;
pub mod weights;
