//! Random operations: the draws of `TrivialAugmentWide`, `RandAugment`, `ColorJitter`, `RandomRotation`, `RandomErasing` and
//! `RandomResizedCrop`, in torchvision's spaces. `auto_augment.rs` has those of `AutoAugment`.

use super::operations::Operation;
use super::params::Rect;
use super::random::CounterRng;
use crate::ImageShape;
use crate::decode::Region;

/// Number of strengths of an operation (torchvision: `num_magnitude_bins`).
pub(super) const MAGNITUDE_BINS: usize = 31;
/// Operations on one image of `RandAugment` (torchvision: `num_ops`).
const RAND_AUGMENT_OPERATIONS: u64 = 2;

/// The kind of an operation, without its strength.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OperationKind {
    Identity,
    ShearX,
    ShearY,
    TranslateX,
    TranslateY,
    Rotate,
    Brightness,
    Color,
    Contrast,
    Sharpness,
    Posterize,
    Solarize,
    AutoContrast,
    Equalize,
    Invert,
}

/// The operations that `TrivialAugmentWide` and `RandAugment` choose from, in torchvision's order.
const OPERATIONS: [OperationKind; 14] = {
    use OperationKind::*;
    [
        Identity,
        ShearX,
        ShearY,
        TranslateX,
        TranslateY,
        Rotate,
        Brightness,
        Color,
        Contrast,
        Sharpness,
        Posterize,
        Solarize,
        AutoContrast,
        Equalize,
    ]
};

/// Counter of the draw of `ColorJitter`'s hue. The three factors have counters 0 to 2, the up to four choices 3 to 6.
const HUE: u64 = 7;

/// Largest strengths of the operations with a range.
pub(super) struct Ranges {
    shear: f64,
    /// Pixels to the right, and down.
    translate: (f64, f64),
    degrees: f64,
    /// Distance of a factor of brightness, saturation, contrast and sharpness from 1.
    factor: f64,
    /// Bits that posterizing drops.
    bits: f32,
}

/// The ranges of `TrivialAugmentWide`.
const TRIVIAL: Ranges = Ranges { shear: 0.99, translate: (32.0, 32.0), degrees: 135.0, factor: 0.99, bits: 6.0 };

/// Draws the operation of `TrivialAugmentWide` (Müller, Hutter: "TrivialAugment: tuning-free yet state-of-the-art data
/// augmentation", 2021); none if it is the identity.
pub(super) fn trivial_augment(stream: &CounterRng) -> Option<Operation> {
    let bin = stream.below(1, MAGNITUDE_BINS as u32) as usize;
    operation(draw_kind(stream, 0), (bin, MAGNITUDE_BINS), stream.below(2, 2) == 1, &TRIVIAL)
}

/// Draws one of [`OPERATIONS`].
fn draw_kind(stream: &CounterRng, counter: u64) -> OperationKind {
    OPERATIONS[stream.below(counter, OPERATIONS.len() as u32) as usize]
}

/// Returns the ranges of `RandAugment` and `AutoAugment` for images of `shape`: the translations follow its sides.
pub(super) fn rand_ranges(shape: ImageShape) -> Ranges {
    let moved = |side: usize| 150.0 / 331.0 * side as f64;
    Ranges { shear: 0.3, translate: (moved(shape.width), moved(shape.height)), degrees: 30.0, factor: 0.9, bits: 4.0 }
}

/// Draws the operations of `RandAugment` (Cubuk et al., 2020) at strength `magnitude`, without identities.
pub(super) fn rand_augment(
    stream: &CounterRng,
    magnitude: usize,
    shape: ImageShape,
) -> impl Iterator<Item = Operation> {
    let ranges = rand_ranges(shape);
    (0..RAND_AUGMENT_OPERATIONS).filter_map(move |k| {
        let negative = stream.below(2 * k + 1, 2) == 1;
        operation(draw_kind(stream, 2 * k), (magnitude, MAGNITUDE_BINS), negative, &ranges)
    })
}

