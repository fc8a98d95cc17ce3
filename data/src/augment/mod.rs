//! Augmentation and normalisation of single images ([`Pipeline`]), and mixing of pairs of images ([`MixParams`]).
//!
//! A sample's parameters depend on (seed, epoch, sample id) and on the number of earlier draws of the sample in the epoch
//! ([`Pipeline::params_of_repetition`]). [`Pipeline::apply`] applies the parameters. Threads, ranks and the order of work change no
//! pixel.

mod affine;
mod apply;
mod auto_augment;
mod mix;
mod operations;
mod params;
mod policy;
mod random;
mod source_lines;

use std::fmt;

pub use auto_augment::AutoAugmentPolicy;
pub use mix::{MixConfig, MixParams};
pub use operations::Operation;
pub use params::{AugmentParams, Rect};
pub use source_lines::SourceLine;

use crate::{DataError, ImageShape};

/// The content of a crop's padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fill {
    /// Black pixels.
    #[default]
    Zero,
    /// The image mirrored at its border pixels; border pixels are not repeated (`reflect` in numpy and PyTorch).
    Reflect,
}

/// One random change to an image. A list of changes is applied in the order crop, flip, vertical flip, rotation, operations,
/// normalisation, cutout or erasing, in whatever order it is given.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Augment {
    /// Pads the image on all sides and takes a window of the image's size at a uniform position (`RandomCrop`).
    Crop {
        /// Pixels of padding on each side.
        padding: usize,
        /// Content of the padding.
        fill: Fill,
    },
    /// Cuts out a rectangle of a random size and place, with an aspect ratio of 3/4 to 4/3, and resamples it to the image's size
    /// (torchvision: `RandomResizedCrop`). It needs the images at their own sizes ([`crate::Dataset::encoded`]).
    RandomResizedCrop {
        /// Smallest part of the image's area that is cut out, above 0 and at most 1. The largest is 1.
        scale: f64,
    },
    /// Exchanges left and right with probability 1/2 (`RandomHorizontalFlip`).
    Flip,
    /// Exchanges left and right in every second epoch. A random half of the samples starts flipped
    /// (Jordan: "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024).
    AlternatingFlip,
    /// Exchanges top and bottom with probability 1/2 (`RandomVerticalFlip`).
    VerticalFlip,
    /// Rotates the image around its centre by a uniform angle (`RandomRotation`). Pixels that come from outside the image are black.
    Rotation {
        /// Largest angle in both directions, above 0 and at most 180.
        degrees: f64,
    },
    /// Applies one of 14 operations at a random strength (torchvision: `TrivialAugmentWide`).
    TrivialAugment,
    /// Applies two of 14 operations at one strength (torchvision: `RandAugment(num_ops=2)`).
    RandAugment {
        /// Strength, from 0 to [`MAX_MAGNITUDE`].
        magnitude: usize,
    },
    /// Applies one of 25 pairs of operations, which were learned for a data set (torchvision: `AutoAugment`).
    AutoAugment {
        /// Data set for which the pairs were learned.
        policy: AutoAugmentPolicy,
    },
    /// Changes brightness, contrast and saturation by a factor of `1 - strength` to `1 + strength` each, in random order
    /// (torchvision: `ColorJitter`; timm: `--color-jitter`).
    ColorJitter {
        /// Largest distance of a factor from 1, above 0.
        strength: f64,
        /// Largest turn of the hues, as a part of the colour circle: 0 (the hues stay) to 0.5.
        hue: f64,
    },
    /// Sets a square to the mean. Its centre is uniform; it is clipped at the borders (DeVries, Taylor: "Improved regularization
    /// of convolutional neural networks with cutout", 2017).
    Cutout {
        /// Side of the square, in pixels.
        size: usize,
    },
    /// Sets a rectangle of 2 % to 33 % of the image to the mean (torchvision: `RandomErasing`; timm: `--reprob`).
    RandomErasing {
        /// Probability that an image is changed, above 0 and at most 1.
        probability: f64,
    },
}

