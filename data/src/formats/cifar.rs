//! CIFAR-10 and CIFAR-100, the official binary files (Krizhevsky, 2009; <https://www.cs.toronto.edu/~kriz/cifar.html>).
//!
//! A record is one label byte (CIFAR-100: a coarse and a fine label byte) and 3072 bytes of pixels: 32x32 red, green and blue
//! values, row by row. The pixels are therefore `[C, H, W]`.

use std::path::{Path, PathBuf};

use super::file::{damaged, open, read_error, read_records};
use super::padding::{ImagePadding, limited_count};
use super::registry::CifarLayout;
use super::{DatasetInfo, LoadRequest, dataset, locate};
use crate::{DataError, Dataset, ImageShape, Splits};

const SHAPE: ImageShape = ImageShape { channels: 3, height: 32, width: 32 };
const PIXELS: usize = 3 * 32 * 32;

/// Maximum size of the file of class names, in bytes. The real files have a few hundred bytes.
const MAX_NAMES: u64 = 64 << 10;

/// Reads the official binary files.
pub(super) fn load(
    info: &DatasetInfo,
    layout: &CifarLayout,
    dir: &Path,
    request: &LoadRequest,
) -> Result<Splits, DataError> {
    let padding = ImagePadding::padded(info, SHAPE, request.image_size)?;
    let dir = locate(info, dir)?;
    let classes = class_names(info, layout, &dir)?;
    let train: Vec<PathBuf> = layout.train.iter().map(|file| dir.join(file)).collect();
    let read =
        |files: &[PathBuf], records, count| read_split(info, layout, &padding, files, records, count, &dir, &classes);
    let train_count = limited_count(request.limit_train, train.len() * layout.train_records, "limit_train")?;
    let test_count = limited_count(request.limit_test, layout.test_records, "limit_test")?;
    padding.check_memory(&dir, train_count + test_count)?;
    Ok(Splits {
        train: read(&train, layout.train_records, train_count)?,
        val: None,
        test: read(&[dir.join(layout.test)], layout.test_records, test_count)?,
        source: dir.display().to_string(),
        names_crc: None,
        record: None,
    })
}

/// Reads the first `count` images of `files`. Each file holds `records` records.
#[expect(clippy::too_many_arguments, reason = "one caller, and a struct would only rename them")]
fn read_split(
    info: &DatasetInfo,
    layout: &CifarLayout,
    padding: &ImagePadding,
    files: &[PathBuf],
    records: usize,
    count: usize,
    dir: &Path,
    classes: &[String],
) -> Result<Dataset, DataError> {
    let record_len = layout.label_bytes.len() + PIXELS;
    let mut images = padding.allocate(dir, count)?;
    let mut labels = Vec::with_capacity(count);
    for file in files.iter().take(count.div_ceil(records)) {
        let bytes = read_records(file, records, record_len, &damaged(info.name))?;
        for (index, record) in bytes.chunks_exact(record_len).take(count - labels.len()).enumerate() {
            let (record_labels, pixels) = record.split_at(layout.label_bytes.len());
            labels.push(label(info, layout, file, index, record_labels)?);
            padding.append(pixels, &mut images);
        }
    }
    Ok(dataset(info, padding, images, labels, classes.to_vec()))
}

/// Checks the label bytes of a record and returns the last one, which is the label used.
fn label(info: &DatasetInfo, layout: &CifarLayout, file: &Path, index: usize, bytes: &[u8]) -> Result<u16, DataError> {
    let mut last = 0;
    for (&value, &classes) in bytes.iter().zip(layout.label_bytes) {
        if value >= classes {
            let kind = if layout.label_bytes.len() == 2 && classes == layout.label_bytes[0] {
                "coarse label"
            } else {
                "label"
            };
            let cause = format!("{kind} {value} is out of range: `{}` has 0 to {}", info.name, classes - 1);
            return Err(DataError::new(file, cause, damaged(info.name)).at(format!("record {index}")));
        }
        last = value;
    }
    Ok(u16::from(last))
}

/// Returns the names in the file beside the data, or the registry's names if there is no such file.
fn class_names(info: &DatasetInfo, layout: &CifarLayout, dir: &Path) -> Result<Vec<String>, DataError> {
    let path = dir.join(layout.names);
    if !path.is_file() {
        return Ok(info.class_names.iter().map(|&name| name.to_owned()).collect());
    }
    read_names(&path, info.class_names.len(), info.name)
}

