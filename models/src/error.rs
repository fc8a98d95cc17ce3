//! Errors of building a network.

/// Error of [`build`](crate::build). `Display` writes the cause, [`BuildError::hint`] returns the remedy and
/// [`BuildError::key`] the configuration key at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// No model has this name.
    #[error("there is no model `{name}`")]
    UnknownModel {
        /// The requested name.
        name: String,
        /// Similar names, most similar first; may be empty.
        nearest: Vec<&'static str>,
    },
    /// The image is too small for the model's poolings and strides.
    #[error("{model} needs images of at least {least}x{least} pixels, these are {}x{}", size[0], size[1])]
    ImageTooSmall {
        /// The model's name.
        model: String,
        /// `[height, width]` given.
        size: [usize; 2],
        /// Smallest valid side in pixels.
        least: usize,
        /// Side in pixels that the hint proposes.
        suggested: usize,
    },
    /// `Spec::num_classes` is zero.
    #[error("a network needs at least one class")]
    NoClasses,
    /// `Spec::in_channels` is zero.
    #[error("a network needs at least one input channel")]
    NoChannels,
}

impl BuildError {
    /// Returns the configuration key whose value is at fault.
    pub fn key(&self) -> &'static str {
        match self {
            Self::UnknownModel { .. } => "model.name",
            Self::ImageTooSmall { .. } => "data.image_size",
            Self::NoClasses => "model.num_classes",
            Self::NoChannels => "data.name",
        }
    }

    /// Returns what the user can do.
    pub fn hint(&self) -> String {
        match self {
            Self::UnknownModel { nearest, .. } if nearest.is_empty() => {
                let names: Vec<_> = crate::entries().iter().map(|entry| entry.name).collect();
                format!("the models are {}", names.join(", "))
            }
            Self::UnknownModel { nearest, .. } => {
                let names: Vec<_> = nearest.iter().map(|name| format!("`{name}`")).collect();
                format!("did you mean {}?", names.join(" or "))
            }
            Self::ImageTooSmall { model, suggested, .. } => {
                let other = if model.starts_with("vgg") { ", or choose lenet or a resnet" } else { "" };
                format!("set `data.image_size = {suggested}` to enlarge the images{other}")
            }
            Self::NoClasses => "leave `model.num_classes` out to take the data set's".to_owned(),
            Self::NoChannels => "images have 1 channel (grey) or 3 (colour)".to_owned(),
        }
    }
}
