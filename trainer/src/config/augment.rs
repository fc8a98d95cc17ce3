//! The words of `data.augment`.

use std::fmt;

use super::key::{KeyValue, Range};
use super::suggest;
use super::value::{Mistake, RawValue};

/// PyTorch recipes for 32-pixel images shift by up to four.
const DEFAULT_PADDING: usize = 4;
/// Larger padding was mistyped: no image here is so large.
const MAX_PADDING: usize = 4096;

/// One augmentation of training images, written `crop`, `crop:2`, `reflect-crop:4`, `flip` or `alternating-flip`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Augmentation {
    /// Pads by that many black pixels on each side and crops back at a random offset.
    Crop {
        /// Pixels on each side, from 1.
        padding: usize,
    },
    /// The same with the image mirrored into the padding.
    ReflectCrop {
        /// Pixels on each side, from 1.
        padding: usize,
    },
    /// Mirrors left to right with probability one half.
    Flip,
    /// Mirrors each image every other epoch, half of them first (airbench).
    AlternatingFlip,
}

impl Augmentation {
    /// One of each, with the default padding.
    const ALL: [Self; 4] = [
        Self::Crop { padding: DEFAULT_PADDING },
        Self::ReflectCrop { padding: DEFAULT_PADDING },
        Self::Flip,
        Self::AlternatingFlip,
    ];

    /// Returns the word without its parameter.
    fn name(&self) -> &'static str {
        match self {
            Self::Crop { .. } => "crop",
            Self::ReflectCrop { .. } => "reflect-crop",
            Self::Flip => "flip",
            Self::AlternatingFlip => "alternating-flip",
        }
    }

    /// Reads one word of `data.augment`.
    fn parse(text: &str) -> Result<Self, Mistake> {
        let (word, parameter) = match text.split_once(':') {
            Some((word, parameter)) => (word, Some(parameter)),
            None => (text, None),
        };
        let Some(mut augmentation) = Self::ALL.into_iter().find(|augmentation| augmentation.name() == word) else {
            return Err(match word {
                "cutout" | "mixup" | "cutmix" => {
                    Mistake::new(format!("{word:?} is not set here")).hint(format!("set `{word}` below `[train]`"))
                }
                _ => Mistake::new(format!("unknown augmentation {text:?}")).hint(suggest::hint(
                    "augmentations",
                    word,
                    &suggest::plain(&Self::words()),
                )),
            });
        };
        match (&mut augmentation, parameter) {
            (_, None) => Ok(augmentation),
            (Self::Crop { padding } | Self::ReflectCrop { padding }, Some(digits)) => {
                let parsed = digits.parse().ok().filter(|pixels| (1..=MAX_PADDING).contains(pixels));
                *padding = parsed.ok_or_else(|| {
                    Mistake::new(format!("expected a padding of 1 pixel or more, found {digits:?}"))
                        .hint("write it like \"crop:4\"; leave the augmentation out for none")
                })?;
                Ok(augmentation)
            }
            (Self::Flip | Self::AlternatingFlip, Some(_)) => {
                Err(Mistake::new(format!("{text:?}: {word} takes no parameter")).hint(format!("write {word:?}")))
            }
        }
    }

    /// Returns the padding of a crop.
    pub(super) fn padding(&self) -> Option<usize> {
        match *self {
            Self::Crop { padding } | Self::ReflectCrop { padding } => Some(padding),
            Self::Flip | Self::AlternatingFlip => None,
        }
    }

    fn words() -> [&'static str; 4] {
        Self::ALL.map(|augmentation| augmentation.name())
    }
}

impl fmt::Display for Augmentation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        self.padding().map_or(Ok(()), |padding| write!(f, ":{padding}"))
    }
}

impl KeyValue for Vec<Augmentation> {
    const VALUES: &'static str = "array of ";

    fn read(raw: &RawValue, _: &Range) -> Result<Self, Mistake> {
        raw.elements("an array of strings", |element| Augmentation::parse(&element.string()?))
    }

    fn write(&self) -> Option<toml::Value> {
        Some(self.iter().map(ToString::to_string).collect::<Vec<_>>().into())
    }

    fn words() -> Vec<&'static str> {
        Augmentation::words().to_vec()
    }
}
