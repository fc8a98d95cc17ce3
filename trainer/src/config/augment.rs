//! The words of `data.augment`.

use data::augment::{Augment, Fill, MAX_MAGNITUDE};

use super::key::{KeyValue, Range};
use super::suggest;
use super::value::{Mistake, RawValue};

/// Padding of a crop, in pixels: PyTorch recipes for 32-pixel images shift by up to four.
const PADDING: usize = 4;
/// Larger padding was mistyped: no image here is so large.
const MAX_PADDING: usize = 4096;
/// Smallest part of the image that `random-resized-crop` cuts out (torchvision's default).
const SCALE: f64 = 0.08;
/// Strength of `rand-augment` (torchvision's default).
const MAGNITUDE: usize = 9;
/// Strength of `color-jitter` (timm's default).
const JITTER: f64 = 0.4;
/// Probability of `random-erasing` (torchvision's default).
const ERASING: f64 = 0.5;

/// One of each, with the default parameter. Cutout is a key of `[train]`.
const ALL: [Augment; 9] = [
    Augment::Crop { padding: PADDING, fill: Fill::Zero },
    Augment::Crop { padding: PADDING, fill: Fill::Reflect },
    Augment::RandomResizedCrop { scale: SCALE },
    Augment::Flip,
    Augment::AlternatingFlip,
    Augment::TrivialAugment,
    Augment::RandAugment { magnitude: MAGNITUDE },
    Augment::ColorJitter { strength: JITTER, hue: 0.0 },
    Augment::RandomErasing { probability: ERASING },
];

/// Reads one word of `data.augment`, e.g. `crop:2`.
fn parse(text: &str) -> Result<Augment, Mistake> {
    let (word, parameter) = text.split_once(':').map_or((text, None), |(word, parameter)| (word, Some(parameter)));
    let Some(default) = ALL.into_iter().find(|augment| augment.name() == word) else {
        return Err(match word {
            "cutout" | "mixup" | "cutmix" => {
                Mistake::new(format!("{word:?} is not set here")).hint(format!("set `{word}` below `[train]`"))
            }
            _ => Mistake::new(format!("unknown augmentation {text:?}")).hint(suggest::hint(
                "augmentations",
                word,
                &suggest::plain(&ALL.map(|augment| augment.name())),
            )),
        });
    };
    let mut augment = default;
    let Some(digits) = parameter else { return Ok(augment) };
    let wrong = |expected: &str| {
        Mistake::new(format!("expected {expected}, found {digits:?}"))
            .hint(format!("write it like \"{default}\"; leave the augmentation out for none"))
    };
    let number = |range: fn(&f64) -> bool| digits.parse().ok().filter(range);
    match &mut augment {
        Augment::Crop { padding, .. } => {
            let parsed = digits.parse().ok().filter(|pixels| (1..=MAX_PADDING).contains(pixels));
            *padding = parsed.ok_or_else(|| wrong("a padding of 1 pixel or more"))?;
        }
        Augment::RandomResizedCrop { scale } => {
            let parsed = number(|scale| *scale > 0.0 && *scale <= 1.0);
            *scale = parsed.ok_or_else(|| wrong("a part of the image above 0 and at most 1"))?;
        }
        Augment::RandAugment { magnitude } => {
            let parsed = digits.parse().ok().filter(|magnitude| *magnitude <= MAX_MAGNITUDE);
            *magnitude = parsed.ok_or_else(|| wrong(&format!("a strength of 0 to {MAX_MAGNITUDE}")))?;
        }
        Augment::ColorJitter { strength, hue } => {
            let (first, second) =
                digits.split_once(':').map_or((digits, None), |(first, second)| (first, Some(second)));
            let parsed = first.parse().ok().filter(|strength: &f64| strength.is_finite() && *strength > 0.0);
            *strength = parsed.ok_or_else(|| wrong("a strength above 0"))?;
            if let Some(second) = second {
                let parsed = second.parse().ok().filter(|hue| (0.0..=0.5).contains(hue));
                *hue =
                    parsed.ok_or_else(|| wrong("a strength and a turn of the hues from 0 to 0.5, such as 0.4:0.1"))?;
            }
        }
        Augment::RandomErasing { probability } => {
            let parsed = number(|probability| *probability > 0.0 && *probability <= 1.0);
            *probability = parsed.ok_or_else(|| wrong("a probability above 0 and at most 1"))?;
        }
        Augment::Flip | Augment::AlternatingFlip | Augment::TrivialAugment | Augment::Cutout { .. } => {
            return Err(Mistake::new(format!("{text:?}: {word} takes no parameter")).hint(format!("write {word:?}")));
        }
    }
    Ok(augment)
}

impl KeyValue for Vec<Augment> {
    const VALUES: &'static str = "array of ";

    fn read(raw: &RawValue, _: &Range) -> Result<Self, Mistake> {
        raw.elements("an array of strings", |element| parse(&element.string()?))
    }

    fn write(&self) -> Option<toml::Value> {
        Some(self.iter().map(ToString::to_string).collect::<Vec<_>>().into())
    }

    fn words() -> Vec<&'static str> {
        ALL.map(|augment| augment.name()).to_vec()
    }
}
