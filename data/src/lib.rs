//! Image data sets, the sharded sampler, augmentation and the prefetching loader.
//!
//! The crate does not depend on models or on the transport between ranks. The global permutation is the same for every world size.
//! The augmentation of a sample depends on (seed, epoch, sample id) alone, and with a weighted sampler also on the number of
//! earlier draws of the sample in the epoch.

pub mod augment;
mod bilinear;
mod crops;
pub mod dataset;
mod decode;
mod encoded;
pub mod error;
pub mod fetch;
pub mod formats;
mod label_sets;
pub mod loader;
mod memory;
#[cfg(test)]
#[path = "../testing/pictures.rs"]
mod pictures;
pub mod sampler;
pub mod split;

pub use crops::{CENTRE_CROP, TEN_CROP};
pub use dataset::{Dataset, ImageShape, SharedPixels, Splits};
pub use encoded::EncodedImages;
pub use error::DataError;
pub use folder::{open_regular, read_regular};
pub use label_sets::LabelSets;
pub use memory::total_memory;
pub use split::{SplitOptions, SplitRecord};
