//! A decoded data set: all images as uint8 in one allocation. Each image is decoded once.

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

/// One split of a data set, decoded.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// The registry's name, e.g. `cifar10`.
    pub name: String,
    /// Pixels, `[N, C, H, W]`, uint8.
    pub images: Vec<u8>,
    /// Class of each image, `[N]`, each below `classes.len()`.
    pub labels: Vec<u16>,
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
    /// If there is no image `index`.
    pub fn image(&self, index: usize) -> &[u8] {
        let len = self.shape.len();
        &self.images[index * len..(index + 1) * len]
    }

    /// Keeps the first `count` images, or all images if there are fewer.
    pub fn truncate(&mut self, count: usize) {
        self.labels.truncate(count);
        self.images.truncate(self.labels.len() * self.shape.len());
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
}

impl Splits {
    /// Returns the splits that exist, each with its name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, &Dataset)> {
        let all = [("training", Some(&self.train)), ("validation", self.val.as_ref()), ("test", Some(&self.test))];
        all.into_iter().filter_map(|(name, split)| Some((name, split?)))
    }
}
