//! Image data sets, the sharded sampler, augmentation and the prefetching loader.
//!
//! The crate knows nothing of models or of the transport between ranks. It hands out the same global permutation
//! whatever the world size, and augments a sample by (seed, epoch, sample id) alone.

pub mod augment;
pub mod dataset;
pub mod error;
pub mod fetch;
pub mod formats;
pub mod loader;
pub mod sampler;

pub use dataset::{Dataset, ImageShape, Splits};
pub use error::DataError;
