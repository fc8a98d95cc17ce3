//! PNG and JPEG images as RGB pixels, and their resampling.
//!
//! Images become RGB as with PIL's `convert("RGB")`: grey is repeated, palettes are looked up, transparency is dropped. CMYK
//! becomes RGB. Samples of 16 bits are rounded to 8 (PIL takes the high byte of colours and clips grey). The orientation in EXIF
//! data is ignored, as by torchvision's `ImageFolder`.

mod jpeg;
mod resample;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt::Display;
use std::io::{BufRead, Cursor, Read, Seek, SeekFrom};

use png::{BitDepth, ColorType, Transformations};
pub(crate) use resample::{Region, ResizeTarget, resample};

/// Maximum memory that the decoder of one image may allocate, in bytes. It bounds what a forged header can request.
pub(crate) const MAX_DECODED: usize = 1 << 30;

/// Maximum side of an image, in pixels: larger than any use, small enough that no size overflows.
pub(crate) const MAX_SIDE: usize = 16_384;
/// Part of the message about an image whose sides cannot be decoded.
pub(crate) const TOO_LARGE: &str = "each side must be from 1 to";

/// The first bytes of every PNG.
const PNG_SIGNATURE: [u8; 8] = *b"\x89PNG\r\n\x1a\n";

/// The first bytes of every JPEG: the markers SOI and the start of the next.
const JPEG_SIGNATURE: [u8; 3] = [0xff, 0xd8, 0xff];

/// A decoded image, 8 bits per sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RgbImage {
    pub(crate) height: usize,
    pub(crate) width: usize,
    /// `[H, W, 3]`.
    pub(crate) pixels: Vec<u8>,
}

/// A compressed image whose header is read.
pub(crate) struct Decoder<'a> {
    format: ImageDecoder<Cursor<&'a [u8]>>,
    size: (usize, usize),
}

enum ImageDecoder<R: BufRead + Seek> {
    Png(Box<png::Reader<R>>),
    Jpeg(Box<zune_jpeg::JpegDecoder<R>>),
}

impl<'a> Decoder<'a> {
    /// Reads the header of an image.
    ///
    /// # Errors
    /// The image is neither PNG nor JPEG, its header is damaged, or its size is 0 or too large.
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Self, String> {
        // A PNG that ends early is an error of its decoder.
        let is_complete = !bytes.starts_with(&JPEG_SIGNATURE) || jpeg::is_complete(bytes);
        let (format, size) = open(Cursor::new(bytes), is_complete)?;
        Ok(Self { format, size })
    }

    /// Returns the height and width in pixels, each from 1 to [`MAX_SIDE`].
    pub(crate) fn size(&self) -> (usize, usize) {
        self.size
    }

    /// Decodes the pixels.
    ///
    /// # Errors
    /// The image is damaged or ends early, or has a feature that is not supported.
    pub(crate) fn decode(self) -> Result<RgbImage, String> {
        let (height, width) = self.size;
        let pixels = match self.format {
            ImageDecoder::Png(reader) => decode_png(*reader)?,
            ImageDecoder::Jpeg(mut decoder) => jpeg::decode(&mut decoder, height * width)?,
        };
        match pixels.len() == height * width * 3 {
            true => Ok(RgbImage { height, width, pixels }),
            false => Err(format!("{} bytes of pixels for {width}x{height} pixels", pixels.len())),
        }
    }
}

/// Returns the height and width of an image and reads no more than its header.
///
/// # Errors
/// Those of [`Decoder::new`].
pub(crate) fn read_size(source: impl BufRead + Seek) -> Result<(usize, usize), String> {
    open(source, true).map(|(_, size)| size)
}

/// Reads an image's header, and returns the decoder and height and width. The first bytes determine the format, because names
/// are often wrong. `is_complete`: a JPEG has its end marker.
fn open<R: BufRead + Seek>(mut source: R, is_complete: bool) -> Result<(ImageDecoder<R>, (usize, usize)), String> {
    let mut start = Vec::with_capacity(PNG_SIGNATURE.len());
    source.by_ref().take(PNG_SIGNATURE.len() as u64).read_to_end(&mut start).map_err(text)?;
    source.seek(SeekFrom::Start(0)).map_err(text)?;
    if start == PNG_SIGNATURE {
        let mut decoder = png::Decoder::new_with_limits(source, png::Limits { bytes: MAX_DECODED });
        decoder.set_ignore_text_chunk(true);
        decoder.set_ignore_iccp_chunk(true);
        // Palettes, fewer than 8 bits and transparent colours become 8 bits and an alpha channel.
        decoder.set_transformations(Transformations::EXPAND);
        let (width, height) = decoder.read_header_info().map_err(text)?.size();
        let size = checked_size(height as usize, width as usize)?;
        Ok((ImageDecoder::Png(Box::new(decoder.read_info().map_err(text)?)), size))
    } else if start.starts_with(&JPEG_SIGNATURE) {
        let (decoder, (height, width)) = jpeg::open(source, is_complete)?;
        Ok((ImageDecoder::Jpeg(Box::new(decoder)), checked_size(height, width)?))
    } else {
        Err("neither a PNG nor a JPEG begins like this".into())
    }
}

fn text(error: impl Display) -> String {
    error.to_string()
}

/// Returns a size that can be decoded.
fn checked_size(height: usize, width: usize) -> Result<(usize, usize), String> {
    let is_possible = |side| (1..=MAX_SIDE).contains(&side);
    match is_possible(height) && is_possible(width) {
        true => Ok((height, width)),
        false => Err(format!("{width}x{height} pixels; {TOO_LARGE} {MAX_SIDE}")),
    }
}

/// Allocates the memory of a decoded image.
fn allocate_samples(len: Option<usize>) -> Result<Vec<u8>, String> {
    let len =
        len.filter(|&len| len <= MAX_DECODED).ok_or_else(|| format!("more than {MAX_DECODED} bytes of pixels"))?;
    Ok(vec![0; len])
}

/// Decodes the image of a PNG; of an animation the default image.
fn decode_png<R: BufRead + Seek>(mut reader: png::Reader<R>) -> Result<Vec<u8>, String> {
    let mut samples = allocate_samples(reader.output_buffer_size())?;
    let frame = reader.next_frame(&mut samples).map_err(text)?;
    samples.truncate(frame.buffer_size());
    let channels = match frame.color_type {
        ColorType::Grayscale => 1,
        ColorType::GrayscaleAlpha => 2,
        ColorType::Rgb => 3,
        ColorType::Rgba => 4,
        ColorType::Indexed => return Err("the palette is missing".into()),
    };
    let samples = match frame.bit_depth {
        BitDepth::Eight => samples,
        BitDepth::Sixteen => {
            samples.chunks_exact(2).map(|two| to_8_bits(u16::from_be_bytes([two[0], two[1]]))).collect()
        }
        depth => return Err(format!("{} bits per sample were not expanded", depth as u8)),
    };
    Ok(match channels {
        3 => samples,
        4 => samples.chunks_exact(4).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect(),
        _ => samples.chunks_exact(channels).flat_map(|pixel| [pixel[0]; 3]).collect(),
    })
}

/// Scales a sample from 0..65535 to 0..255, rounded. PIL does not: it takes the high byte of colours and clips grey at 255.
fn to_8_bits(sample: u16) -> u8 {
    ((u32::from(sample) + 128) / 257) as u8
}
