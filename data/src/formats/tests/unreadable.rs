//! Files and folders that exist and cannot be read. Other tests may run as root, who may read all files, so links to themselves
//! stand in for missing permissions.

use std::os::unix::fs::symlink;
use std::path::Path;

use super::folder::Folder;
use super::{load, request};
use crate::encoded::ImageFile;

#[test]
fn a_folder_that_cannot_be_read_is_not_reported_as_missing() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("link");
    symlink("link", &link).unwrap();
    for name in ["image-folder", "mnist", "cifar10"] {
        let error = load(&request(name, &link)).unwrap_err();
        assert!(error.file == link && error.cause.starts_with("cannot be read: "), "{name}: {error}");
    }
    let below = folder.path().join("mnist");
    symlink("mnist", &below).unwrap();
    let error = load(&request("mnist", folder.path())).unwrap_err();
    assert!(error.file == below && error.cause.starts_with("cannot be read: "), "{error}");
    // A class, and a folder below a class, are not left out silently.
    for name in ["train/bird", "train/cat/more"] {
        let folder = Folder::new();
        symlink(Path::new(name).file_name().unwrap(), folder.path(name)).unwrap();
        let error = folder.error();
        assert!(error.starts_with(&format!("{name}: cannot be read: ")), "{error}");
    }
    for name in ["train", "test", "val"] {
        let folder = Folder::new();
        let split = folder.path(name);
        if split.exists() {
            std::fs::remove_dir_all(&split).unwrap();
        }
        symlink(name, split).unwrap();
        let error = folder.error();
        assert!(error.starts_with(&format!("{name}: cannot be read: ")), "{error}");
    }
}

/// Linux has a file whose first byte cannot be read: reading it fails with EIO, as on a broken disk.
#[cfg(target_os = "linux")]
#[test]
fn an_error_of_the_disk_is_no_damage() {
    const BROKEN: &str = "/proc/self/mem";
    let error = ImageFile::Path(BROKEN.into()).size().unwrap_err();
    assert!(error.is_transient && !error.is_bad_image, "{error}");
    assert!(error.cause.starts_with("cannot be read: "), "{error}");

    let folder = Folder::new();
    symlink(BROKEN, folder.path("train/cat/2.png")).unwrap();
    let error = folder.load().unwrap_err();
    assert!(error.is_transient && error.file.ends_with("train/cat/2.png"), "{error}");

    let archives = tempfile::tempdir().unwrap();
    std::fs::write(archives.path().join("test.tar"), super::webdataset::archive(&[])).unwrap();
    symlink(BROKEN, archives.path().join("train.tar")).unwrap();
    let error = load(&request("webdataset", archives.path())).unwrap_err();
    assert!(error.is_transient && error.file.ends_with("train.tar"), "{error}");
}
