//! The files of a run and the screen: run folder, metrics, curves, tables, progress.
//!
//! The input is records (one step, one epoch, one run). The output is files and text. The module does not use tensors, models or
//! strategies. Only rank 0 creates a [`Reporter`]. Every other rank writes only its own log.

pub mod accuracy_table;
mod average_precision;
pub mod comparison;
pub mod confusion;
pub mod curves;
pub mod download;
pub mod environment;
pub mod metrics;
pub mod missing;
pub mod pace;
pub mod progress;
pub mod reporter;
pub mod run_folder;
pub mod run_lock;
pub mod scaling;
pub mod screen;
pub mod start_table;
pub mod summary;
pub mod summary_csv;
mod svg;
pub mod sweep;
pub mod tensorboard;
#[cfg(test)]
mod testing;

pub use average_precision::AveragePrecision;
pub use confusion::Confusion;
pub use metrics::{EpochRecord, StepRecord};
pub use reporter::{Reporter, ReporterOptions};
pub use run_folder::RunFolder;
pub use start_table::Section;
pub use summary::{RunSummary, VALIDATION};
