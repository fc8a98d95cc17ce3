//! The tests of the program and of the library, in one executable: each one more would link all of burn.

mod common;
#[path = "common/engine.rs"]
mod engine;

mod any_program;
mod autotune;
mod bench_allreduce;
mod cli;
mod compare;
mod ddp;
mod ddp_failures;
mod decode_per_epoch;
mod deploy;
mod diagnostics;
mod doctor;
mod documents;
mod dp;
mod fine_tune;
mod first_light;
mod foreign_launchers;
mod hostile_input;
mod hosts;
mod image_sizes;
mod imbalance;
mod layers;
mod messages;
mod multi_label;
mod nodes;
mod onnx;
mod precision;
mod predict;
mod queued_steps;
mod resume;
mod rows;
mod run_folder;
mod run_lock;
mod scaling;
mod signals;
mod speedrun;
mod splits;
mod strategy;
mod sweep;
mod timeline;
mod tutorial;
mod validation;
mod weights;
