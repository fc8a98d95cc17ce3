//! `fashion-mini`: 8,000 images of Fashion-MNIST, compiled into the program (origin and licence: `assets/fashion-mini`).

use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use super::{DatasetInfo, LoadRequest, idx};
use crate::{DataError, Splits};

/// File names and contents of the four IDX files, in the order of [`idx::STEMS`].
const FILES: [(&str, &[u8]); 4] = [
    ("train-images-idx3-ubyte.gz", include_bytes!("../../assets/fashion-mini/train-images-idx3-ubyte.gz")),
    ("train-labels-idx1-ubyte.gz", include_bytes!("../../assets/fashion-mini/train-labels-idx1-ubyte.gz")),
    ("t10k-images-idx3-ubyte.gz", include_bytes!("../../assets/fashion-mini/t10k-images-idx3-ubyte.gz")),
    ("t10k-labels-idx1-ubyte.gz", include_bytes!("../../assets/fashion-mini/t10k-labels-idx1-ubyte.gz")),
];

/// Reads the built-in files and ignores the request's `dir`.
pub(super) fn load(info: &DatasetInfo, request: &LoadRequest) -> Result<Splits, DataError> {
    let [train_images, train_labels, test_images, test_labels] = FILES;
    let read = |(name, bytes): (&str, &'static [u8]), kind| {
        // No bound is needed: the files are known. The decoder checks gzip's checksum.
        idx::read(Path::new(name), MultiGzDecoder::new(bytes), u64::MAX, kind, "the program is damaged: reinstall it")
    };
    let split = |images: (&str, _), labels: (&str, _), limit, option| {
        let pixels = read(images, idx::image_kind(info))?;
        let classes = read(labels, idx::IdxKind::Labels)?;
        let (images, labels) = (Path::new(images.0), Path::new(labels.0));
        idx::assemble(info, request.image_size, (images, pixels), (labels, classes), limit, option)
    };
    Ok(Splits {
        train: split(train_images, train_labels, request.limit_train, "limit_train")?,
        val: None,
        test: split(test_images, test_labels, request.limit_test, "limit_test")?,
        source: "built in".to_owned(),
        names_crc: None,
        record: None,
    })
}
