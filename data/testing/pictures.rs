//! Writes images for tests and measurements: PNG and JPEG files of pixels that a function determines.

#![allow(dead_code, reason = "each user uses a part")]

use std::path::Path;

/// Returns the RGB pixels of an image, row by row, `[H, W, 3]`. `pixel` gets column and row.
pub fn rgb(width: u32, height: u32, pixel: impl Fn(u32, u32) -> [u8; 3]) -> Vec<u8> {
    (0..height).flat_map(|y| (0..width).map(move |x| (x, y))).flat_map(|(x, y)| pixel(x, y)).collect()
}

/// Returns a PNG of samples in the file's order. 16-bit samples are big-endian.
pub fn png(width: u32, height: u32, color: png::ColorType, depth: png::BitDepth, samples: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(color);
    encoder.set_depth(depth);
    encoder.set_compression(png::Compression::Fastest);
    encoder.write_header().and_then(|mut writer| writer.write_image_data(samples)).expect("a PNG in memory");
    bytes
}

/// Writes an RGB image as PNG. `pixel` gets column and row.
pub fn save_png(path: impl AsRef<Path>, width: u32, height: u32, pixel: impl Fn(u32, u32) -> [u8; 3]) {
    let pixels = rgb(width, height, pixel);
    save(path.as_ref(), &png(width, height, png::ColorType::Rgb, png::BitDepth::Eight, &pixels));
}

/// Writes a grey image, `[H, W]`, as PNG.
pub fn save_grey_png(path: impl AsRef<Path>, width: u32, height: u32, pixels: &[u8]) {
    save(path.as_ref(), &png(width, height, png::ColorType::Grayscale, png::BitDepth::Eight, pixels));
}

fn save(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("the picture's folder exists");
}

/// Returns a JPEG of RGB pixels, `[H, W, 3]`, at quality 90 without subsampled colours.
pub fn jpeg(width: u16, height: u16, pixels: &[u8]) -> Vec<u8> {
    jpeg_of(width, height, pixels, jpeg_encoder::ColorType::Rgb, |_| {})
}

/// Returns a JPEG of samples that `color` describes, with what `set` changes.
pub fn jpeg_of(
    width: u16,
    height: u16,
    samples: &[u8],
    color: jpeg_encoder::ColorType,
    set: impl Fn(&mut jpeg_encoder::Encoder<&mut Vec<u8>>),
) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = jpeg_encoder::Encoder::new(&mut bytes, 90);
    set(&mut encoder);
    encoder.encode(samples, width, height, color).expect("a JPEG in memory");
    bytes
}
