//! Affine changes of an image with nearest-neighbour sampling, as torchvision's `affine` and `rotate` do them on tensors
//! (`affine_grid` and `grid_sample` with `align_corners=False`).

use crate::ImageShape;

/// Maps a pixel of the result to its source. Coordinates are pixels from the image's centre, x right and y down:
/// `source x = m[0] x + m[1] y + m[2]`, `source y = m[3] x + m[4] y + m[5]`.
pub(super) struct Affine([f64; 6]);

impl Affine {
    /// Shears rows around the upper left corner of an image of `height` rows.
    pub(super) fn shear_x(level: f64, height: usize) -> Self {
        Self([1.0, level, level * 0.5 * height as f64, 0.0, 1.0, 0.0])
    }

    /// Shears columns around the upper left corner of an image of `width` columns.
    pub(super) fn shear_y(level: f64, width: usize) -> Self {
        Self([1.0, 0.0, 0.0, level, 1.0, level * 0.5 * width as f64])
    }

    /// Moves the image right and down.
    pub(super) fn translate(right: f64, down: f64) -> Self {
        Self([1.0, 0.0, -right, 0.0, 1.0, -down])
    }

    /// Rotates the image counter-clockwise.
    pub(super) fn rotate(degrees: f64) -> Self {
        let (sin, cos) = degrees.to_radians().sin_cos();
        Self([cos, -sin, 0.0, sin, cos, 0.0])
    }

    /// Replaces each pixel of `image`, `[C, H, W]`, by its source; black where the source is outside.
    pub(super) fn apply(&self, image: &mut [u8], shape: ImageShape) {
        let (height, width) = (shape.height, shape.width);
        let source = image.to_vec();
        let m = self.0.map(|x| x as f32);
        // PyTorch's order of operations in f32: source coordinates scaled to [-1, 1], then back to pixels.
        let scaled = |m: &[f32], side: usize| [m[0], m[1], m[2]].map(|x| x / (0.5 * side as f32));
        let (to_x, to_y) = (scaled(&m[..3], width), scaled(&m[3..], height));
        let nearest = |to: [f32; 3], x: f32, y: f32, side: usize| {
            let unit = x * to[0] + y * to[1] + to[2];
            let at = ((unit + 1.0) * (0.5 * side as f32) - 0.5).round_ties_even();
            (at >= 0.0 && at < side as f32).then_some(at as usize)
        };
        let centred = |at: usize, side: usize| at as f32 - 0.5 * side as f32 + 0.5;
        for row in 0..height {
            for column in 0..width {
                let (x, y) = (centred(column, width), centred(row, height));
                let from = nearest(to_x, x, y, width).zip(nearest(to_y, x, y, height)).map(|(x, y)| y * width + x);
                for channel in (0..shape.channels).map(|channel| channel * height * width) {
                    image[channel + row * width + column] = from.map_or(0, |from| source[channel + from]);
                }
            }
        }
    }
}