/// Largest strength of [`Augment::RandAugment`] (torchvision: `num_magnitude_bins - 1`).
pub const MAX_MAGNITUDE: usize = policy::MAGNITUDE_BINS - 1;

impl fmt::Display for Augment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Crop { padding: number, .. }
            | Self::RandAugment { magnitude: number }
            | Self::Cutout { size: number } => {
                write!(f, ":{number}")
            }
            Self::RandomResizedCrop { scale: number }
            | Self::RandomErasing { probability: number }
            | Self::Rotation { degrees: number } => write!(f, ":{number}"),
            Self::AutoAugment { policy } => write!(f, ":{}", policy.name()),
            Self::ColorJitter { strength, hue: 0.0 } => write!(f, ":{strength}"),
            Self::ColorJitter { strength, hue } => write!(f, ":{strength}:{hue}"),
            Self::Flip | Self::AlternatingFlip | Self::VerticalFlip | Self::TrivialAugment => Ok(()),
        }
    }
}

/// Makes an error about the configured augmentation.
fn error(cause: impl Into<String>, hint: impl Into<String>) -> DataError {
    DataError::new("", cause, hint).at("augment")
}

/// Augmentation and normalisation of images of one shape.
#[derive(Debug, Clone)]
pub struct Pipeline {
    augment: Vec<Augment>,
    fill: Fill,
    shape: ImageShape,
    tables: Vec<apply::Table>,
}

impl Pipeline {
    /// Makes a pipeline for images of `shape`. `mean` and `std` are `[C]`, for pixels scaled to [0, 1].
    ///
    /// # Errors
    /// A `mean` or `std` that does not have one value per channel, a mean that is not finite, a deviation that is not
    /// positive, two augmentations of one [kind](Augment::kind), a padding of 0 or not below the image's sides, a cutout of 0
    /// or larger than the image, a strength or probability outside its range, operations on images of 2 or more than 3
    /// channels.
    pub fn new(augment: &[Augment], mean: &[f32], std: &[f32], shape: ImageShape) -> Result<Self, DataError> {
        if shape.is_empty() {
            return Err(error(format!("images of {shape} have no pixels"), "check the data set"));
        }
        check_statistics(mean, std, shape)?;
        let mut fill = Fill::Zero;
        for (i, step) in augment.iter().enumerate() {
            check_step(step, shape)?;
            if let Some(other) = augment[..i].iter().find(|other| other.kind() == step.kind()) {
                let cause = format!("`{other}` and `{step}` exclude each other");
                return Err(error(cause, "an image is changed once in each of these ways: keep one of the two"));
            }
            if let Augment::Crop { fill: chosen, .. } = step {
                fill = *chosen;
            }
        }
        let tables = mean.iter().zip(std).map(|(&mean, &std)| apply::table(mean, std)).collect();
        Ok(Self { augment: augment.to_vec(), fill, shape, tables })
    }

    /// Returns the shape of the images before and after augmentation.
    pub fn shape(&self) -> ImageShape {
        self.shape
    }
}

impl Augment {
    /// Returns the augmentation's name in a configuration, without its number.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Crop { fill: Fill::Zero, .. } => "crop",
            Self::Crop { fill: Fill::Reflect, .. } => "reflect-crop",
            Self::RandomResizedCrop { .. } => "random-resized-crop",
            Self::Flip => "flip",
            Self::AlternatingFlip => "alternating-flip",
            Self::VerticalFlip => "vertical-flip",
            Self::Rotation { .. } => "rotation",
            Self::TrivialAugment => "trivial-augment",
            Self::RandAugment { .. } => "rand-augment",
            Self::AutoAugment { .. } => "auto-augment",
            Self::ColorJitter { .. } => "color-jitter",
            Self::Cutout { .. } => "cutout",
            Self::RandomErasing { .. } => "random-erasing",
        }
    }

    /// Returns the augmentation's kind. Augmentations of the same kind exclude each other.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Crop { .. } | Self::RandomResizedCrop { .. } => "crop",
            Self::Flip | Self::AlternatingFlip => "flip",
            Self::VerticalFlip => "vertical flip",
            Self::Rotation { .. } => "rotation",
            Self::TrivialAugment | Self::RandAugment { .. } | Self::AutoAugment { .. } | Self::ColorJitter { .. } => {
                "colour policy"
            }
            Self::Cutout { .. } | Self::RandomErasing { .. } => "cutout",
        }
    }

    /// Returns whether the loader must compute the pixels: a device that augments can only gather pixels.
    pub fn computes_pixels(&self) -> bool {
        self.changes_colours() || matches!(self, Self::RandomResizedCrop { .. } | Self::Rotation { .. })
    }

    /// Returns whether the augmentation applies operations to the colours.
    fn changes_colours(&self) -> bool {
        matches!(
            self,
            Self::TrivialAugment | Self::RandAugment { .. } | Self::AutoAugment { .. } | Self::ColorJitter { .. }
        )
    }
}

