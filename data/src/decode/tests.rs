//! Decoding and resampling compared with PIL (`tests/reference/images.jsonl`).

use serde_json::Value;

use super::*;
use crate::pictures::{jpeg, png, rgb};

pub(crate) fn golden(key: &str) -> Vec<Value> {
    let lines = include_str!("../../tests/reference/images.jsonl").lines();
    lines.map(|line| serde_json::from_str::<Value>(line).unwrap()).filter(|line| !line[key].is_null()).collect()
}

pub(crate) fn bytes(line: &Value, key: &str) -> Vec<u8> {
    let digits = line[key].as_str().unwrap();
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}

pub(crate) fn numbers<const N: usize>(line: &Value, key: &str) -> [usize; N] {
    std::array::from_fn(|at| line[key][at].as_u64().unwrap() as usize)
}

/// The same picture as in `make_images_golden.py`.
pub(crate) fn image(height: usize, width: usize) -> RgbImage {
    let pixels = rgb(width as u32, height as u32, |x, y| {
        let check = if (x / 5 + y / 4) % 2 == 1 { 230 } else { 20 };
        [(x * 255 / (width as u32 - 1).max(1)) as u8, ((y * 11 + x * 3) % 256) as u8, (check + (x * y) % 17) as u8]
    });
    RgbImage { height, width, pixels }
}

fn decode(bytes: &[u8]) -> Result<RgbImage, String> {
    Decoder::new(bytes)?.decode()
}

/// Returns `[3, H, W]` as `[H, W, 3]`.
pub(crate) fn interleaved(planes: &[u8]) -> Vec<u8> {
    let plane = planes.len() / 3;
    (0..plane).flat_map(|at| [planes[at], planes[plane + at], planes[2 * plane + at]]).collect()
}

#[test]
fn every_kind_of_file_has_the_pixels_of_pil() {
    let lines = golden("file");
    assert_eq!(lines.len(), 16);
    for line in lines {
        let name = line["file"].as_str().unwrap();
        let image = decode(&bytes(&line, "bytes")).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!([image.height, image.width], numbers(&line, "size"), "{name}");
        let distances: Vec<u8> = image.pixels.iter().zip(bytes(&line, "pixels")).map(|(a, b)| a.abs_diff(b)).collect();
        let mean = distances.iter().map(|&distance| f64::from(distance)).sum::<f64>() / distances.len() as f64;
        let largest = distances.into_iter().max().unwrap();
        println!("{name}: at most {largest}, mean {mean:.3}");
        // JPEG does not define the rounding of its transforms.
        let (most, most_mean) = if name.starts_with("png") { (0, 0.0) } else { (3, 0.6) };
        assert!(largest <= most && mean <= most_mean, "{name}: at most {largest}, mean {mean:.3}");
    }
}

#[test]
fn resampling_has_the_pixels_of_pil() {
    for line in golden("crop") {
        let ([height, width], [target_height, target_width]) = (numbers(&line, "size"), numbers(&line, "target"));
        let [top, left, region_height, region_width] = numbers(&line, "crop");
        let region = Region { top, left, height: region_height, width: region_width };
        let mut out = vec![0; 3 * target_height * target_width];
        resample(&image(height, width), region, ResizeTarget::whole(target_height, target_width), &mut out);
        let distances = interleaved(&out).into_iter().zip(bytes(&line, "pixels")).map(|(a, b)| a.abs_diff(b));
        // From version 13 on PIL starts with the columns where that is faster. The sums between are rounded, too.
        let less = |source: usize, target: usize| source as i64 - target as i64;
        let columns_first = less(region_height, target_height) > 0.max(2 * less(region_width, target_width));
        let largest = distances.max().unwrap();
        assert!(largest <= u8::from(columns_first), "{region:?} of {height}x{width}: {largest}");
    }
}

#[test]
fn a_part_of_the_result_is_that_of_the_whole_result() {
    let (image, region) = (image(37, 53), Region { top: 3, left: 1, height: 31, width: 50 });
    for (height, width) in [(16, 20), (31, 20), (60, 50), (31, 50)] {
        let mut whole = vec![0; 3 * height * width];
        resample(&image, region, ResizeTarget::whole(height, width), &mut whole);
        let part = Region { top: 5, left: 7, height: 9, width: 11 };
        let mut out = vec![0; 3 * 9 * 11];
        resample(&image, region, ResizeTarget { height, width, part }, &mut out);
        let expected = (0..3).flat_map(|channel| (5..14).map(move |y| (channel * height + y) * width + 7));
        let expected: Vec<u8> = expected.flat_map(|at| whole[at..at + 11].to_vec()).collect();
        assert_eq!(out, expected, "{height}x{width}");
    }
}

#[test]
fn a_jpeg_that_ends_early_is_an_error() {
    let picture = image(48, 64);
    let baseline = jpeg(64, 48, &picture.pixels);
    let progressive = crate::pictures::jpeg_of(64, 48, &picture.pixels, jpeg_encoder::ColorType::Rgb, |encoder| {
        encoder.set_progressive(true);
    });
    for file in [baseline, progressive] {
        assert!(decode(&file).is_ok());
        assert!(decode(&[&file[..], b"more bytes behind the end"].concat()).is_ok());
        for part in [3, file.len() / 4, file.len() / 2, file.len() * 3 / 4] {
            assert!(decode(&file[..part]).is_err(), "{part} bytes of {}", file.len());
        }
    }
    // Only the end marker is missing: all pixels are there.
    let file = jpeg(64, 48, &picture.pixels);
    assert_eq!(decode(&file[..file.len() - 2]), decode(&file));
}

#[test]
fn sizes_are_read_from_headers_and_have_a_limit() {
    let picture = png(5, 3, png::ColorType::Grayscale, png::BitDepth::Eight, &[0; 15]);
    assert_eq!(read_size(Cursor::new(&picture[..60])), Ok((3, 5)));
    let picture = jpeg(16, 8, &[9; 16 * 8 * 3]);
    assert_eq!(read_size(Cursor::new(&picture)), Ok((8, 16)));
    let wide = png(16_385, 1, png::ColorType::Grayscale, png::BitDepth::Eight, &[0; 16_385]);
    assert_eq!(decode(&wide).unwrap_err(), "16385x1 pixels; each side must be from 1 to 16384");
    assert_eq!(decode(b"GIF89a").unwrap_err(), "neither a PNG nor a JPEG begins like this");
    assert!(decode(&[]).is_err());
}
