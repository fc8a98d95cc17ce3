//! A folder of images: `DIR/train/CLASS/**/*.png|jpg|jpeg`, and `DIR/val` (or `valid`, `validation`) and `DIR/test` with the same
//! layout. `val` may be missing. If only `test` is missing, `val` is the test split. Both may be missing where the training set is
//! split.
//!
//! Order and labels are those of torchvision's `ImageFolder`: classes are sorted by name, the files of a class by folder and
//! then by name. Images become RGB as with PIL's `convert("RGB")`: grey is repeated, transparency is dropped.

mod walk;

use std::path::{Path, PathBuf};

use super::file::{check_folder, is_folder};
use super::repeated::{DuplicateKind, Split, first_duplicate};
use super::split_files::{SplitFiles, load_splits};
use super::{DatasetInfo, LoadRequest};
use crate::{DataError, Splits};
use walk::{ClassImage, classes, images};
pub(super) use walk::{READABLE_EXTENSIONS, UNREADABLE_EXTENSIONS, images_below};

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
    let optional = |dir: Option<PathBuf>| dir.map_or_else(|| Ok(Vec::new()), |dir| images(&dir, &names));
    let (train, val, test) = (images(&dirs.train, &names)?, optional(dirs.val)?, optional(dirs.test)?);
    check_repeated(
        [(Split::Train, &train), (Split::Val, &val), (Split::Test, &test)],
        request.split.validation.is_some(),
    )?;
    let is_used = |split: Split| !request.only_for_evaluation || test.is_empty() || split == Split::Test;
    let used = [(Split::Train, &train), (Split::Val, &val), (Split::Test, &test)]
        .into_iter()
        .filter(|(split, _)| is_used(*split));
    check_files(used.flat_map(|(_, images)| images), request.defer_missing)?;
    let [train, val, test] = [train, val, test].map(|images| images.into_iter().map(ClassImage::sample).collect());
    load_splits(info, dir, SplitFiles { train, val, test }, &names, request)
}

/// Checks that images are regular files. Images that are decoded in each epoch are opened late, those of the test split after
/// training. `defer_missing` as in [`LoadRequest::defer_missing`].
fn check_files<'a>(images: impl Iterator<Item = &'a ClassImage>, defer_missing: bool) -> Result<(), DataError> {
    let mut problems = images.filter_map(|image| image.problem.as_deref());
    let first = problems.find(|problem| !(defer_missing && problem.is_bad_image));
    first.map_or(Ok(()), |problem| Err(problem.clone()))
}

/// Checks that no image has two classes or two splits. `splits` as in [`first_duplicate`].
fn check_repeated(parts: [(Split, &Vec<ClassImage>); 3], splits: bool) -> Result<(), DataError> {
    let images = parts.into_iter().flat_map(|(part, images)| images.iter().map(move |image| (part, image)));
    // A link to nothing has no inode.
    let images = images.filter_map(|(part, image)| Some((image.inode?, image.label, part, image)));
    let Some((first, image, repeat)) = first_duplicate(images, splits) else { return Ok(()) };
    let one = "remove one of the two: an image has one class and one split";
    let (why, hint) = match repeat {
        DuplicateKind::Label => ("an image has two classes", one),
        DuplicateKind::Split => ("an image of one split is in another one", one),
        DuplicateKind::Validation => (
            "data.validation may take it and train on it too",
            "remove one of the two (data.sampler_weights draws some classes more often), or move the validation images to val/",
        ),
    };
    Err(DataError::new(&image.path, format!("is the same file as {}: {why}", first.path.display()), hint))
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
    check_folder(dir, layout)?;
    let train = dir.join("train");
    check_folder(&train, layout)?;
    let found = |name: &str| {
        let path = dir.join(name);
        Ok(is_folder(&path)?.then_some(path))
    };
    let val = ["val", "valid", "validation"].into_iter().map(found).collect::<Result<Vec<_>, DataError>>()?;
    let mut val = val.into_iter().flatten();
    let (val, other, test) = (val.next(), val.next(), found("test")?);
    if let (Some(val), Some(other)) = (&val, other) {
        let cause = format!("is a validation split, and so is {}", val.display());
        return Err(DataError::new(other, cause, "keep one of the two folders"));
    }
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
