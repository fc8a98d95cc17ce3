//! Operations on the colours and the geometry of one image: those of torchvision's `TrivialAugmentWide`, `RandAugment`, `AutoAugment`
//! and `ColorJitter`, on uint8 tensors (`torchvision.transforms._functional_tensor`). Arithmetic is f32 in torchvision's order, so
//! colours are equal to the bit.

use super::affine::Affine;
use crate::ImageShape;

/// One operation with its strength.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Operation {
    /// Moves row `y` left by `level * y` pixels (`affine` with a shear around the upper left corner).
    ShearX(f64),
    /// Moves column `x` up by `level * x` pixels.
    ShearY(f64),
    /// Moves the image right by this number of pixels; left if negative.
    TranslateX(i32),
    /// Moves the image down by this number of pixels; up if negative.
    TranslateY(i32),
    /// Rotates the image counter-clockwise around its centre, in degrees (`rotate`).
    Rotate(f64),
    /// Multiplies the pixels by a factor (`adjust_brightness`).
    Brightness(f64),
    /// Blends with the grey image: 0 is grey, 1 unchanged (`adjust_saturation`). Grey images do not change.
    Saturation(f64),
    /// Blends with the mean grey: 0 is flat, 1 unchanged (`adjust_contrast`).
    Contrast(f64),
    /// Turns the hues by a part of the colour circle, -0.5 to 0.5 (`adjust_hue`). Grey images do not change.
    Hue(f64),
    /// Blends with the smoothed image: 0 is smooth, 1 unchanged, 2 sharp (`adjust_sharpness`).
    Sharpness(f64),
    /// Keeps this number of upper bits of each pixel, 0 to 8 (`posterize`).
    Posterize(u32),
    /// Inverts the pixels from a threshold on (`solarize`).
    Solarize(f32),
    /// Replaces each pixel `x` by `255 - x` (`invert`).
    Invert,
    /// Stretches each channel to the range 0 to 255 (`autocontrast`).
    AutoContrast,
    /// Makes the histogram of each channel as uniform as a table of values can (`equalize`).
    Equalize,
}

impl Operation {
    /// Applies the operation to `image`, `[C, H, W]`, 1 or 3 channels. Pixels that come from outside the image are black.
    ///
    /// # Panics
    /// If `image` is not one image long.
    pub fn apply(&self, image: &mut [u8], shape: ImageShape) {
        assert_eq!(image.len(), shape.len(), "image of another shape");
        let (height, width) = (shape.height, shape.width);
        let affine = match *self {
            Self::ShearX(level) => Affine::shear_x(level, height),
            Self::ShearY(level) => Affine::shear_y(level, width),
            Self::TranslateX(pixels) => Affine::translate(f64::from(pixels), 0.0),
            Self::TranslateY(pixels) => Affine::translate(0.0, f64::from(pixels)),
            Self::Rotate(degrees) => Affine::rotate(degrees),
            _ => return self.recolour(image, shape),
        };
        affine.apply(image, shape);
    }

    fn recolour(&self, image: &mut [u8], shape: ImageShape) {
        let plane = shape.height * shape.width;
        match *self {
            Self::Brightness(factor) => blend(image, |_| 0.0, factor),
            Self::Contrast(factor) => {
                let mean = mean_grey(image, plane);
                blend(image, |_| mean, factor);
            }
            Self::Saturation(factor) => {
                if shape.channels == 3 {
                    let grey = grey(image, plane);
                    blend(image, |at| f32::from(grey[at % plane]), factor);
                }
            }
            Self::Hue(turn) => {
                if shape.channels == 3 {
                    turn_hue(image, plane, turn as f32);
                }
            }
            Self::Sharpness(factor) => {
                if shape.height > 2 && shape.width > 2 {
                    let smooth = smoothed(image, shape);
                    blend(image, |at| f32::from(smooth[at]), factor);
                }
            }
            Self::Posterize(bits) => {
                let mask = (0xff00_u32 >> bits.min(8)) as u8;
                image.iter_mut().for_each(|x| *x &= mask);
            }
            Self::Solarize(threshold) => {
                image.iter_mut().filter(|x| f32::from(**x) >= threshold).for_each(|x| *x = 255 - *x);
            }
            Self::Invert => image.iter_mut().for_each(|x| *x = 255 - *x),
            Self::AutoContrast => image.chunks_exact_mut(plane).for_each(stretch),
            Self::Equalize => image.chunks_exact_mut(plane).for_each(equalize),
            Self::ShearX(_) | Self::ShearY(_) | Self::TranslateX(_) | Self::TranslateY(_) | Self::Rotate(_) => {}
        }
    }
}

/// Sets pixel `at` to `factor * pixel + (1 - factor) * other(at)`, clamped to 0..255 and truncated (torchvision: `_blend`).
fn blend(image: &mut [u8], other: impl Fn(usize) -> f32, factor: f64) {
    // PyTorch multiplies a uint8 tensor by a Python number in f32.
    let (own, rest) = (factor as f32, (1.0 - factor) as f32);
    for (at, x) in image.iter_mut().enumerate() {
        *x = (own * f32::from(*x) + rest * other(at)).clamp(0.0, 255.0) as u8;
    }
}

