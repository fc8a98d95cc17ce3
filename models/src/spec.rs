//! What a network is built for.

use crate::BuildError;

/// What a network must be built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    /// Classes, the width of the logits.
    pub num_classes: usize,
    /// Colour planes of the images.
    pub in_channels: usize,
    /// `[height, width]` of the images in pixels.
    pub image_size: [usize; 2],
}

impl Spec {
    /// Refuses images with a side below `least`; `suggested` goes into the hint.
    pub(crate) fn require_side(&self, model: &str, least: usize, suggested: usize) -> Result<(), BuildError> {
        if self.image_size.iter().all(|&side| side >= least) {
            return Ok(());
        }
        Err(BuildError::ImageTooSmall { model: model.to_owned(), size: self.image_size, least, suggested })
    }
}
