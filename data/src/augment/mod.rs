//! Augmentation and normalisation of single images ([`Pipeline`]), and mixing of pairs of images ([`BatchMix`]).
//!
//! A sample's parameters depend on (seed, epoch, sample id) alone ([`Pipeline::params`]) and are then applied
//! ([`Pipeline::apply`]). Threads, ranks and the order of work change no pixel.

mod apply;
mod mix;
mod params;
mod random;
mod source_lines;

use std::fmt;
use std::str::FromStr;

pub use mix::{BatchMix, Mixing};
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

/// One random change to an image. A list of changes is applied in the order crop, flip, cutout, in whatever order it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Augment {
    /// Pads the image on all sides and takes a window of the image's size at a uniform position (`RandomCrop`).
    Crop {
        /// Pixels of padding on each side.
        padding: usize,
        /// Content of the padding.
        fill: Fill,
    },
    /// Exchanges left and right with probability 1/2 (`RandomHorizontalFlip`).
    Flip,
    /// Exchanges left and right in every second epoch. A random half of the samples starts flipped
    /// (Jordan: "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024).
    AlternatingFlip,
    /// Sets a square to the mean. Its centre is uniform; it is clipped at the borders (DeVries, Taylor: "Improved regularization
    /// of convolutional neural networks with cutout", 2017).
    Cutout {
        /// Side of the square, in pixels.
        size: usize,
    },
}

/// Default padding of a crop, in pixels: that of the usual CIFAR recipes.
const DEFAULT_PADDING: usize = 4;

impl fmt::Display for Augment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Crop { padding, fill: Fill::Zero } => write!(f, "crop:{padding}"),
            Self::Crop { padding, fill: Fill::Reflect } => write!(f, "reflect-crop:{padding}"),
            Self::Flip => f.write_str("flip"),
            Self::AlternatingFlip => f.write_str("alternating-flip"),
            Self::Cutout { size } => write!(f, "cutout:{size}"),
        }
    }
}

impl FromStr for Augment {
    type Err = DataError;

    /// Parses `crop`, `crop:2`, `reflect-crop`, `reflect-crop:2`, `flip`, `alternating-flip` or `cutout:12`.
    fn from_str(text: &str) -> Result<Self, DataError> {
        let (name, argument) = match text.split_once(':') {
            Some((name, argument)) => (name, Some(argument)),
            None => (text, None),
        };
        let pixels = |default: Option<usize>| match argument {
            Some(argument) => argument.parse().map_err(|_| {
                let cause = format!("`{argument}` in `{text}` is not a number of pixels");
                error(cause, format!("write a whole number after the colon, as in `{name}:{DEFAULT_PADDING}`"))
            }),
            None => default.ok_or_else(|| {
                error(format!("`{name}` needs a number of pixels"), format!("write for instance `{name}:12`"))
            }),
        };
        let plain = |augment| match argument {
            Some(_) => Err(error(format!("`{name}` takes no number"), format!("write `{name}` alone"))),
            None => Ok(augment),
        };
        match name {
            "crop" => Ok(Self::Crop { padding: pixels(Some(DEFAULT_PADDING))?, fill: Fill::Zero }),
            "reflect-crop" => Ok(Self::Crop { padding: pixels(Some(DEFAULT_PADDING))?, fill: Fill::Reflect }),
            "flip" => plain(Self::Flip),
            "alternating-flip" => plain(Self::AlternatingFlip),
            "cutout" => Ok(Self::Cutout { size: pixels(None)? }),
            _ => Err(error(
                format!("`{text}` is not an augmentation"),
                "one of crop, crop:PIXELS, reflect-crop, reflect-crop:PIXELS, flip, alternating-flip, cutout:PIXELS",
            )),
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
    /// positive, two crops, two flips or two cutouts, a padding of 0 or not below the image's sides, a cutout of 0 or larger
    /// than the image.
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
                return Err(error(cause, "an image is cropped, flipped and cut once: keep one of the two"));
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
    /// Returns the augmentation's kind. Augmentations of the same kind exclude each other.
    fn kind(&self) -> &'static str {
        match self {
            Self::Crop { .. } => "crop",
            Self::Flip | Self::AlternatingFlip => "flip",
            Self::Cutout { .. } => "cutout",
        }
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
        _ => Ok(()),
    }
}