/// Returns the luminance of each pixel of an RGB image, `[H * W]`, truncated (torchvision: `rgb_to_grayscale`).
fn grey(image: &[u8], plane: usize) -> Vec<u8> {
    let (red, rest) = image.split_at(plane);
    let (green, blue) = rest.split_at(plane);
    let luminance =
        |((&r, &g), &b): ((&u8, &u8), &u8)| (0.2989 * f32::from(r) + 0.587 * f32::from(g) + 0.114 * f32::from(b)) as u8;
    red.iter().zip(green).zip(blue).map(luminance).collect()
}

/// Returns the mean luminance; of an image of one channel, the mean.
fn mean_grey(image: &[u8], plane: usize) -> f32 {
    let sum = |pixels: &[u8]| pixels.iter().map(|&x| u64::from(x)).sum::<u64>() as f32;
    if image.len() == plane { sum(image) / plane as f32 } else { sum(&grey(image, plane)) / plane as f32 }
}

/// Turns the hue of each pixel of an RGB image (torchvision: `adjust_hue`).
fn turn_hue(image: &mut [u8], plane: usize, turn: f32) {
    let (red, rest) = image.split_at_mut(plane);
    let (green, blue) = rest.split_at_mut(plane);
    for ((r, g), b) in red.iter_mut().zip(green).zip(blue) {
        let [h, s, v] = rgb_to_hsv([*r, *g, *b].map(|value| f32::from(value) / 255.0));
        // torchvision's conversion of floats to uint8.
        let byte = |value: f32| (value * (256.0 - 1e-3)) as u8;
        [*r, *g, *b] = hsv_to_rgb([(h + turn).rem_euclid(1.0), s, v]).map(byte);
    }
}

/// Returns hue, saturation and value, each in 0..1, of a colour in 0..1 (torchvision: `_rgb2hsv`).
fn rgb_to_hsv([r, g, b]: [f32; 3]) -> [f32; 3] {
    let (most, least) = (r.max(g).max(b), r.min(g).min(b));
    let range = most - least;
    if range == 0.0 {
        return [0.0, 0.0, most];
    }
    let [rc, gc, bc] = [r, g, b].map(|value| (most - value) / range);
    let sixth = match most {
        _ if most == r => bc - gc,
        _ if most == g => 2.0 + rc - bc,
        _ => 4.0 + gc - rc,
    };
    [(sixth / 6.0 + 1.0) % 1.0, range / most, most]
}

/// Returns the colour in 0..1 of a hue, saturation and value (torchvision: `_hsv2rgb`).
fn hsv_to_rgb([h, s, v]: [f32; 3]) -> [f32; 3] {
    let sector = (h * 6.0).floor();
    let f = h * 6.0 - sector;
    let [p, q, t] = [s, s * f, s * (1.0 - f)].map(|part| (v * (1.0 - part)).clamp(0.0, 1.0));
    match sector as u32 % 6 {
        0 => [v, t, p],
        1 => [q, v, p],
        2 => [p, v, t],
        3 => [p, q, v],
        4 => [t, p, v],
        _ => [v, p, q],
    }
}

/// Smooths with a 3x3 kernel of ones with 5 in the middle, over 13. Border pixels do not change.
fn smoothed(image: &[u8], shape: ImageShape) -> Vec<u8> {
    let (height, width) = (shape.height, shape.width);
    let mut out = image.to_vec();
    for (source, out) in image.chunks_exact(height * width).zip(out.chunks_exact_mut(height * width)) {
        for y in 1..height - 1 {
            for x in 1..width - 1 {
                let row = |y: usize| &source[y * width + x - 1..][..3];
                let sum: u32 = [row(y - 1), row(y), row(y + 1)].into_iter().flatten().map(|&x| u32::from(x)).sum();
                let sum = sum + 4 * u32::from(source[y * width + x]);
                // The sum over 13 is never halfway between two integers.
                out[y * width + x] = ((2 * sum + 13) / 26) as u8;
            }
        }
    }
    out
}

/// Maps the smallest value of a channel to 0 and the largest to 255. A flat channel does not change.
fn stretch(plane: &mut [u8]) {
    let (low, high) = plane.iter().fold((255, 0), |(low, high), &x| (x.min(low), x.max(high)));
    if low < high {
        // PyTorch divides a number by a tensor with its reciprocal.
        let scale = 255.0 * (1.0 / f32::from(high - low));
        plane.iter_mut().for_each(|x| *x = (f32::from(*x - low) * scale).clamp(0.0, 255.0) as u8);
    }
}

/// Equalizes the histogram of a channel (PIL: `ImageOps.equalize`).
fn equalize(plane: &mut [u8]) {
    let mut histogram = [0usize; 256];
    plane.iter().for_each(|&x| histogram[usize::from(x)] += 1);
    let last = histogram.iter().rfind(|&&count| count > 0).copied().unwrap_or(0);
    let step = (plane.len() - last) / 255;
    if step == 0 {
        return;
    }
    let mut table = [0u8; 256];
    let mut below = 0;
    for (value, count) in histogram.into_iter().enumerate() {
        // Entry 0 is 0: the table has the sums of the values below.
        table[value] = if value == 0 { 0 } else { ((below + step / 2) / step).min(255) as u8 };
        below += count;
    }
    plane.iter_mut().for_each(|x| *x = table[usize::from(*x)]);
}
