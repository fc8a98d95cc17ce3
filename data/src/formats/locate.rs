//! Finds the folder that holds a data set's files.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::file::{check_folder, read_error};
use super::{DatasetFormat, DatasetInfo, idx};
use crate::DataError;

/// Finds the folder of the data set's files: `dir` or one of the usual folders below it.
///
/// A folder with all files is preferred to one with some files. If only incomplete folders exist, the first is returned, so
/// that the reader can name the missing file.
pub(crate) fn locate(info: &DatasetInfo, dir: &Path) -> Result<PathBuf, DataError> {
    let hint = format!("--data-dir names the data folder; `trainer data fetch {}` downloads the files", info.name);
    check_folder(dir, &hint)?;
    let places: Vec<PathBuf> =
        std::iter::once(dir.to_owned()).chain(info.folders.iter().map(|folder| dir.join(folder))).collect();
    let present: Vec<(usize, usize)> = places.iter().map(|place| count(info, place)).collect();
    let complete = present.iter().position(|&(have, all)| have == all);
    let partial = present.iter().position(|&(have, _)| have > 0);
    match complete.or(partial) {
        Some(index) => Ok(places[index].clone()),
        None => Err(unreadable(&places).unwrap_or_else(|| not_found(info, dir, &places))),
    }
}

/// Returns the error of the first folder that exists and hides its files, for example without the permission to search it.
fn unreadable(places: &[PathBuf]) -> Option<DataError> {
    places.iter().find_map(|place| {
        // Looking up the entry `.` needs the permission that looking up a file needs.
        let error = std::fs::metadata(place.join(".")).err()?;
        let is_missing = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
        (!is_missing).then(|| read_error(place, &error))
    })
}

/// Returns how many of the data set's files are in `place`, and how many files the data set has.
fn count(info: &DatasetInfo, place: &Path) -> (usize, usize) {
    match info.format {
        DatasetFormat::Cifar(layout) => {
            let files = || layout.train.iter().chain([&layout.test]);
            (files().filter(|file| place.join(file).is_file()).count(), files().count())
        }
        DatasetFormat::Idx => {
            (idx::STEMS.iter().filter(|stem| idx::find(place, stem).is_some()).count(), idx::STEMS.len())
        }
        DatasetFormat::ImageFolder
        | DatasetFormat::Manifest
        | DatasetFormat::Webdataset
        | DatasetFormat::BuiltIn
        | DatasetFormat::Custom(_) => (usize::from(place.is_dir()), 1),
    }
}

fn not_found(info: &DatasetInfo, dir: &Path, places: &[PathBuf]) -> DataError {
    let files = match info.format {
        DatasetFormat::Cifar(layout) => [layout.train, &[layout.test]].concat().join(", "),
        _ => format!("{}; .gz or not", idx::STEMS.map(idx::file_name).join(", ")),
    };
    let looked = places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ");
    let mut hint = format!("`trainer data fetch {}` downloads them; --data-dir names another folder", info.name);
    if let DatasetFormat::Cifar(layout) = info.format {
        let [archive, pickles] = layout.lookalikes;
        if dir.join(archive).is_file() {
            hint = format!(
                "{archive} is there but not unpacked: `trainer data fetch {}` checks and unpacks it",
                info.name
            );
        } else if dir.join(pickles).is_dir() {
            hint = format!("{pickles} is the Python version; the trainer reads the binary version ({archive}): {hint}");
        }
    }
    DataError::new(dir, format!("the files of `{}` are not here ({files}); looked in {looked}", info.name), hint)
}
