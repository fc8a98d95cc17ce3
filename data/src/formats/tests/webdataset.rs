//! Archives with mistakes.

use super::{load, request};
use crate::formats::LoadRequest;
use crate::pictures::png;
use crate::{DataError, SplitOptions};

/// The name of the global header that `git archive` writes.
const GLOBAL_HEADER: &str = "pax_global_header";

/// Makes an archive of files. A name that ends with a slash is a folder.
pub(super) fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        if name.ends_with('/') {
            header.set_entry_type(tar::EntryType::Directory);
        }
        if *name == GLOBAL_HEADER {
            header.set_entry_type(tar::EntryType::XGlobalHeader);
        }
        archive.append_data(&mut header, name, *bytes).unwrap();
    }
    archive.into_inner().unwrap()
}

fn image() -> Vec<u8> {
    png(4, 3, png::ColorType::Rgb, png::BitDepth::Eight, &[7; 36])
}

/// Reads a folder whose archive of training images is `train`, without its path in errors.
fn read(train: &[u8]) -> Result<crate::Splits, DataError> {
    let folder = tempfile::tempdir().unwrap();
    let test = archive(&[("1.png", &image()), ("1.cls", b"0")]);
    std::fs::write(folder.path().join("train-0.tar"), train).unwrap();
    std::fs::write(folder.path().join("test.tar"), test).unwrap();
    load(&request("webdataset", folder.path())).map_err(|error| {
        let file = error.file.strip_prefix(folder.path()).unwrap_or(&error.file).to_owned();
        DataError { file, ..error }
    })
}

fn error(train: &[u8]) -> String {
    let error = read(train).unwrap_err();
    assert!(!error.hint.is_empty());
    error.to_string()
}

#[test]
fn samples_are_members_of_one_name() {
    let image = image();
    let long = format!("{}/x.png", "d".repeat(150));
    let train = archive(&[
        (GLOBAL_HEADER, b"52 comment=3a6f1b0c9d2e4f5061728394a5b6c7d8e9f0a1b2\n"),
        ("a/", b""),
        // No label of an image.
        ("a/0.json", b"{\"made\": 2024}"),
        ("a/1.cls", b" 1\n"),
        ("a/1.seg.png", b"not used"),
        ("a/1.PNG", &image),
        ("README", b"text"),
        ("._1.png", b"hidden"),
        ("a/2.jpeg", &image),
        ("a/2.json", b"{\"cls\": 0}"),
        (&long, &image),
        (&long.replace("png", "cls"), b"1"),
    ]);
    let splits = read(&train).unwrap();
    assert_eq!(splits.train.labels, [1, 0, 1]);
    assert_eq!(splits.train.classes, ["0", "1"]);
    assert_eq!(splits.train.image(2), [7; 36]);
    assert_eq!((splits.test.len(), splits.val.is_none()), (1, true));
}

#[test]
fn errors_name_the_archive_member() {
    let image = image();
    let good = archive(&[("1.png", &image), ("1.cls", b"0"), ("2.png", &image), ("2.cls", b"0")]);
    assert_eq!(read(&good).unwrap().train.len(), 2);
    let second = good.len() - 1024 - 1024;
    for (bytes, expected) in [
        (good[..second + 100].to_vec(), format!("train-0.tar: byte {second}: is not a tar archive here")),
        (good[..512 + 20].to_vec(), "train-0.tar: byte 512: the archive ends early, in `1.png` of ".into()),
        (
            good[..good.len() - 1024].to_vec(),
            format!("train-0.tar: byte {}: the archive ends early: its end marker", good.len() - 1024),
        ),
        (b"no archive".repeat(100), "train-0.tar: byte 0: is not a tar archive here".into()),
        (
            archive(&[("1.png", &image), ("2.png", &image), ("2.cls", b"0")]),
            "train-0.tar: byte 512: the image `1.png` has no label".into(),
        ),
        (archive(&[("1.cls", b"0"), ("2.png", &image)]), "train-0.tar: byte 512: the sample `1` has no image".into()),
        (
            archive(&[("1.json", b"{\"label\": 0}"), ("2.png", &image), ("2.cls", b"0")]),
            "train-0.tar: byte 512: the sample `1` has no image".into(),
        ),
        (
            archive(&[("1.png", &image), ("1.cls", b"0"), ("2.json", b"{\"cls\": 0}")]),
            "train-0.tar: byte 2560: the sample `2` has no image".into(),
        ),
        (
            archive(&[("1.png", &image), ("1.jpg", &image), ("1.cls", b"0")]),
            "train-0.tar: byte 1536: `1.jpg` is the second".into(),
        ),
        (
            archive(&[
                ("1.png", &image),
                ("1.cls", b"0"),
                ("2.png", &image),
                ("2.cls", b"0"),
                ("1.png", &image),
                ("1.cls", b"0"),
            ]),
            "train-0.tar: byte 4608: two samples have the key `1`".into(),
        ),
        (
            archive(&[("1.png", &image), ("1.cls", b"cat")]),
            "train-0.tar: byte 1536: `1.cls` has no class number from 0 to 65535: \"cat\"".into(),
        ),
        (
            archive(&[("1.png", &image), ("1.cls", b"65536")]),
            "train-0.tar: byte 1536: `1.cls` has no class number".into(),
        ),
        (
            archive(&[("1.png", &image), ("1.json", b"{\"label\": -1}")]),
            "train-0.tar: byte 1536: `1.json` has no class number".into(),
        ),
        (
            archive(&[("1.webp", &image), ("1.cls", b"0")]),
            "train-0.tar: byte 512: `1.webp`: images of the format webp".into(),
        ),
        (
            archive(&[("1.png", &image), ("1.cls", b"1")]),
            "the class 0 has no training image, and labels go up to 1".into(),
        ),
        (archive(&[]), "the archives train*.tar hold no image".into()),
    ] {
        let found = error(&bytes);
        assert!(found.starts_with(&expected), "{found}\n{expected}");
    }
}

