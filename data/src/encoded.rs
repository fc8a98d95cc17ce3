//! Images that stay in their files: they are read and decoded whenever a batch needs them.

use std::io::{BufReader, Cursor, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rayon::prelude::*;

use crate::crops::{TEN_CROP, centre_of_resized, crops_of_resized};
use crate::decode::{self, Decoder, Region, ResizeTarget, TOO_LARGE, resample};
use crate::formats::{ParsedFile, open, read_error};
use crate::{DataError, ImageShape};

/// Maximum size of an encoded image, in bytes.
pub(crate) const MAX_BYTES: u64 = 1 << 30;

/// Number of pixels from which an image is large. Threads decode large images one at a time.
const LARGE: usize = 4096 * 4096;

/// Held while a large image is decoded.
static LARGE_IMAGE_LOCK: Mutex<()> = Mutex::new(());

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

/// Location of an encoded image.
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
    /// Returns the name of the image below the folder `root`. For a member of an archive, adds its position.
    pub(crate) fn name(&self, root: &Path) -> String {
        match self {
            Self::Path(path) => path.strip_prefix(root).unwrap_or(path).display().to_string(),
            Self::Member { archive, offset, len } => {
                format!("{}:{offset}+{len}", archive.strip_prefix(root).unwrap_or(archive).display())
            }
        }
    }

    /// Reads the encoded image.
    fn read(&self) -> Result<Vec<u8>, DataError> {
        let (path, offset) = match self {
            Self::Path(path) => (path.as_path(), 0),
            Self::Member { archive, offset, .. } => (&**archive, *offset),
        };
        let (mut file, file_len) = open(path)?;
        match *self {
            Self::Path(_) => {
                let mut bytes = Vec::with_capacity(self.check_len(file_len)? as usize);
                // The file may grow meanwhile.
                file.by_ref().take(MAX_BYTES).read_to_end(&mut bytes).map_err(|e| read_error(path, &e))?;
                Ok(bytes)
            }
            Self::Member { len, .. } => {
                let mut bytes = vec![0; self.check_len(len)? as usize];
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
                self.check_len(len)?;
                let mut source = BufReader::new(ParsedFile::new(path, file));
                let size = decode::read_size(&mut source);
                // The decoder's text does not tell a disk that does not answer from a damaged image.
                if let (Err(_), Some(failure)) = (&size, source.into_inner().failure) {
                    return Err(failure);
                }
                size
            }
            Self::Member { .. } => decode::read_size(Cursor::new(self.read()?)),
        };
        size.map_err(|cause| self.damaged(&cause))
    }

    /// Decodes the image into `out`, `[3, H, W]` of `shape`. `window` gets the height and width of the image and returns the region
    /// to resample to `shape`. If `window` returns `None`, `resize` determines the pixels.
    pub(crate) fn decode(
        &self,
        shape: ImageShape,
        resize: Resize,
        window: impl Fn(usize, usize) -> Option<Region>,
        out: &mut [u8],
    ) -> Result<(), DataError> {
        let part = |height: usize, width: usize| {
            let whole = Region::whole(height, width);
            Ok(match (window(height, width), resize) {
                (Some(region), _) => [(region, ResizeTarget::whole(shape.height, shape.width))],
                (None, Resize::ShorterSide(side)) => [(whole, centre_of_resized((height, width), side, shape))],
                (None, Resize::None) if (height, width) != (shape.height, shape.width) => {
                    return Err(self.size_mismatch((height, width), shape));
                }
                (None, _) => [(whole, ResizeTarget::whole(shape.height, shape.width))],
            })
        };
        self.decode_parts(part, out)
    }

    /// Decodes ten views of the image into `out`, `[10, 3, H, W]` of `shape`: those of [`crate::TEN_CROP`]. The shorter side is
    /// resampled to `side` pixels, which is at least the sides of `shape`.
    pub(crate) fn decode_ten_crops(&self, shape: ImageShape, side: usize, out: &mut [u8]) -> Result<(), DataError> {
        let parts = |height: usize, width: usize| {
            let crops = crops_of_resized((height, width), side, shape);
            Ok(crops.map(|target| (Region::whole(height, width), target)))
        };
        self.decode_parts(parts, out)?;
        // The last five are of the mirrored image.
        let (_, mirrored) = out.split_at_mut(TEN_CROP / 2 * shape.len());
        mirrored.chunks_exact_mut(shape.width).for_each(<[u8]>::reverse);
        Ok(())
    }

    /// Decodes the image and writes resampled regions of it to `out`. `parts` returns the regions, from the height and width.
    fn decode_parts<const N: usize>(
        &self,
        parts: impl FnOnce(usize, usize) -> Result<[(Region, ResizeTarget); N], DataError>,
        out: &mut [u8],
    ) -> Result<(), DataError> {
        let bytes = self.read()?;
        let decoder = Decoder::new(&bytes).map_err(|cause| self.damaged(&cause))?;
        let (height, width) = decoder.size();
        let parts = parts(height, width)?;
        // A large image takes as much memory as thousands of small ones: decode one at a time.
        let _lock = (height * width > LARGE).then(|| LARGE_IMAGE_LOCK.lock());
        let image = decoder.decode().map_err(|cause| self.damaged(&cause))?;
        let len = out.len() / N;
        for ((region, target), out) in parts.into_iter().zip(out.chunks_exact_mut(len)) {
            resample(&image, region, target, out);
        }
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
    pub(crate) fn size_mismatch(&self, (height, width): (usize, usize), shape: ImageShape) -> DataError {
        let cause = format!("is {width}x{height} pixels, the first image is {}x{}", shape.width, shape.height);
        self.error(cause, "set image_size in [data] to resize all images to a square")
    }

    /// Makes the error of an image that cannot be decoded.
    fn damaged(&self, cause: &str) -> DataError {
        let hint = if cause.contains(TOO_LARGE) {
            "scale the image down, or remove it"
        } else {
            "the image is damaged or of another format: replace it, convert it to PNG or JPEG, or remove it"
        };
        // The decoder's text may have several lines.
        let cause = cause.split_whitespace().collect::<Vec<_>>().join(" ");
        self.error(format!("cannot be decoded: {cause}"), hint).of_bad_image()
    }

    /// Returns a length in bytes that an image may have.
    fn check_len(&self, len: u64) -> Result<u64, DataError> {
        match len <= MAX_BYTES {
            true => Ok(len),
            false => {
                let cause = format!("has {len} bytes, an image has at most {MAX_BYTES}");
                Err(self.error(cause, "replace the image if it is damaged, or scale it down").of_bad_image())
            }
        }
    }
}

/// Returns the pixels of the shorter side from which ten crops are cut.
///
/// # Errors
/// See [`EncodedImages::ten_crop_side`].
pub(crate) fn ten_crop_side(resize: Resize) -> Result<usize, DataError> {
    match resize {
        Resize::ShorterSide(side) => Ok(side),
        Resize::None | Resize::Whole => {
            let hint = "cut them out of images whose shorter side is resized: data.resize = 256 with image_size = 224";
            Err(DataError::new("", "ten crops need images that are larger than those of the network", hint)
                .at("ten_crop"))
        }
    }
}

/// The encoded images of one split.
#[derive(Debug, Clone)]
pub struct EncodedImages {
    files: Vec<ImageFile>,
    resize: Resize,
    shape: ImageShape,
    /// Whether the caller decodes the images once. If false, the loader decodes them in each epoch.
    is_decoding_deferred: bool,
    /// The folder that [`EncodedImages::names`] removes from the names.
    root: PathBuf,
}

impl EncodedImages {
    /// Makes the images of a split, of three channels, from their files. `source` is the folder of the data set or a file in it.
    pub(crate) fn new(files: Vec<ImageFile>, resize: Resize, shape: ImageShape, source: &Path) -> Self {
        let root = if source.is_dir() { source } else { source.parent().unwrap_or(source) };
        Self { files, resize, shape, is_decoding_deferred: false, root: root.to_owned() }
    }

    /// Marks that the caller decodes the images once.
    pub(crate) fn with_deferred_decoding(self) -> Self {
        Self { is_decoding_deferred: true, ..self }
    }

    /// Returns whether the caller decodes the images once ([`crate::formats::LoadRequest::defer_decoding`]). Otherwise they are
    /// decoded in each epoch.
    pub fn is_decoding_deferred(&self) -> bool {
        self.is_decoding_deferred
    }

    /// Decodes a part of the pixels of all images, `[N, 3, H, W]`, on all threads: `out.len()` bytes from byte `start` on. Bytes
    /// after the last image stay as they are.
    ///
    /// # Errors
    /// The first image of the part that cannot be decoded.
    pub fn decode_bytes(&self, start: usize, out: &mut [u8]) -> Result<(), DataError> {
        let len = self.shape.len();
        let end = (start + out.len()).min(self.len() * len);
        let (mut parts, mut rest, mut at) = (Vec::new(), out, start);
        while at < end {
            let (image, offset) = (at / len, at % len);
            let (part, after) = rest.split_at_mut((len - offset).min(end - at));
            at += part.len();
            rest = after;
            parts.push((image, offset, part));
        }
        let failed = parts.into_par_iter().find_map_first(|(image, offset, part)| {
            if part.len() == len {
                return self.decode(image, part).err();
            }
            let mut whole = vec![0; len];
            let decoded = self.decode(image, &mut whole);
            part.copy_from_slice(&whole[offset..][..part.len()]);
            decoded.err()
        });
        failed.map_or(Ok(()), Err)
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

    /// Decodes ten views of image `index` into `out`, `[10, 3, H, W]`.
    pub(crate) fn decode_ten_crops(&self, index: usize, out: &mut [u8]) -> Result<(), DataError> {
        self.files[index].decode_ten_crops(self.shape, self.ten_crop_side()?, out)
    }

    /// Returns the pixels of the shorter side from which ten crops are cut.
    ///
    /// # Errors
    /// Whole images are resized to the shape of the data set, or not at all, so there is nothing to cut.
    pub(crate) fn ten_crop_side(&self) -> Result<usize, DataError> {
        ten_crop_side(self.resize)
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

    /// Returns the name of each image, without the folder of the data set. For a member of an archive, adds its position.
    pub fn names(&self) -> impl Iterator<Item = String> {
        self.files.iter().map(|file| file.name(&self.root))
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
    use crate::crops::CENTRE_CROP;
    use crate::decode::tests::{bytes, golden, image, interleaved, numbers};
    use crate::pictures::png;

    /// Writes the test image of that height and width as PNG.
    fn picture(folder: &tempfile::TempDir, [height, width]: [usize; 2]) -> ImageFile {
        let path = folder.path().join("picture");
        let (rgb, eight) = (png::ColorType::Rgb, png::BitDepth::Eight);
        std::fs::write(&path, png(width as u32, height as u32, rgb, eight, &image(height, width).pixels)).unwrap();
        ImageFile::Path(path)
    }

    #[test]
    fn resizing_and_cutting_the_centre_have_the_pixels_of_pil() {
        let folder = tempfile::tempdir().unwrap();
        for line in golden("resize") {
            let ([height, width], [cut, _]) = (numbers(&line, "size"), numbers(&line, "target"));
            let file = picture(&folder, [height, width]);
            let shape = ImageShape { channels: 3, height: cut, width: cut };
            let resize = Resize::ShorterSide(line["resize"].as_u64().unwrap() as usize);
            let mut out = vec![0; shape.len()];
            file.decode(shape, resize, |_, _| None, &mut out).unwrap();
            assert_eq!(interleaved(&out), bytes(&line, "pixels"), "{height}x{width}, {resize:?}");
        }
    }

    #[test]
    fn ten_crops_are_torchvisions() {
        let folder = tempfile::tempdir().unwrap();
        for line in golden("ten_crop") {
            let ([height, width], [rows, columns]) = (numbers(&line, "size"), numbers(&line, "target"));
            let file = picture(&folder, [height, width]);
            let shape = ImageShape { channels: 3, height: rows, width: columns };
            let side = line["ten_crop"].as_u64().unwrap() as usize;
            let mut out = vec![0; TEN_CROP * shape.len()];
            file.decode_ten_crops(shape, side, &mut out).unwrap();
            let views: Vec<u8> = out.chunks_exact(shape.len()).flat_map(interleaved).collect();
            assert_eq!(views, bytes(&line, "pixels"), "{height}x{width}");
            let mut centre = vec![0; shape.len()];
            file.decode(shape, Resize::ShorterSide(side), |_, _| None, &mut centre).unwrap();
            assert_eq!(out[CENTRE_CROP * shape.len()..][..shape.len()], centre);
        }
        assert_eq!(golden("ten_crop").len(), 2);
    }
}
