//! What a run leaves behind and what a person sees of it: run folder, metrics, curves, tables, progress.
//!
//! Nothing here knows of tensors, models or strategies: records come in, files and text go out. Only rank 0 makes a
//! [`Reporter`]; every other rank writes nothing but its own log.

pub mod comparison;
pub mod confusion;
pub mod curves;
pub mod download;
pub mod environment;
pub mod metrics;
pub mod pace;
pub mod progress;
pub mod reporter;
pub mod run_folder;
pub mod screen;
pub mod summary;
pub mod summary_csv;
pub mod table;
pub mod tensorboard;
#[cfg(test)]
mod testing;

pub use confusion::Confusion;
pub use metrics::{EpochRecord, StepRecord};
pub use reporter::{Reporter, ReporterOptions};
pub use run_folder::RunFolder;
pub use screen::Section;
pub use summary::RunSummary;
