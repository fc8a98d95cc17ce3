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
    /// CRC-32C of the names and labels of the training images, if they are in files. Older versions did not write it.
    #[serde(default, rename = "names", skip_serializing_if = "Option::is_none")]
    names_crc: Option<u32>,
}

impl SplitFile {
    fn new(seed: u64, record: &SplitRecord) -> Self {
        let SplitRecord { images, validation, unused, names_crc } = record.clone();
        Self { seed, images, validation, unused, names_crc }
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

/// Checks that the validation split equals the split in the run's `split.json`.
///
/// # Errors
/// The file is damaged, or the split has changed.
pub(crate) fn check_validation(folder: &RunFolder, record: &SplitRecord) -> Result<(), Failure> {
    let same = |saved: &SplitFile| {
        saved.images == record.images
            && saved.validation == record.validation
            && saved.names_crc.is_none_or(|crc| Some(crc) == record.names_crc)
    };
    match read(folder)? {
        // Older versions wrote no file.
        Some(saved) if !same(&saved) => Err(Failure::usage(
            format!("{}: the validation split differs from that of the run", folder.split().display()),
            "the run may have trained on these images, so the result would be too good: restore the run's \
             images, or add test images",
        )),
        _ => Ok(()),
    }
}

/// Reads the file. Returns `None` if there is none.
fn read(folder: &RunFolder) -> Result<Option<SplitFile>, FileError> {
    let path = folder.split();
    let bytes = read_or_empty(&path)?;
    if bytes.is_empty() {
        return Ok(None);
    }
    let damaged = |error: serde_json::Error| {
        FileError::input(&path, error.to_string(), "the file is damaged: restore it, or start a new run")
    };
    serde_json::from_slice(&bytes).map(Some).map_err(damaged)
}

/// Checks that a run that has already trained still has the same split, of the same images.
///
/// # Errors
/// The file is damaged, or the split has changed.
pub(super) fn check(folder: &RunFolder, seed: u64, record: Option<&SplitRecord>) -> Result<(), Failure> {
    // A run that was killed before its first checkpoint starts from the beginning.
    if !checkpoint::exists(&folder.checkpoints())? {
        return Ok(());
    }
    let (path, saved) = (folder.split(), read(folder)?);
    let mut now = record.map(|record| SplitFile::new(seed, record));
    let before = saved.as_ref().and_then(|saved| saved.names_crc);
    let mut renamed = false;
    if let Some(now) = &mut now {
        // Older versions wrote no checksum.
        renamed = before.is_some() && now.names_crc != before;
        now.names_crc = before;
    }
    if saved.is_none() && now.is_some() {
        return Err(Failure::usage(
            format!("{}: the file is missing or empty, so the run had no split of its training images", path.display()),
            "restore the file from a copy of the run, if it was lost; a run that had no split goes on without \
             data.validation, data.fraction and data.limit_train",
        ));
    }
    if saved != now {
        return Err(Failure::usage(
            format!("{}: the run was started with another split of its training images", path.display()),
            "a run keeps data.validation, data.fraction, data.limit_train and its images: images that were trained on cannot \
             validate it",
        ));
    }
    if renamed {
        return Err(Failure::usage(
            format!("{}: the training images have other names or labels than when the run was started", path.display()),
            "the split of a run is by position, so images that were trained on would be in the validation split: give the run \
             the images that it had",
        ));
    }
    Ok(())
}
