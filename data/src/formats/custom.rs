//! Data sets of other crates: their images come from a function.

use std::path::Path;

use parking_lot::RwLock;

use super::padding::{ImagePadding, limited_count};
use super::registry::{DATASETS, DatasetFormat, DatasetInfo};
use super::{LoadRequest, dataset};
use crate::{DataError, Dataset, ImageShape, Splits};

/// A data set that a program adds with [`register`].
#[derive(Debug, Clone, Copy)]
pub struct CustomDataset {
    /// Name in the configuration file.
    pub name: &'static str,
    /// One line that describes the data set.
    pub description: &'static str,
    /// Shape of every image.
    pub shape: ImageShape,
    /// Names of the classes in label order.
    pub classes: &'static [&'static str],
    /// Mean of each channel of the training images, in [0, 1].
    pub mean: &'static [f32],
    /// Standard deviation of each channel of the training images, in [0, 1].
    pub std: &'static [f32],
    /// Makes or reads the images. It gets the folder of `data.dir` or `--data-dir`, or else the cache folder, and is called once
    /// per process.
    pub read: fn(&Path) -> Result<CustomSplits, DataError>,
}

/// The images of a [`CustomDataset`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CustomSplits {
    /// Training images.
    pub train: LabelledImages,
    /// Test images, never trained on.
    pub test: LabelledImages,
}

/// Images and their classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelledImages {
    /// Pixels, `[N, C, H, W]`, uint8.
    pub images: Vec<u8>,
    /// Class of each image, `[N]`.
    pub labels: Vec<u16>,
}

/// The function of a [`CustomDataset`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader(fn(&Path) -> Result<CustomSplits, DataError>);

impl PartialEq for Reader {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::fn_addr_eq(self.0, other.0)
    }
}

impl Eq for Reader {}

static REGISTERED: RwLock<Vec<&DatasetInfo>> = RwLock::new(Vec::new());

/// Adds a data set, which `data.name` then selects. Call the function before all other functions for data sets.
///
/// # Panics
///
/// When there is a data set of this name already, mean or deviation do not have one value per channel, or there is no class.
pub fn register(custom: CustomDataset) {
    let CustomDataset { name, description, shape, classes, mean, std, read } = custom;
    assert!(!classes.is_empty(), "the data set `{name}` has no class");
    assert!(!shape.is_empty(), "the images of the data set `{name}` have no pixel");
    let channels = shape.channels;
    assert!([mean.len(), std.len()] == [channels; 2], "the data set `{name}` has {channels} channels");
    let info = DatasetInfo {
        name,
        description,
        license: "that of your images",
        homepage: "",
        channels: Some(channels),
        height: Some(shape.height),
        width: Some(shape.width),
        classes: Some(classes.len()),
        class_names: classes,
        default_mean: mean,
        default_std: std,
        train_len: None,
        test_len: None,
        needs_dir: false,
        folders: &[],
        format: DatasetFormat::Custom(Reader(read)),
    };
    let mut registered = REGISTERED.write();
    let mut taken = DATASETS.iter().chain(registered.iter().copied());
    assert!(taken.all(|other| other.name != name), "there is a data set `{name}` already");
    // A handful of entries that live as long as the program.
    registered.push(Box::leak(Box::new(info)));
}

/// Returns the data sets that were added.
pub(super) fn registered() -> Vec<&'static DatasetInfo> {
    REGISTERED.read().clone()
}

/// Calls the data set's function and checks what it returns.
pub(super) fn load(info: &DatasetInfo, reader: Reader, request: &LoadRequest) -> Result<Splits, DataError> {
    let dir = request.dir.as_deref().unwrap_or(Path::new(""));
    let CustomSplits { train, test } = (reader.0)(dir)?;
    if request.image_size.is_some() {
        let counts = [(&train, request.limit_train), (&test, request.limit_test)];
        let count = counts.into_iter().map(|(split, limit)| limit.unwrap_or(usize::MAX).min(split.labels.len())).sum();
        ImagePadding::padded(info, natural(info), request.image_size)?.check_memory(Path::new(""), count)?;
    }
    Ok(Splits {
        train: checked(info, train, request.image_size, request.limit_train, "train", "limit_train")?,
        val: None,
        test: checked(info, test, request.image_size, request.limit_test, "test", "limit_test")?,
        source: "this program".to_owned(),
        names_crc: None,
        record: None,
    })
}

