//! Image folders.

use std::path::{Path, PathBuf};

use png::{BitDepth, ColorType};

use super::{load, request};
use crate::formats::{DecodePolicy, LoadRequest};
use crate::pictures::{jpeg, png, rgb, save_png};
use crate::{DataError, ImageShape, SplitOptions, Splits};

pub(super) struct Folder(pub(super) tempfile::TempDir);

impl Folder {
    /// Makes a folder with two classes and one image of 4x3 pixels per class in train and in test.
    pub(super) fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        for split in ["train", "test"] {
            folder.flat(&format!("{split}/cat/1.png"), 1);
            folder.flat(&format!("{split}/dog/1.png"), 2);
        }
        folder
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    /// Writes a PNG of 4x3 pixels of one value.
    fn flat(&self, name: &str, value: u8) {
        save_png(self.path(name), 4, 3, |_, _| [value; 3]);
    }

    /// Writes a PNG of 4x3 pixels.
    fn save(&self, name: &str, color: ColorType, depth: BitDepth, samples: &[u8]) {
        std::fs::write(self.path(name), png(4, 3, color, depth, samples)).unwrap();
    }

    pub(super) fn load(&self) -> Result<Splits, DataError> {
        load(&request("image-folder", self.0.path()))
    }

    /// Returns the error without the folder's path.
    pub(super) fn error(&self) -> String {
        let error = self.load().unwrap_err();
        assert!(!error.hint.is_empty());
        error.to_string().replace(&format!("{}/", self.0.path().display()), "").replace('\\', "/")
    }
}

#[test]
fn order_and_labels_are_torchvisions() {
    let folder = Folder::new();
    // Capital letters sort before small ones. Files of a class sort by folder (as a whole string), then by name.
    for (name, value) in [("train/Zebra/x.png", 10), ("train/cat/a/q/z.png", 3), ("train/cat/a-b/y.png", 4)] {
        folder.flat(name, value);
    }
    for (name, value) in [("train/cat/10.PNG", 5), ("train/cat/2.png", 6), ("test/Zebra/x.png", 11)] {
        folder.flat(name, value);
    }
    std::fs::write(folder.path("train/cat/notes.txt"), "no image").unwrap();
    std::fs::write(folder.path("train/cat/.hidden.png"), "no image").unwrap();
    std::fs::write(folder.path("train/readme.md"), "no class").unwrap();
    let splits = folder.load().unwrap();
    assert_eq!(splits.train.classes, ["Zebra", "cat", "dog"]);
    assert_eq!(splits.train.labels, [0, 1, 1, 1, 1, 1, 2]);
    let firsts: Vec<u8> = (0..splits.train.len()).map(|i| splits.train.image(i)[0]).collect();
    assert_eq!(firsts, [10, 1, 5, 6, 4, 3, 2]);
    assert_eq!((splits.test.labels, splits.test.shape.to_string()), (vec![0, 1, 2], "3x3x4".to_owned()));
}

#[test]
fn every_kind_of_image_becomes_rgb_planes() {
    let folder = Folder::new();
    let colours = rgb(4, 3, |x, y| [x as u8, 100 + y as u8, 200 + (x + y) as u8]);
    folder.save("train/cat/1.png", ColorType::Rgb, BitDepth::Eight, &colours);
    let greys: Vec<u8> = (0..12).map(|at| 10 * (at % 4) + at / 4).collect();
    folder.save("train/cat/2.png", ColorType::Grayscale, BitDepth::Eight, &greys);
    let transparent: Vec<u8> = colours.chunks_exact(3).flat_map(|p| [p[0], p[1], p[2], 17]).collect();
    folder.save("train/cat/3.png", ColorType::Rgba, BitDepth::Eight, &transparent);
    // 257 times the value, and a little more, which is rounded off.
    let deep: Vec<u8> = colours.iter().flat_map(|&value| (u16::from(value) * 257 + 100).to_be_bytes()).collect();
    folder.save("train/cat/4.png", ColorType::Rgb, BitDepth::Sixteen, &deep);
    // A PNG with the name of a JPEG, and a real JPEG. JPEG is lossy but keeps a flat colour.
    folder.flat("train/cat/5.jpg", 7);
    std::fs::write(folder.path("train/cat/6.JPEG"), jpeg(4, 3, &[90; 36])).unwrap();
    let set = folder.load().unwrap().train;
    assert_eq!(set.shape, ImageShape { channels: 3, height: 3, width: 4 });
    #[rustfmt::skip]
    let planes = [
        0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3,
        100, 100, 100, 100, 101, 101, 101, 101, 102, 102, 102, 102,
        200, 201, 202, 203, 201, 202, 203, 204, 202, 203, 204, 205,
    ];
    assert_eq!(set.image(0), planes, "colour");
    let grey = [0, 10, 20, 30, 1, 11, 21, 31, 2, 12, 22, 32];
    assert_eq!(set.image(1), [grey, grey, grey].concat(), "grey");
    assert_eq!(set.image(2), planes, "transparency dropped");
    assert_eq!(set.image(3), planes, "16 bits");
    assert_eq!(set.image(4), [7; 36]);
    assert!(set.image(5).iter().all(|p| p.abs_diff(90) <= 2), "{:?}", set.image(5));
}

