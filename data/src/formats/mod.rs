//! Readers of the data sets: files in, decoded [`Splits`] out. One format a file.
//!
//! Every reader checks what it reads (sizes, headers, labels) before it allocates or indexes by it, so that a damaged or
//! forged file is an error that names the file and the record, never a panic.

mod cifar;
mod fashion_mini;
mod file;
mod fit;
mod idx;
mod image_folder;
mod locate;
mod registry;
#[cfg(test)]
pub(crate) mod tests;

use std::path::{Path, PathBuf};

pub use registry::{DatasetInfo, dataset_names, metadata};

pub(crate) use cifar::read_names;
pub(crate) use file::{open, read_error};
pub(crate) use idx::{decompressed, find as find_idx};
pub(crate) use locate::locate;
pub(crate) use registry::Format;

use crate::{DataError, Dataset, Splits};

/// Which data set to read, from where, and how much of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadRequest {
    /// One of [`dataset_names`].
    pub name: String,
    /// The folder with the set's files, or one above it. Not needed for `fashion-mini`.
    pub dir: Option<PathBuf>,
    /// Side of the square images to hand out, in pixels. Sets of a fixed size are padded with zeros around the centre (MNIST
    /// 28 → 32); images of a folder are resized. `None`: as they are.
    pub image_size: Option<usize>,
    /// Keeps the first this many training images. An image folder, whose files are sorted by class, is thinned to the
    /// first images of every class instead.
    pub limit_train: Option<usize>,
    /// The same for the test images.
    pub limit_test: Option<usize>,
}

/// Reads, checks and decodes both splits of a data set.
///
/// # Errors
/// Unknown name, files not found (all places looked at are listed), damaged or truncated files, labels out of range, images
/// of differing sizes, an `image_size` below the set's own, a limit of zero, or more pixels than memory holds.
pub fn load(request: &LoadRequest) -> Result<Splits, DataError> {
    let info = info(&request.name)?;
    match info.format {
        Format::BuiltIn => fashion_mini::load(info, request),
        Format::Cifar(layout) => cifar::load(info, layout, folder(info, request)?, request),
        Format::Idx => idx::load(info, folder(info, request)?, request),
        Format::ImageFolder => image_folder::load(info, folder(info, request)?, request),
    }
}

/// The registry's entry, or an error that lists the names there are.
pub(crate) fn info(name: &str) -> Result<&'static DatasetInfo, DataError> {
    metadata(name).ok_or_else(|| {
        let names = dataset_names().collect::<Vec<_>>().join(", ");
        DataError::new("", format!("there is no data set `{name}`"), format!("the data sets are {names}"))
    })
}

fn folder<'a>(info: &DatasetInfo, request: &'a LoadRequest) -> Result<&'a Path, DataError> {
    request.dir.as_deref().ok_or_else(|| {
        let hint = match info.format {
            Format::ImageFolder => "name the folder that holds train/ and test/ with `dir` in [data] or --data-dir".to_owned(),
            _ => format!(
                "`trainer data fetch {}` gets the files; if you have them, name their folder with `dir` in [data] or --data-dir",
                info.name
            ),
        };
        DataError::new("", format!("no folder is given for the data set `{}`", info.name), hint)
    })
}

/// Puts a split together. The readers have checked that the numbers fit.
fn dataset(info: &DatasetInfo, fit: &fit::Fit, images: Vec<u8>, labels: Vec<u16>, classes: Vec<String>) -> Dataset {
    debug_assert_eq!(images.len(), labels.len() * fit.shape().len());
    Dataset { name: info.name.to_owned(), images, labels, shape: fit.shape(), classes }
}