/// Reads a file of class names, one per line.
pub(crate) fn read_names(path: &Path, expected: usize, name: &str) -> Result<Vec<String>, DataError> {
    let (file, len) = open(path)?;
    if len > MAX_NAMES {
        let cause = format!("{len} bytes is too long for a list of {expected} class names");
        return Err(DataError::new(path, cause, damaged(name)));
    }
    let text = std::io::read_to_string(file).map_err(|e| read_error(path, &e))?;
    let names: Vec<String> = text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if names.len() != expected {
        let cause = format!("{} class names, `{name}` has {expected}", names.len());
        return Err(DataError::new(path, cause, damaged(name)));
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{DatasetFormat, dataset_info};

    /// Makes a record with the given label bytes and pixels that count up from `index`.
    fn record(index: u8, labels: &[u8]) -> Vec<u8> {
        labels.iter().copied().chain((0..PIXELS).map(|p| (p as u8).wrapping_add(index))).collect()
    }

    fn read(name: &str, bytes: &[u8], records: usize, count: usize) -> Result<Dataset, DataError> {
        let info = dataset_info(name).unwrap();
        let DatasetFormat::Cifar(layout) = info.format else { unreachable!() };
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("x.bin");
        std::fs::write(&file, bytes).unwrap();
        let classes = class_names(info, layout, dir.path()).unwrap();
        let padding = ImagePadding::padded(info, SHAPE, None).unwrap();
        let result = read_split(info, layout, &padding, &[file.clone(), file], records, count, dir.path(), &classes);
        result.map_err(|e| DataError { file: e.file.file_name().unwrap().into(), ..e })
    }

    #[test]
    fn cifar10_records_become_images() {
        let bytes: Vec<u8> = (0..4).flat_map(|i| record(i, &[9 - i])).collect();
        let set = read("cifar10", &bytes, 4, 6).unwrap();
        assert_eq!(set.labels, [9, 8, 7, 6, 9, 8]);
        assert_eq!(set.images.len(), 6 * PIXELS);
        // The second record of both files, which are the same file.
        assert_eq!(set.image(1), &record(1, &[])[..]);
        assert_eq!(set.image(5), set.image(1));
        assert_eq!(set.classes[8], "ship");
    }

    #[test]
    fn cifar100_uses_the_fine_label() {
        let bytes: Vec<u8> = (0..3).flat_map(|i| record(i, &[19 - i, 99 - i])).collect();
        let set = read("cifar100", &bytes, 3, 3).unwrap();
        assert_eq!(set.labels, [99, 98, 97]);
        assert_eq!(set.image(2), &record(2, &[])[..]);
        assert_eq!(set.classes.len(), 100);
        assert_eq!(set.classes[99], "worm");
    }

    #[test]
    fn errors_name_the_damaged_record() {
        let bytes: Vec<u8> = (0..4).flat_map(|i| record(i, &[i])).collect();
        let error = read("cifar10", &bytes[..2 * 3073 + 5], 4, 8).unwrap_err();
        assert_eq!(
            error.to_string(),
            "x.bin: record 2: the file is truncated: 6151 bytes of 12292, it ends in this record"
        );
        let error = read("cifar10", &[&bytes[..], &[1, 2]].concat(), 4, 8).unwrap_err();
        assert_eq!(
            error.to_string(),
            "x.bin: byte 12292: the file is 12294 bytes long, 2 more than the 12292 expected"
        );
        let mut wrong = bytes.clone();
        wrong[3 * 3073] = 10;
        let error = read("cifar10", &wrong, 4, 8).unwrap_err();
        assert_eq!(error.to_string(), "x.bin: record 3: label 10 is out of range: `cifar10` has 0 to 9");
        let error = read("cifar100", &record(0, &[20, 5]), 1, 1).unwrap_err();
        assert_eq!(error.to_string(), "x.bin: record 0: coarse label 20 is out of range: `cifar100` has 0 to 19");
        let error = read("cifar100", &record(0, &[19, 100]), 1, 1).unwrap_err();
        assert_eq!(error.to_string(), "x.bin: record 0: label 100 is out of range: `cifar100` has 0 to 99");
    }

    #[test]
    fn names_beside_the_data_are_used_and_counted() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("batches.meta.txt");
        std::fs::write(&file, "a\r\nb\n\n").unwrap();
        assert_eq!(read_names(&file, 2, "cifar10").unwrap(), ["a", "b"]);
        assert_eq!(read_names(&file, 10, "cifar10").unwrap_err().cause, "2 class names, `cifar10` has 10");
        std::fs::write(&file, [0xff, 0xfe]).unwrap();
        assert!(read_names(&file, 10, "cifar10").is_err());
        std::fs::write(&file, vec![b'\n'; 100_000]).unwrap();
        assert!(read_names(&file, 10, "cifar10").unwrap_err().cause.starts_with("100000 bytes is too long"));
    }
}
