//! Data sets that are downloaded file by file, unpacking of archives, data sets without downloads, and verification.

use std::path::Path;

use super::super::sources::file;
use super::super::*;
use super::server::{Behaviour, Server};
use super::{archive, leak, options, sha};
use crate::formats::tests::{gzip, idx_files};
use crate::pictures::save_png;

/// Makes a small MNIST: its source and the files on the server.
fn small_mnist() -> (&'static DatasetSource, Vec<(String, Vec<u8>)>) {
    let (train, test) = (idx_files(20), idx_files(10));
    let contents = [
        ("train-images", 3, train.0),
        ("train-labels", 1, train.1),
        ("t10k-images", 3, test.0),
        ("t10k-labels", 1, test.1),
    ];
    let (mut downloads, mut files, mut served) = (Vec::new(), Vec::new(), Vec::new());
    for (stem, dims, bytes) in contents {
        let name: &str = format!("{stem}-idx{dims}-ubyte").leak();
        let packed_name: &str = format!("{name}.gz").leak();
        let packed = gzip(&bytes);
        downloads.push(Download {
            file: packed_name,
            bytes: packed.len() as u64,
            sha256: sha(&packed),
            archive: false,
        });
        files.push(file(name, bytes.len() as u64, sha(&bytes)));
        served.push((packed_name.to_owned(), packed));
    }
    (leak("mnist", "mnist", downloads, files), served)
}

#[test]
fn only_missing_and_altered_files_are_fetched() {
    let dest = tempfile::tempdir().unwrap();
    let folder = dest.path().join("mnist");
    let (source, served) = small_mnist();
    let server = Server::start(served, |_| Behaviour::Good);
    let fetched = || fetch_source(source, dest.path(), &options(&server), &()).map(|_| server.take_paths());
    assert_eq!(fetched().unwrap().len(), 4);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 4);
    assert_eq!(
        crate::formats::load(&crate::formats::LoadRequest {
            name: "mnist".to_owned(),
            dir: Some(dest.path().to_owned()),
            ..Default::default()
        })
        .unwrap()
        .train
        .len(),
        20
    );
    // The uncompressed file under another spelling is the same file.
    let labels = folder.join("train-labels-idx1-ubyte.gz");
    std::fs::write(folder.join("train-labels.idx1-ubyte"), idx_files(20).1).unwrap();
    std::fs::remove_file(&labels).unwrap();
    assert!(fetched().unwrap().is_empty());
    std::fs::remove_file(folder.join("t10k-labels-idx1-ubyte.gz")).unwrap();
    assert_eq!(fetched().unwrap(), ["/t10k-labels-idx1-ubyte.gz"]);
    // A damaged file under another spelling would be read first, so it is removed.
    let mut damaged = idx_files(20).1;
    damaged[11] ^= 1;
    std::fs::write(folder.join("train-labels.idx1-ubyte"), &damaged).unwrap();
    let report = verify::verify_source(source, dest.path()).unwrap();
    assert!(matches!(&report.files[1].status, FileStatus::Altered(how) if how.starts_with("sha256 is ")), "{report:?}");
    assert_eq!(fetched().unwrap(), ["/train-labels-idx1-ubyte.gz"]);
    assert!(verify::verify_source(source, dest.path()).unwrap().is_ok());
}

#[test]
fn files_in_a_folder_that_fetch_does_not_own_are_not_touched() {
    let dest = tempfile::tempdir().unwrap();
    let raw = dest.path().join("MNIST/raw");
    std::fs::create_dir_all(&raw).unwrap();
    std::fs::write(raw.join("train-labels-idx1-ubyte"), "old").unwrap();
    let (source, served) = small_mnist();
    let server = Server::start(served, |_| Behaviour::Good);
    let error = fetch_source(source, dest.path(), &options(&server), &()).unwrap_err();
    assert!(error.cause.contains("are here already and would be read first"), "{error}");
    assert!(server.take_paths().is_empty());
}

