//! Makes the splits of a data set whose images are files: compares the images' sizes, and decodes the images into memory or leaves
//! decoding to the loader.

use std::path::Path;

use rayon::prelude::*;

use super::padding::{ImagePadding, check_side, limited_count};
use super::{DatasetInfo, DecodePolicy, LoadRequest, dataset};
use crate::encoded::{ImageFile, Resize};
use crate::label_sets::first_missing_class;
use crate::{DataError, Dataset, EncodedImages, ImageShape, LabelSets, Splits};

/// An encoded image and its class.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) file: ImageFile,
    /// 0 in a multi-label data set.
    pub(super) label: u16,
    /// The classes of an image of a multi-label data set. None if each image has one class.
    pub(super) label_set: Option<Box<[u16]>>,
}

/// The image files of each split, in the order of their data set. Only `train` always has an image.
#[derive(Debug, Default)]
pub(super) struct SplitFiles {
    pub(super) train: Vec<Sample>,
    pub(super) val: Vec<Sample>,
    pub(super) test: Vec<Sample>,
}

/// Makes the splits of images in files, with the request's limits. `source` is the folder or the file that lists the
/// images.
pub(super) fn load_splits(
    info: &DatasetInfo,
    source: &Path,
    files: SplitFiles,
    classes: &[String],
    request: &LoadRequest,
) -> Result<Splits, DataError> {
    let files = SplitFiles {
        train: limit_per_class(files.train, classes.len(), request.limit_train, "limit_train")?,
        val: limit_per_class(files.val, classes.len(), request.limit_test, "limit_test")?,
        test: limit_per_class(files.test, classes.len(), request.limit_test, "limit_test")?,
    };
    if request.label_delim.is_some() {
        check_classes_left(&files.train, classes)?;
    }
    let names_crc = names_crc(&files.train, source);
    let resize = resize(request.image_size, request.resize)?;
    let (height, width) = match request.image_size {
        Some(size) => {
            check_side(size)?;
            (size, size)
        }
        // A damaged image is reported, or replaced, when it is decoded. An evaluation may have no training image.
        None => match files
            .train
            .iter()
            .chain(files.test.iter().filter(|_| request.only_for_evaluation))
            .find_map(|sample| sample.file.size().ok())
        {
            Some(size) => size,
            None => files.train[0].file.size()?,
        },
    };
    let padding = ImagePadding::exact(ImageShape { channels: 3, height, width });
    let all = [&files.train, &files.val, &files.test];
    let count = all.iter().map(|samples| samples.len()).sum();
    let in_each_epoch = match request.decode {
        DecodePolicy::Memory => false,
        DecodePolicy::Epoch => true,
        DecodePolicy::BySize(most) => count as u128 * padding.shape().len() as u128 > u128::from(most),
    };
    // A loader that decodes in each epoch compares each image's size there: reading all headers may take minutes.
    if !in_each_epoch {
        if resize == Resize::None {
            all.iter().try_for_each(|samples| check_sizes(samples, padding.shape()))?;
        }
        padding.check_memory(source, count).map_err(or_in_each_epoch)?;
    }
    let decoded = |samples: Vec<Sample>| match in_each_epoch || request.defer_decoding {
        true => {
            let labels = samples.iter().map(|sample| sample.label).collect();
            let files = samples.into_iter().map(|sample| sample.file).collect();
            let encoded = EncodedImages::new(files, resize, padding.shape(), source);
            let encoded = if in_each_epoch { encoded } else { encoded.with_deferred_decoding() };
            Ok(Dataset { encoded: Some(encoded), ..dataset(info, &padding, Vec::new(), labels, classes.to_vec()) })
        }
        false => decode_all(info, &padding, resize, source, &samples, classes),
    };
    let split = |samples: Vec<Sample>| -> Result<Dataset, DataError> {
        let multi_label = request.label_delim.is_some();
        let set = |sample: &Sample| sample.label_set.clone().unwrap_or_default();
        let sets = multi_label.then(|| samples.iter().map(set).collect::<Vec<_>>());
        let label_sets = sets.map(|sets| sets.iter().map(|set| &**set).collect::<LabelSets>());
        Ok(Dataset { label_sets, ..decoded(samples)? })
    };
    Ok(Splits {
        train: split(files.train)?,
        val: if files.val.is_empty() { None } else { Some(split(files.val)?) },
        test: split(files.test)?,
        source: source.display().to_string(),
        names_crc: Some(names_crc),
        record: None,
    })
}