#[test]
fn val_stands_in_for_test() {
    let folder = Folder::new();
    std::fs::rename(folder.path("test"), folder.path("val")).unwrap();
    assert_eq!(folder.load().unwrap().test.len(), 2);
    std::fs::remove_dir_all(folder.path("val")).unwrap();
    assert!(folder.error().ends_with("there is neither a folder test nor val"));
    std::fs::remove_dir_all(folder.path("train")).unwrap();
    assert_eq!(folder.error(), "train: there is no such folder");
}

#[test]
fn a_held_out_part_of_train_replaces_test() {
    let folder = Folder::new();
    std::fs::remove_dir_all(folder.path("test")).unwrap();
    let request = request("image-folder", folder.0.path());
    let error = load(&request).unwrap_err();
    assert!(error.hint.contains("data.validation = 0.1"), "{}", error.hint);
    for index in 2..6 {
        folder.flat(&format!("train/cat/{index}.png"), 1);
        folder.flat(&format!("train/dog/{index}.png"), 2);
    }
    let split = SplitOptions { validation: Some(0.2), ..SplitOptions::default() };
    let splits = load(&LoadRequest { split, ..request }).unwrap();
    assert_eq!((splits.train.len(), splits.test.len(), splits.val.is_none()), (8, 2, true));
}

#[test]
fn jpeg_has_several_extensions_and_other_formats_are_errors() {
    let folder = Folder::new();
    for name in ["2.jfif", "3.jpe"] {
        std::fs::write(folder.path(&format!("train/cat/{name}")), jpeg(4, 3, &rgb(4, 3, |_, _| [1; 3]))).unwrap();
    }
    assert_eq!(folder.load().unwrap().train.labels, [0, 0, 0, 1]);
    std::fs::write(folder.path("train/cat/4.heif"), "").unwrap();
    assert_eq!(folder.error(), "train/cat/4.heif: images of the format heif cannot be read");
}

/// The size of the data set is that of the first image that can be read.
#[test]
fn a_damaged_first_image_does_not_hide_the_size() {
    let folder = Folder::new();
    folder.flat("train/cat/2.png", 1);
    std::fs::write(folder.path("train/cat/1.png"), "no image").unwrap();
    assert!(folder.error().starts_with("train/cat/1.png: cannot be decoded"));
    let in_each_epoch = LoadRequest { decode: DecodePolicy::Epoch, ..request("image-folder", folder.0.path()) };
    assert_eq!(load(&in_each_epoch).unwrap().train.shape.to_string(), "3x3x4");
}

#[test]
fn val_beside_test_is_the_validation_split() {
    let folder = Folder::new();
    assert!(folder.load().unwrap().val.is_none());
    for (name, value) in [("val/cat/1.png", 31), ("val/cat/2.png", 32), ("val/dog/1.png", 33)] {
        folder.flat(name, value);
    }
    let splits = folder.load().unwrap();
    let val = splits.val.unwrap();
    assert_eq!((val.labels.as_slice(), val.shape), (&[0, 0, 1][..], splits.train.shape));
    assert_eq!((0..3).map(|i| val.image(i)[0]).collect::<Vec<_>>(), [31, 32, 33]);
    assert_eq!((splits.test.len(), splits.test.image(0)[0]), (2, 1));
    // limit_test limits both splits.
    let mut request = request("image-folder", folder.0.path());
    request.limit_test = Some(1);
    let splits = load(&request).unwrap();
    assert_eq!((splits.train.len(), splits.val.unwrap().len(), splits.test.len()), (2, 1, 1));
}

