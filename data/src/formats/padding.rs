//! Fits images into the requested square. Checks limits and memory before anything is allocated.

use std::path::Path;

use super::DatasetInfo;
use crate::decode::MAX_SIDE;
use crate::memory::available_memory;
use crate::{DataError, ImageShape};

/// Natural and padded shape of the images of a data set.
#[derive(Debug, Clone, Copy)]
pub(super) struct ImagePadding {
    natural: ImageShape,
    padded: ImageShape,
}

impl ImagePadding {
    /// Pads images of shape `natural` with zeros to a square of `image_size`, if that is given.
    pub(super) fn padded(
        info: &DatasetInfo,
        natural: ImageShape,
        image_size: Option<usize>,
    ) -> Result<Self, DataError> {
        let size = image_size.unwrap_or(0);
        if image_size.is_some() && (size < natural.height || size < natural.width) {
            return Err(DataError::new(
                "",
                format!("image_size {size} is smaller than the {natural} images of `{}`", info.name),
                format!(
                    "images are padded, never shrunk: image_size must be at least {}",
                    natural.height.max(natural.width)
                ),
            ));
        }
        let padded = ImageShape { height: size.max(natural.height), width: size.max(natural.width), ..natural };
        if image_size.is_some() {
            check_side(size)?;
        }
        Ok(Self { natural, padded })
    }

    /// Pads images of shape `natural` to `padded`, which is not smaller.
    pub(super) fn between(natural: ImageShape, padded: ImageShape) -> Self {
        Self { natural, padded }
    }

    /// Pads nothing: the reader resizes the images or keeps their size.
    pub(super) fn exact(shape: ImageShape) -> Self {
        Self { natural: shape, padded: shape }
    }

    /// Returns the shape of the padded images.
    pub(super) fn shape(&self) -> ImageShape {
        self.padded
    }

    /// Returns true if images keep their size.
    pub(super) fn is_identity(&self) -> bool {
        self.natural == self.padded
    }

    /// Appends one image, `[C, H, W]`, padded with zeros on all sides. If the padding is odd, the spare row or column is below
    /// or right.
    pub(super) fn append(&self, image: &[u8], out: &mut Vec<u8>) {
        if self.is_identity() {
            out.extend_from_slice(image);
            return;
        }
        let start = out.len();
        out.resize(start + self.padded.len(), 0);
        let top = (self.padded.height - self.natural.height) / 2;
        let left = (self.padded.width - self.natural.width) / 2;
        for (index, row) in image.chunks_exact(self.natural.width).enumerate() {
            let (channel, y) = (index / self.natural.height, index % self.natural.height);
            let at = start + (channel * self.padded.height + top + y) * self.padded.width + left;
            out[at..at + row.len()].copy_from_slice(row);
        }
    }

    /// Allocates memory for `count` padded images.
    pub(super) fn allocate(&self, dir: &Path, count: usize) -> Result<Vec<u8>, DataError> {
        self.check_memory(dir, count)?;
        let mut images = Vec::new();
        match images.try_reserve_exact(count * self.padded.len()) {
            Ok(()) => Ok(images),
            Err(_) => Err(self.too_large(dir, count, "more than this process may have")),
        }
    }

    /// Checks that `count` padded images fit into the free memory. Linux overcommits memory: without the check, the allocation
    /// succeeds, and the OOM killer later kills a process.
    pub(super) fn check_memory(&self, dir: &Path, count: usize) -> Result<(), DataError> {
        let needed = count.checked_mul(self.padded.len());
        match (needed, available_memory()) {
            (None, _) => Err(self.too_large(dir, count, "more than any machine has")),
            (Some(needed), Some(available)) if needed as u64 > available => {
                Err(self.too_large(dir, count, &format!("{} are available", gib(available as f64))))
            }
            _ => Ok(()),
        }
    }

    /// Makes the error of images that do not fit into memory.
    fn too_large(&self, dir: &Path, count: usize, bound: &str) -> DataError {
        let needed = gib(count as f64 * self.padded.len() as f64);
        DataError::new(
            dir,
            format!("{count} images of {} need {needed} of memory, {bound}", self.padded),
            "set a smaller image_size, or limit_train and limit_test",
        )
    }
}

fn gib(bytes: f64) -> String {
    format!("{:.1} GiB", bytes / (1u64 << 30) as f64)
}

/// Refuses an impossible `image_size`.
pub(super) fn check_side(size: usize) -> Result<(), DataError> {
    if (1..=MAX_SIDE).contains(&size) {
        return Ok(());
    }
    Err(DataError::new("", format!("image_size is {size}"), format!("it must be from 1 to {MAX_SIDE}")))
}

/// Returns how many of `available` images a limit keeps.
pub(super) fn limited_count(limit: Option<usize>, available: usize, option: &str) -> Result<usize, DataError> {
    if limit == Some(0) {
        return Err(DataError::new("", format!("{option} = 0 leaves no image"), "leave it out to use all images"));
    }
    Ok(limit.map_or(available, |n| n.min(available)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::dataset_info;

    #[test]
    fn pads_around_the_centre() {
        let shape = ImageShape { channels: 2, height: 2, width: 2 };
        let padding = ImagePadding::padded(dataset_info("mnist").unwrap(), shape, Some(5)).unwrap();
        let mut out = vec![9];
        padding.append(&[1, 2, 3, 4, 5, 6, 7, 8], &mut out);
        #[rustfmt::skip]
        assert_eq!(out, [9,
            0, 0, 0, 0, 0,  0, 1, 2, 0, 0,  0, 3, 4, 0, 0,  0, 0, 0, 0, 0,  0, 0, 0, 0, 0,
            0, 0, 0, 0, 0,  0, 5, 6, 0, 0,  0, 7, 8, 0, 0,  0, 0, 0, 0, 0,  0, 0, 0, 0, 0,
        ]);
    }

    #[test]
    fn impossible_sizes_and_limits_are_refused() {
        let info = dataset_info("mnist").unwrap();
        let shape = ImageShape { channels: 1, height: 28, width: 28 };
        let error = ImagePadding::padded(info, shape, Some(27)).unwrap_err();
        assert_eq!(error.cause, "image_size 27 is smaller than the 1x28x28 images of `mnist`");
        assert!(ImagePadding::padded(info, shape, Some(0)).is_err());
        assert!(ImagePadding::padded(info, shape, Some(usize::MAX)).is_err());
        let huge = ImagePadding::exact(ImageShape { channels: 3, height: MAX_SIDE, width: MAX_SIDE });
        let error = huge.allocate(Path::new("data"), 10_000_000).unwrap_err();
        assert!(
            error.cause.contains("need 7500000.0 GiB of memory, ") && error.cause.ends_with(" are available"),
            "{error}"
        );
        assert!(error.hint.contains("image_size"), "{}", error.hint);
        assert!(huge.allocate(Path::new("data"), usize::MAX).is_err());
        assert!(limited_count(Some(0), 10, "limit_train").is_err());
        assert_eq!(limited_count(Some(20), 10, "limit_train"), Ok(10));
    }
}
