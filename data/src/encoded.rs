//! Images that stay in their files: they are read and decoded whenever a batch needs them.

use std::io::{BufReader, Cursor, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rayon::prelude::*;

use crate::decode::{self, Decoder, Region, Target, resample};
use crate::formats::{open, read_error};
use crate::{DataError, ImageShape};

/// Maximum size of an encoded image, in bytes.
pub(crate) const MAX_BYTES: u64 = 1 << 30;

/// Pixels of a large image. One at a time is decoded, whatever the number of threads.
const LARGE: usize = 4096 * 4096;

static ONE_LARGE_IMAGE: Mutex<()> = Mutex::new(());

/// How an image of any size becomes one of the data set's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resize {
    /// All images have the shape already.
    None,
    /// The whole image is resampled to the shape (torchvision: `Resize((H, W))`).
    Whole,
    /// The shorter side is resampled to this many pixels, then the centre is cut out (torchvision: `Resize(side)` and
    /// `CenterCrop((H, W))`). The shape's sides are not larger.
    ShorterSide(usize),
}

/// The place of an encoded image.
#[derive(Debug, Clone)]
pub(crate) enum ImageFile {
    /// A file.
    Path(PathBuf),
    /// A part of an archive.
    Member {
        /// The archive.
        archive: Arc<Path>,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

impl ImageFile {
    /// Reads the encoded image.
    fn read(&self) -> Result<Vec<u8>, DataError> {
        let (path, offset) = match self {
            Self::Path(path) => (path.as_path(), 0),
            Self::Member { archive, offset, .. } => (&**archive, *offset),
        };
        let (mut file, file_len) = open(path)?;
        match *self {
            Self::Path(_) => {
                let mut bytes = Vec::with_capacity(self.checked(file_len)? as usize);
                // The file may grow meanwhile.
                file.by_ref().take(MAX_BYTES).read_to_end(&mut bytes).map_err(|e| read_error(path, &e))?;
                Ok(bytes)
            }
            Self::Member { len, .. } => {
                let mut bytes = vec![0; self.checked(len)? as usize];
                file.read_exact_at(&mut bytes, offset)
                    .map_err(|e| read_error(path, &e).at(format!("byte {offset}")))?;
                Ok(bytes)
            }
        }
    }

    /// Returns the height and width of the image from its header.
    pub(crate) fn size(&self) -> Result<(usize, usize), DataError> {
        let size = match self {
            Self::Path(path) => {
                let (file, len) = open(path)?;
                self.checked(len)?;
                decode::read_size(BufReader::new(file))
            }
            Self::Member { .. } => decode::read_size(Cursor::new(self.read()?)),
        };
        size.map_err(|cause| self.damaged(&cause))
    }

    /// Decodes the image into `out`, `[3, H, W]` of `shape`. `window` chooses the region of an image of a height and width that
    /// is resampled to the shape; where `window` returns none, `resize` determines the pixels.
    pub(crate) fn decode(
        &self,
        shape: ImageShape,
        resize: Resize,
        window: impl Fn(usize, usize) -> Option<Region>,
        out: &mut [u8],
    ) -> Result<(), DataError> {
        let bytes = self.read()?;
        let decoder = Decoder::new(&bytes).map_err(|cause| self.damaged(&cause))?;
        let (height, width) = decoder.size();
        let whole = Region::whole(height, width);
        let (region, target) = match (window(height, width), resize) {
            (Some(region), _) => (region, Target::whole(shape.height, shape.width)),
            (None, Resize::ShorterSide(side)) => (whole, centre_of_resized((height, width), side, shape)),
            (None, Resize::None) if (height, width) != (shape.height, shape.width) => {
                return Err(self.other_size((height, width), shape));
            }
            (None, _) => (whole, Target::whole(shape.height, shape.width)),
        };
        // Each large image takes as much memory as thousands of small ones.
        let _turn = (height * width > LARGE).then(|| ONE_LARGE_IMAGE.lock());
        let image = decoder.decode().map_err(|cause| self.damaged(&cause))?;
        resample(&image, region, target, out);
        Ok(())
    }

    /// Makes an error about the image.
    pub(crate) fn error(&self, cause: impl Into<String>, hint: &str) -> DataError {
        match self {
            Self::Path(path) => DataError::new(path, cause, hint),
            Self::Member { archive, offset, .. } => DataError::new(archive, cause, hint).at(format!("byte {offset}")),
        }
    }

    /// Makes the error of an image whose height and width are not those of the first image.
    pub(crate) fn other_size(&self, (height, width): (usize, usize), shape: ImageShape) -> DataError {
        let cause = format!("is {width}x{height} pixels, the first image is {}x{}", shape.width, shape.height);
        self.error(cause, "set image_size in [data] to resize all images to a square")
    }

    /// Makes the error of an image that cannot be decoded.
    fn damaged(&self, cause: &str) -> DataError {
        let hint = "the image is damaged or of another format: replace it, convert it to PNG or JPEG, or remove it";
        self.error(format!("cannot be decoded: {cause}"), hint)
    }

    /// Returns a length in bytes that an image may have.
    fn checked(&self, len: u64) -> Result<u64, DataError> {
        match len <= MAX_BYTES {
            true => Ok(len),
            false => {
                let cause = format!("has {len} bytes, an image has at most {MAX_BYTES}");
                Err(self.error(cause, "replace the image if it is damaged, or scale it down"))
            }
        }
    }
}

/// Returns the centre of an image whose shorter side is resampled to `side` pixels, in torchvision's rounding.
fn centre_of_resized((height, width): (usize, usize), side: usize, shape: ImageShape) -> Target {
    let longer = |short: usize, long: usize| (side * long) / short;
    let (height, width) = match height < width {
        true => (side, longer(height, width)),
        false => (longer(width, height), side),
    };
    // `CenterCrop` rounds halves to even.
    let start = |all: usize, part: usize| ((all - part) as f64 / 2.0).round_ties_even() as usize;
    let (top, left) = (start(height, shape.height), start(width, shape.width));
    Target { height, width, part: Region { top, left, height: shape.height, width: shape.width } }
}

/// The encoded images of one split.
#[derive(Debug, Clone)]
pub struct EncodedImages {
    files: Vec<ImageFile>,
    resize: Resize,
    shape: ImageShape,
    /// The folder that the names of [`EncodedImages::names`] do not have.
    root: PathBuf,
}

impl EncodedImages {
    /// Makes the images of a split, of three channels, from their files. `source` is the folder of the data set or a file in it.
    pub(crate) fn new(files: Vec<ImageFile>, resize: Resize, shape: ImageShape, source: &Path) -> Self {
        let root = if source.is_dir() { source } else { source.parent().unwrap_or(source) };
        Self { files, resize, shape, root: root.to_owned() }
    }

    /// Returns the number of images.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Returns true when there is no image.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Decodes image `index` as for an evaluation into `out`, `[3, H, W]`.
    ///
    /// # Errors
    /// The file is missing or damaged, or has another size where images are not resized.
    ///
    /// # Panics
    /// If there is no image `index`, or `out` is not one image long.
    pub fn decode(&self, index: usize, out: &mut [u8]) -> Result<(), DataError> {
        self.decode_window(index, |_, _| None, out)
    }

    /// Decodes image `index`; `window` as in [`ImageFile::decode`].
    pub(crate) fn decode_window(
        &self,
        index: usize,
        window: impl Fn(usize, usize) -> Option<Region>,
        out: &mut [u8],
    ) -> Result<(), DataError> {
        self.files[index].decode(self.shape, self.resize, window, out)
    }

    /// Decodes all images on all threads, and returns the mistakes in the order of the images.
    pub(crate) fn check(&self) -> Vec<DataError> {
        let scratch = || vec![0; self.shape.len()];
        let decoded = self
            .files
            .par_iter()
            .map_init(scratch, |out, file| file.decode(self.shape, self.resize, |_, _| None, out).err());
        decoded.collect::<Vec<_>>().into_iter().flatten().collect()
    }

    /// Returns the name of each image, without the folder of the data set; of a member of an archive also its place.
    pub fn names(&self) -> impl Iterator<Item = String> {
        self.files.iter().map(|file| match file {
            ImageFile::Path(path) => path.strip_prefix(&self.root).unwrap_or(path).display().to_string(),
            ImageFile::Member { archive, offset, len } => {
                format!("{}:{offset}+{len}", archive.strip_prefix(&self.root).unwrap_or(archive).display())
            }
        })
    }

    /// Returns the images `ids`, in their order.
    pub(crate) fn select(&self, ids: &[u32]) -> Self {
        let files = ids.iter().map(|&id| self.files[id as usize].clone()).collect();
        Self { files, root: self.root.clone(), ..*self }
    }

    /// Keeps the first `count` images.
    pub(crate) fn truncate(&mut self, count: usize) {
        self.files.truncate(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::tests::{bytes, golden, image, interleaved, numbers};
    use crate::pictures::png;

    #[test]
    fn resizing_and_cutting_the_centre_have_the_pixels_of_pil() {
        let folder = tempfile::tempdir().unwrap();
        for line in golden("resize") {
            let ([height, width], [cut, _]) = (numbers(&line, "size"), numbers(&line, "target"));
            let path = folder.path().join("picture");
            let (rgb, eight) = (png::ColorType::Rgb, png::BitDepth::Eight);
            std::fs::write(&path, png(width as u32, height as u32, rgb, eight, &image(height, width).pixels)).unwrap();
            let shape = ImageShape { channels: 3, height: cut, width: cut };
            let resize = Resize::ShorterSide(line["resize"].as_u64().unwrap() as usize);
            let mut out = vec![0; shape.len()];
            ImageFile::Path(path).decode(shape, resize, |_, _| None, &mut out).unwrap();
            assert_eq!(interleaved(&out), bytes(&line, "pixels"), "{height}x{width}, {resize:?}");
        }
    }

    #[test]
    fn the_centre_is_torchvisions() {
        let shape = ImageShape { channels: 3, height: 224, width: 224 };
        let of = |height, width| centre_of_resized((height, width), 256, shape);
        let part = |top, left| Region { top, left, height: 224, width: 224 };
        assert_eq!(of(375, 500), Target { height: 256, width: 341, part: part(16, 58) });
        assert_eq!(of(500, 375), Target { height: 341, width: 256, part: part(58, 16) });
        assert_eq!(of(10, 10), Target { height: 256, width: 256, part: part(16, 16) });
    }
}