#[test]
fn a_validation_split_with_mistakes_is_an_error() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("val")).unwrap();
    assert_eq!(folder.error(), "val: the split is empty: it has no class folder");
    folder.flat("val/cat/1.png", 1);
    assert!(folder.error().starts_with("val/dog: there is no such folder, but "), "{}", folder.error());
    std::fs::create_dir(folder.path("val/dog")).unwrap();
    assert_eq!(folder.error(), "val/dog: the class folder holds no image");
    save_png(folder.path("val/dog/1.png"), 8, 6, |_, _| [1; 3]);
    assert_eq!(folder.error(), "val/dog/1.png: is 8x6 pixels, the first image is 4x3");
    folder.flat("val/dog/1.png", 1);
    folder.flat("val/emu/1.png", 1);
    assert!(folder.error().starts_with("train/emu: there is no such folder, but "), "{}", folder.error());
}

#[test]
fn splits_must_have_the_same_classes() {
    let folder = Folder::new();
    folder.flat("test/emu/1.png", 1);
    assert!(folder.error().starts_with("train/emu: there is no such folder, but "));
    folder.flat("train/emu/1.png", 1);
    folder.flat("train/fox/1.png", 1);
    assert!(folder.error().starts_with("test/fox: there is no such folder, but "));
    std::fs::create_dir(folder.path("test/fox")).unwrap();
    assert_eq!(folder.error(), "test/fox: the class folder holds no image");
    std::fs::remove_dir_all(folder.path("train")).unwrap();
    std::fs::create_dir(folder.path("train")).unwrap();
    assert!(folder.error().ends_with("the split is empty: it has no class folder"));
}

#[test]
fn damaged_and_foreign_files_are_named() {
    let folder = Folder::new();
    let whole = std::fs::read(folder.path("train/cat/1.png")).unwrap();
    std::fs::write(folder.path("train/dog/9.png"), &whole[..whole.len() - 20]).unwrap();
    assert!(folder.error().starts_with("train/dog/9.png: cannot be decoded: "), "{}", folder.error());
    std::fs::write(folder.path("train/dog/9.png"), "no image").unwrap();
    assert!(folder.error().starts_with("train/dog/9.png: cannot be decoded: "), "{}", folder.error());
    // Every run reports the first damaged file in order.
    std::fs::write(folder.path("train/dog/7.png"), "").unwrap();
    for _ in 0..5 {
        assert!(folder.error().starts_with("train/dog/7.png: "), "{}", folder.error());
    }
    std::fs::write(folder.path("test/dog/a.webp"), "RIFF").unwrap();
    std::fs::remove_file(folder.path("train/dog/7.png")).unwrap();
    assert_eq!(folder.error(), "test/dog/a.webp: images of the format webp cannot be read");
}

#[test]
fn a_limit_thins_every_class() {
    let folder = Folder::new();
    for index in 2..6 {
        folder.flat(&format!("train/cat/{index}.png"), 10 + index);
    }
    let mut request = request("image-folder", folder.0.path());
    request.limit_train = Some(4);
    let set = load(&request).unwrap().train;
    assert_eq!(set.labels, [0, 0, 0, 1]);
    assert_eq!((0..4).map(|i| set.image(i)[0]).collect::<Vec<_>>(), [1, 12, 13, 2]);
}

#[cfg(unix)]
#[test]
fn a_link_that_leads_up_is_an_error() {
    let folder = Folder::new();
    std::os::unix::fs::symlink(Path::new(".."), folder.path("train/cat/up")).unwrap();
    assert!(folder.error().starts_with("train/cat/up/cat: is the same folder as "), "{}", folder.error());
}

