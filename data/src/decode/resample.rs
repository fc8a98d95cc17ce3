//! Bilinear resampling with antialiasing, in PIL's arithmetic: `Image.resize(size, Image.BILINEAR)`, which torchvision's `Resize`
//! and `RandomResizedCrop` call for PIL images. Results are equal to PIL's bit for bit (`src/libImaging/Resample.c`). Since
//! version 13, PIL resamples columns before rows where the height shrinks most. There, results differ by at most one level.

use super::RgbImage;
use crate::bilinear::{Weights, weights};

/// A rectangle of pixels: rows from `top` on, columns from `left` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) top: usize,
    pub(crate) left: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
}

impl Region {
    /// Returns the region of a whole image.
    pub(crate) fn whole(height: usize, width: usize) -> Self {
        Self { top: 0, left: 0, height, width }
    }
}

/// The size to which a region is resampled, and the part of the result that is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResizeTarget {
    pub(crate) height: usize,
    pub(crate) width: usize,
    pub(crate) part: Region,
}

impl ResizeTarget {
    /// Makes a target of which the whole result is computed.
    pub(crate) fn whole(height: usize, width: usize) -> Self {
        Self { height, width, part: Region::whole(height, width) }
    }
}

/// Fractional bits of a fixed-point weight. Of the 32 bits, 8 are for the pixel and 2 for the sum's sign and overflow.
const PRECISION: u32 = 32 - 8 - 2;

/// Rounds a weight to fixed point.
fn fixed(weight: f64) -> i32 {
    (0.5 + weight * f64::from(1 << PRECISION)) as i32
}

/// Rounds a sum of weighted pixels.
fn rounded(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}

/// Half of a pixel value's unit, which rounds a sum.
const HALF: i32 = 1 << (PRECISION - 1);

/// Resamples the region `source` of `image` to the size of `target`, and writes the target's part to `out` as planes,
/// `[3, H, W]`. Rows are resampled first, then columns, as in PIL.
///
/// # Panics
/// If the region is not inside the image, the part not inside the target, or `out` has another length.
pub(crate) fn resample(image: &RgbImage, source: Region, target: ResizeTarget, out: &mut [u8]) {
    let part = target.part;
    assert!(source.top + source.height <= image.height && source.left + source.width <= image.width);
    assert!(part.top + part.height <= target.height && part.left + part.width <= target.width);
    let plane = part.height * part.width;
    assert_eq!(out.len(), 3 * plane, "output of another shape");
    let row_len = 3 * part.width;
    let vertical = (source.height != target.height)
        .then(|| weights(source.height, target.height, part.top..part.top + part.height, fixed));
    let horizontal = (source.width != target.width)
        .then(|| weights(source.width, target.width, part.left..part.left + part.width, fixed));
    // Only the rows that the result needs.
    let rows = match vertical.as_deref() {
        Some([first, .., last]) => first.first..last.first + last.weights.len(),
        Some([one]) => one.first..one.first + one.weights.len(),
        _ => part.top..part.top + part.height,
    };
    let mut wide = vec![0; rows.len() * row_len];
    for (row, wide) in rows.clone().zip(wide.chunks_exact_mut(row_len)) {
        let start = ((source.top + row) * image.width + source.left) * 3;
        let pixels = &image.pixels[start..start + 3 * source.width];
        match &horizontal {
            None => wide.copy_from_slice(&pixels[3 * part.left..][..row_len]),
            Some(horizontal) => narrow_row(pixels, horizontal, wide),
        }
    }
    let mut sums = vec![0i32; row_len];
    let mut done = vec![0u8; row_len];
    for y in 0..part.height {
        let row = match &vertical {
            None => &wide[y * row_len..][..row_len],
            Some(vertical) => {
                let Weights { first, weights } = &vertical[y];
                sums.fill(HALF);
                for (&weight, row) in weights.iter().zip(wide[(first - rows.start) * row_len..].chunks_exact(row_len)) {
                    sums.iter_mut().zip(row).for_each(|(sum, &pixel)| *sum += i32::from(pixel) * weight);
                }
                done.iter_mut().zip(&sums).for_each(|(done, &sum)| *done = rounded(sum));
                &done
            }
        };
        for (channel, plane) in out.chunks_exact_mut(plane).enumerate() {
            let out = &mut plane[y * part.width..][..part.width];
            out.iter_mut().zip(row.chunks_exact(3)).for_each(|(out, pixel)| *out = pixel[channel]);
        }
    }
}

/// Resamples one row of RGB pixels.
fn narrow_row(pixels: &[u8], weights: &[Weights<i32>], out: &mut [u8]) {
    for (Weights { first, weights }, out) in weights.iter().zip(out.chunks_exact_mut(3)) {
        let mut sums = [HALF; 3];
        for (&weight, pixel) in weights.iter().zip(pixels[3 * first..].chunks_exact(3)) {
            for (sum, &sample) in sums.iter_mut().zip(pixel) {
                *sum += i32::from(sample) * weight;
            }
        }
        out.copy_from_slice(&sums.map(rounded));
    }
}