fn check_statistics(mean: &[f32], std: &[f32], shape: ImageShape) -> Result<(), DataError> {
    for (name, values) in [("mean", mean), ("std", std)] {
        if values.len() != shape.channels {
            let cause = format!("{} values for images of {} channels ({shape})", values.len(), shape.channels);
            return Err(DataError::new("", cause, "give one value per channel").at(name));
        }
    }
    if let Some(bad) = mean.iter().find(|mean| !mean.is_finite()) {
        return Err(DataError::new("", format!("{bad} is not a number"), "pixels are scaled to [0, 1]").at("mean"));
    }
    if let Some(bad) = std.iter().find(|std| !std.is_finite() || **std <= 0.0) {
        let cause = format!("{bad} is not a positive number");
        return Err(DataError::new("", cause, "pixels are divided by std: use 1 to keep them unchanged").at("std"));
    }
    Ok(())
}

fn check_step(step: &Augment, shape: ImageShape) -> Result<(), DataError> {
    let side = shape.height.min(shape.width);
    let out_of_range = |number, range: &str| Err(error(format!("the {number} of `{step}` is out of range"), range));
    match *step {
        Augment::Crop { padding: 0, .. } | Augment::Cutout { size: 0 } => {
            Err(error(format!("`{step}` does nothing"), "use at least 1 pixel, or leave it out"))
        }
        Augment::Crop { padding, .. } if padding >= side => Err(error(
            format!("`{step}` pads images of {shape} by {padding} pixels"),
            format!("the padding must be smaller than the image's side: at most {}", side - 1),
        )),
        Augment::Cutout { size } if size > side => Err(error(
            format!("`{step}` cuts {size} pixels out of images of {shape}"),
            format!("the cutout must fit into the image: at most {side}"),
        )),
        Augment::RandAugment { magnitude } if magnitude > MAX_MAGNITUDE => {
            Err(error(format!("`{step}` is too strong"), format!("use a strength of 0 to {MAX_MAGNITUDE}; 9 is usual")))
        }
        Augment::ColorJitter { strength, .. } if !(strength.is_finite() && strength > 0.0) => {
            out_of_range("strength", "use a number above 0, for instance 0.4, or leave it out")
        }
        Augment::ColorJitter { hue, .. } if !(0.0..=0.5).contains(&hue) => {
            out_of_range("hue", "use 0 to 0.5, which is half of the colour circle")
        }
        Augment::RandomErasing { probability } if !(probability > 0.0 && probability <= 1.0) => {
            out_of_range("probability", "use a number above 0 and at most 1, or leave it out")
        }
        Augment::RandomResizedCrop { scale } if !(scale > 0.0 && scale <= 1.0) => {
            out_of_range("scale", "use a number above 0 and at most 1; 0.08 is usual")
        }
        Augment::Rotation { degrees } if !(degrees > 0.0 && degrees <= 180.0) => {
            out_of_range("angle", "use a number above 0 and at most 180, or leave it out")
        }
        _ if step.changes_colours() && ![1, 3].contains(&shape.channels) => {
            Err(error(format!("`{step}` cannot change images of {shape}"), "images of 1 or 3 channels have colours"))
        }
        _ => Ok(()),
    }
}
