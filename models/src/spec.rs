//! Specification of a network's inputs and outputs.

use crate::BuildError;

/// Image shape and number of classes of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    /// Number of classes, the width of the logits.
    pub num_classes: usize,
    /// Channels of the images.
    pub in_channels: usize,
    /// `[height, width]` of the images in pixels.
    pub image_size: [usize; 2],
}

impl Spec {
    /// Checks that both image sides are at least `least` pixels. `suggested` is the size that the hint proposes.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`].
    pub fn require_side(&self, model: &str, least: usize, suggested: usize) -> Result<(), BuildError> {
        if self.image_size.iter().all(|&side| side >= least) {
            return Ok(());
        }
        Err(BuildError::ImageTooSmall { model: model.to_owned(), size: self.image_size, least, suggested })
    }
}