/// Returns the shape of the images that the program registered.
fn natural(info: &DatasetInfo) -> ImageShape {
    let fact = |value: Option<usize>| value.expect("a registered data set has a shape");
    ImageShape { channels: fact(info.channels), height: fact(info.height), width: fact(info.width) }
}

/// Makes a split of the images, padded to `image_size`.
fn checked(
    info: &DatasetInfo,
    given: LabelledImages,
    image_size: Option<usize>,
    limit: Option<usize>,
    split: &str,
    option: &str,
) -> Result<Dataset, DataError> {
    let LabelledImages { mut images, mut labels } = given;
    let wrong = |cause: String| {
        let hint = "correct the function that the program registered for this data set";
        DataError::new("", format!("the {split} images of `{}`: {cause}", info.name), hint)
    };
    let natural = natural(info);
    if labels.is_empty() {
        return Err(wrong("there are none".to_owned()));
    }
    if images.len() != labels.len() * natural.len() {
        let expected = labels.len() * natural.len();
        let cause = format!("{} bytes, {} labels of images of {natural} need {expected}", images.len(), labels.len());
        return Err(wrong(cause));
    }
    let classes = info.class_names.len();
    if let Some(image) = labels.iter().position(|&label| usize::from(label) >= classes) {
        let cause = format!("image {image} has label {}, the classes are 0 to {}", labels[image], classes - 1);
        return Err(wrong(cause));
    }
    let padding = ImagePadding::padded(info, natural, image_size)?;
    labels.truncate(limited_count(limit, labels.len(), option)?);
    images.truncate(labels.len() * natural.len());
    if !padding.is_identity() {
        let mut padded = padding.allocate(Path::new(""), labels.len())?;
        images.chunks_exact(natural.len()).for_each(|image| padding.append(image, &mut padded));
        images = padded;
    }
    let names = info.class_names.iter().map(|&name| name.to_owned()).collect();
    Ok(dataset(info, &padding, images, labels, names))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{self, dataset_info, dataset_names};

    const SHAPE: ImageShape = ImageShape { channels: 1, height: 2, width: 2 };

    fn add(name: &'static str, read: fn(&Path) -> Result<CustomSplits, DataError>) {
        let description = "of a test";
        register(CustomDataset {
            name,
            description,
            shape: SHAPE,
            classes: &["a", "b"],
            mean: &[0.5],
            std: &[0.5],
            read,
        });
    }

    fn three(labels: [u16; 3], bytes: usize) -> CustomSplits {
        let split = || LabelledImages { images: (0..bytes as u8).collect(), labels: labels.to_vec() };
        CustomSplits { train: split(), test: split() }
    }

    fn load(name: &str, image_size: Option<usize>) -> Result<Splits, DataError> {
        formats::load(&LoadRequest { name: name.into(), image_size, limit_test: Some(2), ..LoadRequest::default() })
    }

    #[test]
    fn the_images_of_a_function_are_limited_and_padded() {
        add("three", |_| Ok(three([0, 1, 1], 12)));
        assert!(dataset_names().any(|name| name == "three") && dataset_info("three").is_some());
        let splits = load("three", None).unwrap();
        assert_eq!((splits.train.len(), splits.test.len()), (3, 2));
        assert_eq!((splits.train.image(1), &splits.train.labels[..]), (&[4, 5, 6, 7][..], &[0, 1, 1][..]));
        let padded = load("three", Some(4)).unwrap().train;
        assert_eq!(padded.image(1), [0, 0, 0, 0, 0, 4, 5, 0, 0, 6, 7, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn images_that_contradict_the_registration_are_refused() {
        add("short", |_| Ok(three([0, 1, 1], 11)));
        add("other class", |_| Ok(three([0, 2, 1], 12)));
        add("empty", |_| {
            Ok(CustomSplits { train: LabelledImages { images: vec![], labels: vec![] }, ..three([0; 3], 12) })
        });
        add("missing", |folder| Err(DataError::new(folder, "is not there", "make it")));
        for (name, cause) in [
            ("short", "the train images of `short`: 11 bytes, 3 labels of images of 1x2x2 need 12"),
            ("other class", "the train images of `other class`: image 1 has label 2, the classes are 0 to 1"),
            ("empty", "the train images of `empty`: there are none"),
            ("missing", "is not there"),
        ] {
            assert_eq!(load(name, None).unwrap_err().cause, cause);
        }
    }

    #[test]
    #[should_panic(expected = "there is a data set `cifar10` already")]
    fn a_name_is_registered_once() {
        add("cifar10", |_| Ok(three([0; 3], 12)));
    }
}