/// Draws brightness, contrast and saturation, each with a factor of `1 - strength` to `1 + strength`, and with a `hue` above 0 a
/// turn of the hues from `-hue` to `hue`, in random order (`ColorJitter`).
pub(super) fn color_jitter(stream: &CounterRng, strength: f64, hue: f64) -> Vec<Operation> {
    let low = (1.0 - strength).max(0.0);
    let factor = |counter| low + (1.0 + strength - low) * stream.unit(counter);
    let mut left =
        vec![Operation::Brightness(factor(0)), Operation::Contrast(factor(1)), Operation::Saturation(factor(2))];
    if hue > 0.0 {
        left.push(Operation::Hue(hue * (2.0 * stream.unit(HUE) - 1.0)));
    }
    let mut drawn = Vec::with_capacity(left.len());
    while !left.is_empty() {
        drawn.push(left.remove(stream.below(2 + left.len() as u64, left.len() as u32) as usize));
    }
    drawn
}

/// Draws the angle of `RandomRotation`: from `-degrees` to `degrees`.
pub(super) fn rotation(stream: &CounterRng, degrees: f64) -> Operation {
    Operation::Rotate(degrees * (2.0 * stream.unit(0) - 1.0))
}

/// Draws the rectangle of `RandomErasing` (Zhong et al., 2020): 2 % to 33 % of the image with an aspect ratio of 0.3 to 3.3,
/// with that probability. None also if ten draws do not fit.
pub(super) fn random_erasing(stream: &CounterRng, probability: f64, shape: ImageShape) -> Option<Rect> {
    if stream.unit(0) >= probability {
        return None;
    }
    let area = (shape.height * shape.width) as f64;
    let between = |counter, low: f64, high: f64| low + (high - low) * stream.unit(counter);
    (0..10).find_map(|attempt| {
        let counter = 1 + 4 * attempt;
        let erased = area * between(counter, 0.02, 0.33);
        let aspect = between(counter + 1, 0.3_f64.ln(), 3.3_f64.ln()).exp();
        let height = (erased * aspect).sqrt().round_ties_even() as usize;
        let width = (erased / aspect).sqrt().round_ties_even() as usize;
        if height >= shape.height || width >= shape.width {
            return None;
        }
        let top = stream.below(counter + 2, (shape.height - height + 1) as u32) as usize;
        let left = stream.below(counter + 3, (shape.width - width + 1) as u32) as usize;
        Some(Rect { top, bottom: top + height, left, right: left + width })
    })
}

/// Draws the region of `RandomResizedCrop` in an image of `height` x `width` pixels: `scale` to 1 of its area with an aspect
/// ratio of 3/4 to 4/3. If ten draws do not fit, the largest region of that ratio around the centre. `unit` returns the next draw
/// in (0, 1).
pub(super) fn resized_crop(mut unit: impl FnMut() -> f64, scale: f64, (height, width): (usize, usize)) -> Region {
    const RATIO: [f64; 2] = [3.0 / 4.0, 4.0 / 3.0];
    let area = (height * width) as f64;
    let [low, high] = RATIO.map(f64::ln);
    for _ in 0..10 {
        let cut = area * (scale + (1.0 - scale) * unit());
        let aspect = (low + (high - low) * unit()).exp();
        let cut_width = (cut * aspect).sqrt().round_ties_even() as usize;
        let cut_height = (cut / aspect).sqrt().round_ties_even() as usize;
        if (1..=width).contains(&cut_width) && (1..=height).contains(&cut_height) {
            let mut start = |places: usize| (unit() * places as f64) as usize;
            let (top, left) = (start(height - cut_height + 1), start(width - cut_width + 1));
            return Region { top, left, height: cut_height, width: cut_width };
        }
    }
    let ratio = width as f64 / height as f64;
    let rounded = |side: f64| side.round_ties_even() as usize;
    let (cut_height, cut_width) = match ratio {
        ratio if ratio < RATIO[0] => (rounded(width as f64 / RATIO[0]).min(height), width),
        ratio if ratio > RATIO[1] => (height, rounded(height as f64 * RATIO[1]).min(width)),
        _ => (height, width),
    };
    let (top, left) = ((height - cut_height) / 2, (width - cut_width) / 2);
    Region { top, left, height: cut_height, width: cut_width }
}

