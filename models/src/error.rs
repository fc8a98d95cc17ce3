//! Why a network could not be built.

/// Why [`build`](crate::build) refuses. `Display` is the cause; [`BuildError::hint`] is for the line below and
/// [`BuildError::key`] says which setting is at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// No model has that name.
    #[error("there is no model `{name}`")]
    UnknownModel {
        /// The name asked for.
        name: String,
        /// Names like it, most alike first; empty when none is.
        nearest: Vec<&'static str>,
    },
    /// The poolings and strides leave nothing of the image.
    #[error("{model} needs images of at least {least}x{least} pixels, these are {}x{}", size[0], size[1])]
    ImageTooSmall {
        /// The model's name.
        model: String,
        /// `[height, width]` given.
        size: [usize; 2],
        /// Smallest side that works.
        least: usize,
        /// Size to resize to.
        suggested: usize,
    },
    /// A network without classes or without input channels.
    #[error("a network needs at least one {0}")]
    Zero(ZeroOf),
}

/// The setting that was zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroOf {
    /// `Spec::num_classes`.
    Class,
    /// `Spec::in_channels`.
    Channel,
}

impl std::fmt::Display for ZeroOf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Class => "class",
            Self::Channel => "input channel",
        })
    }
}

impl BuildError {
    /// The configuration key whose value is at fault.
    pub fn key(&self) -> &'static str {
        match self {
            Self::UnknownModel { .. } => "model.name",
            Self::ImageTooSmall { .. } => "data.image_size",
            Self::Zero(ZeroOf::Class) => "model.num_classes",
            Self::Zero(ZeroOf::Channel) => "data.name",
        }
    }

    /// What the user can do.
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
            Self::Zero(ZeroOf::Class) => "leave `model.num_classes` out to take the data set's".to_owned(),
            Self::Zero(ZeroOf::Channel) => "images have 1 channel (grey) or 3 (colour)".to_owned(),
        }
    }
}
