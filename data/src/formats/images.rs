//! Image files of any size: lists them, compares their sizes and decodes them.

use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::file::read_error;
use super::fit::{Fit, check_side, keep};
use super::{DatasetInfo, dataset};
use crate::decode::{self, Decoder, Region, Target, resample};
use crate::{DataError, Dataset, ImageShape, Splits};

/// Maximum size of an image file, in bytes.
const MAX_BYTES: u64 = 1 << 30;

/// Pixels of a large image. One at a time is decoded, whatever the number of threads.
const LARGE: usize = 4096 * 4096;

static ONE_LARGE_IMAGE: Mutex<()> = Mutex::new(());

/// An image file and its class.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) path: PathBuf,
    pub(super) label: u16,
}

/// The image files of each split, in the order of their data set. Only `train` has always an image.
#[derive(Debug, Default)]
pub(super) struct SplitFiles {
    pub(super) train: Vec<Sample>,
    pub(super) val: Vec<Sample>,
    pub(super) test: Vec<Sample>,
}

/// Decodes the images of all splits. With `image_size`, images are resized to that square; otherwise all images must have the
/// size of the first. `source` is the folder or the file that lists the images.
pub(super) fn load_splits(
    info: &DatasetInfo,
    source: &Path,
    files: SplitFiles,
    classes: &[String],
    image_size: Option<usize>,
) -> Result<Splits, DataError> {
    let (height, width) = match image_size {
        Some(size) => {
            check_side(size)?;
            (size, size)
        }
        None => size_of(&files.train[0].path)?,
    };
    let fit = Fit::exact(ImageShape { channels: 3, height, width });
    let resize = image_size.is_some();
    if !resize {
        let all = [&files.train, &files.val, &files.test];
        all.iter().try_for_each(|samples| check_sizes(samples, fit.shape()))?;
        fit.check_memory(source, all.iter().map(|samples| samples.len()).sum())?;
    }
    let decode = |samples: Vec<Sample>| decode_all(info, &fit, resize, source, &samples, classes);
    Ok(Splits {
        train: decode(files.train)?,
        val: if files.val.is_empty() { None } else { Some(decode(files.val)?) },
        test: decode(files.test)?,
        source: source.display().to_string(),
        record: None,
    })
}

/// Keeps `limit` images: the first of every class, then the second of every class, and so on. Their order stays. The first
/// images of the whole list would all be of one class.
pub(super) fn thin(
    all: Vec<Sample>,
    classes: usize,
    limit: Option<usize>,
    option: &str,
) -> Result<Vec<Sample>, DataError> {
    let count = keep(limit, all.len(), option)?;
    if count == all.len() {
        return Ok(all);
    }
    let mut seen = vec![0; classes];
    // (position in the class, position in the list)
    let mut turns: Vec<(usize, usize)> = Vec::with_capacity(all.len());
    for (index, sample) in all.iter().enumerate() {
        let class = usize::from(sample.label);
        turns.push((seen[class], index));
        seen[class] += 1;
    }
    // By position in the class, then by class: positions in the list grow with the class.
    turns.sort_unstable();
    let mut kept: Vec<usize> = turns[..count].iter().map(|&(_, index)| index).collect();
    kept.sort_unstable();
    let mut all: Vec<Option<Sample>> = all.into_iter().map(Some).collect();
    Ok(kept.into_iter().filter_map(|index| all[index].take()).collect())
}

/// Checks in the headers that all images have the size `shape`: nothing large is decoded before a small mistake is found.
fn check_sizes(samples: &[Sample], shape: ImageShape) -> Result<(), DataError> {
    let mistake = samples.par_iter().find_map_first(|sample| match size_of(&sample.path) {
        Ok(size) if size == (shape.height, shape.width) => None,
        Ok(size) => Some(other_size(&sample.path, size, shape)),
        Err(error) => Some(error),
    });
    mistake.map_or(Ok(()), Err)
}

/// Makes the error of an image whose height and width are not those of the first image.
fn other_size(path: &Path, (height, width): (usize, usize), shape: ImageShape) -> DataError {
    let cause = format!("is {width}x{height} pixels, the first image is {}x{}", shape.width, shape.height);
    DataError::new(path, cause, "set image_size in [data] to resize all images to a square")
}

/// Decodes all images of a split.
fn decode_all(
    info: &DatasetInfo,
    fit: &Fit,
    resize: bool,
    dir: &Path,
    samples: &[Sample],
    names: &[String],
) -> Result<Dataset, DataError> {
    let mut images = fit.allocate(dir, samples.len())?;
    images.resize(samples.len() * fit.shape().len(), 0);
    let failed = images
        .par_chunks_exact_mut(fit.shape().len())
        .zip(samples)
        // Report the first failure in order, so that every run has the same message.
        .find_map_first(|(out, sample)| decode(&sample.path, fit.shape(), resize, out).err());
    if let Some(error) = failed {
        return Err(error);
    }
    let labels = samples.iter().map(|sample| sample.label).collect();
    Ok(dataset(info, fit, images, labels, names.to_vec()))
}

/// Decodes one image into `out`, `[3, H, W]`.
pub(super) fn decode(path: &Path, shape: ImageShape, resize: bool, out: &mut [u8]) -> Result<(), DataError> {
    let (mut file, len) = open(path)?;
    let mut bytes = Vec::with_capacity(len as usize);
    // The file may grow meanwhile.
    file.by_ref().take(MAX_BYTES).read_to_end(&mut bytes).map_err(|e| read_error(path, &e))?;
    let decoder = Decoder::new(&bytes).map_err(|cause| image_error(path, &cause))?;
    let (height, width) = decoder.size();
    if !resize && (height, width) != (shape.height, shape.width) {
        return Err(other_size(path, (height, width), shape));
    }
    // Each large image takes as much memory as thousands of small ones.
    let _turn = (height * width > LARGE).then(|| ONE_LARGE_IMAGE.lock().unwrap_or_else(PoisonError::into_inner));
    let image = decoder.decode().map_err(|cause| image_error(path, &cause))?;
    resample(&image, Region::whole(height, width), Target::whole(shape.height, shape.width), out);
    Ok(())
}

/// Opens an image file, and returns its length in bytes.
fn open(path: &Path) -> Result<(std::fs::File, u64), DataError> {
    let (file, len) = super::open(path)?;
    if len > MAX_BYTES {
        let cause = format!("has {len} bytes, an image has at most {MAX_BYTES}");
        return Err(DataError::new(path, cause, "replace the image if it is damaged, or scale it down"));
    }
    Ok((file, len))
}

/// Returns the height and width of an image from its header.
fn size_of(path: &Path) -> Result<(usize, usize), DataError> {
    let (file, _) = open(path)?;
    decode::read_size(BufReader::new(file)).map_err(|cause| image_error(path, &cause))
}

/// Makes the error of an image that cannot be decoded.
fn image_error(path: &Path, cause: &str) -> DataError {
    let hint = "the image is damaged or of another format: replace it, convert it to PNG or JPEG, or remove it";
    DataError::new(path, format!("cannot be decoded: {cause}"), hint)
}
