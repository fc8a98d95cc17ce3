//! The words of `data.augment`.

use std::fmt;

use serde::{Serialize, Serializer};

/// PyTorch recipes for 32-pixel images shift by up to four.
const DEFAULT_PADDING: usize = 4;
/// Padding above this is a slip of the keyboard: no image here is so large.
const MAX_PADDING: usize = 4096;

/// The words, for hints.
pub(super) const WORDS: &[&str] = &["crop", "reflect-crop", "flip", "alternating-flip"];

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

/// What is wrong with a word of `data.augment`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BadAugmentation {
    /// No such augmentation.
    Unknown,
    /// The part after the colon is not a number of pixels that can be padded.
    Padding(String),
    /// A colon after a word that takes no parameter.
    NoParameter(&'static str),
}

impl Augmentation {
    /// The augmentation of that word.
    pub(super) fn parse(text: &str) -> Result<Self, BadAugmentation> {
        let (word, parameter) = match text.split_once(':') {
            Some((word, parameter)) => (word, Some(parameter)),
            None => (text, None),
        };
        let padding = || match parameter {
            None => Ok(DEFAULT_PADDING),
            Some(digits) => digits
                .parse()
                .ok()
                .filter(|padding| (1..=MAX_PADDING).contains(padding))
                .ok_or_else(|| BadAugmentation::Padding(digits.to_owned())),
        };
        let plain = |augmentation, word| match parameter {
            None => Ok(augmentation),
            Some(_) => Err(BadAugmentation::NoParameter(word)),
        };
        match word {
            "crop" => Ok(Self::Crop { padding: padding()? }),
            "reflect-crop" => Ok(Self::ReflectCrop { padding: padding()? }),
            "flip" => plain(Self::Flip, "flip"),
            "alternating-flip" => plain(Self::AlternatingFlip, "alternating-flip"),
            _ => Err(BadAugmentation::Unknown),
        }
    }

    /// The padding of a crop.
    pub(super) fn padding(&self) -> Option<usize> {
        match *self {
            Self::Crop { padding } | Self::ReflectCrop { padding } => Some(padding),
            Self::Flip | Self::AlternatingFlip => None,
        }
    }
}

impl fmt::Display for Augmentation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Crop { padding } => write!(f, "crop:{padding}"),
            Self::ReflectCrop { padding } => write!(f, "reflect-crop:{padding}"),
            Self::Flip => f.write_str("flip"),
            Self::AlternatingFlip => f.write_str("alternating-flip"),
        }
    }
}

impl Serialize for Augmentation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