/// Checks that a limit leaves every class of a multi-label data set a training image. The readers check it without a limit.
fn check_classes_left(train: &[Sample], classes: &[String]) -> Result<(), DataError> {
    let sets = train.iter().filter_map(|sample| sample.label_set.as_deref());
    let Some(class) = first_missing_class(classes.len(), sets.flatten()) else { return Ok(()) };
    let cause = format!("the first {} training images have none of the class `{}`", train.len(), classes[class]);
    Err(DataError::new("", cause, "use a larger limit, or data.fraction, which chooses images at random")
        .at("limit_train"))
}

/// Returns the CRC-32C of the names and labels of images. `source` is the folder or the file that lists them.
fn names_crc(samples: &[Sample], source: &Path) -> u32 {
    let root = if source.is_dir() { source } else { source.parent().unwrap_or(source) };
    samples.iter().fold(0, |sum, sample| {
        // Unambiguous: a name contains no NUL, and the text of a set ends at its "]".
        let sum = crc32c::crc32c_append(sum, format!("{}\0{}\0", sample.file.name(root), sample.label).as_bytes());
        sample.label_set.iter().fold(sum, |sum, set| crc32c::crc32c_append(sum, format!("{set:?}").as_bytes()))
    })
}

/// Adds a hint to an error about memory: images in files can be decoded in each epoch.
fn or_in_each_epoch(error: DataError) -> DataError {
    DataError { hint: format!("decode the images in each epoch (data.decode = \"epoch\"), {}", error.hint), ..error }
}

/// Returns how images of another size than the data set's are resized.
fn resize(image_size: Option<usize>, shorter_side: Option<usize>) -> Result<Resize, DataError> {
    match (image_size, shorter_side) {
        (None, None) => Ok(Resize::None),
        (Some(_), None) => Ok(Resize::Whole),
        (Some(size), Some(side)) if side >= size => {
            check_side(side)?;
            Ok(Resize::ShorterSide(side))
        }
        (size, Some(side)) => {
            let cut = size.map_or("image_size is not set".to_owned(), |size| format!("image_size is {size}"));
            let hint = "the centre of image_size pixels is cut out of the resized image: use for example image_size = 224 \
                        and resize = 256";
            Err(DataError::new("", format!("resize is {side} and {cut}"), hint))
        }
    }
}

/// Keeps `limit` images: the first of every class, then the second of every class, and so on. Their order stays. The first
/// images of the whole list would all be of one class.
fn limit_per_class(
    all: Vec<Sample>,
    classes: usize,
    limit: Option<usize>,
    option: &str,
) -> Result<Vec<Sample>, DataError> {
    let count = limited_count(limit, all.len(), option)?;
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
    let mistake = samples.par_iter().find_map_first(|sample| match sample.file.size() {
        Ok(size) if size == (shape.height, shape.width) => None,
        Ok(size) => Some(sample.file.size_mismatch(size, shape)),
        Err(error) => Some(error),
    });
    mistake.map_or(Ok(()), Err)
}

/// Decodes all images of a split.
fn decode_all(
    info: &DatasetInfo,
    padding: &ImagePadding,
    resize: Resize,
    dir: &Path,
    samples: &[Sample],
    names: &[String],
) -> Result<Dataset, DataError> {
    let mut images = padding.allocate(dir, samples.len()).map_err(or_in_each_epoch)?;
    images.resize(samples.len() * padding.shape().len(), 0);
    let failed = images
        .par_chunks_exact_mut(padding.shape().len())
        .zip(samples)
        // Report the first failure in order, so that every run has the same message.
        .find_map_first(|(out, sample)| sample.file.decode(padding.shape(), resize, |_, _| None, out).err());
    if let Some(error) = failed {
        return Err(error);
    }
    let labels = samples.iter().map(|sample| sample.label).collect();
    Ok(dataset(info, padding, images, labels, names.to_vec()))
}
