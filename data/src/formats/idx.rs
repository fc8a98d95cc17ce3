//! MNIST's IDX files (LeCun, Cortes, Burges; <http://yann.lecun.com/exdb/mnist/>), gzipped or not.
//!
//! Two zero bytes, the type (8: uint8), the number of dimensions, each dimension as a big-endian u32, then the values.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;

use super::file::{check_length, damaged, open, read_error, transient_or};
use super::padding::{ImagePadding, limited_count};
use super::{DatasetInfo, LoadRequest, dataset, locate};
use crate::{DataError, Dataset, ImageShape, Splits};

/// The names of a data set's four files, without the suffix that names the type.
pub(crate) const STEMS: [&str; 4] = ["train-images", "train-labels", "t10k-images", "t10k-labels"];

/// Deflate's maximum compression ratio.
const MAX_RATIO: u64 = 1032;

/// The expected contents of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdxKind {
    /// `[N, height, width]`.
    Images { height: usize, width: usize },
    /// `[N]`.
    Labels,
}

impl IdxKind {
    fn dims(self) -> usize {
        if self == IdxKind::Labels { 1 } else { 3 }
    }

    fn plural(self) -> &'static str {
        if self == IdxKind::Labels { "labels" } else { "images" }
    }
}

/// Reads the four files.
pub(super) fn load(info: &DatasetInfo, dir: &Path, request: &LoadRequest) -> Result<Splits, DataError> {
    let dir = locate(info, dir)?;
    let read = |images, labels| -> Result<_, DataError> {
        let (images, labels) = (required(info, &dir, images)?, required(info, &dir, labels)?);
        let pixels = read_file(&images, image_kind(info), info.name)?;
        let classes = read_file(&labels, IdxKind::Labels, info.name)?;
        Ok(((images, pixels), (labels, classes)))
    };
    let [train_images, train_labels, test_images, test_labels] = STEMS;
    let (train, test) = (read(train_images, train_labels)?, read(test_images, test_labels)?);
    let counts = [
        limited_count(request.limit_train, train.1.1.len(), "limit_train")?,
        limited_count(request.limit_test, test.1.1.len(), "limit_test")?,
    ];
    let padding = ImagePadding::padded(info, natural_shape(info), request.image_size)?;
    padding.check_memory(&dir, counts.iter().sum())?;
    let split = |((images, pixels), (labels, classes)): ((PathBuf, _), (PathBuf, _)), limit, option| {
        assemble(info, request.image_size, (&images, pixels), (&labels, classes), limit, option)
    };
    Ok(Splits {
        train: split(train, request.limit_train, "limit_train")?,
        val: None,
        test: split(test, request.limit_test, "limit_test")?,
        source: dir.display().to_string(),
        names_crc: None,
        record: None,
    })
}

/// Returns the shape of the data set's images. The registry states it for every data set in IDX files.
fn natural_shape(info: &DatasetInfo) -> ImageShape {
    let known = |value: Option<usize>| value.expect("the registry states the shape of every IDX data set");
    ImageShape { channels: known(info.channels), height: known(info.height), width: known(info.width) }
}

/// Returns the expected contents of the data set's image files.
pub(super) fn image_kind(info: &DatasetInfo) -> IdxKind {
    let ImageShape { height, width, .. } = natural_shape(info);
    IdxKind::Images { height, width }
}

/// Returns the official name of a file, e.g. `train-images-idx3-ubyte`.
pub(super) fn file_name(stem: &str) -> String {
    format!("{stem}-idx{}-ubyte", dims(stem))
}

fn dims(stem: &str) -> usize {
    if stem.ends_with("labels") { 1 } else { 3 }
}

/// Finds the file of `stem` in `dir` under any of its spellings. Uncompressed files are preferred, because they read faster.
pub(crate) fn find(dir: &Path, stem: &str) -> Option<PathBuf> {
    let names = [file_name(stem), format!("{stem}.idx{}-ubyte", dims(stem))];
    ["", ".gz"]
        .iter()
        .flat_map(|gz| names.each_ref().map(|name| dir.join(format!("{name}{gz}"))))
        .find(|path| path.is_file())
}

fn required(info: &DatasetInfo, dir: &Path, stem: &str) -> Result<PathBuf, DataError> {
    find(dir, stem).ok_or_else(|| {
        DataError::new(
            dir.join(format!("{}.gz", file_name(stem))),
            "the file is missing (other files of the data set are beside it)",
            format!("`trainer data fetch {}` downloads it", info.name),
        )
    })
}

