//! Whole data sets: the built-in one, folders of IDX files in every spelling, image folders. The readers' own tests cover
//! damage of single files.

mod folder;
mod folder_sizes;
mod fuzz;
mod manifest;
mod multi_label;
mod unreadable;
mod webdataset;

use std::io::Write;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::*;
use crate::ImageShape;

fn request(name: &str, dir: impl Into<PathBuf>) -> LoadRequest {
    LoadRequest { name: name.to_owned(), dir: Some(dir.into()), ..LoadRequest::default() }
}

fn fashion_mini() -> Splits {
    load(&LoadRequest { name: "fashion-mini".to_owned(), ..LoadRequest::default() }).unwrap()
}

/// Makes IDX files of the first `count` images and labels of fashion-mini's test split.
pub(crate) fn idx_files(count: usize) -> (Vec<u8>, Vec<u8>) {
    let set = fashion_mini().test;
    let mut images = vec![0, 0, 8, 3];
    [count as u32, 28, 28].iter().for_each(|d| images.extend(d.to_be_bytes()));
    images.extend(&set.images[..count * 784]);
    let mut labels = vec![0, 0, 8, 1];
    labels.extend((count as u32).to_be_bytes());
    labels.extend(set.labels[..count].iter().map(|&label| label as u8));
    (images, labels)
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn fashion_mini_is_what_its_origin_says() {
    let splits = fashion_mini();
    assert_eq!(splits.source, "built in");
    for (set, per_class) in [(&splits.train, 700), (&splits.test, 100)] {
        assert_eq!(set.shape, ImageShape { channels: 1, height: 28, width: 28 });
        assert_eq!((set.len(), set.images.len()), (10 * per_class, 10 * per_class * 784));
        for class in 0..10 {
            assert_eq!(set.labels.iter().filter(|&&label| label == class).count(), per_class, "class {class}");
        }
    }
    // The first labels of the official files, in their order.
    assert_eq!(splits.train.labels[..10], [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]);
    assert_eq!(splits.test.labels[..10], [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]);
    assert_eq!(splits.train.classes[9], "Ankle boot");
    // Checksums of the pixels, computed with numpy from the official files.
    assert_eq!(sha256(&splits.train.images), "d539559dcd3945a376df9f10b0aa92cc3038b419858c8c91bcd7fae17559ee07");
    assert_eq!(sha256(&splits.test.images), "3d7f6d64869a3f2d1afe64ae33ffb9b20670a91b31e3bbf0657e3999ec7b35cf");
    let info = dataset_info("fashion-mini").unwrap();
    assert_eq!((info.train_len, info.test_len), (Some(splits.train.len()), Some(splits.test.len())));
    let (mean, std) = mean_and_std(&splits.train.images);
    assert!((mean - f64::from(info.default_mean[0])).abs() < 0.005, "{mean}");
    assert!((std - f64::from(info.default_std[0])).abs() < 0.005, "{std}");
}

fn mean_and_std(pixels: &[u8]) -> (f64, f64) {
    let n = pixels.len() as f64;
    let mean = pixels.iter().map(|&p| f64::from(p)).sum::<f64>() / n;
    let var = pixels.iter().map(|&p| (f64::from(p) - mean).powi(2)).sum::<f64>() / n;
    (mean / 255.0, var.sqrt() / 255.0)
}

#[test]
fn limits_keep_the_first_and_padding_centres() {
    let all = fashion_mini();
    let mut request = LoadRequest { name: "fashion-mini".to_owned(), ..LoadRequest::default() };
    request.limit_train = Some(30);
    request.image_size = Some(32);
    let some = load(&request).unwrap();
    assert_eq!((some.train.len(), some.test.len()), (30, 1000));
    assert_eq!(some.train.labels, all.train.labels[..30]);
    assert_eq!(some.train.shape, ImageShape { channels: 1, height: 32, width: 32 });
    let (padded, natural) = (some.train.image(29), all.train.image(29));
    for y in 0..32 {
        for x in 0..32 {
            let inside = (2..30).contains(&y) && (2..30).contains(&x);
            let expected = if inside { natural[(y - 2) * 28 + x - 2] } else { 0 };
            assert_eq!(padded[y * 32 + x], expected, "row {y} column {x}");
        }
    }
    request.image_size = Some(20);
    assert_eq!(load(&request).unwrap_err().cause, "image_size 20 is smaller than the 1x28x28 images of `fashion-mini`");
    request = LoadRequest { name: "fashion-mini".to_owned(), limit_test: Some(0), ..LoadRequest::default() };
    assert_eq!(load(&request).unwrap_err().cause, "limit_test = 0 leaves no image");
}

#[test]
fn idx_files_are_found_in_every_spelling_and_folder() {
    let (images, labels) = idx_files(12);
    let layouts: [(&str, &str, bool, &str); 6] = [
        ("mnist", "", false, "-idx"),
        ("mnist", "", true, ".idx"),
        ("mnist", "mnist", true, "-idx"),
        ("mnist", "MNIST/raw", false, ".idx"),
        ("fashion-mnist", "fashion-mnist", true, "-idx"),
        ("fashion-mnist", "FashionMNIST/raw", false, "-idx"),
    ];
    for (name, below, gz, idx) in layouts {
        let dir = tempfile::tempdir().unwrap();
        let folder = if below.is_empty() { dir.path().to_owned() } else { dir.path().join(below) };
        std::fs::create_dir_all(&folder).unwrap();
        for split in ["train", "t10k"] {
            for (what, dims, bytes) in [("images", 3, &images), ("labels", 1, &labels)] {
                let (bytes, ending) = if gz { (gzip(bytes), ".gz") } else { (bytes.clone(), "") };
                std::fs::write(folder.join(format!("{split}-{what}{idx}{dims}-ubyte{ending}")), bytes).unwrap();
            }
        }
        let splits = load(&request(name, dir.path())).unwrap();
        assert_eq!(splits.source, folder.display().to_string(), "{name} {below}");
        assert_eq!(splits.train.images, images[16..], "{name} {below}");
        assert_eq!(splits.test.labels, labels[8..].iter().map(|&l| u16::from(l)).collect::<Vec<_>>());
        assert_eq!(splits.train.classes, dataset_info(name).unwrap().class_names);
    }
}

#[test]
fn an_uncompressed_file_named_gz_is_read() {
    let (images, labels) = idx_files(3);
    let dir = tempfile::tempdir().unwrap();
    for split in ["train", "t10k"] {
        // Browsers decompress while downloading and keep the name.
        std::fs::write(dir.path().join(format!("{split}-images-idx3-ubyte.gz")), &images).unwrap();
        std::fs::write(dir.path().join(format!("{split}-labels-idx1-ubyte.gz")), gzip(&labels)).unwrap();
    }
    assert_eq!(load(&request("mnist", dir.path())).unwrap().test.len(), 3);
    std::fs::remove_file(dir.path().join("t10k-labels-idx1-ubyte.gz")).unwrap();
    let error = load(&request("mnist", dir.path())).unwrap_err();
    assert_eq!(error.file, dir.path().join("t10k-labels-idx1-ubyte.gz"));
    assert_eq!(error.cause, "the file is missing (other files of the data set are beside it)");
    // The header reveals swapped files.
    std::fs::write(dir.path().join("t10k-labels-idx1-ubyte"), &images).unwrap();
    assert_eq!(load(&request("mnist", dir.path())).unwrap_err().cause, "has 3 dimensions, a file of labels has 1");
}

#[test]
fn missing_files_and_searched_folders_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display().to_string();
    let error = load(&request("cifar10", dir.path())).unwrap_err();
    assert_eq!(error.file, dir.path());
    assert_eq!(
        error.cause.replace(&at, "DIR"),
        "the files of `cifar10` are not here (data_batch_1.bin, data_batch_2.bin, data_batch_3.bin, data_batch_4.bin, \
         data_batch_5.bin, test_batch.bin); looked in DIR, DIR/cifar-10-batches-bin, DIR/cifar10, \
         DIR/cifar10/cifar-10-batches-bin"
    );
    assert_eq!(error.hint, "`trainer data fetch cifar10` downloads them; --data-dir names another folder");
    std::fs::create_dir(dir.path().join("cifar-10-batches-py")).unwrap();
    let error = load(&request("cifar10", dir.path())).unwrap_err();
    assert!(error.hint.starts_with("cifar-10-batches-py is the Python version"), "{}", error.hint);
    std::fs::write(dir.path().join("cifar-10-binary.tar.gz"), "").unwrap();
    let error = load(&request("cifar10", dir.path())).unwrap_err();
    assert!(error.hint.starts_with("cifar-10-binary.tar.gz is there but not unpacked"), "{}", error.hint);

    let error = load(&request("mnist", dir.path().join("nowhere"))).unwrap_err();
    assert_eq!(error.cause, "there is no such folder");
    let error = load(&request("imagenet", dir.path())).unwrap_err();
    assert_eq!(error.to_string(), "there is no data set `imagenet`");
    // Another test of this process may have registered a data set, which comes last.
    let names = "cifar10, cifar100, mnist, fashion-mnist, image-folder, manifest, webdataset, fashion-mini";
    assert!(error.hint.contains(names), "{}", error.hint);
    let error = load(&LoadRequest { name: "cifar100".to_owned(), ..LoadRequest::default() }).unwrap_err();
    assert_eq!(error.cause, "no folder is given for the data set `cifar100`");
}

