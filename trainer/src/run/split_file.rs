//! `split.json`: the training images that a run uses for validation or leaves out. A resumed run must not train on these images.

use data::SplitRecord;
use serde::{Deserialize, Serialize};

use crate::engine::checkpoint;
use crate::failure::Failure;
use crate::files::{FileError, read_or_empty, write_atomic};
use crate::report::RunFolder;

/// The content of the file. Images are positions in the training set as read from disk, after `data.limit_train`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SplitFile {
    /// Seed of the random choice of images.
    seed: u64,
    /// Training images before the split.
    images: usize,
    /// The validation split.
    validation: Vec<u32>,
    /// Images of no split.
    unused: Vec<u32>,
}

impl SplitFile {
    fn new(seed: u64, record: &SplitRecord) -> Self {
        let SplitRecord { images, validation, unused } = record.clone();
        Self { seed, images, validation, unused }
    }
}

/// Writes the file of a run that splits its training set.
///
/// # Errors
/// The file cannot be written.
pub(super) fn write(folder: &RunFolder, seed: u64, record: Option<&SplitRecord>) -> Result<(), FileError> {
    let Some(record) = record else { return Ok(()) };
    let text = serde_json::to_string(&SplitFile::new(seed, record)).expect("numbers are valid JSON");
    write_atomic(&folder.split(), text.as_bytes())
}

/// Checks that a run that has already trained still has the same split.
///
/// # Errors
/// The file is damaged, or the split has changed.
pub(super) fn check(folder: &RunFolder, seed: u64, record: Option<&SplitRecord>) -> Result<(), Failure> {
    // A run that was killed before its first checkpoint starts from the beginning.
    if !checkpoint::any(&folder.checkpoints())? {
        return Ok(());
    }
    let path = folder.split();
    let bytes = read_or_empty(&path)?;
    let saved: Option<SplitFile> = match bytes.is_empty() {
        true => None,
        false => Some(serde_json::from_slice(&bytes).map_err(|error| {
            FileError::input(&path, error.to_string(), "the file is damaged: restore it, or start a new run")
        })?),
    };
    if saved == record.map(|record| SplitFile::new(seed, record)) {
        return Ok(());
    }
    Err(Failure::usage(
        format!("{}: the run was started with another split of its training images", path.display()),
        "a run keeps data.validation, data.fraction, data.limit_train and its images: images that were trained on cannot \
         validate it",
    ))
}
