//! The words of `data.augment`.

use std::ops::Bound::{self, Excluded, Included};
use std::ops::RangeBounds;
use std::str::FromStr;

use data::augment::{Augment, AutoAugmentPolicy, Fill, MAX_MAGNITUDE};

use super::key::{KeyValue, Range};
use super::suggest;
use super::value::{RawValue, ValueError};

/// Padding of a crop, in pixels: PyTorch recipes for 32-pixel images shift by up to four.
const PADDING: usize = 4;
/// Largest padding of a crop, in pixels. A larger value is a typing mistake.
const MAX_PADDING: usize = 4096;
/// Smallest part of the image that `random-resized-crop` cuts out (torchvision's default).
const SCALE: f64 = 0.08;
/// Strength of `rand-augment` (torchvision's default).
const MAGNITUDE: usize = 9;
/// Strength of `color-jitter` (timm's default).
const JITTER: f64 = 0.4;
/// Largest angle of `rotation`, in degrees.
const DEGREES: f64 = 15.0;
/// Probability of `random-erasing` (torchvision's default).
const ERASING: f64 = 0.5;

/// One of each, with the default parameter. Cutout is a key of `[train]`.
const ALL: [Augment; 12] = [
    Augment::Crop { padding: PADDING, fill: Fill::Zero },
    Augment::Crop { padding: PADDING, fill: Fill::Reflect },
    Augment::RandomResizedCrop { scale: SCALE },
    Augment::Flip,
    Augment::AlternatingFlip,
    Augment::VerticalFlip,
    Augment::Rotation { degrees: DEGREES },
    Augment::TrivialAugment,
    Augment::RandAugment { magnitude: MAGNITUDE },
    Augment::AutoAugment { policy: AutoAugmentPolicy::ImageNet },
    Augment::ColorJitter { strength: JITTER, hue: 0.0 },
    Augment::RandomErasing { probability: ERASING },
];

/// Numbers above 0 and at most 1.
const PART: (Bound<f64>, Bound<f64>) = (Excluded(0.0), Included(1.0));

/// Parses a number. Returns `None` if `digits` is not a number in `range`.
fn number<T: FromStr + PartialOrd>(digits: &str, range: impl RangeBounds<T>) -> Option<T> {
    digits.parse().ok().filter(|number| range.contains(number))
}

/// Reads one word of `data.augment`, e.g. `crop:2`.
fn parse(text: &str) -> Result<Augment, ValueError> {
    let (word, parameter) = text.split_once(':').map_or((text, None), |(word, parameter)| (word, Some(parameter)));
    let Some(default) = ALL.into_iter().find(|augment| augment.name() == word) else {
        return Err(match word {
            "cutout" | "mixup" | "cutmix" => {
                ValueError::new(format!("{word:?} is not set here")).hint(format!("set `{word}` below `[train]`"))
            }
            _ => ValueError::new(format!("unknown augmentation {text:?}")).hint(suggest::hint(
                "augmentations",
                word,
                &suggest::without_aliases(&ALL.map(|augment| augment.name())),
            )),
        });
    };
    let mut augment = default;
    let Some(digits) = parameter else { return Ok(augment) };
    let wrong = |expected: &str| {
        ValueError::new(format!("expected {expected}, found {digits:?}"))
            .hint(format!("write it like \"{default}\"; leave the augmentation out for none"))
    };
    match &mut augment {
        Augment::Crop { padding, .. } => {
            *padding = number(digits, 1..=MAX_PADDING).ok_or_else(|| wrong("a padding of 1 pixel or more"))?;
        }
        Augment::RandomResizedCrop { scale } => {
            *scale = number(digits, PART).ok_or_else(|| wrong("a part of the image above 0 and at most 1"))?;
        }
        Augment::RandAugment { magnitude } => {
            let expected = || wrong(&format!("a strength of 0 to {MAX_MAGNITUDE}"));
            *magnitude = number(digits, 0..=MAX_MAGNITUDE).ok_or_else(expected)?;
        }
        Augment::Rotation { degrees } => {
            let range = (Excluded(0.0), Included(180.0));
            *degrees = number(digits, range).ok_or_else(|| wrong("an angle above 0 and at most 180 degrees"))?;
        }
        Augment::AutoAugment { policy } => {
            let names = AutoAugmentPolicy::ALL.map(AutoAugmentPolicy::name).join(", ");
            *policy = digits.parse().map_err(|()| wrong(&format!("a policy ({names})")))?;
        }
        Augment::ColorJitter { strength, hue } => {
            let (first, second) = digits.split_once(':').unwrap_or((digits, "0"));
            let range = (Excluded(0.0), Excluded(f64::INFINITY));
            *strength = number(first, range).ok_or_else(|| wrong("a strength above 0"))?;
            let expected = || wrong("a strength and a turn of the hues from 0 to 0.5, such as 0.4:0.1");
            *hue = number(second, 0.0..=0.5).ok_or_else(expected)?;
        }
        Augment::RandomErasing { probability } => {
            *probability = number(digits, PART).ok_or_else(|| wrong("a probability above 0 and at most 1"))?;
        }
        Augment::Flip
        | Augment::AlternatingFlip
        | Augment::VerticalFlip
        | Augment::TrivialAugment
        | Augment::Cutout { .. } => {
            return Err(ValueError::new(format!("{text:?}: {word} takes no parameter")).hint(format!("write {word:?}")));
        }
    }
    Ok(augment)
}

impl KeyValue for Augment {
    const TYPE: &'static str = String::TYPE;
    const WRITES_EMPTY: bool = true;

    fn read(raw: &RawValue, _: &Range) -> Result<Self, ValueError> {
        parse(&raw.string()?)
    }

    fn write(&self) -> Option<toml::Value> {
        Some(self.to_string().into())
    }

    fn choices() -> Vec<&'static str> {
        ALL.map(|augment| augment.name()).to_vec()
    }
}