/// A whole CIFAR-10 of the official size. The label of record r is r mod 10; all its pixels are r mod 251.
#[test]
fn cifar10_is_read_from_its_official_layout() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("cifar-10-batches-bin");
    std::fs::create_dir(&folder).unwrap();
    let mut bytes = Vec::with_capacity(30_730_000);
    for record in 0..10_000 {
        bytes.push((record % 10) as u8);
        bytes.resize(bytes.len() + 3072, (record % 251) as u8);
    }
    for name in ["data_batch_1.bin", "data_batch_2.bin", "data_batch_4.bin", "data_batch_5.bin"] {
        // Only the first two are read, so the others may be empty.
        std::fs::write(folder.join(name), if name.contains(['1', '2']) { &bytes[..] } else { &[] }).unwrap();
    }
    std::fs::write(folder.join("test_batch.bin"), &bytes).unwrap();
    let mut request = request("cifar10", dir.path());
    request.limit_train = Some(10_003);
    request.limit_test = Some(5);
    // data_batch_3 is missing but not needed for so few images.
    let splits = load(&request).unwrap();
    assert_eq!((splits.train.len(), splits.test.len()), (10_003, 5));
    assert_eq!(splits.train.labels[9_998..], [8, 9, 0, 1, 2]);
    assert_eq!(splits.train.image(10_002), [2; 3072]);
    assert_eq!(splits.train.image(9_999), [(9_999 % 251) as u8; 3072]);
    request.limit_train = None;
    assert_eq!(load(&request).unwrap_err().file, Path::new(&folder).join("data_batch_3.bin"));
    std::fs::write(folder.join("test_batch.bin"), &bytes[..1_000_000]).unwrap();
    request.limit_train = Some(1);
    assert_eq!(
        load(&request).unwrap_err().to_string(),
        format!(
            "{}: record 325: the file is truncated: 1000000 bytes of 30730000, it ends in this record",
            folder.join("test_batch.bin").display()
        )
    );
}
