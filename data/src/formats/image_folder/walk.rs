//! Finds the classes and the images of a split.

use std::collections::HashMap;
use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};

use crate::encoded::ImageFile;
use crate::formats::file::is_folder;
use crate::formats::read_error;
use crate::formats::repeated::Inode;
use crate::formats::split_files::Sample;
use crate::{DataError, open_regular};

/// File name extensions of the images that are read, in upper or lower case.
pub(in crate::formats) const READABLE_EXTENSIONS: [&str; 5] = ["png", "jpg", "jpeg", "jpe", "jfif"];

/// Extensions of images that cannot be read. Ignoring such a file silently would change the data set.
#[rustfmt::skip]
pub(in crate::formats) const UNREADABLE_EXTENSIONS: [&str; 19] = [
    "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm", "pbm", "avif", "heic", "heif", "jxl", "jp2", "j2k", "ico", "tga", "psd", "dng",
    "exr",
];

/// Maximum depth of folders below a class.
const MAX_DEPTH: usize = 32;

/// Returns the names of a split's class folders, sorted.
pub(super) fn classes(split: &Path) -> Result<Vec<String>, DataError> {
    let mut names = Vec::new();
    for entry in entries(split)? {
        // `is_folder` follows links, as torchvision does. Hidden folders (.ipynb_checkpoints) are not classes.
        if is_hidden(&entry) || !is_folder(&entry)? {
            continue;
        }
        let name = entry
            .file_name()
            .and_then(|name| name.to_str())
            .ok_or_else(|| DataError::new(&entry, "the name of the class is not UTF-8", "rename the folder"))?;
        names.push(name.to_owned());
    }
    names.sort_unstable();
    let hint = "each class is a folder of images, named after the class";
    if names.is_empty() {
        return Err(DataError::new(split, "the split is empty: it has no class folder", hint));
    }
    if names.len() > usize::from(u16::MAX) + 1 {
        let cause = format!("{} class folders, at most {} are supported", names.len(), usize::from(u16::MAX) + 1);
        return Err(DataError::new(split, cause, hint));
    }
    Ok(names)
}

/// An image of a class.
pub(super) struct ClassImage {
    pub(super) path: PathBuf,
    pub(super) label: u16,
    /// `None` if there is no such file, as at the end of a broken link.
    pub(super) inode: Option<Inode>,
    /// Why the image is not a file that can be read.
    pub(super) problem: Option<Box<DataError>>,
}

impl ClassImage {
    pub(super) fn sample(self) -> Sample {
        Sample { file: ImageFile::Path(self.path), label: self.label, label_set: None }
    }
}

/// An image below a folder.
struct FoundImage {
    path: PathBuf,
    inode: Option<Inode>,
    problem: Option<Box<DataError>>,
}

