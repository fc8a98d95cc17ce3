//! The parts of resized images that torchvision's `CenterCrop` and `TenCrop` cut out.

use crate::ImageShape;
use crate::decode::{Region, ResizeTarget};

/// Number of views of an image in a ten-crop evaluation (torchvision's `TenCrop`). View [`CENTRE_CROP`] is the only view of an
/// evaluation without ten crops.
pub const TEN_CROP: usize = 10;

/// Index of the view that is the centre of the image.
pub const CENTRE_CROP: usize = 4;

/// Returns the height and width of an image whose shorter side is resampled to `side` pixels, in torchvision's rounding.
fn resized((height, width): (usize, usize), side: usize) -> (usize, usize) {
    let longer = |short: usize, long: usize| (side * long) / short;
    match height < width {
        true => (side, longer(height, width)),
        false => (longer(width, height), side),
    }
}

/// Returns the first row or column of the middle `part` of `all` pixels: `CenterCrop` rounds halves to even.
fn middle(all: usize, part: usize) -> usize {
    ((all - part) as f64 / 2.0).round_ties_even() as usize
}

/// Returns the centre of an image whose shorter side is resampled to `side` pixels.
pub(crate) fn centre_of_resized(size: (usize, usize), side: usize, shape: ImageShape) -> ResizeTarget {
    let (height, width) = resized(size, side);
    let (top, left) = (middle(height, shape.height), middle(width, shape.width));
    ResizeTarget { height, width, part: Region { top, left, height: shape.height, width: shape.width } }
}

/// Returns the crops of torchvision's `TenCrop` of an image whose shorter side is resampled to `side` pixels: the corners (top
/// left, top right, bottom left, bottom right) and the centre, and then those that mirror to the crops of the mirrored image.
pub(crate) fn crops_of_resized(size: (usize, usize), side: usize, shape: ImageShape) -> [ResizeTarget; TEN_CROP] {
    let (height, width) = resized(size, side);
    let (bottom, right) = (height - shape.height, width - shape.width);
    let places =
        [(0, 0), (0, right), (bottom, 0), (bottom, right), (middle(height, shape.height), middle(width, shape.width))];
    std::array::from_fn(|at| {
        let (top, left) = places[at % places.len()];
        let left = if at < places.len() { left } else { right - left };
        ResizeTarget { height, width, part: Region { top, left, height: shape.height, width: shape.width } }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_centre_is_torchvisions() {
        let shape = ImageShape { channels: 3, height: 224, width: 224 };
        let of = |height, width| centre_of_resized((height, width), 256, shape);
        let part = |top, left| Region { top, left, height: 224, width: 224 };
        assert_eq!(of(375, 500), ResizeTarget { height: 256, width: 341, part: part(16, 58) });
        assert_eq!(of(500, 375), ResizeTarget { height: 341, width: 256, part: part(58, 16) });
        assert_eq!(of(10, 10), ResizeTarget { height: 256, width: 256, part: part(16, 16) });
    }
}