#[test]
fn archives_that_lead_out_are_refused() {
    let (source, _) = archive();
    type Entry<'a> = (&'a str, tar::EntryType, &'a str);
    let cases: [(Entry<'_>, &str); 4] = [
        (("../evil.bin", tar::EntryType::Regular, ""), "leads out"),
        (("/evil.bin", tar::EntryType::Regular, ""), "leads out"),
        (("cifar-10-batches-bin/../../evil.bin", tar::EntryType::Regular, ""), "leads out"),
        (
            ("cifar-10-batches-bin/data_batch_1.bin", tar::EntryType::Symlink, "../../evil.bin"),
            "neither a file nor a folder",
        ),
    ];
    for ((path, kind, link), expected) in cases {
        let dest = tempfile::tempdir().unwrap();
        let target = dest.path().join("a/b");
        std::fs::create_dir_all(&target).unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        // The builder refuses such names, so write them byte by byte.
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_size(4);
        header.set_cksum();
        tar.append(&header, &b"evil"[..]).unwrap();
        let file = dest.path().join("x.tar.gz");
        std::fs::write(&file, gzip(&tar.into_inner().unwrap())).unwrap();
        let error = unpack::unpack(&file, source, &target).unwrap_err();
        assert!(error.cause.contains(expected), "{path}: {error}");
        assert!(!dest.path().join("evil.bin").exists() && !dest.path().join("a/evil.bin").exists());
        assert_eq!(std::fs::read_dir(&target).unwrap().count(), 0);
    }
}

#[test]
fn an_incomplete_archive_is_an_error() {
    let (source, packed) = archive();
    let dest = tempfile::tempdir().unwrap();
    let file = dest.path().join("x.tar.gz");
    for bytes in [&packed[..packed.len() / 2], &gzip(&[0; 1024])[..], b"no archive"] {
        std::fs::write(&file, bytes).unwrap();
        assert!(unpack::unpack(&file, source, dest.path()).is_err());
    }
    // No partial file is left.
    let parts = std::fs::read_dir(dest.path()).unwrap();
    assert!(parts.map(|e| e.unwrap().file_name().into_string().unwrap()).all(|name| !name.ends_with(".part")));
}

#[test]
fn sets_without_downloads_say_so() {
    let nowhere = Path::new("does not exist");
    let says = |name| fetch(name, nowhere, &FetchOptions::default(), &()).unwrap().to_string();
    assert_eq!(says("fashion-mini"), "`fashion-mini` is part of the program: there is nothing to fetch");
    assert!(says("image-folder").starts_with("`image-folder` reads your own images"));
    assert!(fetch("cifar", nowhere, &FetchOptions::default(), &()).unwrap_err().hint.contains("cifar10, cifar100"));
    assert!(!nowhere.exists());
    let report = verify("fashion-mini", nowhere, None).unwrap();
    assert!(report.is_ok());
    assert_eq!(report.files.len(), 2);
    assert_eq!(report.files[0].status.to_string(), "ok (structure)");
    assert!(verify("image-folder", nowhere, None).is_err());
    assert!(verify("cifar10", nowhere, None).is_err());
}

#[test]
fn verify_reads_every_image_of_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    for split in ["train", "val"] {
        let class = dir.path().join(split).join("a");
        std::fs::create_dir_all(&class).unwrap();
        save_png(class.join("1.png"), 4, 4, |_, _| [0; 3]);
        // Sizes may differ, because the configuration can resize the images.
        save_png(class.join("2.png"), 5, 4, |_, _| [0; 3]);
    }
    let report = verify("image-folder", dir.path(), None).unwrap();
    assert!(report.is_ok());
    assert_eq!(report.files[1].path, dir.path().join("val"));
    let test = dir.path().join("test/a");
    std::fs::create_dir_all(&test).unwrap();
    save_png(test.join("1.png"), 4, 4, |_, _| [0; 3]);
    let report = verify("image-folder", dir.path(), None).unwrap();
    let checked: Vec<_> = report.files.iter().map(|file| file.path.strip_prefix(dir.path()).unwrap()).collect();
    assert_eq!(checked, ["train", "val", "test"].map(Path::new));
    let bad = dir.path().join("val/a/2.png");
    std::fs::write(&bad, "no image").unwrap();
    let report = verify("image-folder", dir.path(), None).unwrap();
    assert_eq!(report.files[0].path, bad);
    let status = report.files[0].status.to_string();
    assert!(status.starts_with("cannot be decoded"), "there is no official file from which it differs: {status}");
    // All damaged images are named, not only the first, and links to nothing.
    std::fs::write(dir.path().join("train/a/1.png"), "no image").unwrap();
    std::os::unix::fs::symlink("nowhere", dir.path().join("train/a/3.png")).unwrap();
    let report = verify("image-folder", dir.path(), None).unwrap();
    let named: Vec<_> = report.files.iter().map(|file| file.path.strip_prefix(dir.path()).unwrap()).collect();
    assert_eq!(named, ["train/a/1.png", "train/a/3.png", "val/a/2.png"].map(Path::new));
}

#[test]
fn verify_tells_missing_from_altered() {
    let (source, packed) = archive();
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("cifar-10-batches-bin");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(dir.path().join("x"), packed).unwrap();
    unpack::unpack(&dir.path().join("x"), source, &folder).unwrap();
    let states = || {
        let report = verify::verify_source(source, dir.path()).unwrap();
        assert_eq!(report.dir, folder);
        report.files.iter().map(|file| file.status.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(states(), [["ok (checksum)"; 6].as_slice(), &["ok (structure)"]].concat());
    let batch = |n: usize| folder.join(format!("data_batch_{n}.bin"));
    let mut bytes = std::fs::read(batch(1)).unwrap();
    std::fs::write(batch(1), &bytes[1..]).unwrap();
    bytes.push(0);
    std::fs::write(batch(2), &bytes).unwrap();
    std::fs::remove_file(batch(4)).unwrap();
    std::fs::write(folder.join("batches.meta.txt"), "cat\ndog\n").unwrap();
    let states = states();
    assert_eq!(states[0], "altered: 19999 bytes of 20000");
    assert_eq!(states[1], "altered: longer than 20000 bytes");
    assert_eq!(states[3], "missing");
    assert_eq!(states[6], "altered: 2 class names, `cifar10` has 10");
    // The data set is complete without its list of class names.
    std::fs::remove_file(folder.join("batches.meta.txt")).unwrap();
    assert_eq!(verify::verify_source(source, dir.path()).unwrap().files.len(), 6);
}
