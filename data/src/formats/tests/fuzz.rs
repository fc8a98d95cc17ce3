//! Random and mutated files yield data or an error, never a panic.

use png::{BitDepth, ColorType};
use proptest::prelude::*;

use super::{gzip, idx_files, load, request};
use crate::formats::idx::{IdxKind, read};
use crate::pictures::{jpeg, png, rgb};

const KINDS: [IdxKind; 3] =
    [IdxKind::Labels, IdxKind::Images { height: 28, width: 28 }, IdxKind::Images { height: 1, width: 3 }];

/// Changes, truncates or extends `bytes`.
fn mutate(bytes: &[u8], changes: &[(usize, u8)], cut: Option<prop::sample::Index>, tail: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for (index, value) in changes {
        let len = bytes.len();
        bytes[index % len] = *value;
    }
    if let Some(cut) = cut {
        bytes.truncate(cut.index(bytes.len()));
    }
    bytes.extend(tail);
    bytes
}

/// Generates up to five new bytes and their positions. About half of the positions are in the header.
fn changes() -> impl Strategy<Value = Vec<(usize, u8)>> {
    prop::collection::vec((prop_oneof![0usize..32, any::<usize>()], any::<u8>()), 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn idx_of_random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..64), start in 0usize..5) {
        // Without a plausible start nearly all cases would fail at the first byte.
        let bytes = [&[0, 0, 8, 3][..start.min(4)], &bytes].concat();
        for kind in KINDS {
            if let Ok(values) = read("f".as_ref(), &bytes[..], bytes.len() as u64, kind, "") {
                prop_assert!(!values.is_empty() && values.len() < bytes.len());
            }
        }
    }

    #[test]
    fn idx_with_random_dimensions(dims in prop::array::uniform3(0u32..40), extra in 0usize..100) {
        let mut bytes = vec![0, 0, 8, 3];
        dims.iter().for_each(|d| bytes.extend(d.to_be_bytes()));
        bytes.resize(bytes.len() + extra, 1);
        let whole = dims[0] > 0 && dims[1..] == [1, 3] && extra == dims[0] as usize * 3;
        prop_assert_eq!(read("f".as_ref(), &bytes[..], bytes.len() as u64, KINDS[2], "").is_ok(), whole);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn damaged_mnist_folder(
        file in 0usize..4,
        packed in any::<bool>(),
        changes in changes(),
        cut in prop::option::of(any::<prop::sample::Index>()),
        tail in prop::collection::vec(any::<u8>(), 0..4),
    ) {
        let (images, labels) = idx_files(4);
        let dir = tempfile::tempdir().unwrap();
        let names = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"];
        for (index, name) in names.iter().enumerate() {
            let whole = if index % 2 == 0 { &images } else { &labels };
            let whole = if packed { gzip(whole) } else { whole.clone() };
            let bytes = if index == file { mutate(&whole, &changes, cut, &tail) } else { whole };
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        if let Ok(splits) = load(&request("mnist", dir.path())) {
            for set in [splits.train, splits.test] {
                prop_assert_eq!(set.images.len(), set.len() * 784);
                prop_assert!(set.labels.iter().all(|&label| label < 10));
            }
        }
    }

    #[test]
    fn damaged_images(
        is_jpeg in any::<bool>(),
        changes in changes(),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let pixels = rgb(9, 7, |x, y| [(x * 20) as u8, (y * 30) as u8, 77]);
        for path in ["train/a", "test/a"] {
            let folder = dir.path().join(path);
            std::fs::create_dir_all(&folder).unwrap();
            let bytes = if is_jpeg { jpeg(9, 7, &pixels) } else { png(9, 7, ColorType::Rgb, BitDepth::Eight, &pixels) };
            std::fs::write(folder.join("1.png"), bytes).unwrap();
        }
        let path = dir.path().join("train/a/1.png");
        let bytes = mutate(&std::fs::read(&path).unwrap(), &changes, cut, &[]);
        std::fs::write(&path, bytes).unwrap();
        if let Ok(splits) = load(&request("image-folder", dir.path())) {
            prop_assert_eq!(splits.train.images.len(), splits.train.shape.len());
        }
    }

    #[test]
    fn damaged_archives(
        changes in changes(),
        cut in prop::option::of(any::<prop::sample::Index>()),
        tail in prop::collection::vec(any::<u8>(), 0..4),
    ) {
        let image = png(4, 3, ColorType::Grayscale, BitDepth::Eight, &[9; 12]);
        let whole = super::webdataset::archive(&[("1.png", &image), ("1.cls", b"0"), ("2.png", &image), ("2.json", b"{\"label\":0}")]);
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("train.tar"), mutate(&whole, &changes, cut, &tail)).unwrap();
        std::fs::write(dir.path().join("test.tar"), &whole).unwrap();
        if let Ok(splits) = load(&request("webdataset", dir.path())) {
            prop_assert_eq!(splits.train.images.len(), splits.train.len() * splits.train.shape.len());
        }
    }
}
