//! Readers of the data sets: each returns the [`Splits`] of a data set, decoded or as encoded files. One file per format.
//!
//! A reader checks all sizes, headers and labels before it uses them to allocate or to index. A damaged or forged file is
//! therefore an error that names the file and the record, never a panic.

mod cifar;
mod custom;
mod fashion_mini;
mod file;
mod idx;
mod image_folder;
mod locate;
mod manifest;
mod padding;
mod registry;
mod repeated;
pub mod single_images;
mod split_files;
#[cfg(test)]
pub(crate) mod tests;
mod webdataset;

use std::path::{Path, PathBuf};

pub use custom::{CustomDataset, CustomSplits, LabelledImages, register};
pub use registry::{DatasetInfo, dataset_info, dataset_names};

pub(crate) use cifar::read_names;
pub(crate) use file::{ParsedFile, open, read_error};
pub(crate) use idx::{decompressed, find as find_idx};
pub(crate) use locate::locate;
pub(crate) use registry::DatasetFormat;
pub(crate) use webdataset::archives;

use crate::memory::total_memory;
use crate::split::{SplitOptions, split};
use crate::{DataError, Dataset, Splits};

/// The data set to read, its folder, and the number of images.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LoadRequest {
    /// One of [`dataset_names`].
    pub name: String,
    /// The folder of the data set's files, or a folder above it; for `manifest` the CSV file. Not needed for `fashion-mini`.
    pub dir: Option<PathBuf>,
    /// Side of the square images, in pixels. Images of a fixed size are padded with zeros on all sides (MNIST 28 → 32); images of
    /// a folder are resized. `None` keeps the size.
    pub image_size: Option<usize>,
    /// Number of training images to keep: the first ones. Of an image folder, a manifest and tar archives, the first
    /// images of every class are kept.
    pub limit_train: Option<usize>,
    /// Number of test images to keep, in the same way. Also limits the validation images.
    pub limit_test: Option<usize>,
    /// Side in pixels to which the shorter side of each image is resized before the centre of `image_size` is cut out
    /// (torchvision: `Resize` and `CenterCrop`). `None` resizes the whole image to a square. Only for images in files.
    pub resize: Option<usize>,
    /// When images in files are decoded.
    pub decode: DecodePolicy,
    /// Leaves images in files that belong in memory to the caller, who decodes them once for several processes, or not at all
    /// ([`EncodedImages::is_decoding_deferred`](crate::EncodedImages::is_decoding_deferred)).
    pub defer_decoding: bool,
    /// Leaves missing images of a folder or a manifest to the reader of each image: the loader replaces them (`data.on_error`),
    /// or the caller reports all of them. Otherwise they are an error of [`load`].
    pub defer_missing: bool,
    /// The parts of the training set, after `limit_train`.
    pub split: SplitOptions,
    /// Splits the training set only if the data set has no test images: an evaluation needs no other part of it. Images of a
    /// folder or a manifest that are not evaluated may be missing.
    pub only_for_evaluation: bool,
    /// The character between the classes of an image in a manifest, such as `;` (fastai's `label_delim`): images may have several
    /// classes or none. `None`: each image has one class.
    pub label_delim: Option<char>,
}

/// When images in files are decoded. Other data sets are always in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DecodePolicy {
    /// Once, at the start. The decoded images stay in memory.
    #[default]
    Memory,
    /// In each epoch, when a batch needs them. Only their paths and labels are in memory.
    Epoch,
    /// In each epoch if the decoded images take more than this many bytes.
    BySize(u64),
}

impl DecodePolicy {
    /// Returns the policy for this machine's memory: in each epoch if the decoded images take more than half of this machine's
    /// memory. Where the system does not report its memory, there is no limit.
    pub fn by_memory() -> Self {
        Self::BySize(total_memory().map_or(u64::MAX, |memory| memory / 2))
    }
}