/// Makes the operation `kind` at strength `bin` of the strengths 0 to `bins - 1`; none for the identity.
pub(super) fn operation(
    kind: OperationKind,
    (bin, bins): (usize, usize),
    negative: bool,
    ranges: &Ranges,
) -> Option<Operation> {
    // Entry `bin` of `torch.linspace(0, end, bins)`, whose last digit depends on the machine.
    let linspace = |end: f64| end * bin as f64 / (bins - 1) as f64;
    let signed = |end: f64| if negative { -linspace(end) } else { linspace(end) };
    Some(match kind {
        OperationKind::Identity => return None,
        OperationKind::ShearX => Operation::ShearX(signed(ranges.shear)),
        OperationKind::ShearY => Operation::ShearY(signed(ranges.shear)),
        OperationKind::TranslateX => Operation::TranslateX(signed(ranges.translate.0) as i32),
        OperationKind::TranslateY => Operation::TranslateY(signed(ranges.translate.1) as i32),
        OperationKind::Rotate => Operation::Rotate(signed(ranges.degrees)),
        OperationKind::Brightness => Operation::Brightness(1.0 + signed(ranges.factor)),
        OperationKind::Color => Operation::Saturation(1.0 + signed(ranges.factor)),
        OperationKind::Contrast => Operation::Contrast(1.0 + signed(ranges.factor)),
        OperationKind::Sharpness => Operation::Sharpness(1.0 + signed(ranges.factor)),
        OperationKind::Posterize => {
            let dropped = bin as f32 / ((bins - 1) as f32 / ranges.bits);
            Operation::Posterize(8 - dropped.round_ties_even() as u32)
        }
        OperationKind::Solarize => Operation::Solarize(255.0 - linspace(255.0) as f32),
        OperationKind::AutoContrast => Operation::AutoContrast,
        OperationKind::Equalize => Operation::Equalize,
        OperationKind::Invert => Operation::Invert,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::decode::tests::{golden, numbers};

    /// Returns the strength that torchvision's list would have for an operation.
    pub(in super::super) fn strength(operation: Option<Operation>) -> f64 {
        match operation {
            Some(Operation::ShearX(level) | Operation::ShearY(level) | Operation::Rotate(level)) => level,
            Some(Operation::TranslateX(pixels) | Operation::TranslateY(pixels)) => f64::from(pixels),
            Some(
                Operation::Brightness(factor)
                | Operation::Saturation(factor)
                | Operation::Contrast(factor)
                | Operation::Sharpness(factor),
            ) => factor - 1.0,
            Some(Operation::Hue(turn)) => turn,
            Some(Operation::Posterize(bits)) => f64::from(bits),
            Some(Operation::Solarize(threshold)) => f64::from(threshold),
            None | Some(Operation::AutoContrast | Operation::Equalize | Operation::Invert) => 0.0,
        }
    }

    #[test]
    fn resized_crops_are_torchvisions() {
        let lines = golden("units");
        assert_eq!(lines.len(), 84);
        for line in lines {
            let [height, width] = numbers(&line, "size");
            let mut units = line["units"].as_array().unwrap().iter().map(|unit| unit.as_f64().unwrap());
            let drawn = resized_crop(|| units.next().unwrap(), line["scale"].as_f64().unwrap(), (height, width));
            let [top, left, cut_height, cut_width] = numbers(&line, "region");
            assert_eq!(drawn, Region { top, left, height: cut_height, width: cut_width }, "{line}");
            assert!(units.next().is_none(), "{line}");
        }
    }

    #[test]
    fn operation_strengths_equal_torchvisions() {
        let lines = include_str!("../../tests/reference/operations.jsonl").lines().take(2);
        let shape = ImageShape { channels: 3, height: 10, width: 12 };
        let mut compared = 0;
        for line in lines {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            let ranges = if line["space"] == "trivial" { TRIVIAL } else { rand_ranges(shape) };
            for (kind, name) in OPERATIONS.into_iter().zip(line["operations"].as_array().unwrap()) {
                let name = name.as_str().unwrap();
                assert_eq!(format!("{kind:?}"), name);
                let expected: Vec<f64> =
                    line["strengths"][name].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
                let drawn = |bin, negative| strength(operation(kind, (bin, MAGNITUDE_BINS), negative, &ranges));
                for (bin, &expected) in expected.iter().take(MAGNITUDE_BINS).enumerate() {
                    for negative in [false, true] {
                        // Posterizing and solarizing have no sign.
                        let signed = !["Posterize", "Solarize"].contains(&name) && negative;
                        let expected = if signed { -expected } else { expected };
                        let drawn = drawn(bin, negative);
                        // Translations are whole pixels.
                        let tolerance = if name.starts_with("Translate") { 1.0 } else { 1e-6 };
                        assert!(
                            (drawn - expected).abs() < tolerance,
                            "{} {name} {bin}: {drawn}, not {expected}",
                            line["space"]
                        );
                        compared += 1;
                    }
                }
            }
        }
        assert_eq!(compared, 2 * 2 * (11 * MAGNITUDE_BINS + 3));
    }
}