impl FoundImage {
    /// `metadata` is that of the file, or of the file at the end of the link.
    fn new(path: PathBuf, metadata: io::Result<Metadata>) -> Self {
        let problem = match &metadata {
            Ok(metadata) if metadata.is_file() => None,
            // Opening names the kind of the file.
            Ok(_) => open_regular(&path).err().map(|error| read_error(&path, &error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let hint = "remove the link, or restore the file that it leads to";
                Some(DataError::new(&path, "is a symbolic link to a file that does not exist", hint).of_bad_image())
            }
            Err(error) => Some(read_error(&path, error)),
        };
        Self { path, inode: metadata.as_ref().ok().map(Inode::of), problem: problem.map(Box::new) }
    }
}

/// Returns the images of all classes of a split, in torchvision's order.
pub(super) fn images(split: &Path, names: &[String]) -> Result<Vec<ClassImage>, DataError> {
    let mut images = Vec::new();
    for (label, name) in (0..=u16::MAX).zip(names) {
        let class = split.join(name);
        let mut found = Vec::new();
        collect(&class, 0, &mut HashMap::new(), &mut found)?;
        if found.is_empty() {
            let hint = "put .png, .jpg or .jpeg files into it, or remove the folder from every split";
            return Err(DataError::new(class, "the class folder holds no image", hint));
        }
        sort(&mut found);
        images.extend(found.into_iter().map(|FoundImage { path, inode, problem }| ClassImage {
            path,
            label,
            inode,
            problem,
        }));
    }
    Ok(images)
}

/// Returns all images in a folder and below it, in the order of a class, and the errors of the files and folders that cannot be
/// read.
pub(in crate::formats) fn images_below(folder: &Path) -> (Vec<PathBuf>, Vec<DataError>) {
    let (mut found, mut errors) = (Vec::new(), Vec::new());
    let read = walk(folder, 0, &mut HashMap::new(), &mut found, &mut |error| {
        errors.push(error);
        Ok(())
    });
    errors.extend(read.err());
    if found.is_empty() && errors.is_empty() {
        errors.push(DataError::new(folder, "the folder holds no image", "images are .png, .jpg or .jpeg files"));
    }
    sort(&mut found);
    (found.into_iter().map(|image| image.path).collect(), errors)
}

/// Sorts by folder and then by name. Folders compare as whole strings, not part by part, as in Python's `sorted(os.walk())`:
/// "a-b" comes before "a/b".
fn sort(images: &mut [FoundImage]) {
    images.sort_unstable_by_key(|FoundImage { path, .. }| {
        let folder = path.parent().map(|p| p.as_os_str().to_owned());
        (folder, path.file_name().map(ToOwned::to_owned))
    });
}

/// Each folder that was read, with its path.
type SeenFolders = HashMap<Inode, PathBuf>;

/// Appends the images in `dir` and in the folders below it to `found`.
fn collect(dir: &Path, depth: usize, seen: &mut SeenFolders, found: &mut Vec<FoundImage>) -> Result<(), DataError> {
    walk(dir, depth, seen, found, &mut Err)
}

/// Appends the images in `dir` and in the folders below `dir` to `found`. A folder that is reached twice is an error: symbolic
/// links can form cycles. `refuse` receives the error of a file or folder; the walk ends if `refuse` returns an error.
fn walk(
    dir: &Path,
    depth: usize,
    seen: &mut SeenFolders,
    found: &mut Vec<FoundImage>,
    refuse: &mut dyn FnMut(DataError) -> Result<(), DataError>,
) -> Result<(), DataError> {
    if depth > MAX_DEPTH {
        let cause = format!("more than {MAX_DEPTH} folders inside each other");
        return Err(DataError::new(dir, cause, "move the images to folders further up"));
    }
    let metadata = std::fs::metadata(dir).map_err(|e| read_error(dir, &e))?;
    if let Some(first) = seen.insert(Inode::of(&metadata), dir.to_owned()) {
        let cause = format!("is the same folder as {}", first.display());
        return Err(DataError::new(dir, cause, "remove the symbolic link: a class may have each folder once"));
    }
    for path in entries(dir)? {
        if is_hidden(&path) {
            continue;
        }
        let metadata = std::fs::metadata(&path);
        if metadata.as_ref().is_ok_and(Metadata::is_dir) {
            walk(&path, depth + 1, seen, found, refuse).or_else(&mut *refuse)?;
            continue;
        }
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("").to_ascii_lowercase();
        if READABLE_EXTENSIONS.contains(&extension.as_str()) {
            found.push(FoundImage::new(path, metadata));
        } else if UNREADABLE_EXTENSIONS.contains(&extension.as_str()) {
            let cause = format!("images of the format {extension} cannot be read");
            refuse(DataError::new(path, cause, "convert it to PNG or JPEG, or remove it"))?;
        } else if let Err(error) = metadata
            && error.kind() != io::ErrorKind::NotFound
        {
            // It may be a folder of images.
            refuse(read_error(&path, &error))?;
        }
    }
    Ok(())
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let read = std::fs::read_dir(dir).map_err(|e| read_error(dir, &e))?;
    read.map(|entry| entry.map(|e| e.path()).map_err(|e| read_error(dir, &e))).collect()
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}
