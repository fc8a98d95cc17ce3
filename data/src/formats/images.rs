//! Image files of any size: lists them, compares their sizes and decodes them.
//!
//! Images become RGB as with PIL's `convert("RGB")`: grey is repeated, transparency is dropped.

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use image::{DynamicImage, ImageDecoder, ImageReader, Limits, imageops::FilterType};
use rayon::prelude::*;

use super::file::read_error;
use super::fit::{Fit, MAX_SIDE, check_side, keep};
use super::{DatasetInfo, dataset};
use crate::{DataError, Dataset, ImageShape, Splits};

/// Maximum memory that the decoder of one image may allocate, in bytes. It bounds what a forged header can request.
const MAX_DECODED: u64 = 1 << 30;

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
    let (decoder, (height, width)) = open(path)?;
    // Each large image takes as much memory as thousands of small ones.
    let _turn = (height * width > LARGE).then(|| ONE_LARGE_IMAGE.lock().unwrap_or_else(PoisonError::into_inner));
    let image = DynamicImage::from_decoder(decoder).map_err(|e| image_error(path, &e))?;
    let rgb = if (height, width) == (shape.height, shape.width) {
        image.into_rgb8()
    } else if resize {
        // Triangle is PIL's and torchvision's antialiased bilinear. `shape` is at most MAX_SIDE.
        let small = DynamicImage::ImageRgb8(image.into_rgb8());
        small.resize_exact(shape.width as u32, shape.height as u32, FilterType::Triangle).into_rgb8()
    } else {
        return Err(other_size(path, (height, width), shape));
    };
    let plane = shape.height * shape.width;
    for (index, pixel) in rgb.pixels().enumerate() {
        for (channel, &value) in pixel.0.iter().enumerate() {
            out[channel * plane + index] = value;
        }
    }
    Ok(())
}

/// Reads an image's header. Returns the decoder of the pixels, and height and width. The first bytes determine the format,
/// because names are often wrong.
fn open(path: &Path) -> Result<(impl ImageDecoder, (usize, usize)), DataError> {
    let (file, len) = super::open(path)?;
    if len > MAX_DECODED {
        let cause = format!("has {len} bytes, an image has at most {MAX_DECODED}");
        return Err(DataError::new(path, cause, "replace the image if it is damaged, or scale it down"));
    }
    let mut reader = ImageReader::new(BufReader::new(file)).with_guessed_format().map_err(|e| read_error(path, &e))?;
    let mut limits = Limits::default();
    limits.max_image_width = Some(MAX_SIDE as u32);
    limits.max_image_height = Some(MAX_SIDE as u32);
    limits.max_alloc = Some(MAX_DECODED);
    reader.limits(limits);
    let decoder = reader.into_decoder().map_err(|e| image_error(path, &e))?;
    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 || decoder.total_bytes() > MAX_DECODED {
        let cause = format!("is {width}x{height} pixels; at most {MAX_DECODED} bytes are decoded");
        return Err(DataError::new(path, cause, "replace the image if it is damaged, or scale it down"));
    }
    Ok((decoder, (height as usize, width as usize)))
}

/// Returns the height and width of an image from its header.
fn size_of(path: &Path) -> Result<(usize, usize), DataError> {
    open(path).map(|(_, size)| size)
}

/// Makes the error of an image that cannot be decoded.
fn image_error(path: &Path, error: &image::ImageError) -> DataError {
    let hint = "the image is damaged or of another format: replace it, convert it to PNG or JPEG, or remove it";
    DataError::new(path, format!("cannot be decoded: {error}"), hint)
}