/// Opens a file and decompresses it while reading if it is gzipped, whatever its name is. Also returns the maximum number of
/// bytes that the file can contain.
pub(crate) fn decompressed(path: &Path) -> Result<(Box<dyn Read>, u64), DataError> {
    let (mut file, len) = open(path)?;
    let mut magic = Vec::new();
    Read::by_ref(&mut file).take(2).read_to_end(&mut magic).map_err(|e| read_error(path, &e))?;
    file.rewind().map_err(|e| read_error(path, &e))?;
    Ok(reader(file, &magic, len))
}

fn reader(file: File, magic: &[u8], len: u64) -> (Box<dyn Read>, u64) {
    let input = BufReader::with_capacity(1 << 16, file);
    if magic == [0x1f, 0x8b] {
        (Box::new(MultiGzDecoder::new(input)), len.saturating_mul(MAX_RATIO))
    } else {
        (Box::new(input), len)
    }
}

fn read_file(path: &Path, kind: IdxKind, name: &str) -> Result<Vec<u8>, DataError> {
    let (input, bound) = decompressed(path)?;
    read(path, input, bound, kind, &damaged(name))
}

/// Reads the values of an IDX file of uint8.
///
/// `bound` is the maximum number of bytes of the input. A header that promises more is refused before any allocation.
pub(super) fn read(
    path: &Path,
    mut input: impl Read,
    bound: u64,
    kind: IdxKind,
    hint: &str,
) -> Result<Vec<u8>, DataError> {
    let fail = |cause: String| DataError::new(path, cause, hint);
    let header_len = 4 + 4 * kind.dims();
    let mut header = Vec::new();
    Read::by_ref(&mut input)
        .take(header_len as u64)
        .read_to_end(&mut header)
        .map_err(|e| transient_or(path, &e, || fail(format!("cannot be read: {e}"))).at("byte 0"))?;
    // The magic number is checked before the length, because its error says more.
    check_magic(&header, kind).map_err(|(byte, cause)| fail(cause).at(format!("byte {byte}")))?;
    if header.len() < header_len {
        let cause = format!("the file is truncated: {} bytes, its header alone has {header_len}", header.len());
        return Err(fail(cause).at(format!("byte {}", header.len())));
    }
    let dims: Vec<u64> =
        header[4..].chunks_exact(4).map(|b| u64::from(u32::from_be_bytes([b[0], b[1], b[2], b[3]]))).collect();
    let record_len = match kind {
        IdxKind::Labels => 1,
        IdxKind::Images { height, width } => {
            if dims[1..] != [height as u64, width as u64] {
                let cause =
                    format!("its images are {}x{}, those of this data set are {height}x{width}", dims[1], dims[2]);
                return Err(fail(cause).at("byte 8"));
            }
            height * width
        }
    };
    if dims[0] == 0 {
        return Err(fail(format!("holds no {}", kind.plural())).at("byte 4"));
    }
    // At most 2^32 records of at most 2^28 bytes: no overflow.
    let body = dims[0] * record_len as u64;
    let expected = header_len as u64 + body;
    if expected > bound {
        let cause = format!(
            "the file is truncated: its header promises {} {}, {expected} bytes, and it can hold at most {bound}",
            dims[0],
            kind.plural()
        );
        return Err(fail(cause).at(format!("record {}", bound.saturating_sub(header_len as u64) / record_len as u64)));
    }
    let mut values = Vec::new();
    // Read one byte more than promised. This finds an overlong file and makes gzip verify the checksum at the end.
    let result = input.take(body + 1).read_to_end(&mut values);
    let actual = header_len as u64 + values.len() as u64;
    if let Err(error) = result {
        let damaged = || fail(format!("cannot be read past byte {actual} of {expected}: {error}"));
        return Err(transient_or(path, &error, damaged).at(format!("record {}", values.len() / record_len)));
    }
    if actual > expected {
        let cause = format!("the file goes on after the {expected} bytes that its header promises");
        return Err(fail(cause).at(format!("byte {expected}")));
    }
    check_length(path, actual, header_len as u64, expected, record_len, hint)?;
    Ok(values)
}

