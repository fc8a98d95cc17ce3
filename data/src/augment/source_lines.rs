//! Augmentation as a gather: the source row and source column of each row and column of an augmented image. Devices that
//! augment by gathering pixels use this; [`Pipeline::apply`] does the same on the host.

use super::{AugmentParams, Fill, Pipeline};

/// Returns the row (or column) of an image of `side` pixels that row `at` of a window moved by `offset` shows; none if the
/// window shows black there.
pub(super) fn source(at: usize, offset: i32, side: usize, fill: Fill) -> Option<usize> {
    let (side, row) = (side as isize, at as isize + offset as isize);
    let mirrored = match fill {
        _ if (0..side).contains(&row) => row,
        Fill::Zero => return None,
        Fill::Reflect if row < 0 => -row,
        Fill::Reflect => 2 * (side - 1) - row,
    };
    Some(mirrored as usize)
}

/// The source of one row or column of an augmented image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceLine {
    /// The row or column of the image; none if this one is black.
    pub source: Option<usize>,
    /// Whether the line crosses the cut-out rectangle. Pixels in both a cut row and a cut column are the mean.
    pub cut: bool,
}

impl Pipeline {
    /// Returns the sources of an augmented image's rows, from the top, `[H]`.
    pub fn rows(&self, params: &AugmentParams) -> impl Iterator<Item = SourceLine> {
        let (height, fill, &AugmentParams { dy, vertical_flip, .. }) = (self.shape.height, self.fill, params);
        let cut = params.cut.map_or(0..0, |cut| cut.top..cut.bottom);
        (0..height).map(move |y| {
            // The window is moved first, then mirrored.
            let seen = if vertical_flip { height - 1 - y } else { y };
            SourceLine { source: source(seen, dy, height, fill), cut: cut.contains(&y) }
        })
    }

    /// Returns the sources of an augmented image's columns, from the left, `[W]`.
    pub fn columns(&self, params: &AugmentParams) -> impl Iterator<Item = SourceLine> {
        let (width, fill, &AugmentParams { dx, flip, .. }) = (self.shape.width, self.fill, params);
        let cut = params.cut.map_or(0..0, |cut| cut.left..cut.right);
        (0..width).map(move |x| {
            // The window is moved first, then mirrored.
            let seen = if flip { width - 1 - x } else { x };
            SourceLine { source: source(seen, dx, width, fill), cut: cut.contains(&x) }
        })
    }

    /// Returns the normalised value of each pixel value, `[C, 256]`, channel by channel.
    pub fn values(&self) -> impl Iterator<Item = f32> {
        self.tables.iter().flatten().copied()
    }
}
