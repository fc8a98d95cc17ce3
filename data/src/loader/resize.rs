//! Resizes the images of a batch to smaller ones: bilinear with antialiasing, as `torch.nn.functional.interpolate(images, size,
//! mode="bilinear", antialias=True)`.

use rayon::prelude::*;

use crate::ImageShape;
use crate::bilinear::{Weights, weights};

/// A stage of progressive resizing: the size of the images up to an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResizeStage {
    /// The last epoch with images of this size, from [`FIRST_EPOCH`](crate::sampler::FIRST_EPOCH) = 1.
    pub last_epoch: usize,
    /// Shorter side in pixels.
    pub side: usize,
}

impl ResizeStage {
    /// Returns the shape to which images of `shape` are resized. Their proportions stay, within a pixel.
    pub fn resized(self, shape: ImageShape) -> ImageShape {
        let shorter = shape.height.min(shape.width).max(1);
        let resized = |extent: usize| ((extent * self.side + shorter / 2) / shorter).max(1);
        ImageShape { height: resized(shape.height), width: resized(shape.width), ..shape }
    }
}

/// Resizes images of `from`, `[N, C, H, W]`, to `to`.
pub(super) fn resize(images: &[f32], from: ImageShape, to: ImageShape) -> Vec<f32> {
    let of_axis = |from, to| weights(from, to, 0..to, |weight| weight as f32);
    let (columns, rows) = (of_axis(from.width, to.width), of_axis(from.height, to.height));
    let mut resized = vec![0.0; images.len() / from.len() * to.len()];
    let planes = images.par_chunks(from.height * from.width);
    let targets = resized.par_chunks_mut(to.height * to.width);
    planes.zip(targets).for_each_init(
        || vec![0.0; from.height * to.width],
        |narrow, (plane, target)| {
            for (line, narrow) in plane.chunks(from.width).zip(narrow.chunks_mut(to.width)) {
                for (out, Weights { first, weights }) in narrow.iter_mut().zip(&columns) {
                    *out = line[*first..].iter().zip(weights).map(|(pixel, weight)| pixel * weight).sum();
                }
            }
            for (out, Weights { first, weights }) in target.chunks_mut(to.width).zip(&rows) {
                out.fill(0.0);
                for (line, weight) in narrow.chunks(to.width).skip(*first).zip(weights) {
                    out.iter_mut().zip(line).for_each(|(out, pixel)| *out += pixel * weight);
                }
            }
        },
    );
    resized
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(channels: usize, height: usize, width: usize) -> ImageShape {
        ImageShape { channels, height, width }
    }

    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|i| (i * 37 % 23) as f32 / 7.0 - 1.0).collect()
    }

    /// `interpolate(x, size=(3, 5), mode="bilinear", antialias=True)` of PyTorch 2.15 for `[2, 1, 5, 8]`.
    #[test]
    fn small_images_equal_pytorchs() {
        let expected = [
            0.466605, 0.234316, 0.809524, 0.49811, 0.199443, 0.902597, 0.9806, 0.320767, 0.867725, -0.042569, 0.229128,
            0.712774, 0.538265, 0.54195, 0.794063, 0.777365, 0.768707, 0.387755, 0.371882, 0.574212, 0.535353,
            0.568489, 0.885582, 0.185185, 0.668831, 1.371985, 0.030234, 0.625, 0.5548, -0.004638,
        ];
        let found = resize(&numbers(80), shape(1, 5, 8), shape(1, 3, 5));
        assert_eq!(found.len(), expected.len());
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?}");
    }

    /// Sum, sum of squares and the first pixels of a row, by PyTorch 2.15 for `[1, 3, 32, 32]`.
    #[test]
    fn images_of_cifar_equal_pytorchs() {
        let expected: [(usize, f64, f64, [f32; 4]); 2] = [
            (16, 438.188_2, 278.719_12, [0.563_775_5, 0.372_767_87, 0.830_357_13, 0.3125]),
            (24, 986.144_17, 757.175_17, [1.172_727_3, 0.227_272_72, 0.759_150_1, 0.553_718_6]),
        ];
        for (side, sum, squares, row) in expected {
            let found = resize(&numbers(3 * 32 * 32), shape(3, 32, 32), shape(3, side, side));
            let total: f64 = found.iter().map(|&x| f64::from(x)).sum();
            let of_squares: f64 = found.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            assert!((total - sum).abs() < 1e-2 && (of_squares - squares).abs() < 1e-2, "{side}: {total}, {of_squares}");
            let at = (2 * side + 5) * side;
            assert!(found[at..at + 4].iter().zip(row).all(|(a, b)| (a - b).abs() < 1e-6), "{side}");
        }
    }

    #[test]
    fn proportions_stay() {
        let stage = ResizeStage { last_epoch: 1, side: 24 };
        assert_eq!(stage.resized(shape(3, 32, 32)), shape(3, 24, 24));
        assert_eq!(stage.resized(shape(3, 48, 64)), shape(3, 24, 32));
        assert_eq!(stage.resized(shape(1, 45, 30)), shape(1, 36, 24));
    }
}