/// Checks the four magic bytes, as many as there are. An error is the byte's position and the cause.
fn check_magic(header: &[u8], kind: IdxKind) -> Result<(), (usize, String)> {
    if header.iter().take(2).any(|&b| b != 0) {
        let start = &header[..header.len().min(4)];
        return Err((0, format!("is not an IDX file: it starts with {start:02x?}, not with two zero bytes")));
    }
    if let Some(&dtype) = header.get(2)
        && dtype != 8
    {
        let name = match dtype {
            0x09 => "int8",
            0x0B => "int16",
            0x0C => "int32",
            0x0D => "float32",
            0x0E => "float64",
            _ => "unknown",
        };
        return Err((2, format!("holds values of type {dtype:#04x} ({name}), images and labels are 0x08 (uint8)")));
    }
    if let Some(&dims) = header.get(3)
        && usize::from(dims) != kind.dims()
    {
        let cause = format!("has {dims} dimensions, a file of {} has {}", kind.plural(), kind.dims());
        return Err((3, cause));
    }
    Ok(())
}

/// Joins the values of an image file and a label file into a split. Both come with the names of their files.
pub(super) fn assemble(
    info: &DatasetInfo,
    image_size: Option<usize>,
    (image_file, mut pixels): (&Path, Vec<u8>),
    (label_file, labels): (&Path, Vec<u8>),
    limit: Option<usize>,
    option: &str,
) -> Result<Dataset, DataError> {
    let natural = natural_shape(info);
    let padding = ImagePadding::padded(info, natural, image_size)?;
    let available = pixels.len() / natural.len();
    if available != labels.len() {
        let cause = format!("holds {} labels, but {} holds {available} images", labels.len(), image_file.display());
        return Err(DataError::new(label_file, cause, damaged(info.name)));
    }
    let classes = info.class_names.len();
    if let Some(record) = labels.iter().position(|&label| usize::from(label) >= classes) {
        let cause = format!("label {} is out of range: `{}` has 0 to {}", labels[record], info.name, classes - 1);
        return Err(DataError::new(label_file, cause, damaged(info.name)).at(format!("record {record}")));
    }
    let count = limited_count(limit, available, option)?;
    pixels.truncate(count * natural.len());
    let images = if padding.is_identity() {
        pixels
    } else {
        let mut images = padding.allocate(image_file, count)?;
        pixels.chunks_exact(natural.len()).for_each(|image| padding.append(image, &mut images));
        images
    };
    let labels = labels[..count].iter().map(|&label| u16::from(label)).collect();
    let names = info.class_names.iter().map(|&name| name.to_owned()).collect();
    Ok(dataset(info, &padding, images, labels, names))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::formats::dataset_info;

    const IMAGES: IdxKind = IdxKind::Images { height: 2, width: 3 };

    fn read_all(bytes: &[u8], kind: IdxKind) -> Result<Vec<u8>, DataError> {
        read(Path::new("f"), bytes, bytes.len() as u64, kind, "hint")
    }

    fn images(count: u32, pixels: usize) -> Vec<u8> {
        let mut file = vec![0, 0, 8, 3];
        [count, 2, 3].iter().for_each(|d| file.extend(d.to_be_bytes()));
        file.extend((0..pixels).map(|p| p as u8));
        file
    }

    #[test]
    fn reads_images_and_labels() {
        assert_eq!(read_all(&images(2, 12), IMAGES).unwrap(), (0..12).collect::<Vec<u8>>());
        assert_eq!(read_all(&[0, 0, 8, 1, 0, 0, 0, 2, 7, 9], IdxKind::Labels).unwrap(), [7, 9]);
    }

    #[test]
    fn each_kind_of_damage_has_its_message() {
        let says = |bytes: &[u8], kind| read_all(bytes, kind).unwrap_err().to_string();
        assert_eq!(says(&[], IMAGES), "f: byte 0: the file is truncated: 0 bytes, its header alone has 16");
        assert_eq!(
            says(b"\x89PNG\r\n", IMAGES),
            "f: byte 0: is not an IDX file: it starts with [89, 50, 4e, 47], not with two zero bytes"
        );
        assert_eq!(
            says(&[0, 0, 13, 3], IMAGES),
            "f: byte 2: holds values of type 0x0d (float32), images and labels are 0x08 (uint8)"
        );
        assert_eq!(says(&[0, 0, 8, 1, 0, 0], IMAGES), "f: byte 3: has 1 dimensions, a file of images has 3");
        let mut wide = images(1, 6);
        wide[15] = 4;
        assert_eq!(says(&wide, IMAGES), "f: byte 8: its images are 2x4, those of this data set are 2x3");
        assert_eq!(says(&images(0, 0), IMAGES), "f: byte 4: holds no images");
        assert_eq!(
            says(&images(3, 16), IMAGES),
            "f: record 2: the file is truncated: its header promises 3 images, 34 bytes, and it can hold at most 32"
        );
        assert_eq!(
            says(&images(2, 13), IMAGES),
            "f: byte 28: the file goes on after the 28 bytes that its header promises"
        );
    }

    /// Fails with EIO after some bytes.
    struct FailingDisk<'a>(&'a [u8]);

    impl Read for FailingDisk<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            match self.0.read(out)? {
                0 => Err(std::io::Error::from_raw_os_error(5)),
                count => Ok(count),
            }
        }
    }

    #[test]
    fn a_disk_that_does_not_answer_is_no_damage() {
        let whole = images(2, 12);
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(&whole).unwrap();
        let packed = packed.finish().unwrap();
        for (len, place) in [(0, "byte 0"), (7, "byte 0"), (16, "record 0"), (23, "record 1")] {
            let disk = FailingDisk(&whole[..len]);
            let error = read(Path::new("f"), disk, whole.len() as u64, IMAGES, "damaged").unwrap_err();
            assert_eq!((error.is_transient, &*error.place), (true, place), "{error}");
            assert!(error.hint.starts_with("check the disk"), "{}", error.hint);
        }
        for len in 0..packed.len() {
            let disk = MultiGzDecoder::new(BufReader::new(FailingDisk(&packed[..len])));
            assert!(read(Path::new("f"), disk, 1 << 20, IMAGES, "damaged").unwrap_err().is_transient, "{len}");
        }
        assert!(!read_all(&whole[..20], IMAGES).unwrap_err().is_transient);
    }

    #[test]
    fn a_forged_count_allocates_nothing() {
        // A gzip file of a few bytes that promises 4 billion images.
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        packed.write_all(&images(u32::MAX, 100)).unwrap();
        let packed = packed.finish().unwrap();
        let bound = packed.len() as u64 * MAX_RATIO;
        let error = read(Path::new("f"), MultiGzDecoder::new(&packed[..]), bound, IMAGES, "").unwrap_err();
        assert!(error.cause.contains("promises 4294967295 images"), "{error}");
    }

    #[test]
    fn damaged_gzip_is_an_error_even_at_the_last_byte() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f.gz");
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(&images(50, 300)).unwrap();
        let packed = packed.finish().unwrap();
        std::fs::write(&path, &packed).unwrap();
        assert_eq!(read_file(&path, IMAGES, "mnist").unwrap().len(), 300);
        // Truncate at every byte, the checksum at the end included.
        for len in 0..packed.len() {
            std::fs::write(&path, &packed[..len]).unwrap();
            assert!(read_file(&path, IMAGES, "mnist").is_err(), "{len} of {} bytes", packed.len());
        }
        // Flip a bit of the checksum, of the length and of the body.
        for byte in [packed.len() - 8, packed.len() - 4, packed.len() / 2] {
            let mut bad = packed.clone();
            bad[byte] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            assert!(read_file(&path, IMAGES, "mnist").is_err(), "byte {byte}");
        }
    }

    #[test]
    fn labels_are_checked_against_images_and_classes() {
        let info = dataset_info("mnist").unwrap();
        let join = |labels: Vec<u8>, limit| {
            let pixels = vec![5; 3 * 784];
            assemble(info, None, (Path::new("images"), pixels), (Path::new("labels"), labels), limit, "limit_test")
        };
        let error = join(vec![0, 1], None).unwrap_err();
        assert_eq!(error.to_string(), "labels: holds 2 labels, but images holds 3 images");
        let error = join(vec![0, 10, 1], Some(1)).unwrap_err();
        assert_eq!(error.to_string(), "labels: record 1: label 10 is out of range: `mnist` has 0 to 9");
        let set = join(vec![3, 9, 1], Some(2)).unwrap();
        assert_eq!((set.labels.as_slice(), set.images.len()), (&[3, 9][..], 2 * 784));
    }
}