/// Returns whether a character can separate the classes of an image ([`LoadRequest::label_delim`]): not a letter, digit, quote or
/// end of a line.
pub fn is_label_delimiter(symbol: char) -> bool {
    !symbol.is_alphanumeric() && symbol != '"' && (symbol == '\t' || !symbol.is_control())
}

/// Reads, checks and decodes the splits of a data set.
///
/// # Errors
/// An unknown name, files that are not found (the error lists all folders searched), damaged or truncated files, labels out of
/// range, images of different sizes, an `image_size` below the images' own size, a limit of zero, more pixels than fit into
/// memory, or those of [`split`].
pub fn load(request: &LoadRequest) -> Result<Splits, DataError> {
    let splits = load_unsplit(request, request.split.validation.is_none())?;
    if request.only_for_evaluation && !splits.test.is_empty() { Ok(splits) } else { split(splits, &request.split) }
}

/// Does the work of [`load`] without splitting the training set. `needs_test`: image files without test images are an error.
pub(crate) fn load_unsplit(request: &LoadRequest, needs_test: bool) -> Result<Splits, DataError> {
    let info = require_dataset_info(&request.name)?;
    if request.label_delim.is_some() && !matches!(info.format, DatasetFormat::Manifest) {
        let cause = format!("each image of the data set `{}` has one class", info.name);
        let hint = "only a manifest lists images with several classes: leave label_delim out, or write a manifest";
        return Err(DataError::new("", cause, hint).at("label_delim"));
    }
    if let Some(delim) = request.label_delim.filter(|delim| !is_label_delimiter(*delim)) {
        let cause = format!("{delim:?} cannot separate classes");
        return Err(DataError::new("", cause, "use no letter, digit or quote: ';' reads cat;dog").at("label_delim"));
    }
    match info.format {
        DatasetFormat::BuiltIn => fashion_mini::load(info, request),
        DatasetFormat::Custom(reader) => custom::load(info, reader, request),
        DatasetFormat::Cifar(layout) => cifar::load(info, layout, folder(info, request)?, request),
        DatasetFormat::Idx => idx::load(info, folder(info, request)?, request),
        DatasetFormat::ImageFolder => image_folder::load(info, folder(info, request)?, request, needs_test),
        DatasetFormat::Manifest => manifest::load(info, folder(info, request)?, request, needs_test),
        DatasetFormat::Webdataset => webdataset::load(info, folder(info, request)?, request, needs_test),
    }
}

/// Returns the registry's entry, or an error that lists all names.
pub(crate) fn require_dataset_info(name: &str) -> Result<&'static DatasetInfo, DataError> {
    dataset_info(name).ok_or_else(|| {
        let names = dataset_names().collect::<Vec<_>>().join(", ");
        DataError::new("", format!("there is no data set `{name}`"), format!("the data sets are {names}"))
    })
}

/// Returns the request's folder, or an error that says how to name it.
fn folder<'a>(info: &DatasetInfo, request: &'a LoadRequest) -> Result<&'a Path, DataError> {
    request.dir.as_deref().ok_or_else(|| {
        let hint = match info.format {
            DatasetFormat::ImageFolder => "name the folder that holds train/ and test/ with `dir` in [data] or --data-dir".to_owned(),
            DatasetFormat::Manifest => manifest::NAME_IT.to_owned(),
            DatasetFormat::Webdataset => webdataset::LAYOUT.to_owned(),
            _ => format!(
                "`trainer data fetch {}` downloads the files; if you have them, name their folder with `dir` in [data] or --data-dir",
                info.name
            ),
        };
        DataError::new("", format!("no folder is given for the data set `{}`", info.name), hint)
    })
}

/// Makes a split. The readers have checked that the lengths agree.
fn dataset(
    info: &DatasetInfo,
    padding: &padding::ImagePadding,
    images: Vec<u8>,
    labels: Vec<u16>,
    classes: Vec<String>,
) -> Dataset {
    let (name, shape) = (info.name.to_owned(), padding.shape());
    Dataset { name, images, shared: None, encoded: None, labels, label_sets: None, shape, classes }
}
