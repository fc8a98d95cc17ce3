//! The views of an image that `--tta` evaluates.

use std::fmt;

use data::DataError;

use crate::config::Tta;
use crate::failure::Failure;

/// The views of each image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Views {
    /// The image as it is.
    One,
    /// The image and its mirror image.
    Flip,
    /// torchvision's `TenCrop` of the resized image.
    TenCrop,
}

impl Views {
    /// Returns the views of the flag's value.
    pub(super) fn of(flag: Option<&str>) -> Self {
        match flag {
            None => Self::One,
            Some("ten-crop") => Self::TenCrop,
            Some(_) => Self::Flip,
        }
    }

    /// Returns the test-time augmentation that runs on the device. Ten crops are not part of it: the data loader cuts them on the
    /// CPU, from the pixels of the image file.
    pub(super) fn on_device(self) -> Tta {
        match self {
            Self::Flip => Tta::Flip,
            Self::One | Self::TenCrop => Tta::None,
        }
    }
}

impl fmt::Display for Views {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::One => "one view",
            Self::Flip => "mirror images",
            Self::TenCrop => "ten crops",
        })
    }
}

/// Converts an error of the data loader. An error of ten crops becomes a message about `--tta ten-crop`.
pub(super) fn ten_crop_failure(error: DataError) -> Failure {
    match error.place.as_str() {
        "ten_crop" => no_ten_crops(&error.cause),
        _ => error.into(),
    }
}

/// Returns the error for images that do not allow ten crops.
pub(super) fn no_ten_crops(cause: &str) -> Failure {
    Failure::usage(
        format!("--tta ten-crop: {cause}"),
        "train with images in files, data.image_size and a larger data.resize, such as 224 and 256 (`trainer eval` takes \
         --image-size and --resize); or use --tta flip",
    )
}
