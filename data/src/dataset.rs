//! A data set: all images as uint8 in one allocation, or the files that they are decoded from in each epoch.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use crate::split::SplitRecord;
use crate::{DataError, EncodedImages, LabelSets};

/// Channels, height and width of every image of a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageShape {
    /// Colour planes: 1 (grey) or 3 (red, green, blue).
    pub channels: usize,
    /// Rows, in pixels.
    pub height: usize,
    /// Columns, in pixels.
    pub width: usize,
}

impl ImageShape {
    /// Returns the bytes of one image, `channels * height * width`.
    pub fn len(&self) -> usize {
        self.channels * self.height * self.width
    }

    /// Returns true when an image has no pixel.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl std::fmt::Display for ImageShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}x{}", self.channels, self.height, self.width)
    }
}

/// Memory with the pixels of all images, `[N, C, H, W]`, that other processes read too.
#[derive(Clone)]
pub struct SharedPixels(Arc<dyn AsRef<[u8]> + Send + Sync>);

impl SharedPixels {
    /// Takes the memory. Bytes after the last image are ignored.
    pub fn new(memory: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self(Arc::new(memory))
    }
}

impl fmt::Debug for SharedPixels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedPixels({} bytes)", (*self.0).as_ref().len())
    }
}

/// One split of a data set.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// The registry's name, e.g. `cifar10`.
    pub name: String,
    /// Pixels, `[N, C, H, W]`, uint8. Empty if the images are in `encoded` or `shared`.
    pub images: Vec<u8>,
    /// The pixels, in memory that other processes read too. None if they are in `images` or `encoded`.
    pub shared: Option<SharedPixels>,
    /// The images in their files, `[N]`, which are decoded in each epoch. None if `images` has all pixels.
    pub encoded: Option<EncodedImages>,
    /// Class of each image, `[N]`, each below `classes.len()`. Of a multi-label data set all are 0.
    pub labels: Vec<u16>,
    /// The classes of each image of a multi-label data set, `[N]`. None if each image has one class.
    pub label_sets: Option<LabelSets>,
    /// Shape of every image.
    pub shape: ImageShape,
    /// Class names in label order.
    pub classes: Vec<String>,
}

impl Dataset {
    /// Returns the number of images.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Returns true when there is no image.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Returns the pixels of image `index`, `[C, H, W]`.
    ///
    /// # Panics
    /// If there is no image `index`, or the images are [encoded](Dataset::encoded).
    pub fn image(&self, index: usize) -> &[u8] {
        let len = self.shape.len();
        &self.all_pixels()[index * len..(index + 1) * len]
    }

    /// Returns the pixels of all images, `[N, C, H, W]`; none if the images are [encoded](Dataset::encoded).
    pub fn all_pixels(&self) -> &[u8] {
        match &self.shared {
            Some(SharedPixels(memory)) => &(**memory).as_ref()[..self.len() * self.shape.len()],
            None => &self.images,
        }
    }

    /// Replaces encoded images by their pixels.
    ///
    /// # Panics
    /// If the memory is smaller than the images.
    pub fn share(&mut self, pixels: SharedPixels) {
        assert!((*pixels.0).as_ref().len() as u64 >= self.decoded_bytes(), "pixels of all images");
        self.encoded = None;
        self.shared = Some(pixels);
    }

    /// Returns the pixels of image `index`, `[C, H, W]`, as an evaluation has them.
    ///
    /// # Errors
    /// An encoded image that cannot be read or decoded.
    ///
    /// # Panics
    /// If there is no image `index`.
    pub fn pixels(&self, index: usize) -> Result<Cow<'_, [u8]>, DataError> {
        let Some(encoded) = &self.encoded else { return Ok(self.image(index).into()) };
        let mut pixels = vec![0; self.shape.len()];
        encoded.decode(index, &mut pixels)?;
        Ok(pixels.into())
    }

    /// Returns the bytes of memory that the decoded images of the split take.
    pub fn decoded_bytes(&self) -> u64 {
        self.len() as u64 * self.shape.len() as u64
    }

    /// Returns the number of images that have each class, `[classes]`.
    pub fn class_sizes(&self) -> Vec<usize> {
        let mut sizes = vec![0; self.classes.len()];
        let mut count = |label: u16| sizes[usize::from(label)] += 1;
        match &self.label_sets {
            None => self.labels.iter().for_each(|&label| count(label)),
            Some(sets) => sets.iter().flatten().for_each(|&label| count(label)),
        }
        sizes
    }

    /// Returns whether two images have the same class, or the same classes.
    pub(crate) fn same_labels(&self, one: usize, other: usize) -> bool {
        match &self.label_sets {
            None => self.labels[one] == self.labels[other],
            Some(sets) => sets.of(one) == sets.of(other),
        }
    }

    /// Returns a copy of the images `ids`, in their order.
    pub(crate) fn select(&self, ids: &[u32]) -> Self {
        let mut images = Vec::new();
        if self.encoded.is_none() {
            images.reserve_exact(ids.len() * self.shape.len());
            ids.iter().for_each(|&id| images.extend_from_slice(self.image(id as usize)));
        }
        Self {
            name: self.name.clone(),
            images,
            shared: None,
            encoded: self.encoded.as_ref().map(|encoded| encoded.select(ids)),
            labels: ids.iter().map(|&id| self.labels[id as usize]).collect(),
            label_sets: self.label_sets.as_ref().map(|sets| sets.select(ids)),
            shape: self.shape,
            classes: self.classes.clone(),
        }
    }

    /// Keeps the images `ids`, which are in ascending order, and frees the memory of the others.
    pub(crate) fn keep(&mut self, ids: &[u32]) {
        if self.encoded.is_some() || self.shared.is_some() {
            *self = self.select(ids);
            return;
        }
        let len = self.shape.len();
        self.label_sets = self.label_sets.as_ref().map(|sets| sets.select(ids));
        // Each image moves to the front or stays, so no image is overwritten before it has moved.
        for (to, &from) in ids.iter().enumerate() {
            let from = from as usize;
            self.images.copy_within(from * len..(from + 1) * len, to * len);
            self.labels[to] = self.labels[from];
        }
        self.truncate(ids.len());
        self.images.shrink_to_fit();
    }

    /// Keeps the first `count` images, or all images if there are fewer.
    pub fn truncate(&mut self, count: usize) {
        self.labels.truncate(count);
        self.images.truncate(self.labels.len() * self.shape.len());
        if let Some(sets) = &mut self.label_sets {
            sets.truncate(self.labels.len());
        }
        if let Some(encoded) = &mut self.encoded {
            encoded.truncate(self.labels.len());
        }
    }
}

/// The splits of a data set and the folder that they come from.
#[derive(Debug, Clone)]
pub struct Splits {
    /// Training images.
    pub train: Dataset,
    /// Validation images, never trained on, which select the best epoch. None if the data set has no such split.
    pub val: Option<Dataset>,
    /// Test images, never trained on.
    pub test: Dataset,
    /// The folder of the files, or `built in`.
    pub source: String,
    /// CRC-32C of the names and labels of the training images, before the split. None unless the data set is an image folder, a
    /// manifest or tar archives.
    pub names_crc: Option<u32>,
    /// The training images that were held out or left out ([`crate::split`]). None if all of them are in `train`.
    pub record: Option<SplitRecord>,
}

impl Splits {
    /// Returns the splits that exist, each with its name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Dataset)> {
        let all = [("training", Some(&self.train)), ("validation", self.val.as_ref()), ("test", Some(&self.test))];
        all.into_iter().filter_map(|(name, split)| Some((name, split?)))
    }
}
