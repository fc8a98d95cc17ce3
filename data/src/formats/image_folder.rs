//! A folder of images: `DIR/train/CLASS/**/*.png|jpg|jpeg`, and `DIR/val` and `DIR/test` with the same layout. `val` may be
//! missing. If only `test` is missing, `val` is the test split. Both may be missing where the training set is split.
//!
//! Order and labels are those of torchvision's `ImageFolder`: classes are sorted by name, the files of a class by folder and
//! then by name. Images become RGB as with PIL's `convert("RGB")`: grey is repeated, transparency is dropped.

mod walk;

use std::path::{Path, PathBuf};

use super::images::{SplitFiles, load_splits};
use super::{DatasetInfo, LoadRequest};
use crate::{DataError, Splits};
pub(super) use walk::{NOT_READ, READ, images_below};
use walk::{classes, samples};

/// Reads an image folder. `needs_test`: a folder without test images is an error.
pub(super) fn load(
    info: &DatasetInfo,
    dir: &Path,
    request: &LoadRequest,
    needs_test: bool,
) -> Result<Splits, DataError> {
    let dirs = split_dirs(dir, needs_test)?;
    let names = classes(&dirs.train)?;
    for split in dirs.val.iter().chain(&dirs.test) {
        check_same_classes(&dirs.train, &names, split)?;
    }
    let optional = |dir: Option<PathBuf>| dir.map_or_else(|| Ok(Vec::new()), |dir| samples(&dir, &names));
    let files =
        SplitFiles { train: samples(&dirs.train, &names)?, val: optional(dirs.val)?, test: optional(dirs.test)? };
    load_splits(info, dir, files, &names, request)
}

/// The folders of the splits.
struct SplitDirs {
    train: PathBuf,
    val: Option<PathBuf>,
    test: Option<PathBuf>,
}

/// Finds the folders of the splits. A `val` without `test` is the test split.
fn split_dirs(dir: &Path, needs_test: bool) -> Result<SplitDirs, DataError> {
    let layout = "an image folder holds train/CLASS/*.png and test/CLASS/*.png (or val/CLASS/*.png)";
    if !dir.is_dir() {
        let cause = if dir.exists() { "is not a folder" } else { "there is no such folder" };
        return Err(DataError::new(dir, cause, layout));
    }
    let train = dir.join("train");
    if !train.is_dir() {
        return Err(DataError::new(train, "there is no such folder", layout));
    }
    let [val, test] = ["val", "test"].map(|name| Some(dir.join(name)).filter(|path| path.is_dir()));
    match (val, test) {
        (None, None) if needs_test => {
            let hint = format!("{layout}; or set data.validation = 0.1 to hold images of train out");
            Err(DataError::new(dir, "there is neither a folder test nor val", hint))
        }
        (test, None) => Ok(SplitDirs { train, val: None, test }),
        (val, test) => Ok(SplitDirs { train, val, test }),
    }
}

/// Checks that a split has the classes of the training split: labels are positions in the list of classes.
fn check_same_classes(train_dir: &Path, train: &[String], test_dir: &Path) -> Result<(), DataError> {
    let test = classes(test_dir)?;
    let lacks = |dir: &Path, name: &String, other: &Path| {
        DataError::new(
            dir.join(name),
            format!("there is no such folder, but {} has the class `{name}`", other.display()),
            "both splits need the same class folders",
        )
    };
    if let Some(name) = test.iter().find(|name| !train.contains(name)) {
        return Err(lacks(train_dir, name, test_dir));
    }
    match train.iter().find(|name| !test.contains(name)) {
        Some(name) => Err(lacks(test_dir, name, train_dir)),
        None => Ok(()),
    }
}
