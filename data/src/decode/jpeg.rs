//! JPEG through `zune-jpeg`.

use std::io::{BufRead, Seek};

use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::{MAX_SIDE, TOO_LARGE, allocate_samples, text};

/// Reads the headers. Returns the decoder, and height and width. `is_complete`: the file has an end marker. Without the marker,
/// missing pixels are an error; the decoder's default would make them grey.
pub(super) fn open<R: BufRead + Seek>(
    source: R,
    is_complete: bool,
) -> Result<(JpegDecoder<R>, (usize, usize)), String> {
    let options = DecoderOptions::default()
        .set_strict_mode(!is_complete)
        .set_max_width(MAX_SIDE)
        .set_max_height(MAX_SIDE)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(source, options);
    decoder.decode_headers().map_err(|error| {
        let text = text(error);
        if text.contains("width limit") || text.contains("height limit") {
            format!("{TOO_LARGE} {MAX_SIDE}")
        } else {
            text
        }
    })?;
    let info = decoder.info().ok_or("the header has no size")?;
    if decoder.input_colorspace() == Some(ColorSpace::Luma) {
        // A third of the bytes; `decode` repeats them.
        decoder.set_options(options.jpeg_set_out_colorspace(ColorSpace::Luma));
    }
    Ok((decoder, (usize::from(info.height), usize::from(info.width))))
}

/// Decodes the image into `[H, W, 3]`.
pub(super) fn decode<R: BufRead + Seek>(decoder: &mut JpegDecoder<R>, plane: usize) -> Result<Vec<u8>, String> {
    let mut samples = allocate_samples(decoder.output_buffer_size())?;
    decoder.decode_into(&mut samples).map_err(text)?;
    Ok(if samples.len() == plane { samples.into_iter().flat_map(|grey| [grey; 3]).collect() } else { samples })
}

/// Returns whether a JPEG has its end marker, EOI. An image that ends early has none.
pub(super) fn is_complete(bytes: &[u8]) -> bool {
    const EOI: u8 = 0xd9;
    let mut at = 0;
    // Skip to the next marker: the bytes between markers are scan data.
    while let Some(start) = bytes.get(at..).and_then(|rest| rest.iter().position(|&byte| byte == 0xff)) {
        at += start;
        // Any number of 0xff may precede a marker.
        while bytes.get(at) == Some(&0xff) {
            at += 1;
        }
        let Some(&marker) = bytes.get(at) else { return false };
        at += 1;
        match marker {
            EOI => return true,
            // In a scan, a byte 0xff that does not start a marker is followed by 0. The markers TEM, RST and SOI have no length.
            0 | 1 | 0xd0..=0xd8 => {}
            _ => {
                let Some(&[high, low]) = bytes.get(at..at + 2) else { return false };
                at += usize::from(u16::from_be_bytes([high, low]));
            }
        }
    }
    false
}