#[test]
fn no_sample_is_left_out_silently() {
    let image = image();
    let dotted = error(&archive(&[("1.png", &image), ("1.cls", b"0"), ("photo.2.png", &image), ("photo.2.cls", b"0")]));
    let expected = "the sample `photo` has no image but `photo.2.png`: the key of a sample ends at the first dot";
    assert!(dotted.ends_with(expected), "{dotted}");
    let one = archive(&[("1.png", &image), ("1.cls", b"0")]);
    let joined = error(&[&one[..], &archive(&[("2.png", &image), ("2.cls", b"0")])].concat());
    assert!(joined.ends_with("there are more data after the end of the archive"), "{joined}");
    // Companions of an image are left out: masks, depth.
    let companions = archive(&[("1.png", &image), ("1.exr", b""), ("1.mask.png", &image), ("1.cls", b"0")]);
    assert_eq!(read(&companions).unwrap().train.len(), 1);
    // tar fills the last of its records up with zeros.
    assert_eq!(read(&[&one[..], &[0; 9000]].concat()).unwrap().train.len(), 1);
}

#[test]
fn an_archive_that_is_listed_twice_is_found_through_links() {
    let one = archive(&[("1.png", &image()), ("1.cls", b"0")]);
    for (file, link, why) in [
        ("train-0.tar", "train-1.tar", "an archive is twice in one split"),
        ("train-0.tar", "test-0.tar", "an archive of one split is in another one"),
        ("test-0.tar", "val.tar", "an archive of one split is in another one"),
    ] {
        for hard in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let path = |name: &str| folder.path().join(name);
            for name in ["train-0.tar", "test-9.tar", file] {
                std::fs::write(path(name), &one).unwrap();
            }
            assert!(load(&request("webdataset", folder.path())).is_ok());
            if hard {
                std::fs::hard_link(path(file), path(link)).unwrap();
            } else {
                std::os::unix::fs::symlink(file, path(link)).unwrap();
            }
            let error = load(&request("webdataset", folder.path())).unwrap_err();
            let (name, other) = if error.file == path(link) { (link, file) } else { (file, link) };
            assert_eq!(error.file, path(name));
            assert_eq!(error.cause, format!("is the same file as {}: {why}", path(other).display()));
        }
    }
}

#[test]
fn archives_have_the_name_of_their_split() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let cause = || load(&request("webdataset", folder.path())).unwrap_err().cause;
    assert_eq!(cause(), "there is no archive train*.tar");
    let one = archive(&[("1.png", &image()), ("1.cls", b"0"), ("2.png", &image()), ("2.cls", b"0")]);
    std::fs::write(path("train.tar"), &one).unwrap();
    assert_eq!(cause(), "there is no archive test*.tar or val*.tar: there is nothing to evaluate");
    let split = SplitOptions { validation: Some(0.5), ..SplitOptions::default() };
    let held_out = load(&LoadRequest { split, ..request("webdataset", folder.path()) }).unwrap();
    assert_eq!((held_out.train.len(), held_out.test.len()), (1, 1));
    std::fs::write(path("val-0.tar"), &one).unwrap();
    assert_eq!(load(&request("webdataset", folder.path())).unwrap().test.len(), 2);
    std::fs::write(path("other.tar"), &one).unwrap();
    assert_eq!(cause(), "the archive's name has no split");
    std::fs::rename(path("other.tar"), path("train-1.tar.gz")).unwrap();
    assert_eq!(cause(), "a compressed archive cannot be read at any place");
}
