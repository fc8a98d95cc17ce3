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

    /// Returns the views that the device makes of one view. The ten crops are those of the file's pixels, which the host makes.
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

/// Returns the failure of a loader, in the words of the command line where it cannot cut ten crops.
pub(super) fn ten_crop_failure(error: DataError) -> Failure {
    match error.place.as_str() {
        "ten_crop" => no_ten_crops(&error.cause),
        _ => error.into(),
    }
}

/// Returns the failure of images out of which no ten crops can be cut.
pub(super) fn no_ten_crops(cause: &str) -> Failure {
    Failure::usage(
        format!("--tta ten-crop: {cause}"),
        "train with images in files, data.image_size and a larger data.resize, such as 224 and 256 (`trainer eval` takes \
         --image-size and --resize); or use --tta flip",
    )
}