/// Without a limit the reader would visit 2^30 folders.
#[test]
fn a_tree_of_links_is_an_error_at_once() {
    let folder = Folder::new();
    for level in 0..30 {
        folder.flat(&format!("links/{level}/1.png"), 1);
        for link in ["a", "b"] {
            std::os::unix::fs::symlink(format!("../{}", level + 1), folder.path(&format!("links/{level}/{link}")))
                .unwrap();
        }
    }
    std::fs::create_dir(folder.path("links/30")).unwrap();
    std::os::unix::fs::symlink("../../links/0", folder.path("train/cat/tree")).unwrap();
    let error = folder.error();
    assert!(error.starts_with("train/cat/tree/") && error.contains(": is the same folder as "), "{error}");
    std::fs::remove_file(folder.path("train/cat/tree")).unwrap();
    folder.flat("more/1.png", 1);
    std::os::unix::fs::symlink("../../more", folder.path("test/dog/link")).unwrap();
    assert_eq!(folder.load().unwrap().test.labels, [0, 1, 1]);
}

#[test]
fn an_image_has_one_class_and_one_split() {
    let folder = Folder::new();
    let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, folder.path(name)).unwrap();
    let error = |expected: &str| {
        let error = folder.error();
        assert!(error.contains("is the same file as ") && error.ends_with(expected), "{error}");
    };
    link("../cat/1.png", "train/dog/2.png");
    error("train/cat/1.png: an image has two classes");
    std::fs::remove_file(folder.path("train/dog/2.png")).unwrap();
    link("../../train/cat/1.png", "test/cat/2.png");
    error("train/cat/1.png: an image of one split is in another one");
    std::fs::remove_file(folder.path("test/cat/2.png")).unwrap();
    // Copies of a training image change how often it is drawn, but a validation split must not have one of them.
    link("1.png", "train/cat/2.png");
    assert_eq!(folder.load().unwrap().train.labels, [0, 0, 1]);
    let mut request = request("image-folder", folder.0.path());
    request.split = SplitOptions { validation: Some(0.5), ..SplitOptions::default() };
    let cause = load(&request).unwrap_err().cause;
    assert!(cause.ends_with("train/cat/1.png: data.validation may take it and train on it too"), "{cause}");
}

#[test]
fn valid_is_another_name_of_val() {
    for name in ["valid", "validation"] {
        let folder = Folder::new();
        for class in ["cat", "dog"] {
            folder.flat(&format!("{name}/{class}/1.png"), 9);
        }
        let splits = folder.load().unwrap();
        assert_eq!((splits.val.unwrap().labels, splits.test.len()), (vec![0, 1], 2));
        folder.flat("val/cat/1.png", 9);
        assert!(
            folder.error().starts_with(&format!("{name}: is a validation split, and so is ")),
            "{}",
            folder.error()
        );
    }
}

#[test]
fn pipes_and_devices_are_errors_at_once() {
    for target in ["pipe", "/dev/zero"] {
        let folder = Folder::new();
        let path = folder.path("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        std::os::unix::fs::symlink(path.parent().unwrap().join(target), folder.path("train/dog/2.png")).unwrap();
        let error = folder.error();
        assert!(error.starts_with("train/dog/2.png: cannot be read: it is a "), "{error}");
    }
}

/// Images that are decoded in each epoch are opened late, those of the test split after training.
#[test]
fn test_images_that_are_not_files_are_errors_before_training() {
    for (target, cause) in [
        ("nowhere", "is a symbolic link to a file that does not exist"),
        ("/dev/zero", "cannot be read: it is a device, not a file"),
    ] {
        let folder = Folder::new();
        std::os::unix::fs::symlink(target, folder.path("test/dog/2.png")).unwrap();
        let in_each_epoch = LoadRequest { decode: DecodePolicy::Epoch, ..request("image-folder", folder.0.path()) };
        let error = load(&in_each_epoch).unwrap_err();
        assert!(error.file.ends_with("test/dog/2.png") && error.cause == cause, "{error}");
        // The loader of a run with data.on_error = "skip" replaces missing images, and no others.
        let deferred = load(&LoadRequest { defer_missing: true, ..in_each_epoch });
        assert_eq!(deferred.is_ok(), target == "nowhere");
    }
}
